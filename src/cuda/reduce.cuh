// Reductions over the lanes that share a row. Always in the same order, so results are the same in every run.
#pragma once

#include "../row_math.h"
#include "vectors.cuh"

namespace sms::cuda {

// Over each group of kLanes neighbouring lanes of a full warp, for kRows rows at once. Every lane holds the result.
template <int kLanes, int kRows, typename Real>
__device__ __forceinline__ void group_max(Real (&value)[kRows]) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) value[r] = fmax(value[r], __shfl_xor_sync(kFullWarp, value[r], offset));
  }
}

template <int kLanes, int kRows, typename Real>
__device__ __forceinline__ void group_sum(Real (&value)[kRows]) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) value[r] = add(value[r], __shfl_xor_sync(kFullWarp, value[r], offset));
  }
}

// Over a warp. Every lane holds the result.
template <typename Real>
__device__ __forceinline__ Real warp_max(Real value) {
  Real values[1] = {value};
  group_max<kWarpLanes>(values);
  return values[0];
}

template <typename Real>
__device__ __forceinline__ Real warp_sum(Real value) {
  Real values[1] = {value};
  group_sum<kWarpLanes>(values);
  return values[0];
}

// A row's maximum and the normalizer of its sum.
template <typename Real>
struct Totals {
  Real maximum;     // may be -inf
  Real normalizer;  // 0 for a dead row, NaN for a NaN row
};

// Over a block of whole warps, at most 32: from each warp's maximum and sum of exponentials against it, the same in all
// lanes of the warp. One barrier; to be called once in a kernel. Every thread holds the result.
template <typename Real>
__device__ __forceinline__ Totals<Real> block_totals(Real maximum, Real sum) {
  __shared__ Real shared[2][kWarpLanes];
  const int lane = threadIdx.x % kWarpLanes;
  const int warps = blockDim.x / kWarpLanes;
  if (lane == 0) {
    shared[0][threadIdx.x / kWarpLanes] = maximum;
    shared[1][threadIdx.x / kWarpLanes] = sum;
  }
  __syncthreads();
  const Real warp_maximum = lane < warps ? shared[0][lane] : kNegativeInfinity<Real>;
  const Real warp_part = lane < warps ? shared[1][lane] : Real{0};
  const Real row_maximum = warp_max(warp_maximum);
  return {row_maximum, normalizer(warp_sum(rescale(warp_part, warp_maximum, row_maximum)))};
}

// Sum over a block of whole warps, from each warp's sum, the same in all its lanes. One barrier; to be called once in a
// kernel. Every thread holds the result.
template <typename Real>
__device__ __forceinline__ Real block_sum(Real sum) {
  __shared__ Real shared[kWarpLanes];
  const int lane = threadIdx.x % kWarpLanes;
  if (lane == 0) shared[threadIdx.x / kWarpLanes] = sum;
  __syncthreads();
  return warp_sum(lane < blockDim.x / kWarpLanes ? shared[lane] : Real{0});
}

}  // namespace sms::cuda
