// Copies from device memory into a block's shared memory that wait for nobody (compute capability 8.0 and newer).
#pragma once

#include <cstdint>

namespace sms::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The shared memory that a launch asked for; 16-byte aligned.
__device__ __forceinline__ char* launched_memory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

// 16 bytes, both addresses aligned.
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

}  // namespace sms::cuda
