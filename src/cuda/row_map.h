// From a row's number to the place of its operands: the order in which rows are walked (host) and the 32-bit index
// arithmetic of the kernels. Free of torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "../problem.h"

namespace sms::cuda {

inline constexpr int kMapDims = 4;
inline constexpr int64_t kMapRows = int64_t{1} << 30;  // sums of a row and a column index fit 32 bits

// Division of n < 2^30 by a constant 2 <= d < 2^31 as a multiplication (Granlund and Montgomery).
struct alignas(8) Divisor {  // so that its numbers are read together
  uint32_t factor;
  uint32_t shift;

  Divisor() = default;
  explicit Divisor(uint32_t divisor) : factor(0), shift(0) {
    while ((uint64_t{4} << shift) < divisor) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << (32 + shift)) - 1) / divisor + 1);
  }

#if defined(__CUDACC__)
  __device__ __forceinline__ uint32_t quotient(uint32_t n) const { return __umulhi(n, factor) >> shift; }
#endif
};

// Whether aligned loads may reach past both ends of a row, by up to kReachBytes: those bytes are the operand's too.
struct Inner {
  bool input;
  bool second;
};
inline constexpr int64_t kReachBytes = 64;

// Where a row's operands begin, relative to the problem's pointers.
struct RowPlace {
  int64_t input;   // bytes
  int64_t second;  // bytes
  int64_t output;  // bytes
  int32_t query;   // query index
  Inner inner;
};

// The same in units of each operand, modulo 2^32: 64-bit arithmetic takes several instructions a step.
struct RowUnits {
  uint32_t input;
  uint32_t second;
  uint32_t output;
  uint32_t query;  // query indices

#if defined(__CUDACC__)
  __device__ __forceinline__ void add(const RowUnits& step, uint32_t count) {
    input += count * step.input;
    second += count * step.second;
    output += count * step.output;
    query += count * step.query;
  }
#endif
};

// An operand of one number a row.
template <typename Byte>
struct RowValues {
  Byte* data;
  bool given;
  int dims;                 // those past it have step 0
  int32_t unit;             // bytes
  uint32_t step[kMapDims];  // as RowMap's
};

// A row's index along a dimension, innermost first, is q[d] - q[d + 1] * size[d], where q[d] is the row's number divided
// by the number of rows that the dimensions before d have together. So the sum of every index times its stride is that
// of q[d] times stride[d] - size[d - 1] * stride[d - 1], the step of d, and no index need be known.
struct RowMap {
  uint32_t rows;          // at most kMapRows
  int dims;               // at most kMapDims
  bool aligned_blocks;    // the rows of a block are neighbours along the innermost dimension
  Divisor before[kMapDims - 1];  // q[d + 1] = before[d].quotient(row)
  RowUnits step[kMapDims];       // 0 from dims on
  int32_t unit[kQuery];          // bytes, of each operand
  // Of the first operands: the places, in units, of rows that have the operand's bytes around them.
  struct {
    uint32_t first;
    uint32_t count;
  } inner[kOutput];

#if defined(__CUDACC__)
  // Where the row's element of `values` lies. Apart from locate(), so that a row pays for it only where it is given;
  // a loop that stays one takes fewest registers from the kernels around it.
  template <typename Byte>
  __device__ __forceinline__ Byte* find(const RowValues<Byte>& values, uint32_t row) const {
    return values.data + offset(values, row);
  }

  template <typename Byte>
  __device__ __forceinline__ int64_t offset(const RowValues<Byte>& values, uint32_t row) const {
    uint32_t units = row * values.step[0];
#pragma unroll 1
    for (int d = 1; d < values.dims; ++d) units += before[d - 1].quotient(row) * values.step[d];
    return int64_t{static_cast<int32_t>(units)} * values.unit;
  }

  __device__ __forceinline__ RowUnits units(uint32_t row) const {
    RowUnits units{0, 0, 0, 0};
    units.add(step[0], row);
#pragma unroll
    for (int d = 1; d < kMapDims; ++d) {
      if (d >= dims) break;
      units.add(step[d], before[d - 1].quotient(row));
    }
    return units;
  }

  __device__ __forceinline__ RowPlace place(const RowUnits& units) const {
    const auto bytes = [&](uint32_t count, Operand operand) {
      return int64_t{static_cast<int32_t>(count)} * unit[operand];
    };
    return {bytes(units.input, kInput), bytes(units.second, kSecond), bytes(units.output, kOutput),
            static_cast<int32_t>(units.query),
            {units.input - inner[kInput].first < inner[kInput].count,
             units.second - inner[kSecond].first < inner[kSecond].count}};
  }

  __device__ __forceinline__ RowPlace locate(uint32_t row) const { return place(units(row)); }

  // The row `rows` after the one at `units`, which lies on the same line along the innermost dimension.
  __device__ __forceinline__ RowUnits along(RowUnits units, uint32_t rows) const {
    units.add(step[0], rows);
    return units;
  }
#endif
};

// What every stride of an operand is a multiple of, in elements; in bytes it fits 31 bits.
inline int64_t unit_of(const Rows& rows, Operand operand) {
  constexpr int64_t kMost = int64_t{1} << 27;
  int64_t unit = 0;
  for (int d = 0; d < rows.dims; ++d) unit = std::gcd(unit, rows.dim[d].stride[operand]);
  if (unit > kMost) unit = std::gcd(unit, kMost);
  return std::max<int64_t>(unit, 1);
}

// The dimension along which to split `rows` where they are too many for a RowMap, or some operand's lie too far apart for
// its units to fit 32 bits; -1 where they are not.
inline int dim_to_split(const Rows& rows) {
  if (rows.dims > kMapDims || rows.count() > kMapRows) return 0;
  for (int operand = 0; operand < kOperands; ++operand) {
    const int64_t unit = unit_of(rows, static_cast<Operand>(operand));
    int64_t low = 0, high = 0, furthest = 0;
    int widest = 0;
    for (int d = 0; d < rows.dims; ++d) {
      const int64_t reach = (rows.dim[d].size - 1) * (rows.dim[d].stride[operand] / unit);
      (reach < 0 ? low : high) += reach;
      if (std::abs(reach) > furthest) {
        furthest = std::abs(reach);
        widest = d;
      }
    }
    if (low < std::numeric_limits<int32_t>::min() || high > std::numeric_limits<int32_t>::max()) return widest;
  }
  return -1;
}

// Calls visit(d, dim, step) for every dimension of more than one row, innermost first: step(operand, unit) is that of
// RowMap in units of `unit` elements. Returns how many there are.
template <typename Visit>
int for_each_map_dim(const Rows& rows, const Visit& visit) {
  RowDim before{};
  int dims = 0;
  for (int d = rows.dims - 1; d >= 0; --d) {
    const RowDim& dim = rows.dim[d];
    if (dim.size == 1) continue;
    visit(dims++, dim, [&](Operand operand, int64_t unit) {
      return static_cast<uint32_t>((dim.stride[operand] - before.size * before.stride[operand]) / unit);
    });
    before = dim;
  }
  return dims;
}

// The map of `rows` (dim_to_split() < 0), given the bytes of an element of each operand, 0 of one that there is not, and the
// rows of a block.
inline RowMap make_row_map(const Rows& rows, int64_t input_bytes, int64_t second_bytes, int64_t output_bytes,
                           int rows_per_block) {
  RowMap map{};
  map.rows = static_cast<uint32_t>(rows.count());
  const int64_t input = unit_of(rows, kInput);
  const int64_t second = unit_of(rows, kSecond);
  const int64_t output = unit_of(rows, kOutput);
  map.unit[kInput] = static_cast<int32_t>(input * input_bytes);
  map.unit[kSecond] = static_cast<int32_t>(second * second_bytes);
  map.unit[kOutput] = static_cast<int32_t>(output * output_bytes);
  const auto find_inner = [&](Operand operand, int64_t unit, int64_t unit_bytes) {
    if (unit_bytes == 0) return;
    int64_t low = 0, high = 0;
    for (int d = 0; d < rows.dims; ++d) {
      const int64_t reach = (rows.dim[d].size - 1) * (rows.dim[d].stride[operand] / unit);
      (reach < 0 ? low : high) += reach;
    }
    const int64_t margin = (kReachBytes - 1) / unit_bytes + 1;
    map.inner[operand] = {static_cast<uint32_t>(low + margin),
                          static_cast<uint32_t>(std::max<int64_t>(high - low - 2 * margin + 1, 0))};
  };
  find_inner(kInput, input, map.unit[kInput]);
  find_inner(kSecond, second, map.unit[kSecond]);
  int64_t innermost = 1, count = 1;
  map.dims = for_each_map_dim(rows, [&](int d, const RowDim& dim, const auto& step) {
    if (d == 0) innermost = dim.size;
    if (d > 0) map.before[d - 1] = Divisor(static_cast<uint32_t>(count));
    map.step[d] = {step(kInput, input), step(kSecond, second), step(kOutput, output), step(kQuery, 1)};
    count *= dim.size;
  });
  map.aligned_blocks = map.dims <= 1 || innermost % rows_per_block == 0;
  return map;
}

// `data` is null where they are not given.
template <typename Byte>
RowValues<Byte> make_row_values(const Rows& rows, Byte* data, Operand operand, int64_t bytes) {
  RowValues<Byte> values{};
  const int64_t unit = unit_of(rows, operand);
  values.data = data;
  values.given = data != nullptr;
  values.unit = static_cast<int32_t>(unit * bytes);
  for_each_map_dim(rows, [&](int d, const RowDim&, const auto& step) {
    values.step[d] = step(operand, unit);
    if (values.step[d] != 0) values.dims = d + 1;
  });
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
