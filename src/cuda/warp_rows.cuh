// A warp, or kLanes lanes of one, holds a row in registers; kRows rows are in flight together. Each row is read and
// written once, and read whole before any of it is written.
#pragma once

#include "dropout.cuh"
#include "prefetch.cuh"
#include "reduce.cuh"
#include "segment.cuh"
#include "sink.cuh"

namespace sms::cuda {

// The kRows rows of a group of lanes, which are as far apart as the block has groups: a warp's rows adjoin.
template <Element kElement, int kLanes, int kVectors, int kRows, bool kPreceded>
struct GroupRows {
  static constexpr uint32_t kGroups = kWarpRowsThreads / kLanes;

  RowPlace place[kRows];
  Ahead<kElement, kPreceded> ahead[kRows];
  Extent extent[kRows];

  // The number of row r, which may not exist.
  __device__ __forceinline__ uint32_t number(int r) const {
    return blockIdx.x * (kGroups * kRows) + threadIdx.x / kLanes + r * kGroups;
  }

  template <typename Arguments>
  __device__ __forceinline__ explicit GroupRows(const Arguments& arguments) {
    const RowMap& map = arguments.rows;
    RowUnits units[kRows];
    if (kRows == 1 || map.aligned_blocks) {
      units[0] = map.units(number(0));
#pragma unroll
      for (int r = 1; r < kRows; ++r) units[r] = map.along(units[0], r * kGroups);
    } else {
#pragma unroll 1
      for (int r = 0; r < kRows; ++r) {
        const RowUnits found = map.units(number(r));
#pragma unroll
        for (int copy = 0; copy < kRows; ++copy) {
          if (copy == r) units[copy] = found;
        }
      }
    }
    // Lanes past the last row go through the motions with a row of no columns: the warp stays whole for its shuffles.
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t row = number(r);
      place[r] = map.place(units[r]);
      ahead[r] = Ahead<kElement, kPreceded>(result_of(arguments, place[r]));
      extent[r] = near_extent(arguments, row, place[r], row < map.rows, 0);
      extent[r] = ahead[r].before(extent[r], kLanes * kVectors * kCountOf<kElement>);
    }
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr int kWarpRowsBlocks = 1024 / kWarpRowsThreads;  // that a multiprocessor can hold
#else
inline constexpr int kWarpRowsBlocks = 1536 / kWarpRowsThreads;
#endif

// Blocks that a multiprocessor is to hold, 0 for any number: where rows of 16-bit elements are not whole the assembler may
// take registers that cost a block, for an order of instructions that is no faster.
constexpr int warp_rows_resident(Element element, MaskKind mask, int lanes, int vectors, bool whole, bool dropout) {
  const bool odd = element_bytes(element) == 2 && lanes == kWarpLanes && vectors > 2 && !whole && !dropout;
  if (!odd || mask == MaskKind::float32) return 0;
  const int blocks = is_packed(element, mask) ? 13 - vectors : vectors == 4 ? 7 : 12 - vectors;
  return blocks < kWarpRowsBlocks ? blocks : kWarpRowsBlocks;
}

template <Element kElement, MaskKind kMask, int kLanes, int kVectors, int kRows, bool kWhole, bool kDropout>
__global__ void
__launch_bounds__(kWarpRowsThreads, warp_rows_resident(kElement, kMask, kLanes, kVectors, kWhole, kDropout))
    warp_rows_forward(const __grid_constant__ ForwardArguments arguments) {
  constexpr bool kPreceded = holds_preceded(kWhole, kDropout, kVectors);
  using RowScores = Scores<kElement, kMask, kLanes, kVectors>;
  using Real = typename RowScores::Real;
  const int lane = threadIdx.x % kLanes;
  const typename RowScores::Exponent exponent{arguments.packed};
  constexpr bool kKeepsExponentials = !RowScores::kIsPacked || kVectors <= kBlockVectors || !kWhole;

  if constexpr (!kDropout) prefetch_for_rows<kElement, kWarpRowsThreads / kLanes * kRows>(arguments);
  const GroupRows<kElement, kLanes, kVectors, kRows, kPreceded> rows(arguments);

  RawScores<kElement, kMask, kLanes, kVectors, kWhole, kPreceded ? kVectors : 0> raw[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const char* x = rows.ahead[r].before(arguments.x + rows.place[r].input, kBytesOf<kElement>);
    const char* mask = rows.ahead[r].before(arguments.mask + rows.place[r].second, arguments.mask_column_stride);
    raw[r].template load<Cache::stream>(arguments, x, mask, rows.place[r].inner, rows.extent[r], 0, lane);
  }
  keep_loads_together();

  RowScores scores[kRows];
  typename RowScores::Key key[kRows];
  Real maximum[kRows];
  Shift<Real> shift[kRows];
  Real sum[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if constexpr (kPreceded) {
      static_assert(kRows == 1);
      // Less code is worth registers where there are few more vectors than those: .87 -> .92 of a copy's speed on an H200 at
      // 1,025 float16 columns under a float mask; but .94 -> .93 at 1,001, and .91 -> .89 at 1,025 without a mask.
      constexpr bool kSumsLater = has_addend(kMask) && kLanes == kWarpLanes && kVectors > kBlockVectors;
      Real element_sum[kSumsLater ? kCountOf<kElement> : 1];
      const int live = live_vectors<kLanes, kCountOf<kElement>>(rows.extent[r]);
      with_largest<1, kVectors>(live, [&](auto count) {
        constexpr int kLive = decltype(count)::value;
        scores[r].template take_live<0, kLive>(raw[r], arguments, rows.extent[r], lane);
        key[r] = scores[r].template largest<kLive>();
        group_maximum<kLanes, RowScores>(maximum, key);
        shift[r] = exponent.shift(maximum[r]);
        scores[r].template exponentiate_live<kLive>(shift[r], exponent);
        if constexpr (kSumsLater) {
          scores[r].template sum_elements<kLive>(element_sum, rows.extent[r], rows.ahead[r], lane);
        } else {
          sum[r] = scores[r].template sum_live<kLive>(rows.extent[r], rows.ahead[r], lane);
        }
      });
      if constexpr (kSumsLater) {
        sum[r] = rows.ahead[r].template sum<kLanes, true>(lane, [&](int i) { return element_sum[i]; });
      }
    } else {
      scores[r].take(raw[r], arguments, rows.extent[r], 0, lane);
      key[r] = scores[r].largest();
    }
  }
  if constexpr (!kPreceded) {
    group_maximum<kLanes, RowScores>(maximum, key);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      shift[r] = exponent.shift(maximum[r]);
      if constexpr (kKeepsExponentials) {
        sum[r] = scores[r].exponentiate(shift[r], exponent, rows.extent[r], lane);
      } else {
        sum[r] = scores[r].sum_exponentials(shift[r], exponent, rows.extent[r], rows.ahead[r], lane);
      }
    }
  }
  group_sum<kLanes>(sum);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Real factor = normalizer(sum[r]);
    if (arguments.sink.given && rows.number(r) < arguments.rows.rows) {
      const Real score = exponent.score(maximum[r]);
      if constexpr (kPreceded && has_addend(kMask) && is_apart(kElement, kMask, kLanes, kVectors)) {
        factor = with_sink_apart<kElement>(arguments, rows.number(r), score, factor, lane == 0);
      } else {
        factor = with_sink<kElement>(arguments, rows.number(r), score, factor, lane == 0);
      }
    }
    char* y = arguments.y + rows.place[r].output;
    if constexpr (!kKeepsExponentials) {
      scores[r].become_probabilities(shift[r], factor, exponent, rows.extent[r]);
      rows.ahead[r].template store<kLanes, kWhole>(y, scores[r].packed, rows.extent[r], lane);
    } else {
      Chunk<16> result[kVectors];
      scores[r].normalize(result, factor);
      if constexpr (kDropout) {
        if (rows.number(r) == 0 && lane == 0) store_random_state(arguments);
        store_with_dropout<kElement, kLanes>(result, factor != factor, arguments, rows.place[r].output, rows.number(r),
                                             0, rows.extent[r], lane);
      } else {
        constexpr int kFull = kOutgrownVectors<kElement, kMask, kLanes * kVectors> / kLanes;
        rows.ahead[r].template store<kLanes, kWhole, kFull>(y, result, rows.extent[r], lane);
      }
    }
  }
}

template <Element kElement, int kLanes, int kVectors, int kRows, bool kWhole, bool kDropout>
__global__ void __launch_bounds__(kWarpRowsThreads)
    warp_rows_backward(const __grid_constant__ BackwardArguments arguments) {
  constexpr bool kPreceded = holds_preceded(kWhole, kDropout, kVectors);
  using Real = Accumulate<kElement>;
  const int lane = threadIdx.x % kLanes;

  if constexpr (!kDropout) prefetch_for_rows<kElement, kWarpRowsThreads / kLanes * kRows>(arguments);
  const GroupRows<kElement, kLanes, kVectors, kRows, kPreceded> rows(arguments);

  RawGradients<kElement, kLanes, kVectors, kWhole, kPreceded ? kVectors : 0> raw[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int grad_stride = arguments.grad_expanded ? 0 : kBytesOf<kElement>;
    const char* y = rows.ahead[r].before(arguments.y + rows.place[r].input, kBytesOf<kElement>);
    const char* grad = rows.ahead[r].before(arguments.grad + rows.place[r].second, grad_stride);
    raw[r].template load<Cache::stream>(arguments, y, grad, rows.place[r].inner, rows.extent[r], 0, lane);
  }
  keep_loads_together();

  Real dot[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    raw[r].settle(rows.extent[r], rows.ahead[r], 0, lane);
    if constexpr (kDropout) drop(raw[r], arguments, rows.number(r), 0, rows.extent[r], lane);
    dot[r] = raw[r].dot(rows.extent[r], rows.ahead[r], lane);
    raw[r].keep_packed();
  }
  group_sum<kLanes>(dot);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Chunk<16> result[kVectors];
    if constexpr (kPreceded) {
      const int live = live_vectors<kLanes, kCountOf<kElement>>(rows.extent[r]);
      raw[r].results(result, live, dot[r], scale_of<Real>(arguments));
    } else {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) result[k] = raw[r].result(k, dot[r], scale_of<Real>(arguments));
    }
    if (arguments.dx != nullptr) {
      constexpr int kFull = kOutgrownVectors<kElement, MaskKind::none, kLanes * kVectors> / kLanes;
      rows.ahead[r].template store<kLanes, kWhole, kFull>(arguments.dx + rows.place[r].output, result, rows.extent[r],
                                                          lane);
    }
    if (arguments.dots.given && lane == 0 && rows.number(r) < arguments.rows.rows) {
      store_row_value(arguments, arguments.dots, rows.number(r), dot[r]);
    }
  }
}

}  // namespace sms::cuda
