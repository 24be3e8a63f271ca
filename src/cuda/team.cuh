// The warps that share a row, and how they share its maximum and its sums: a block's, or those of a cluster of blocks.
#pragma once

#include "cluster.cuh"
#include "reduce.cuh"

namespace sms::cuda {

// A row's maximum and the normalizer of its sum.
template <typename Real>
struct Totals {
  Real maximum;     // may be -inf
  Real normalizer;  // 0 for a dead row, NaN for a NaN row
};

// The warps of a block, at most 32, that share a row. They meet once in a kernel.
struct BlockTeam {
  __device__ __forceinline__ int warp() const { return static_cast<int>(threadIdx.x) / kWarpLanes; }
  __device__ __forceinline__ int warps() const { return static_cast<int>(blockDim.x) / kWarpLanes; }

  // From each warp's maximum and sum of exponentials against it, the same in all lanes of the warp. Every thread holds
  // the result.
  template <typename Real, typename Exponent>
  __device__ __forceinline__ Totals<Real> totals(Real maximum, Real sum, const Exponent& exponent) const {
    __shared__ Real shared[2][kWarpLanes];
    const int lane = threadIdx.x % kWarpLanes;
    if (lane == 0) {
      shared[0][warp()] = maximum;
      shared[1][warp()] = sum;
    }
    __syncthreads();
    const Real warp_maximum = lane < warps() ? shared[0][lane] : kNegativeInfinity<Real>;
    const Real warp_part = lane < warps() ? shared[1][lane] : Real{0};
    const Real row_maximum = warp_max(warp_maximum);
    return {row_maximum, normalizer(warp_sum(exponent.rescale(warp_part, warp_maximum, row_maximum)))};
  }

  // The sum of each warp's sum. Every thread holds the result.
  template <typename Real>
  __device__ __forceinline__ Real sum(Real value) const {
    __shared__ Real shared[kWarpLanes];
    const int lane = threadIdx.x % kWarpLanes;
    if (lane == 0) shared[warp()] = value;
    __syncthreads();
    return warp_sum(lane < warps() ? shared[lane] : Real{0});
  }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// The warps of a cluster of blocks, or of a block alone, that share a row. Each warp hands its kNumbers numbers to
// every block, so that each can combine all of them in the same order. To be made at the start of a kernel; meets once.
template <typename Real, int kNumbers>
class ClusterTeam {
 public:
  uint32_t block = cluster_block();
  uint32_t blocks = cluster_blocks();

  __device__ __forceinline__ ClusterTeam() : number_(numbers()) {
    if (blocks > 1) cluster_arrive_unordered();
  }

  __device__ __forceinline__ uint32_t row() const { return blockIdx.x / blocks; }

  // As BlockTeam's.
  template <typename Exponent>
  __device__ __forceinline__ Totals<Real> totals(Real maximum, Real sum, const Exponent& exponent) const {
    tell({maximum, sum});
    const int lane = threadIdx.x % kWarpLanes;
    Real row_maximum = kNegativeInfinity<Real>;
    for (int w = lane; w < warps(); w += kWarpLanes) row_maximum = fmax(row_maximum, number_[0][w]);
    row_maximum = warp_max(row_maximum);
    Real row_sum = 0;
    for (int w = lane; w < warps(); w += kWarpLanes) {
      row_sum = add(row_sum, exponent.rescale(number_[1][w], number_[0][w], row_maximum));
    }
    return {row_maximum, normalizer(warp_sum(row_sum))};
  }

  __device__ __forceinline__ Real sum(Real value) const {
    tell({value});
    Real row_sum = 0;
    for (int w = threadIdx.x % kWarpLanes; w < warps(); w += kWarpLanes) row_sum = add(row_sum, number_[0][w]);
    return warp_sum(row_sum);
  }

 private:
  static constexpr int kMaxWarps = kClusterBlocks * kSharedThreads / kWarpLanes;
  using Numbers = Real (*)[kMaxWarps];

  __device__ __forceinline__ int warps() const { return static_cast<int>(blocks * blockDim.x / kWarpLanes); }

  static __device__ __forceinline__ Numbers numbers() {
    __shared__ Real memory[kNumbers][kMaxWarps];
    return memory;
  }

  __device__ __forceinline__ void tell(const Real (&number)[kNumbers]) const {
    const uint32_t warp = (block * blockDim.x + threadIdx.x) / kWarpLanes;
    const uint32_t lane = threadIdx.x % kWarpLanes;
    if (blocks == 1) {
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) {
        if (lane == 0) number_[n][warp] = number[n];
      }
      __syncthreads();
      return;
    }
    cluster_wait();
    if (lane < blocks) {
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) store_in_block(&number_[n][warp], lane, number[n]);
    }
    cluster_arrive();
    cluster_wait();
  }

  Numbers number_;
};

#endif

}  // namespace sms::cuda
