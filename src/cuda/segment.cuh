// What a lane holds of one segment of a row: raw inputs in flight, scores, gradients. Shared by the strategies.
#pragma once

#include "../pieces.h"
#include "../row_math.h"
#include "arguments.h"
#include "elements.cuh"

namespace sms::cuda {

// Marks a cell outside the live columns [begin, end) of a vector whose first column is a; most vectors have none.
template <int kCount, typename Real>
__device__ __forceinline__ void fill_outside(Real (&value)[kCount], const Extent& extent, int a, Real fill) {
  if (a < extent.begin || a + kCount > extent.end) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] = a + i >= extent.begin && a + i < extent.end ? value[i] : fill;
  }
}

// Inputs of the forward direction for kVectors vectors of a lane, loaded but not looked at, so that the loads of
// several vectors and rows are in flight together.
template <Element kElement, MaskKind kMask, int kLanes, int kVectors>
struct RawScores {
  static constexpr int kCount = kCountOf<kElement>;
  static constexpr int kBytes = kBytesOf<kElement>;
  static constexpr int kMaskBytes = mask_element_bytes(kMask, kElement);
  using Mask = Shape<kMaskBytes, kCount>;
  using Real = Accumulate<kElement>;

  Chunk<16> x[kVectors][1];
  typename Mask::Piece mask[kVectors][Mask::kPieces];

  // Vectors first, first + 1, ... of the segment whose column 0 is at `x_base` and `mask_base`.
  template <Cache kCache>
  __device__ __forceinline__ void load(const char* x_base, const char* mask_base, int64_t mask_column_stride,
                                       const Extent& extent, int first, int lane) {
    load_vectors<kLanes, kCache, kBytes, kCount>(x, x_base, extent, first, lane);
    if constexpr (kMask != MaskKind::none) {
      if (mask_column_stride == kMaskBytes) {
        load_vectors<kLanes, Cache::keep, kMaskBytes, kCount>(mask, mask_base, extent, first, lane);
      } else {
        load_strided<kLanes, kMaskBytes, kCount>(mask, mask_base, mask_column_stride, extent, first, lane);
      }
    }
  }

  // The scores x * scale + mask, each step rounded; -inf in excluded cells, whatever was there.
  __device__ __forceinline__ void scores(Real (*score)[kCount], Real scale, const Extent& extent, int first,
                                         int lane) const {
    const Extent lane_extent = extent.moved(lane * kCount);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Real value[kCount];
      unpack<kElement>(x[k][0], value);
#pragma unroll
      for (int i = 0; i < kCount; ++i) value[i] = multiply(value[i], scale);
      if constexpr (kMask == MaskKind::boolean) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const bool excluded = (mask[k][0].word[i / 4] & (0xffu << (8 * (i % 4)))) != 0;
          value[i] = excluded ? kNegativeInfinity<Real> : value[i];
        }
      } else if constexpr (kMask == MaskKind::same) {
        Real addend[kCount];
        unpack<kElement>(mask[k][0], addend);
#pragma unroll
        for (int i = 0; i < kCount; ++i) value[i] = add(value[i], addend[i]);
      } else if constexpr (kMask == MaskKind::float32) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) value[i] = add(value[i], __uint_as_float(mask[k][i / 4].word[i % 4]));
      }
      fill_outside(value, lane_extent, (first + k) * kLanes * kCount, kNegativeInfinity<Real>);
#pragma unroll
      for (int i = 0; i < kCount; ++i) score[k][i] = value[i];
    }
  }
};

// The scores of all kVectors vectors of a warp's lane, a few vectors in flight at a time.
template <Cache kCache, Element kElement, MaskKind kMask, int kVectors>
__device__ __forceinline__ void load_scores(Accumulate<kElement> (&score)[kVectors][kCountOf<kElement>], const char* x,
                                            const char* mask, int64_t mask_column_stride, Accumulate<kElement> scale,
                                            const Extent& extent, int lane) {
  constexpr int kBatch = kVectorsInFlight<kMask>;
#pragma unroll
  for (int first = 0; first < kVectors; first += kBatch) {
    RawScores<kElement, kMask, kWarpLanes, kBatch> raw;
    raw.template load<kCache>(x, mask, mask_column_stride, extent, first, lane);
    raw.scores(score + first, scale, extent, first, lane);
  }
}

// Probabilities and their gradients, as loaded.
template <Element kElement, int kLanes, int kVectors>
struct RawGradients {
  static constexpr int kCount = kCountOf<kElement>;
  static constexpr int kBytes = kBytesOf<kElement>;
  using Real = Accumulate<kElement>;

  Chunk<16> y[kVectors][1];
  Chunk<16> grad[kVectors][1];

  template <Cache kCache>
  __device__ __forceinline__ void load(const char* y_base, const char* grad_base, bool grad_expanded,
                                       const Extent& extent, int lane) {
    load_vectors<kLanes, kCache, kBytes, kCount>(y, y_base, extent, 0, lane);
    if (grad_expanded) {
      load_strided<kLanes, kBytes, kCount>(grad, grad_base, 0, extent, 0, lane);
    } else {
      load_vectors<kLanes, kCache, kBytes, kCount>(grad, grad_base, extent, 0, lane);
    }
  }

  // Makes the assembler unpack 16-bit elements again from here on. It would keep the numbers otherwise, at twice the
  // registers, and spill. Kernels are launched on one-dimensional grids, so blockIdx.y is 0, which it does not know.
  __device__ __forceinline__ void keep_packed() {
    if constexpr (kBytes == 2) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          y[k][0].word[w] ^= blockIdx.y;
          grad[k][0].word[w] ^= blockIdx.y;
        }
      }
    }
  }

  __device__ __forceinline__ void vector(int k, Real (&probability)[kCount], Real (&gradient)[kCount],
                                         const Extent& extent, int lane) const {
    unpack<kElement>(y[k][0], probability);
    unpack<kElement>(grad[k][0], gradient);
    fill_outside(probability, extent.moved(lane * kCount), k * kLanes * kCount, Real{0});
  }

  // This vector's share of sum(grad * y). Cells of probability 0 take no part, whatever their gradient.
  __device__ __forceinline__ Real dot(int k, const Extent& extent, int lane) const {
    Real probability[kCount], gradient[kCount];
    vector(k, probability, gradient, extent, lane);
    Real sum = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sum = fma(probability[i], probability[i] == Real{0} ? Real{0} : gradient[i], sum);
    }
    return sum;
  }

  __device__ __forceinline__ Chunk<16> result(int k, Real dot, Real scale, const Extent& extent, int lane) const {
    Real probability[kCount], gradient[kCount];
    vector(k, probability, gradient, extent, lane);
#pragma unroll
    for (int i = 0; i < kCount; ++i) gradient[i] = score_gradient(probability[i], gradient[i], dot, scale);
    return pack<kElement>(gradient);
  }
};

// The largest of a lane's scores. A NaN may be lost here: the sum of exponentials keeps it (row_math.h).
template <int kVectors, int kCount, typename Real>
__device__ __forceinline__ Real largest(const Real (&score)[kVectors][kCount]) {
  Real maximum = kNegativeInfinity<Real>;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) maximum = fmax(maximum, score[k][i]);
  }
  return maximum;
}

// Replaces scores by exponentials against `maximum`, which may be -inf; returns their sum.
template <int kVectors, int kCount, typename Real>
__device__ __forceinline__ Real exponentiate(Real (&score)[kVectors][kCount], Real maximum) {
  const Real shift = finite_shift(maximum);
  Real sum = 0;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    Real part = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      score[k][i] = exponential(score[k][i], shift);
      part = add(part, score[k][i]);
    }
    sum = add(sum, part);
  }
  return sum;
}

// The probabilities as stored: exponentials times the row's factor (NaN in a NaN row, excluded cells included).
template <Element kElement, int kVectors>
__device__ __forceinline__ void normalize(Chunk<16> (&result)[kVectors],
                                          const Accumulate<kElement> (&exponentials)[kVectors][kCountOf<kElement>],
                                          Accumulate<kElement> factor) {
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    Accumulate<kElement> value[kCountOf<kElement>];
#pragma unroll
    for (int i = 0; i < kCountOf<kElement>; ++i) value[i] = multiply(exponentials[k][i], factor);
    result[k] = pack<kElement>(value);
  }
}

}  // namespace sms::cuda
