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

__device__ __forceinline__ void unpack_bfloat16(uint32_t pair, float& low, float& high) {
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xffff0000u);
}

// To nearest, ties to even, in integers; NaN stays NaN.
__device__ __forceinline__ uint32_t round_bfloat16(float value) {
  const uint32_t bits = __float_as_uint(value);
  return value != value ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

__device__ __forceinline__ uint32_t pack_bfloat16(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return convert_to_bfloat16(low, high);
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

// -inf in both elements of a pair.
template <Element kElement>
inline constexpr uint32_t kNegativeInfinityPair = kElement == Element::float16 ? 0xfc00fc00u : 0xff80ff80u;

template <Element kElement>
__device__ __forceinline__ void unpack_pair(uint32_t pair, float& low, float& high) {
  if constexpr (kElement == Element::float16) {
    unpack_float16(pair, low, high);
  } else {
    unpack_bfloat16(pair, low, high);
  }
}

// Element `index`, known at compile time after unrolling.
template <Element kElement>
__device__ __forceinline__ Accumulate<kElement> unpack_one(const Chunk<16>& chunk, int index) {
  if constexpr (kElement == Element::float64) {
    return __hiloint2double(chunk.word[2 * index + 1], chunk.word[2 * index]);
  } else if constexpr (kElement == Element::float32) {
    return __uint_as_float(chunk.word[index]);
  } else {
    float low, high;
    unpack_pair<kElement>(chunk.word[index / 2], low, high);
    return index % 2 == 0 ? low : high;
  }
}

// The larger of two pairs, element by element; a NaN gives way to a number.
template <Element kElement>
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return kElement == Element::float16 ? max_of_float16(a, b) : max_of_bfloat16(a, b);
#else
  float a_low, a_high, b_low, b_high;
  unpack_pair<kElement>(a, a_low, a_high);
  unpack_pair<kElement>(b, b_low, b_high);
  const float low = fmax(a_low, b_low);
  const float high = fmax(a_high, b_high);
  return kElement == Element::float16 ? pack_float16(low, high) : pack_bfloat16(low, high);
#endif
}

// All bits of each half whose byte of `bytes` is not zero: bytes 0 and 1, or 2 and 3.
template <int kPair>
__device__ __forceinline__ uint32_t halves_of_bytes(uint32_t bytes) {
  return nonzero_halves(__byte_perm(bytes, 0, kPair == 0 ? 0x4140 : 0x4342));
}

// 0 * element of a pair: 0, or NaN for infinities and NaN.
template <Element kElement>
__device__ __forceinline__ uint32_t zero_or_nan(uint32_t pair) {
  const uint32_t exponent = kElement == Element::float16 ? 0x7c007c00u : 0x7f807f80u;
  // A carry into the sign bit of its half where all bits of the exponent are set.
  const uint32_t lowest = kElement == Element::float16 ? 0x04000400u : 0x00800080u;
  return spread_signs<0xbb99>((pair & exponent) + lowest) & 0x7fff7fffu;
}

}  // namespace sms::cuda
