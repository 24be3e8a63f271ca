// What a kernel needs of a thread-block cluster (compute capability 9.0 and newer), in PTX.
#pragma once

#include <cstdint>

namespace sms::cuda {

__device__ __forceinline__ uint32_t cluster_block() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_blocks() {
  uint32_t count;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return count;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// First half of a barrier that orders nothing: the second half tells that every block of the cluster has begun.
__device__ __forceinline__ void cluster_arrive_unordered() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Stores to where `target`, in this block's shared memory, lies in that of block `rank` of the cluster.
template <typename Real>
__device__ __forceinline__ void store_in_block(Real* target, uint32_t rank, Real value) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(target)), "r"(rank));
  if constexpr (sizeof(Real) == 8) {
    asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(remote), "d"(value) : "memory");
  } else {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
  }
}

}  // namespace sms::cuda
