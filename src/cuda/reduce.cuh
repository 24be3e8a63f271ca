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

// A maximum is exact, so how it is found changes no result. But a NaN may be lost or be the maximum; the sum of
// exponentials is NaN either way (row_math.h).
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
__device__ __forceinline__ float warp_max(float value) {
  // Integers in the order of the numbers; the same again gives back the number.
  const auto ordered = [](int32_t bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(ordered(__reduce_max_sync(kFullWarp, ordered(__float_as_int(value)))));
}
#else
__device__ __forceinline__ float warp_max(float value) {
  return warp_reduce(value, [](float a, float b) { return fmax(a, b); });
}
#endif

__device__ __forceinline__ double warp_max(double value) {
  return warp_reduce(value, [](double a, double b) { return fmax(a, b); });
}

// The largest of each row's keys (segment.cuh) as a number.
template <int kLanes, typename Scores, int kRows>
__device__ __forceinline__ void group_maximum(typename Scores::Real (&maximum)[kRows],
                                              typename Scores::Key (&key)[kRows]) {
  if constexpr (kLanes < kWarpLanes) group_reduce<kLanes>(key, Scores::larger);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    maximum[r] = Scores::maximum_of(key[r]);
    if constexpr (kLanes == kWarpLanes) maximum[r] = warp_max(maximum[r]);
  }
}

template <typename Real>
__device__ __forceinline__ Real warp_sum(Real value) {
  return warp_reduce(value, [](Real a, Real b) { return add(a, b); });
}

}  // namespace sms::cuda
