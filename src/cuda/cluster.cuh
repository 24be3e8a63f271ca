// What a kernel needs of a thread-block cluster (compute capability 9.0 and newer), in PTX.
#pragma once

#include <cstdint>

#include "copy.cuh"

namespace sms::cuda {

__device__ __forceinline__ uint32_t cluster_block() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_number() {
  uint32_t number;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(number));
  return number;
}

__device__ __forceinline__ uint32_t cluster_blocks() {
  uint32_t count;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return count;
}

// First half of a barrier that orders nothing: the second half tells that every block of the cluster has begun.
__device__ __forceinline__ void cluster_arrive_unordered() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// A barrier in shared memory, for one use, that counts the bytes that blocks of the cluster send to this one. Unlike a
// barrier of the cluster it has nobody wait for earlier stores, and costs no fence of all memory.
struct ByteBarrier {
  uint64_t state;

  // By one thread, before the cluster's first barrier: how many bytes will come.
  __device__ __forceinline__ void expect(uint32_t bytes) {
    asm volatile(
        "{\n\t.reg .b64 token;\n\tmbarrier.init.shared::cta.b64 [%0], 1;\n\t"
        "fence.mbarrier_init.release.cluster;\n\t"
        "mbarrier.arrive.expect_tx.shared::cta.b64 token, [%0], %1;\n\t}" ::"r"(shared_address(&state)),
        "r"(bytes)
        : "memory");
  }

  // Until they are there, and visible.
  __device__ __forceinline__ void wait() {
    uint32_t done;
    do {
      asm volatile(
          "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n\t"
          "selp.u32 %0, 1, 0, p;\n\t}"
          : "=r"(done)
          : "r"(shared_address(&state))
          : "memory");
    } while (done == 0);
  }
};

// Sends a number to where `target`, in this block's shared memory, lies in that of block `rank` of the cluster.
template <typename Real>
__device__ __forceinline__ void send_to_block(Real* target, ByteBarrier* barrier, uint32_t rank, Real value) {
  uint32_t remote, remote_barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(target)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(shared_address(&barrier->state)), "r"(rank));
  if constexpr (sizeof(Real) == 8) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(remote),
                 "l"(__double_as_longlong(value)), "r"(remote_barrier)
                 : "memory");
  } else {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote),
                 "r"(__float_as_uint(value)), "r"(remote_barrier)
                 : "memory");
  }
}

}  // namespace sms::cuda
