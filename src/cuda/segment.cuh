// What a lane holds of one segment of a row: raw inputs in flight, scores, gradients. Shared by the strategies.
#pragma once

#include "../pieces.h"
#include "../row_math.h"
#include "arguments.h"
#include "elements.cuh"

namespace sms::cuda {

// Where the results of a row lie; without results, its probabilities.
__device__ __forceinline__ const char* result_of(const ForwardArguments& arguments, const RowPlace& place) {
  return arguments.y + place.output;
}
__device__ __forceinline__ const char* result_of(const BackwardArguments& arguments, const RowPlace& place) {
  return arguments.dx != nullptr ? arguments.dx + place.output : arguments.y + place.input;
}

// The sum of kCount terms, of which the first kLive are term(0), term(1), ... and the others 0. The order is such that a sum
// of terms that are moved on by one, the first one then 0, has the same bits if the last one was 0: that of a segment with
// columns before it (Ahead). If kCount is a power of 2 the last one may also be another number that takes the place of the
// first: a folded end.
template <int kCount, int kLive = kCount, int kFirst = 0, int kStep = 1, typename Term>
__device__ __forceinline__ auto sum_of_vectors(const Term& term) {
  if constexpr (kLive == 0) {
    return decltype(term(0)){0};
  } else if constexpr (kCount == 1) {
    return term(kFirst);
  } else {
    constexpr int kRight = kCount == 3 ? kFirst + 2 * kStep : kFirst + kStep;
    const auto left = sum_of_vectors<(kCount + 1) / 2, kLive, kFirst, kCount == 3 ? kStep : 2 * kStep>(term);
    if constexpr (kRight >= kLive) {
      return left;
    } else {
      return add(left, sum_of_vectors<kCount / 2, kLive, kRight, 2 * kStep>(term));
    }
  }
}

SMS_HOST_DEVICE constexpr bool is_power_of_2(int count) { return (count & (count - 1)) == 0; }

// kBehind of vectors that have columns before them, but none that are folded.
inline constexpr int kNothingBehind = -1;

// The columns before a segment (vectors.cuh): none, if it is not kPreceded. Whether its end may be folded is kMayFold.
template <Element kElement, bool kPreceded, bool kMayFold = kPreceded>
struct Ahead {
  static constexpr int kCount = kCountOf<kElement>;
  using Real = Accumulate<kElement>;
  // Of the first vectors of a segment of kVectors, as RawScores and RawGradients have it.
  template <int kVectors>
  static constexpr int kBehind = !kPreceded ? 0 : kMayFold ? kVectors : kNothingBehind;

  int columns;

  Ahead() = default;
  __device__ __forceinline__ explicit Ahead(const char* result)
      : columns(kPreceded ? elements_ahead<kBytesOf<kElement>>(result) : 0) {}

  __device__ __forceinline__ const char* before(const char* segment, int64_t column_stride) const {
    return kPreceded ? segment - columns * column_stride : segment;
  }
  __device__ __forceinline__ Extent before(const Extent& extent, int length) const {
    return kPreceded ? extent.preceded(columns, length) : extent;
  }

  // Whether elements [0, columns) of the first lane's first vector, which no column of the segment's beginning takes,
  // hold its end: columns from `length` on. Then nothing of it is without a place.
  __device__ __forceinline__ static bool folds(int end, int length) { return kPreceded && end > length; }

  // Whether this is such an element.
  __device__ __forceinline__ bool is_folded(int element, int lane) const { return lane == 0 && element < columns; }

  // at_edges() (vectors.cuh) of vectors of a segment.
  template <int kLanes, int kVectors, bool kWhole, int kBehind, typename Run>
  __device__ __forceinline__ void at_edges(const Extent& extent, int first, int lane, const Run& run) const {
    cuda::at_edges<kLanes, kCount, kVectors, kWhole, kPreceded, kBehind>(extent, first, lane, run);
  }

  // A lane's sum, given those of each element over its vectors, for group_sum(). Its bits do not depend on the columns
  // before: elements of what would be a lane's vectors without them are summed in their order, by the lane that has the
  // first of them and then by the next. That one keeps the sum: group_sum() adds those of lanes half a group apart
  // first, so that a turn of the group changes no bits. Every lane of the warp calls it.
  // kByBits: fewer instructions and more registers, as bits become predicates all at once.
  template <int kLanes, bool kByBits = false, typename Sum>
  __device__ __forceinline__ Real sum(int lane, const Sum& sum_of_element) const {
    Real sum = 0;
    if constexpr (!kPreceded) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum = add(sum, sum_of_element(i));
    } else {
      const uint32_t bits = kByBits ? ~0u << columns : 0;
      // Not ~bits, which would be taken for the same bits, one at a time.
      const uint32_t bits_before = kByBits ? static_cast<uint32_t>(one_number(1 << columns)) - 1 : 0;
      const auto is_behind = [&](int i) {
        return kByBits ? i == kCount - 1 || (bits >> i & 1) != 0 : i >= columns;
      };
      const auto is_before = [&](int i) { return kByBits ? (bits_before >> i & 1) != 0 : i < columns; };
      Real element[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        element[i] = sum_of_element(i);
        if (is_behind(i)) sum = add(sum, element[i]);
      }
      sum = __shfl_sync(kFullWarp, sum, lane + kLanes - 1, kLanes);
#pragma unroll
      for (int i = 0; i + 1 < kCount; ++i) {
        if (is_before(i)) sum = add(sum, element[i]);
      }
    }
    return sum;
  }

  // The sum of each element over a lane's vectors, given term(k, i) of vector k and element i, and that those of vectors
  // from kLive on are 0; an end that is folded counts as behind the others. Every lane of the warp calls it.
  template <int kLanes, int kVectors, int kLive, typename Term>
  __device__ __forceinline__ void sum_elements(Real (&element)[kCount], const Extent& extent, int lane,
                                               const Term& term) const {
    constexpr int kLength = kLanes * kVectors * kCount;
#pragma unroll
    for (int i = 0; i < kCount; ++i) element[i] = sum_of_vectors<kVectors, kLive>([&](int k) { return term(k, i); });
    if constexpr (kOrdersEnd<kVectors, kLive>) {
      const bool any_folds = folds(extent.end, kLength);
      if (!__any_sync(kFullWarp, any_folds)) return;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const Real moved = sum_of_vectors<kVectors>([&](int k) { return term((k + 1) % kVectors, i); });
        element[i] = is_folded(i, lane) && any_folds ? moved : element[i];
      }
    }
  }

  // sum() of these, in fewer registers.
  template <int kLanes, int kVectors, int kLive = kVectors, typename Term>
  __device__ __forceinline__ Real sum_of_terms(const Extent& extent, int lane, const Term& term) const {
    constexpr int kLength = kLanes * kVectors * kCount;
    const auto plain = [&](int i) { return sum_of_vectors<kVectors, kLive>([&](int k) { return term(k, i); }); };
    if constexpr (kOrdersEnd<kVectors, kLive>) {
      if (__any_sync(kFullWarp, folds(extent.end, kLength))) {
        return sum<kLanes>(lane, [&](int i) {
          const Real moved = sum_of_vectors<kVectors>([&](int k) { return term((k + 1) % kVectors, i); });
          return is_folded(i, lane) && folds(extent.end, kLength) ? moved : plain(i);
        });
      }
    }
    return sum<kLanes>(lane, plain);
  }

  // kFull: as in store_preceded().
  template <int kLanes, bool kWhole, int kFull = 0, int kVectors>
  __device__ __forceinline__ void store(char* segment, const Chunk<16> (&value)[kVectors], const Extent& extent,
                                        int lane) const {
    constexpr int kBytes = kBytesOf<kElement>;
    if constexpr (kPreceded) {
      char* boundary = segment - reinterpret_cast<uintptr_t>(segment) % kVectorBytes;
      store_preceded<kLanes, kBytes, kFull>(boundary, value, extent, columns, lane);
    } else {
      store_vectors<kLanes, kWhole, kBytes>(segment, value, extent, lane);
    }
  }

 private:
  // Whether a folded end, in the first vector, is to be summed in another order than what else is there.
  template <int kVectors, int kLive>
  static constexpr bool kOrdersEnd = kMayFold && kLive == kVectors && !is_power_of_2(kVectors);
};

// Loads columns from `length` on of a segment whose end is folded into the first lane's first vector: a lane reads one and
// hands it over. Every lane of the warp calls it.
template <int kLanes, int kElementBytes, int kBytes, int kPieces>
__device__ __forceinline__ void load_folded(Chunk<kBytes> (&into)[kPieces], const char* segment_base,
                                            int64_t column_stride, const Extent& extent, int length, int lane) {
  constexpr int kPieceCount = kBytes / kElementBytes;
  constexpr int kCount = kPieces * kPieceCount;
  const int count = extent.end - length;
#pragma unroll
  for (int first = 0; first < kCount; first += kLanes) {
    Chunk<kElementBytes> own;
    if (first + lane < min(count, kCount)) {
      own = load_aligned<kElementBytes, Cache::keep>(segment_base + (length + first + lane) * column_stride);
    }
#pragma unroll
    for (int i = first; i < min(first + kLanes, kCount); ++i) {
      Chunk<kElementBytes> element;
#pragma unroll
      for (int w = 0; w < (kElementBytes + 3) / 4; ++w) {
        element.word[w] = __shfl_sync(kFullWarp, own.word[w], i - first, kLanes);
      }
      if (lane == 0 && i < count) replace_element(into[i / kPieceCount], i % kPieceCount, element);
    }
  }
}

// Inputs of the forward direction for kVectors vectors of a lane, loaded but not looked at, so that the loads of
// several vectors and rows are in flight together.
template <Element kElement, MaskKind kMask, int kLanes, int kVectors, bool kWhole, int kBehind = 0>
struct RawScores {
  static constexpr int kCount = kCountOf<kElement>;
  static constexpr int kBytes = kBytesOf<kElement>;
  static constexpr int kMaskBytes = mask_element_bytes(kMask, kElement);
  using Mask = Shape<kMaskBytes, kCount>;

  static constexpr bool kIsPacked = is_packed(kElement, kMask);
  static constexpr bool kFills = kWhole || kBehind == 0;  // else Scores::take_live() excludes what is not live
  static constexpr bool kApart = kBehind > 0 && is_apart(kElement, kMask, kLanes, kVectors);  // not in a block

  Chunk<16> x[kVectors][1];
  typename Mask::Piece mask[kVectors][Mask::kPieces];

  // Vectors first, first + 1, ... of the segment whose column 0 is at `x_base` and `mask_base`. If kBehind is above 0, the
  // end of the segment may be folded: elements of vector kBehind then take the place of the first lane's first ones.
  // Vectors of the segment without a live column come as scores of -inf where they are packed or, but for float64, have a float
  // mask; as anything if not kFills.
  template <Cache kCache>
  __device__ __forceinline__ void load(const ForwardArguments& arguments, const char* x_base, const char* mask_base,
                                       const Inner& inner, const Extent& extent, int first, int lane) {
    load_x<kCache>(arguments, x_base, inner, extent, first, lane);
    load_mask(arguments, mask_base, inner, extent, first, lane);
    if constexpr (kBehind > 0) {
      constexpr int kLength = kBehind * kLanes * kCount;
      if (__any_sync(kFullWarp, extent.end > kLength)) {
        load_folded<kLanes, kBytes>(x[0], x_base, kBytes, extent, kLength, lane);
        if constexpr (kMask != MaskKind::none) {
          // Null: a boolean mask that excludes nothing.
          if (__any_sync(kFullWarp, mask_base != nullptr)) {
            load_folded<kLanes, kMaskBytes>(mask[0], mask_base, arguments.mask_column_stride, extent, kLength, lane);
          }
        }
      }
    }
  }

  template <Cache kCache>
  __device__ __forceinline__ void load_x(const ForwardArguments& arguments, const char* x_base, const Inner& inner,
                                         const Extent& extent, int first, int lane) {
    const uint32_t dead_x = kIsPacked ? kNegativeInfinityPair<kElement> ^ arguments.packed.flip : 0;
    load_vectors<kLanes, kCache, kWhole, kBytes, kCount, kFills, kApart>(x, x_base, arguments.x_span, inner.input, extent,
                                                                         first, lane, dead_x);
  }

  __device__ __forceinline__ void load_mask(const ForwardArguments& arguments, const char* mask_base, const Inner& inner,
                                            const Extent& extent, int first, int lane) {
    if constexpr (kMask != MaskKind::none) {
      const uint32_t dead_mask = has_addend(kMask) && kBytes != 8 ? kExcludedAddend : 0;
      if (kWhole || arguments.mask_column_stride == kMaskBytes) {
        load_vectors<kLanes, Cache::keep, kWhole, kMaskBytes, kCount, kFills, kApart>(
            mask, mask_base, arguments.mask_span, inner.second, extent, first, lane, dead_mask);
      } else {
        load_strided<kLanes, kMaskBytes, kCount, kApart>(mask, mask_base, arguments.mask_column_stride, extent, first,
                                                         lane, dead_mask);
      }
    }
  }

  // Makes the cells of vector k that are not live scores of -inf, of 16-bit elements.
  template <typename Edge>
  __device__ __forceinline__ void exclude(int k, const Edge& edge) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t live = edge.template live_bits<kBytes>(w);
      uint32_t& word = x[k][0].word[w];
      word = kIsPacked ? (word & live) | (kNegativeInfinityPair<kElement> & ~live) : word & live;
    }
    if constexpr (kIsPacked) return;
    constexpr int kWords = Mask::kChunkBytes / 4;
#pragma unroll
    for (int w = 0; w < kWords * Mask::kPieces; ++w) {
      const uint32_t live = edge.template live_bits<kMaskBytes>(w);
      uint32_t& word = mask[k][w / kWords].word[w % kWords];
      word = (word & live) | (kExcludedAddend & ~live);
    }
  }

  // A word of a float mask that is -inf everywhere.
  static constexpr uint32_t kExcludedAddend =
      kBytes == 2 && kMask == MaskKind::same ? kNegativeInfinityPair<kElement> : 0xff800000u;
};

// What is taken from a score before it is exponentiated.
template <typename Real>
struct Shift {
  Real score;     // in the unit of the scores, before the change of base
  Real exponent;  // after it
  bool far;       // the former is to be taken
};

// Exponents of scores, in the unit that they are held in. For 16-bit elements the change of base and the subtraction are
// one fused multiply-add: a maximum's exponent is rounded once, alike for all cells and their sum, so that the error
// cancels. It would not where the rounding itself overflows, so scores far from 0 are shifted before the change of base,
// as are all of wider elements: the only live cell of a row then gives exactly 1.
template <typename Real, bool kUnscaled, bool kFused>
struct Exponents {
  PackedScale packed;

  __device__ __forceinline__ Shift<Real> shift(Real maximum) const {
    if constexpr (kFused) {
      const Real exponent = multiply(maximum, factor());
      if (fabs(exponent) <= kNear) return {0, exponent, false};
    }
    return {finite(maximum), 0, true};
  }

  // exp(score - maximum) for each element.
  template <int kCount>
  __device__ __forceinline__ void exponentiate(Real (&value)[kCount], const Shift<Real>& shift) const {
    if constexpr (kFused) {
      if (shift.far) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) value[i] = add(value[i], -shift.score);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) value[i] = power_of_two(fma(value[i], factor(), -shift.exponent));
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) value[i] = exponential(value[i], shift.score);
    }
  }

  // A maximum as a score.
  __device__ __forceinline__ Real score(Real maximum) const {
    return kUnscaled ? multiply(maximum, static_cast<Real>(packed.unit)) : maximum;
  }

  // A sum of exponentials taken against the maximum `from`, restated against `to` >= `from`. Keeps NaN.
  __device__ __forceinline__ Real rescale(Real sum, Real from, Real to) const {
    const Shift<Real> target = shift(to);
    if constexpr (kFused) {
      const Shift<Real> source = shift(from);
      // A sum against -inf is 0 or NaN, and not to be multiplied by infinity.
      const Real score = source.far ? from : Real{0};
      const Real exponent = fma(add(score, -target.score), factor(), add(source.exponent, -target.exponent));
      return multiply(sum, power_of_two(exponent));
    } else {
      return multiply(sum, exponential(from, target.score));
    }
  }

 private:
  static constexpr Real kNear = 1 << 24;  // what rounding adds to such an exponent is less than 1

  __device__ __forceinline__ Real factor() const {
    return kUnscaled ? static_cast<Real>(packed.factor) : static_cast<Real>(kLog2E);
  }

  // The maximum, but 0 for -inf, as finite_shift() says, and NaN where it overflows as a score.
  __device__ __forceinline__ Real finite(Real maximum) const {
    if constexpr (kUnscaled) {
      const float scaled = multiply(maximum, packed.unit);
      const float shift = scaled == kNegativeInfinity<float> ? 0.0f : maximum;
      return scaled == -kNegativeInfinity<float> ? scaled - scaled : shift;
    } else {
      return finite_shift(maximum);
    }
  }
};

// The scores of kVectors vectors of a lane, then their exponentials. Vectors without a live column cost little.
template <Element kElement, MaskKind kMask, int kLanes, int kVectors>
struct Scores {
  static constexpr int kCount = kCountOf<kElement>;
  // Packed scores stay unscaled until they are exponentiated (arguments.h).
  static constexpr bool kIsPacked = is_packed(kElement, kMask);
  using Real = Accumulate<kElement>;
  using Exponent = Exponents<Real, kIsPacked, kBytesOf<kElement> == 2>;
  // What is compared for the maximum: a pair of elements where they stay packed.
  using Key = std::conditional_t<kIsPacked, uint32_t, Real>;

  Chunk<16> packed[kIsPacked ? kVectors : 1];
  Real value[kVectors][kCount];  // scores where they are not packed; then exponentials

  static constexpr int kLength = kLanes * kVectors * kCount;  // of a segment
  // Whether exponentials of rows that are not whole are computed twice too.
  static constexpr bool kComputesTwice = kIsPacked && kVectors == 2 * kBlockVectors;

  static __device__ __forceinline__ constexpr int column(int k) { return k * kLanes * kCount; }

  // Takes vectors first, first + 1, ... ; excluded cells become -inf, whatever was there.
  template <int kBatch, bool kWhole>
  __device__ __forceinline__ void take(const RawScores<kElement, kMask, kLanes, kBatch, kWhole>& raw,
                                       const ForwardArguments& arguments, const Extent& extent, int first, int lane) {
    const auto at_all_edges = [&](const auto& exclude) {
      at_edges<kLanes, kCount, kBatch, kWhole, false, 0>(extent, first, lane, exclude);
    };
    const auto lane_is_live = [&](int k) { return extent.any_live(column(first + k) + lane * kCount, kCount); };
    if constexpr (kBytesOf<kElement> == 2) {
      auto live = raw;
      if constexpr (kIsPacked) prepare_packed<kBatch>(live, arguments, lane_is_live);
      at_all_edges([&](int k, const auto& edge) { live.exclude(k, edge); });
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (kIsPacked || may_be_live(extent, first + k)) {
          take_vector(first + k, live, k, arguments);
        } else {
#pragma unroll
          for (int i = 0; i < kCount; ++i) value[first + k][i] = constant_of_branch<0xff800000u>();
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        take_vector(first + k, raw, k, arguments);
        const bool any_live = lane_is_live(k);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          value[first + k][i] = any_live ? value[first + k][i] : kNegativeInfinity<Real>;
        }
      }
      at_all_edges([&](int k, const auto& edge) { exclude(value[first + k], edge); });
    }
  }

  // The same of a segment with columns before it, of the kLive vectors from kFirst on, as at_live_edges() knows them. The
  // others of the batch are left as they are, but for those that sum_exponentials() looks at.
  template <int kFirst, int kLive, int kBatch, int kBehind>
  __device__ __forceinline__ void take_live(const RawScores<kElement, kMask, kLanes, kBatch, false, kBehind>& raw,
                                            const ForwardArguments& arguments, const Extent& extent, int lane) {
    const auto at_edges_of_live = [&](const auto& exclude) {
      constexpr bool kMayFold = kBehind > 0 && kLive == kBatch;
      at_live_edges<kLanes, kCount, kVectors, kFirst, kLive, kMayFold>(extent, lane, exclude);
    };
    if constexpr (kBytesOf<kElement> == 2) {
      auto live = raw;
      if constexpr (kIsPacked) prepare_packed<kLive>(live, arguments, [](int) { return true; });
      at_edges_of_live([&](int k, const auto& edge) { live.exclude(k, edge); });
#pragma unroll
      for (int k = 0; k < kLive; ++k) take_vector(kFirst + k, live, k, arguments);
      if constexpr (kComputesTwice) {
#pragma unroll
        for (int k = kLive; k < kBatch; ++k) packed[kFirst + k] = filled_with<16>(smallest_key());
      }
    } else {
#pragma unroll
      for (int k = 0; k < kLive; ++k) take_vector(kFirst + k, raw, k, arguments);
      at_edges_of_live([&](int k, const auto& edge) { exclude(value[kFirst + k], edge); });
    }
  }

  // The lane's largest score, as far as it is known: a NaN may be lost here, the sum of exponentials keeps it
  // (row_math.h). Of the first kLive vectors.
  template <int kLive = kVectors>
  __device__ __forceinline__ Key largest() const {
    Key key = smallest_key();
#pragma unroll
    for (int k = 0; k < kLive; ++k) {
      if constexpr (kIsPacked) {
#pragma unroll
        for (int w = 0; w < 4; ++w) key = larger(key, packed[k].word[w]);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) key = larger(key, value[k][i]);
      }
    }
    return key;
  }

  static __device__ __forceinline__ Key smallest_key() {
    if constexpr (kIsPacked) {
      return kNegativeInfinityPair<kElement>;
    } else {
      return kNegativeInfinity<Real>;
    }
  }

  static __device__ __forceinline__ Key larger(Key a, Key b) {
    if constexpr (kIsPacked) {
      return max_pair<kElement>(a, b);
    } else {
      return fmax(a, b);
    }
  }

  static __device__ __forceinline__ Real maximum_of(Key key) {
    if constexpr (kIsPacked) {
      float low, high;
      unpack_pair<kElement>(key, low, high);
      return fmax(low, high);
    } else {
      return key;
    }
  }

  // Turns scores into exponentials; returns their sum.
  __device__ __forceinline__ Real exponentiate(const Shift<Real>& shift, const Exponent& exponent,
                                               const Extent& extent, int lane) {
    const Shift<Real> warp_shift = shift_of_warp(shift);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (may_be_live(extent, k)) {
        exponentiate_vector(k, warp_shift, exponent);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          if constexpr (sizeof(Real) == 4) {
            value[k][i] = constant_of_branch<0>();
          } else {
            value[k][i] = 0;
          }
        }
      }
    }
    return Ahead<kElement, false>{}.template sum_of_terms<kLanes, kVectors>(
        extent, lane, [&](int k, int i) { return value[k][i]; });
  }

  // Turns those of a segment with columns before it into exponentials; the first kLive vectors are live.
  template <int kLive>
  __device__ __forceinline__ void exponentiate_live(const Shift<Real>& shift, const Exponent& exponent) {
#pragma unroll
    for (int k = kLive; k < kVectors; ++k) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) value[k][i] = 0;
    }
    const Shift<Real> warp_shift = shift_of_warp(shift);
    // Such rows wait for arithmetic and instructions: one test serves all vectors, and scores that are not packed are shifted,
    // if far, before what they have in common with others.
    constexpr bool kShiftsFirst = kBytesOf<kElement> == 2 && !kIsPacked;
    if (kShiftsFirst && warp_shift.far) {
#pragma unroll
      for (int k = 0; k < kLive; ++k) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) value[k][i] = add(value[k][i], -warp_shift.score);
      }
    }
    if (kShiftsFirst || (kBytesOf<kElement> == 2 && !warp_shift.far)) {
#pragma unroll
      for (int k = 0; k < kLive; ++k) exponentiate_vector(k, {0, warp_shift.exponent, false}, exponent);
    } else {
#pragma unroll
      for (int k = 0; k < kLive; ++k) exponentiate_vector(k, warp_shift, exponent);
    }
  }

  // The lane's sum of these; and that of each element over them, for Ahead::sum().
  template <int kLive>
  __device__ __forceinline__ Real sum_live(const Extent& extent, const Ahead<kElement, true>& ahead, int lane) const {
    return ahead.template sum_of_terms<kLanes, kVectors, kLive>(extent, lane,
                                                                [&](int k, int i) { return value[k][i]; });
  }
  template <int kLive, typename Columns>
  __device__ __forceinline__ void sum_elements(Real (&sum)[kCount], const Extent& extent, const Columns& ahead,
                                               int lane) const {
    ahead.template sum_elements<kLanes, kVectors, kLive>(sum, extent, lane, [&](int k, int i) { return value[k][i]; });
  }

  // The probabilities as stored: exponentials times the row's factor (NaN in a NaN row, excluded cells included).
  __device__ __forceinline__ void normalize(Chunk<16> (&result)[kVectors], Real factor) const {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Real probability[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) probability[i] = multiply(value[k][i], factor);
      result[k] = pack<kElement>(probability);
    }
  }

  // The same two for packed scores, which keep no exponentials but compute them again: same bits, fewer registers.
  template <bool kPreceded>
  __device__ __forceinline__ Real sum_exponentials(const Shift<Real>& shift, const Exponent& exponent,
                                                   const Extent& extent, const Ahead<kElement, kPreceded>& ahead,
                                                   int lane) const {
    static_assert(!kPreceded || is_power_of_2(kVectors));
    const Shift<Real> warp_shift = shift_of_warp(shift);
    Real sum[kCount];
    sum_vectors<kVectors>(sum, 0, 1, warp_shift, exponent, extent);
    return ahead.template sum<kLanes>(lane, [&](int i) { return sum[i]; });
  }

  __device__ __forceinline__ void become_probabilities(const Shift<Real>& shift, Real factor, const Exponent& exponent,
                                                       const Extent& extent) {
    const Shift<Real> warp_shift = shift_of_warp(shift);
    Real none[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) none[i] = multiply(Real{0}, factor);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (!may_be_live(extent, k)) {
        packed[k] = pack<kElement>(none);
        continue;
      }
      // Has the assembler unpack them again, as RawGradients::keep_packed() does.
#pragma unroll
      for (int w = 0; w < 4; ++w) packed[k].word[w] ^= blockIdx.y;
      Real probability[kCount];
      exponentials_of<4>(packed[k], 0, warp_shift, exponent, probability);
#pragma unroll
      for (int i = 0; i < kCount; ++i) probability[i] = multiply(probability[i], factor);
      packed[k] = pack<kElement>(probability);
    }
  }

 private:
  // As sum_of_vectors() of the exponentials of packed scores, for each element. Two vectors are added up before they are
  // added to others, a few elements at a time, so that few exponentials wait in registers.
  template <int kTerms>
  __device__ __forceinline__ void sum_vectors(Real (&sum)[kCount], int first, int step, const Shift<Real>& shift,
                                              const Exponent& exponent, const Extent& extent) const {
    if constexpr (kTerms <= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] = 0;
      add_vectors<kTerms>(sum, first, step, shift, exponent, extent);
    } else if constexpr (kTerms == 3) {
      sum_vectors<2>(sum, first, step, shift, exponent, extent);
      add_vectors<1>(sum, first + 2 * step, step, shift, exponent, extent);
    } else if constexpr (kTerms <= 5) {
      sum_vectors<(kTerms + 1) / 2>(sum, first, 2 * step, shift, exponent, extent);
      add_vectors<2>(sum, first + step, 2 * step, shift, exponent, extent);
    } else {
      sum_vectors<(kTerms + 1) / 2>(sum, first, 2 * step, shift, exponent, extent);
      Real other[kCount];
      sum_vectors<kTerms / 2>(other, first + step, 2 * step, shift, exponent, extent);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sum[i] = add(sum[i], other[i]);
    }
  }

  template <int kTerms>
  __device__ __forceinline__ void add_vectors(Real (&sum)[kCount], int first, int step, const Shift<Real>& shift,
                                              const Exponent& exponent, const Extent& extent) const {
    if (!may_be_live(extent, first) && (kTerms == 1 || !may_be_live(extent, first + step))) return;
#pragma unroll
    for (int w = 0; w < 4; w += 2) {
      Real few[kTerms][4];
#pragma unroll
      for (int t = 0; t < kTerms; ++t) exponentials_of<2>(packed[first + t * step], w, shift, exponent, few[t]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[2 * w + i] = add(sum[2 * w + i], kTerms == 1 ? few[0][i] : add(few[0][i], few[kTerms - 1][i]));
      }
    }
  }

  // Exponentials of words w, w + 1, ... of a vector. A few at a time: the branch in between would otherwise have all of
  // them wait for it in registers.
  template <int kWords>
  static __device__ __forceinline__ void exponentials_of(const Chunk<16>& scores, int w, const Shift<Real>& shift,
                                                         const Exponent& exponent, Real (&out)[2 * kWords]) {
#pragma unroll
    for (int n = 0; n < kWords; n += 2) {
      Real few[4];
      unpack_pair<kElement>(scores.word[w + n], few[0], few[1]);
      unpack_pair<kElement>(scores.word[w + n + 1], few[2], few[3]);
      exponent.exponentiate(few, shift);
#pragma unroll
      for (int i = 0; i < 4; ++i) out[2 * n + i] = few[i];
    }
  }

  // One way for the whole warp, where all of it comes here: a lane with several vectors.
  static __device__ __forceinline__ Shift<Real> shift_of_warp(Shift<Real> shift) {
    if constexpr (kVectors > 1 && kBytesOf<kElement> == 2) shift.far = __any_sync(kFullWarp, shift.far);
    return shift;
  }

  // Whether any lane of the warp has a live column in its vector k. The end of a segment may be folded into the first.
  static __device__ __forceinline__ bool may_be_live(const Extent& extent, int k) {
    if constexpr (kVectors == 1) return true;
    const bool folds = kComputesTwice && k == 0 && extent.end > kLength;
    return __any_sync(kFullWarp, extent.any_live(column(k), kLanes * kCount) || folds);
  }

  // Makes the largest exponent of kPrepared packed vectors that of their largest element, and -inf what a mask excludes,
  // given lane_is_live(k).
  template <int kPrepared, typename Raw, typename LaneIsLive>
  static __device__ __forceinline__ void prepare_packed(Raw& raw, const ForwardArguments& arguments,
                                                        const LaneIsLive& lane_is_live) {
    constexpr uint32_t kExcluded = kNegativeInfinityPair<kElement>;
    const auto for_words = [&](const auto& run) {
#pragma unroll
      for (int k = 0; k < kPrepared; ++k) {
#pragma unroll
        for (int w = 0; w < 4; ++w) run(k, w, raw.x[k][0].word[w]);
      }
    };
    if (arguments.packed.flip != 0) {
      for_words([&](int, int, uint32_t& word) { word ^= arguments.packed.flip; });
    }
    if (arguments.packed.zero) {
      for_words([&](int k, int, uint32_t& word) { word = lane_is_live(k) ? zero_or_nan<kElement>(word) : kExcluded; });
    }
    if constexpr (kMask == MaskKind::boolean) {
      for_words([&](int k, int w, uint32_t& word) {
        const uint32_t bytes = raw.mask[k][0].word[w / 2];
        const uint32_t excluded = w % 2 == 0 ? halves_of_bytes<0>(bytes) : halves_of_bytes<1>(bytes);
        word = (word & ~excluded) | (kExcluded & excluded);
      });
    }
  }

  // Vector k of the segment, given as vector `from` of what was loaded.
  template <typename Raw>
  __device__ __forceinline__ void take_vector(int k, const Raw& raw, int from, const ForwardArguments& arguments) {
    if constexpr (kIsPacked) {
      packed[k] = raw.x[from][0];
    } else {
      unpack<kElement>(raw.x[from][0], value[k]);
      apply_mask(value[k], raw.mask[from], scale_of<Real>(arguments));
    }
  }

  template <typename Edge>
  static __device__ __forceinline__ void exclude(Real (&scores)[kCount], const Edge& edge) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = edge.is_live(i) ? scores[i] : kNegativeInfinity<Real>;
  }

  __device__ __forceinline__ void exponentiate_vector(int k, const Shift<Real>& shift, const Exponent& exponent) {
    if constexpr (kIsPacked) {
      exponentials_of<4>(packed[k], 0, shift, exponent, value[k]);
    } else {
      exponent.exponentiate(value[k], shift);
    }
  }

  // Scores that are not packed, given their elements.
  template <typename Mask>
  static __device__ __forceinline__ void apply_mask(Real (&out)[kCount], const Mask& mask, Real scale) {
    if constexpr (has_addend(kMask)) {
      Real addend[kCount];
      if constexpr (kMask == MaskKind::same) {
        unpack<kElement>(mask[0], addend);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) addend[i] = __uint_as_float(mask[i / 4].word[i % 4]);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) out[i] = fma(out[i], scale, addend[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        out[i] = multiply(out[i], scale);
        if constexpr (kMask == MaskKind::boolean) {
          const bool excluded = (mask[0].word[i / 4] & (0xffu << (8 * (i % 4)))) != 0;
          out[i] = excluded ? kNegativeInfinity<Real> : out[i];
        }
      }
    }
  }
};

// Loads and takes all kVectors vectors of a warp's lane, a few vectors in flight at a time.
template <Cache kCache, bool kWhole, Element kElement, MaskKind kMask, int kVectors, bool kPreceded, bool kMayFold>
__device__ __forceinline__ void load_scores(Scores<kElement, kMask, kWarpLanes, kVectors>& scores,
                                            const ForwardArguments& arguments, const char* x, const char* mask,
                                            const Inner& inner, const Extent& extent,
                                            const Ahead<kElement, kPreceded, kMayFold>&, int lane) {
  constexpr bool kAll = kVectors == kOddBlockVectors || (kWhole && !has_addend(kMask));
  constexpr int kInFlight = kAll ? kVectors : kVectorsInFlight<kMask>;
  constexpr int kMost = kInFlight < kVectors ? kInFlight : kVectors;
  // What of x a lane holds is its scores, of float32: so all of it is in flight, and its mask, which the L2 has, in batches.
  // Measured on an H200, with x in batches too: .93 -> .94 of a copy's speed at 65,536 columns, .89 -> .905 at 131,072.
  if constexpr (kWhole && has_addend(kMask) && kBytesOf<kElement> == 4 && kMost < kVectors) {
    RawScores<kElement, kMask, kWarpLanes, kVectors, kWhole> all;
    all.template load_x<kCache>(arguments, x, inner, extent, 0, lane);
    in_batches<kVectors, kMost>([&](auto first, auto end) {
      constexpr int kFirst = decltype(first)::value;
      constexpr int kBatch = decltype(end)::value - kFirst;
      RawScores<kElement, kMask, kWarpLanes, kBatch, kWhole> raw;
      raw.load_mask(arguments, mask, inner, extent, kFirst, lane);
      keep_loads_together();
#pragma unroll
      for (int k = 0; k < kBatch; ++k) raw.x[k][0] = all.x[kFirst + k][0];
      scores.take(raw, arguments, extent, kFirst, lane);
    });
  } else {
    const int live = live_vectors<kWarpLanes, kCountOf<kElement>>(extent);
    in_batches<kVectors, kMost>([&](auto first, auto end) {
      constexpr int kFirst = decltype(first)::value;
      constexpr int kBatch = decltype(end)::value - kFirst;
      constexpr int kBehind = kFirst == 0 ? Ahead<kElement, kPreceded, kMayFold>::template kBehind<kVectors> : 0;
      RawScores<kElement, kMask, kWarpLanes, kBatch, kWhole, kBehind> raw;
      raw.template load<kCache>(arguments, x, mask, inner, extent, kFirst, lane);
      keep_loads_together();
      if constexpr (kPreceded) {
        with_largest<0, kBatch>(live - kFirst, [&](auto count) {
          scores.template take_live<kFirst, decltype(count)::value>(raw, arguments, extent, lane);
        });
      } else {
        scores.take(raw, arguments, extent, kFirst, lane);
      }
    });
  }
}

// Probabilities and their gradients, as loaded.
template <Element kElement, int kLanes, int kVectors, bool kWhole, int kBehind = 0>
struct RawGradients {
  static constexpr int kCount = kCountOf<kElement>;
  static constexpr int kBytes = kBytesOf<kElement>;
  using Real = Accumulate<kElement>;
  static constexpr bool kApart = kBehind > 0 && is_apart(kElement, MaskKind::none, kLanes, kVectors);

  Chunk<16> y[kVectors][1];
  Chunk<16> grad[kVectors][1];

  // As RawScores::load().
  template <Cache kCache, typename Arguments>
  __device__ __forceinline__ void load(const Arguments& arguments, const char* y_base, const char* grad_base,
                                       const Inner& inner, const Extent& extent, int first, int lane) {
    load_vectors<kLanes, kCache, kWhole, kBytes, kCount, true, kApart>(y, y_base, arguments.y_span, inner.input, extent,
                                                                       first, lane, 0);
    if (!kWhole && arguments.grad_expanded) {
      load_strided<kLanes, kBytes, kCount, kApart>(grad, grad_base, 0, extent, first, lane, 0);
    } else {
      // Gradients of 16 bits where the probability is 0 are dropped by settle().
      load_vectors<kLanes, kCache, kWhole, kBytes, kCount, kWhole || kBytes != 2, kApart>(
          grad, grad_base, arguments.grad_span, inner.second, extent, first, lane, 0);
    }
    if constexpr (kBehind > 0) {
      constexpr int kLength = kBehind * kLanes * kCount;
      if (__any_sync(kFullWarp, extent.end > kLength)) {
        load_folded<kLanes, kBytes>(y[0], y_base, kBytes, extent, kLength, lane);
        load_folded<kLanes, kBytes>(grad[0], grad_base, arguments.grad_expanded ? 0 : kBytes, extent, kLength, lane);
      }
    }
  }

  // Makes cells outside the live columns, and gradients where the probability is 0, take no part: to be called once.
  template <typename Columns>
  __device__ __forceinline__ void settle(const Extent& extent, const Columns& ahead, int first, int lane) {
    const auto exclude = [&](int k, const auto& edge) {
#pragma unroll
      for (int w = 0; w < 4; ++w) y[k][0].word[w] &= edge.template live_bits<kBytes>(w);
    };
    ahead.template at_edges<kLanes, kVectors, kWhole, kBehind>(extent, first, lane, exclude);
    if constexpr (kBytes == 2) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
#pragma unroll
        for (int w = 0; w < 4; ++w) grad[k][0].word[w] &= nonzero_halves(y[k][0].word[w]);
      }
    }
  }

  __device__ __forceinline__ void settle(const Extent& extent, int first, int lane) {
    settle(extent, Ahead<kElement, false>{}, first, lane);
  }

  // The lane's share of sum(grad * y).
  template <typename Columns>
  __device__ __forceinline__ Real dot(const Extent& extent, const Columns& ahead, int lane) const {
    return ahead.template sum_of_terms<kLanes, kVectors>(extent, lane, [&](int k, int i) {
      const Real probability = unpack_one<kElement>(y[k][0], i);
      // Cells of probability 0 take no part, whatever their gradient.
      const bool out = kBytes != 2 && probability == Real{0};
      return multiply(probability, out ? Real{0} : unpack_one<kElement>(grad[k][0], i));
    });
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

  // The results of all vectors, `into` zeros: those behind the first `live` ones of every lane stay so. Every lane of the
  // warp calls it.
  __device__ __forceinline__ void results(Chunk<16> (&into)[kVectors], int live, Real dot, Real scale) const {
    in_turn<0, 1, kVectors>([&](auto number) {
      constexpr int k = decltype(number)::value;
      if (k > 0 && !__any_sync(kFullWarp, live > k)) return true;
      into[k] = result(k, dot, scale);
      return false;
    });
  }

  // The gradient of the scores: exactly 0 where the probability is, whatever the row's sum holds.
  __device__ __forceinline__ Chunk<16> result(int k, Real dot, Real scale) const {
    Real probability[kCount], gradient[kCount];
    unpack<kElement>(y[k][0], probability);
    unpack<kElement>(grad[k][0], gradient);
    if constexpr (kBytes == 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        gradient[i] = multiply(scale, multiply(probability[i], add(gradient[i], -dot)));
      }
      Chunk<16> chunk = pack<kElement>(gradient);
#pragma unroll
      for (int w = 0; w < 4; ++w) chunk.word[w] &= nonzero_halves(y[k][0].word[w]);
      return chunk;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) gradient[i] = score_gradient(probability[i], gradient[i], dot, scale);
      return pack<kElement>(gradient);
    }
  }
};

}  // namespace sms::cuda
