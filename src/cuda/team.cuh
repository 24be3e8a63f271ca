// The warps that share a row, and how they share its maximum and its sums: a block's, or those of a cluster of blocks.
#pragma once

#include "ptx.cuh"
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
  static __device__ __forceinline__ uint32_t block() { return 0; }
  __device__ __forceinline__ uint32_t row() const { return blockIdx.x; }
  __device__ __forceinline__ bool first_thread() const { return threadIdx.x == 0; }
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

// The warps of a cluster of blocks that share a row, or, if kMayBeAlone, of a block without a cluster. Each warp hands
// its kNumbers numbers to every block, so that each can combine all of them in the same order. To be made at the start of
// a kernel.
template <typename Real, int kNumbers, bool kMayBeAlone>
class ClusterTeam {
 public:
  // Read anew wherever they are asked for: registers are scarcer.
  static __device__ __forceinline__ uint32_t block() { return cluster_block(); }
  static __device__ __forceinline__ uint32_t blocks() { return cluster_blocks(); }

  __device__ __forceinline__ ClusterTeam() {
    if (alone()) return;
    if (threadIdx.x == 0) barrier().expect(static_cast<uint32_t>(warps()) * kNumbers * sizeof(Real));
    cluster_arrive_unordered();
  }

  __device__ __forceinline__ uint32_t row() const { return cluster_number(); }
  __device__ __forceinline__ bool first_thread() const { return block() == 0 && threadIdx.x == 0; }
  __device__ __forceinline__ int warp() const {
    return static_cast<int>((block() * blockDim.x + threadIdx.x) / kWarpLanes);
  }
  __device__ __forceinline__ int warps() const { return static_cast<int>(blocks() * blockDim.x / kWarpLanes); }

  // As BlockTeam's.
  template <typename Exponent>
  __device__ __forceinline__ Totals<Real> totals(Real maximum, Real sum, const Exponent& exponent) const {
    tell({maximum, sum});
    const int lane = threadIdx.x % kWarpLanes;
    Real row_maximum = kNegativeInfinity<Real>;
    for (int w = lane; w < warps(); w += kWarpLanes) row_maximum = fmax(row_maximum, numbers()[0][w]);
    row_maximum = warp_max(row_maximum);
    Real row_sum = 0;
    for (int w = lane; w < warps(); w += kWarpLanes) {
      row_sum = add(row_sum, exponent.rescale(numbers()[1][w], numbers()[0][w], row_maximum));
    }
    return {row_maximum, normalizer(warp_sum(row_sum))};
  }

  __device__ __forceinline__ Real sum(Real value) const {
    tell({value});
    Real row_sum = 0;
    for (int w = threadIdx.x % kWarpLanes; w < warps(); w += kWarpLanes) row_sum = add(row_sum, numbers()[0][w]);
    return warp_sum(row_sum);
  }

 private:
  static constexpr int kMaxWarps = kClusterBlocks * kBlockThreads / kWarpLanes;
  using Numbers = Real (*)[kMaxWarps];

  // A send without a cluster is an illegal instruction.
  static __device__ __forceinline__ bool alone() { return kMayBeAlone && blocks() == 1; }

  static __device__ __forceinline__ Numbers numbers() {
    __shared__ Real memory[kNumbers][kMaxWarps];
    return memory;
  }

  static __device__ __forceinline__ ByteBarrier& barrier() {
    __shared__ ByteBarrier memory;
    return memory;
  }

  __device__ __forceinline__ void tell(const Real (&number)[kNumbers]) const {
    const uint32_t lane = threadIdx.x % kWarpLanes;
    if (alone()) {
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) {
        if (lane == 0) numbers()[n][warp()] = number[n];
      }
      __syncthreads();
      return;
    }
    cluster_wait();
    if (lane < blocks()) {
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) send_to_block(&numbers()[n][warp()], &barrier(), lane, number[n]);
    }
    barrier().wait();
  }
};

// The warps of one or more blocks that share a row; one, where there are no clusters.
template <typename Real, int kNumbers>
using BlocksTeam = ClusterTeam<Real, kNumbers, true>;

#else

template <typename Real, int kNumbers>
using BlocksTeam = BlockTeam;

#endif

}  // namespace sms::cuda
