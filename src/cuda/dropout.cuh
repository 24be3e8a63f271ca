// Dropout of what a lane holds: probabilities before they are stored, gradients before they are summed.
#pragma once

#include "segment.cuh"

namespace sms::cuda {

// Which cells of one row are kept.
struct RowDropout {
  Draw draw;
  uint64_t first_four;
  uint32_t threshold;

  __device__ __forceinline__ RowDropout(const DropoutArguments& arguments, int64_t row_number)
      : draw(draw_of(arguments.random)),
        first_four(static_cast<uint64_t>(row_number) * static_cast<uint64_t>(arguments.fours)),
        threshold(arguments.threshold) {}

  // Bit k * kCount + i tells of element i of this lane's vector k, where that has a live column, or if `all`. The
  // segment's first cell is of column `start`, a multiple of kCount. Two fours are under way at a time; with all of them
  // the code would be many times as long.
  template <int kCount, int kLanes, int kVectors>
  __device__ __forceinline__ uint32_t kept(int64_t start, const Extent& extent, int lane, bool all) const {
    constexpr int kFours = (kCount + kFour - 1) / kFour;  // of a vector
    static_assert(kCount * kVectors <= 32);
    uint32_t bits = 0;
#pragma unroll(kFours == 1 ? 2 : 1)
    for (int k = 0; k < kVectors; ++k) {
      const int column = (k * kLanes + lane) * kCount;
      if (!all && !extent.any_live(column, kCount)) continue;
      const uint64_t first = static_cast<uint64_t>(start + column);
      uint32_t vector = 0;
#pragma unroll
      for (int f = 0; f < kFours; ++f) {
        uint32_t word[kFour];
        random_four(word, draw, first_four + first / kFour + f);
#pragma unroll
        for (int i = 0; i < kFour; ++i) vector |= word[i] >= threshold ? 1u << (kFour * f + i) : 0u;
      }
      if (kCount < kFour) vector = vector >> (first % kFour) & ((1u << kCount) - 1);
      bits |= vector << (k * kCount);
    }
    return bits;
  }
};

// Of a row that may not exist.
template <typename Arguments>
__device__ __forceinline__ RowDropout row_dropout(const Arguments& arguments, uint32_t row) {
  return {arguments.dropout, arguments.dropout.first_row + arguments.rows.offset(arguments.dropout.row_number, row)};
}

template <typename Real>
__device__ __forceinline__ Real dropout_factor(const DropoutArguments& arguments) {
  return sizeof(Real) == 4 ? static_cast<Real>(arguments.factor) : static_cast<Real>(arguments.factor64);
}

// To be called by one thread of a launch: what backward needs to draw the same numbers.
__device__ __forceinline__ void store_random_state(const ForwardArguments& arguments) {
  if (arguments.random_state == nullptr) return;
  const Draw draw = draw_of(arguments.dropout.random);
  arguments.random_state[0] = static_cast<int64_t>(draw.seed);
  arguments.random_state[1] = static_cast<int64_t>(draw.offset);
}

// Probabilities as stored, with dropout: kept ones times the factor, the others 0. `start` is the column of the segment's
// first cell.
template <Element kElement, int kLanes, int kVectors>
__device__ __forceinline__ void drop(Chunk<16> (&y)[kVectors], bool is_nan, const ForwardArguments& arguments,
                                     uint32_t row, int64_t start, const Extent& extent, int lane) {
  using Real = Accumulate<kElement>;
  constexpr int kCount = kCountOf<kElement>;
  // Without a live column a vector is 0 already, but in a row of NaN.
  const uint32_t kept =
      row_dropout(arguments, row).template kept<kCount, kLanes, kVectors>(start, extent, lane, /*all=*/is_nan);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    Real probability[kCount];
    unpack<kElement>(y[k], probability);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Real value = multiply(probability[i], dropout_factor<Real>(arguments.dropout));
      probability[i] = (kept >> (k * kCount + i) & 1) != 0 ? value : Real{0};
    }
    y[k] = pack<kElement>(probability);
  }
}

// store_vectors() to arguments.before_dropout, if that is wanted, and then with dropout to arguments.y, both `offset`
// bytes on. One loop, so that the code is there once.
template <Element kElement, int kLanes, int kVectors>
__device__ __forceinline__ void store_with_dropout(Chunk<16> (&y)[kVectors], bool is_nan,
                                                   const ForwardArguments& arguments, int64_t offset, uint32_t row,
                                                   int64_t start, const Extent& extent, int lane) {
  bool dropped = arguments.before_dropout == nullptr;
#pragma unroll 1
  while (true) {
    if (dropped) drop<kElement, kLanes>(y, is_nan, arguments, row, start, extent, lane);
    store_vectors<kLanes, false, kBytesOf<kElement>>((dropped ? arguments.y : arguments.before_dropout) + offset, y,
                                                     extent, lane);
    if (dropped) break;
    dropped = true;
  }
}

// Zeroes the gradients of dropped cells, after settle().
template <Element kElement, int kLanes, int kVectors, bool kWhole>
__device__ __forceinline__ void drop_gradients(RawGradients<kElement, kLanes, kVectors, kWhole>& raw,
                                               const RowDropout& dropout, int64_t start, const Extent& extent,
                                               int lane) {
  constexpr int kCount = kCountOf<kElement>;
  constexpr int kBytes = kBytesOf<kElement>;
  const uint32_t kept = dropout.template kept<kCount, kLanes, kVectors>(start, extent, lane, /*all=*/false);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t& word = raw.grad[k][0].word[w];
      const auto keeps = [&](int element) { return (kept >> (k * kCount + element) & 1) != 0; };
      if constexpr (kBytes == 2) {
        word &= (keeps(2 * w) ? 0x0000ffffu : 0u) | (keeps(2 * w + 1) ? 0xffff0000u : 0u);
      } else {
        word = keeps(w / (kBytes / 4)) ? word : 0u;
      }
    }
  }
}

template <Element kElement, int kLanes, int kVectors, bool kWhole>
__device__ __forceinline__ void drop(RawGradients<kElement, kLanes, kVectors, kWhole>& raw,
                                     const BackwardArguments& arguments, uint32_t row, int64_t start,
                                     const Extent& extent, int lane) {
  drop_gradients(raw, row_dropout(arguments, row), start, extent, lane);
}

}  // namespace sms::cuda
