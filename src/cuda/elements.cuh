// Elements in memory and the numbers that they are computed with.
#pragma once

#include <type_traits>

#include "vectors.cuh"

namespace sms::cuda {

// Real numbers that rows of an element are accumulated in.
template <Element kElement>
using Accumulate = std::conditional_t<kElement == Element::float64, double, float>;

template <Element kElement>
inline constexpr int kBytesOf = element_bytes(kElement);

// Elements of a 16-byte vector.
template <Element kElement>
inline constexpr int kCountOf = kVectorBytes / kBytesOf<kElement>;

// Conversions of float16 and bfloat16 pairs, in PTX: the headers cost more time than all of a small kernel.
__device__ __forceinline__ void unpack_float16(uint32_t pair, float& low, float& high) {
  asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\tcvt.f32.f16 %0, l;\n\tcvt.f32.f16 %1, h;\n\t}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
}

__device__ __forceinline__ void unpack_bfloat16(uint32_t pair, float& low, float& high) {
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xffff0000u);
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

// To nearest, ties to even, in integers; NaN stays NaN.
__device__ __forceinline__ uint32_t round_bfloat16(float value) {
  const uint32_t bits = __float_as_uint(value);
  return value != value ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

__device__ __forceinline__ uint32_t pack_bfloat16(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return round_bfloat16(low) | (round_bfloat16(high) << 16);
#endif
}

template <Element kElement>
__device__ __forceinline__ void unpack(const Chunk<16>& chunk, Accumulate<kElement> (&value)[kCountOf<kElement>]) {
  if constexpr (kElement == Element::float64) {
#pragma unroll
    for (int i = 0; i < 2; ++i) value[i] = __hiloint2double(chunk.word[2 * i + 1], chunk.word[2 * i]);
  } else if constexpr (kElement == Element::float32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = __uint_as_float(chunk.word[i]);
  } else {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kElement == Element::float16) {
        unpack_float16(chunk.word[w], value[2 * w], value[2 * w + 1]);
      } else {
        unpack_bfloat16(chunk.word[w], value[2 * w], value[2 * w + 1]);
      }
    }
  }
}

template <Element kElement>
__device__ __forceinline__ Chunk<16> pack(const Accumulate<kElement> (&value)[kCountOf<kElement>]) {
  Chunk<16> chunk;
  if constexpr (kElement == Element::float64) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      chunk.word[2 * i] = __double2loint(value[i]);
      chunk.word[2 * i + 1] = __double2hiint(value[i]);
    }
  } else if constexpr (kElement == Element::float32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) chunk.word[i] = __float_as_uint(value[i]);
  } else {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      chunk.word[w] = kElement == Element::float16 ? pack_float16(value[2 * w], value[2 * w + 1])
                                                   : pack_bfloat16(value[2 * w], value[2 * w + 1]);
    }
  }
  return chunk;
}

}  // namespace sms::cuda
