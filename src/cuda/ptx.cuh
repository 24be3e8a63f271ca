// What kernels say in PTX, and the shared memory that a launch asks for: all of a device that C++ of a host cannot be.
// tests/emulation has the same functions for a host, where it tries the kernels without a device.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(SMS_EMULATION)

#include "emulated_ptx.h"

#else

namespace sms::cuda {

// Loads and stores of 16 bytes. In PTX and volatile because the compiler would move the loads apart
// (keep_loads_together()). `stream`: they are not needed again.
__device__ __forceinline__ void load_16(uint32_t (&word)[4], const char* address, bool stream) {
  if (stream) {
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(address));
  } else {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(address));
  }
}

// The same of 8 bytes, which may be needed again.
__device__ __forceinline__ void load_8(uint32_t& low, uint32_t& high, const char* address) {
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "l"(address));
}

__device__ __forceinline__ void store_16(char* address, const uint32_t (&word)[4]) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(word[0]), "r"(word[1]), "r"(word[2]),
               "r"(word[3])
               : "memory");
}

// The address as a value of its own: the compiler would otherwise add its parts again for every access.
__device__ __forceinline__ const char* one_address(const char* address) {
  asm("" : "+l"(address));
  __builtin_assume(__isGlobal(address));
  return address;
}

// The same of a number.
__device__ __forceinline__ int one_number(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Waits for the kThreads threads of this half of the block. A barrier's number in a register would take all 16 of a block.
template <int kThreads>
__device__ __forceinline__ void wait_for_half_of_block(bool is_first) {
  if (is_first) {
    asm volatile("bar.sync 0, %0;" ::"n"(kThreads) : "memory");
  } else {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
  }
}

// A word that costs nothing.
__device__ __forceinline__ uint32_t any_word() {
  uint32_t word;
  asm volatile("" : "=r"(word));
  return word;
}

// At the end of each branch of a choice between arrays' elements: branches that end alike would be merged into one that
// finds its element in memory.
template <int kNumber>
__device__ __forceinline__ void keep_apart() {
  asm volatile("// %0" ::"n"(kNumber));
}

// A constant, in the branch that asks for it: the compiler would otherwise set it before every branch.
template <uint32_t kBits>
__device__ __forceinline__ float constant_of_branch() {
  float constant;
  asm volatile("mov.b32 %0, %1;" : "=f"(constant) : "n"(kBits));
  return constant;
}

// Conversions of pairs and their maxima: the headers that have them cost more time than all of a small kernel.
__device__ __forceinline__ void unpack_float16(uint32_t pair, float& low, float& high) {
  asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\tcvt.f32.f16 %0, l;\n\tcvt.f32.f16 %1, h;\n\t}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
}

__device__ __forceinline__ uint32_t pack_float16(float low, float high) {
  uint32_t pair;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("{\n\t.reg .b16 l, h;\n\tcvt.rn.f16.f32 l, %1;\n\tcvt.rn.f16.f32 h, %2;\n\tmov.b32 %0, {l, h};\n\t}"
      : "=r"(pair)
      : "f"(low), "f"(high));
#endif
  return pair;
}

// Compute capability 8.0 and newer.
__device__ __forceinline__ uint32_t convert_to_bfloat16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ uint32_t max_of_float16(uint32_t a, uint32_t b) {
  uint32_t pair;
  asm("max.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}
__device__ __forceinline__ uint32_t max_of_bfloat16(uint32_t a, uint32_t b) {
  uint32_t pair;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

// Four bytes of copies of a sign bit of `word` each: byte n of the result has that of byte (nibble n of kBytes) - 8.
// The intrinsic for prmt ignores the bit that asks for signs.
template <uint32_t kBytes>
__device__ __forceinline__ uint32_t spread_signs(uint32_t word) {
  uint32_t spread;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(spread) : "r"(word), "n"(kBytes));
  return spread;
}

// All bits of each half of a pair, elements `first` and the next of a vector, that is before element `count`, or is not.
// Compares them as float16 numbers: 1,024 + n has the bits 0x6400 + n. Both at most 1,000.
template <bool kBefore>
__device__ __forceinline__ uint32_t halves_at(uint32_t first, uint32_t count) {
  const uint32_t elements = 0x64006400u + first * 0x10001u + 0x10000u;
  const uint32_t counts = 0x64006400u + count * 0x10001u;
  uint32_t halves;
  if constexpr (kBefore) {
    asm("set.lt.u32.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(elements), "r"(counts));
  } else {
    asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(elements), "r"(counts));
  }
  return halves;
}

// All bits of each half of a pair that has one of its lower 15 bits set: elements of 16 bits that are not zero. As float16
// numbers they are not equal to 0, or NaN, whatever they are numbers of.
__device__ __forceinline__ uint32_t nonzero_halves(uint32_t pair) {
  uint32_t halves;
  asm("set.neu.u32.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(pair), "r"(0));
  return halves;
}

// The shared memory that a launch asked for; 16-byte aligned.
__device__ __forceinline__ char* launched_memory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes of device memory into a block's shared memory, both addresses aligned, and waits for nobody from
// compute capability 8.0 on.
__device__ __forceinline__ void copy_16(char* target, const char* source) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)), "l"(source) : "memory");
#else
  *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
#endif
}

// Waits for this thread's copies; a barrier then tells of everyone's.
__device__ __forceinline__ void wait_for_copies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Asks for bytes of device memory to be brought into the L2, and waits for nobody. Both a multiple of 16. Compute
// capability 9.0 and newer.
__device__ __forceinline__ void prefetch_to_l2(const char* address, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

// Clusters of blocks: compute capability 9.0 and newer.
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

  // Until they are there, and visible. A thread sleeps meanwhile, for a millisecond at most: without that hint it asks
  // again and again, in place of warps that could go on (H200, float16 under a float mask: .92 -> .94 of a copy's speed at
  // 32,768 columns, .90 -> .92 at 65,536).
  __device__ __forceinline__ void wait() {
    uint32_t done;
    do {
      asm volatile(
          "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0, 1000000;\n\t"
          "selp.u32 %0, 1, 0, p;\n\t}"
          : "=r"(done)
          : "r"(shared_address(&state))
          : "memory");
    } while (done == 0);
  }
};

// Sends 4, 8 or 16 bytes to where `target`, in this block's shared memory, lies in that of block `rank` of the cluster.
template <typename Value>
__device__ __forceinline__ void send_to_block(Value* target, ByteBarrier* barrier, uint32_t rank, const Value& value) {
  uint32_t remote, remote_barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(target)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(shared_address(&barrier->state)), "r"(rank));
  if constexpr (sizeof(Value) == 4) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote), "r"(word),
                 "r"(remote_barrier)
                 : "memory");
  } else {
    uint64_t word[sizeof(Value) / 8];
    memcpy(word, &value, sizeof word);
#pragma unroll
    for (uint32_t i = 0; i < sizeof(Value) / 8; ++i) {
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(remote + 8 * i),
                   "l"(word[i]), "r"(remote_barrier)
                   : "memory");
    }
  }
}

}  // namespace sms::cuda

#endif
