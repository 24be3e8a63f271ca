// From a row's number to the place of its operands: the order in which rows are walked (host) and the 32-bit index
// arithmetic of the kernels. Free of torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../problem.h"

namespace sms::cuda {

inline constexpr int kMapDims = 4;
inline constexpr int64_t kMapRows = int64_t{1} << 30;  // sums of a row and a column index fit 32 bits

// Division of n < 2^31 by a constant 1 <= d < 2^31 as a multiplication (Granlund and Montgomery).
struct Divisor {
  uint32_t value;
  uint32_t factor;
  uint32_t shift;

  Divisor() = default;
  explicit Divisor(uint32_t divisor) : value(divisor), factor(0), shift(0) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    factor = static_cast<uint32_t>((((uint64_t{1} << shift) - divisor) << 32) / divisor + 1);
  }

#if defined(__CUDACC__)
  __device__ __forceinline__ uint32_t quotient(uint32_t n) const { return (__umulhi(n, factor) + n) >> shift; }
#endif
};

// Where a row's operands begin, relative to the problem's pointers.
struct RowPlace {
  int64_t input;   // bytes
  int64_t second;  // bytes
  int64_t output;  // bytes
  int32_t query;   // query index
};

// An operand of one number a row.
template <typename Byte>
struct RowValues {
  Byte* data;                 // null where it is not given
  int64_t stride[kMapDims];   // bytes, innermost dimension first
};

struct RowMap {
  uint32_t rows;          // at most kMapRows
  int dims;               // at most kMapDims
  bool aligned_blocks;    // the rows of a block are neighbours along the innermost dimension
  Divisor size[kMapDims];     // innermost dimension first
  RowPlace stride[kMapDims];  // one step along the dimension

#if defined(__CUDACC__)
  // Where the row's element of `values` lies. Apart from locate(), so that a row pays for it only where it is given;
  // a loop that stays one takes fewest registers from the kernels around it.
  template <typename Byte>
  __device__ __forceinline__ Byte* find(const RowValues<Byte>& values, uint32_t row) const {
    return values.data + offset(values, row);
  }

  template <typename Byte>
  __device__ __forceinline__ int64_t offset(const RowValues<Byte>& values, uint32_t row) const {
    int64_t bytes = 0;
#pragma unroll 1
    for (int d = 0; d < dims; ++d) {
      uint32_t index = row;
      if (d + 1 < dims) {
        row = size[d].quotient(index);
        index -= row * size[d].value;
      }
      bytes += index * values.stride[d];
    }
    return bytes;
  }

  __device__ __forceinline__ RowPlace locate(uint32_t row) const {
    RowPlace place{0, 0, 0, 0};
#pragma unroll
    for (int d = 0; d < kMapDims; ++d) {
      if (d < dims) {
        uint32_t index = row;
        if (d + 1 < dims) {
          row = size[d].quotient(index);
          index -= row * size[d].value;
        }
        place.input += index * stride[d].input;
        place.second += index * stride[d].second;
        place.output += index * stride[d].output;
        place.query += static_cast<int32_t>(index) * stride[d].query;
      }
    }
    return place;
  }

  // The row `steps` after the one at `place`, which lies on the same line along the innermost dimension.
  __device__ __forceinline__ RowPlace along(RowPlace place, uint32_t steps) const {
    place.input += steps * stride[0].input;
    place.second += steps * stride[0].second;
    place.output += steps * stride[0].output;
    place.query += static_cast<int32_t>(steps) * stride[0].query;
    return place;
  }
#endif
};

// The map of `rows` (at most kMapDims dimensions and kMapRows rows), given the bytes of an element of each operand and
// the rows of a block.
inline RowMap make_row_map(const Rows& rows, int64_t input_bytes, int64_t second_bytes, int64_t output_bytes,
                           int rows_per_block) {
  RowMap map{};
  map.rows = static_cast<uint32_t>(rows.count());
  map.dims = rows.dims;
  map.aligned_blocks = rows.dims <= 1 || rows.dim[rows.dims - 1].size % rows_per_block == 0;
  for (int d = 0; d < rows.dims; ++d) {
    const RowDim& dim = rows.dim[rows.dims - 1 - d];
    map.size[d] = Divisor(static_cast<uint32_t>(dim.size));
    map.stride[d] = {dim.stride[kInput] * input_bytes, dim.stride[kSecond] * second_bytes,
                     dim.stride[kOutput] * output_bytes, static_cast<int32_t>(dim.stride[kQuery])};
  }
  return map;
}

template <typename Byte>
RowValues<Byte> make_row_values(const Rows& rows, Byte* data, Operand operand, int64_t bytes) {
  RowValues<Byte> values{};
  values.data = data;
  for (int d = 0; d < rows.dims; ++d) values.stride[d] = rows.dim[rows.dims - 1 - d].stride[operand] * bytes;
  return values;
}

// The order in which to walk `rows`: dimensions of size 1 dropped, strides of operands that the problem lacks (`used`
// false) taken as 0, dimensions that share a mask row innermost (if `share_second`), neighbours merged where one
// stride serves both.
//
// Sharing heads innermost lets a mask come from L2: on an H200 long rows under a mask [B, 1, Sq, Sk] went from .75 of a
// copy's speed (every head reads the mask again) to .83 and more. Without such a mask memory order is up to 5% better.
inline Rows walk_order(const Rows& rows, const bool (&used)[kOperands], bool share_second) {
  const auto shares_mask = [](const RowDim& dim) { return dim.stride[kSecond] == 0 && dim.stride[kInput] != 0; };
  Rows order;
  for (int d = 0; d < rows.dims; ++d) {
    if (rows.dim[d].size == 1) continue;
    RowDim& dim = order.dim[order.dims++];
    dim = rows.dim[d];
    for (int operand = 0; operand < kOperands; ++operand) {
      if (!used[operand]) dim.stride[operand] = 0;
    }
  }
  if (share_second) {
    std::stable_partition(order.dim, order.dim + order.dims, [&](const RowDim& dim) { return !shares_mask(dim); });
  }
  int last = 0;
  for (int d = 1; d < order.dims; ++d) {
    RowDim& outer = order.dim[last];
    const RowDim inner = order.dim[d];
    bool mergeable = true;
    for (int operand = 0; operand < kOperands; ++operand) {
      mergeable = mergeable && outer.stride[operand] == inner.stride[operand] * inner.size;
    }
    if (mergeable) {
      std::copy(inner.stride, inner.stride + kOperands, outer.stride);
      outer.size *= inner.size;
    } else {
      order.dim[++last] = inner;
    }
  }
  order.dims = std::min(order.dims, last + 1);
  return order;
}

}  // namespace sms::cuda
