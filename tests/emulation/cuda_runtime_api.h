// What nvcc knows by itself, and of the CUDA runtime what src/cuda calls, for a C++ compiler: to be included before
// everything else, as nvcc does with its own.
#pragma once

#include <math.h>  // and not <cmath> alone: kernels call fmax() and others outside of std, for float too

#include <algorithm>
#include <cstring>
#include <tuple>

#include "device.h"

#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local

using std::max;
using std::min;

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }

inline dim3 threadIdx;
inline dim3 blockIdx;
inline dim3 blockDim;
inline dim3 gridDim;

// The bits of one type as another; the rest of a larger one is 0.
template <typename To, typename From>
To bits_as(const From& from) {
  To to{};
  std::memcpy(&to, &from, std::min(sizeof to, sizeof from));
  return to;
}

inline float __uint_as_float(uint32_t bits) { return bits_as<float>(bits); }
inline uint32_t __float_as_uint(float value) { return bits_as<uint32_t>(value); }
inline float __int_as_float(int32_t bits) { return bits_as<float>(bits); }
inline int32_t __float_as_int(float value) { return bits_as<int32_t>(value); }
inline double __hiloint2double(int high, int low) {
  return bits_as<double>(uint64_t{static_cast<uint32_t>(high)} << 32 | static_cast<uint32_t>(low));
}
inline int __double2loint(double value) { return static_cast<int>(bits_as<uint64_t>(value)); }
inline int __double2hiint(double value) { return static_cast<int>(bits_as<uint64_t>(value) >> 32); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift % 32));
}
inline uint32_t __funnelshift_lc(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (32 - std::min<uint32_t>(shift, 32)));
}

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t chosen = 0;
  for (int n = 0; n < 4; ++n) chosen |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * n) & 7)) & 0xff) << (8 * n);
  return chosen;
}

inline void expect_full_warp(uint32_t lanes) {
  if (lanes != 0xffffffffu) sms::emulation::fail("lanes of a warp alone: only the whole warp is emulated");
}

template <typename Value>
Value __shfl_sync(uint32_t lanes, Value value, int source, int width = 32) {
  expect_full_warp(lanes);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return bits_as<Value>(sms::emulation::exchange(bits_as<uint64_t>(value), lane / width * width + source % width));
}
template <typename Value>
Value __shfl_xor_sync(uint32_t lanes, Value value, int flipped) {
  expect_full_warp(lanes);
  return bits_as<Value>(
      sms::emulation::exchange(bits_as<uint64_t>(value), static_cast<int>(threadIdx.x) % 32 ^ flipped));
}
inline int32_t __reduce_max_sync(uint32_t lanes, int32_t value) {
  for (int flipped = 16; flipped > 0; flipped /= 2) value = std::max(value, __shfl_xor_sync(lanes, value, flipped));
  return value;
}
inline bool __any_sync(uint32_t lanes, bool value) {
  expect_full_warp(lanes);
  return sms::emulation::any_of_warp(value);
}
inline bool __all_sync(uint32_t lanes, bool value) { return !__any_sync(lanes, !value); }
inline void __syncwarp() { sms::emulation::wait_for_warp(); }
inline void __syncthreads() { sms::emulation::wait_for_block(); }

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidDeviceFunction = 98 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4 };
using cudaStream_t = struct CUstream_st*;

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    dim3 clusterDim;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  return static_cast<size_t>(bytes) <= sms::emulation::kMostSharedBytes ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename... Parameters, typename... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), const Given&... given) {
  const unsigned threads = config->blockDim.x;
  const unsigned blocks = config->numAttrs == 0 ? 1 : config->attrs[0].val.clusterDim.x;
  const bool possible = threads > 0 && threads <= sms::emulation::kMostThreads && threads % 32 == 0 && blocks > 0 &&
                        blocks <= sms::emulation::kMostBlocks && config->gridDim.x > 0 &&
                        config->gridDim.x % blocks == 0 &&
                        config->dynamicSmemBytes <= sms::emulation::kMostSharedBytes;
  if (!possible) return cudaErrorInvalidValue;
  const std::tuple<Parameters...> parameters(given...);
  sms::emulation::launch(config->gridDim, threads, config->dynamicSmemBytes, blocks,
                         [&] { std::apply(kernel, parameters); });
  return cudaSuccess;
}
