// Reductions over the lanes that share a row. Always in the same order, so results are the same in every run.
#pragma once

#include "../row_math.h"
#include "vectors.cuh"

namespace sms::cuda {

// Over each group of kLanes neighbouring lanes of a full warp, for kRows rows at once: combine(a, b) of all values.
// Every lane holds the result.
template <int kLanes, int kRows, typename Value, typename Combine>
__device__ __forceinline__ void group_reduce(Value (&value)[kRows], const Combine& combine) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) value[r] = combine(value[r], __shfl_xor_sync(kFullWarp, value[r], offset));
  }
}

template <int kLanes, int kRows, typename Real>
__device__ __forceinline__ void group_sum(Real (&value)[kRows]) {
  group_reduce<kLanes>(value, [](Real a, Real b) { return add(a, b); });
}

// Over a warp. Every lane holds the result.
template <typename Value, typename Combine>
__device__ __forceinline__ Value warp_reduce(Value value, const Combine& combine) {
  Value values[1] = {value};
  group_reduce<kWarpLanes>(values, combine);
  return values[0];
}

template <typename Real>
__device__ __forceinline__ Real warp_max(Real value) {
  return warp_reduce(value, [](Real a, Real b) { return fmax(a, b); });
}

template <typename Real>
__device__ __forceinline__ Real warp_sum(Real value) {
  return warp_reduce(value, [](Real a, Real b) { return add(a, b); });
}

}  // namespace sms::cuda
