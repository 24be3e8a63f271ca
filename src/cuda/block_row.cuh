// A block, or a cluster of blocks, holds a row in registers: each warp a segment of some vectors a lane, the number of
// warps as the row is long. The row is read and written once, and read whole before any of it is written. The warps meet
// once; where rows are not whole that, and what it then writes, is all that one with nothing live does.
#pragma once

#include "dropout.cuh"
#include "prefetch.cuh"
#include "segment.cuh"
#include "sink.cuh"
#include "team.cuh"

namespace sms::cuda {

template <MaskKind kMask, int kVectors, int kRows, bool kDropout>
using RowTeam = BlockTeam<block_threads(kVectors, kRows, kDropout) / kWarpLanes / kRows, kRows,
                          may_take_from_both_ends(kMask, kRows, kDropout)>;
// How many of the largest blocks a multiprocessor has registers for: of packed rows that are whole, as many as it has
// threads for.
template <Direction kDirection, int kVectors, int kRows, bool kDropout, bool kWholePacked = false>
inline constexpr int kMostResident =
    kVectors == kOddBlockVectors
        ? (kDirection == Direction::forward ? kOddBlocksResident : kOddBackwardBlocksResident)
        : (kWholePacked ? kPackedBlocksResident : kBlocksResident) * kBlockThreads / block_threads(kVectors, kRows, kDropout);

// Whether the register budget is that of kOddAddendThreads. What few rows need lies apart then (sink.cuh): .827 -> .837 of a
// copy's speed on an H200 at 4,097 float16 columns, causal under a float mask.
template <Element kElement, MaskKind kMask, int kVectors, bool kWhole, bool kDropout>
inline constexpr bool kIsOddAddend =
    kBytesOf<kElement> == 2 && kMask == MaskKind::same && holds_preceded(kWhole, kDropout, kVectors);

// A warp's segment of its team's row; without columns, if it holds none.
template <Element kElement, int kVectors, bool kPreceded>
struct BlockSegment {
  static constexpr int kLength = kWarpLanes * kVectors * kCountOf<kElement>;
  using Columns = Ahead<kElement, kPreceded, kPreceded && kVectors != kOddBlockVectors>;

  RowPlace place;
  int start;  // its first column
  int lane;
  Columns ahead;
  Extent extent;

  template <typename Arguments, typename Team>
  __device__ __forceinline__ BlockSegment(const Arguments& arguments, const Team& team) {
    place = team.place(arguments);
    const int length = kPreceded ? arguments.part_columns : kLength;
    start = team.segment() * length;
    lane = threadIdx.x % kWarpLanes;
    ahead = Columns(result_of(arguments, place));
    extent = ahead.before(near_extent(arguments, team.row(), place, team.holds_segment(), start), length);
  }

  __device__ __forceinline__ int live_vectors() const {
    return cuda::live_vectors<kWarpLanes, kCountOf<kElement>>(extent);
  }

  // Of the warp. Only where it is kPreceded: the extent of others may begin before the segment or end behind it.
  __device__ __forceinline__ bool has_nothing_live() const { return !__any_sync(kFullWarp, extent.begin < extent.end); }

  // Stores the same vector everywhere.
  __device__ __forceinline__ void fill(char* segment, const Chunk<16>& vector) const {
    Chunk<16> vectors[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) vectors[k] = vector;
    ahead.template store<kWarpLanes, false>(segment, vectors, extent, lane);
  }
};

template <Element kElement, int kVectors>
__device__ __forceinline__ int columns_of_block() {
  return static_cast<int>(blockDim.x) * kVectors * kCountOf<kElement>;
}

// A row's normalizer with its sink, if it has one. The thread for which `stores` is true writes what the sink takes.
template <Element kElement, bool kApart = false, typename Real, typename Exponent>
__device__ __forceinline__ Real normalizer_of(const ForwardArguments& arguments, uint32_t row,
                                              const Totals<Real>& totals, const Exponent& exponent, bool stores) {
  if (!arguments.sink.given) return totals.normalizer;
  const Real maximum = exponent.score(totals.maximum);
  if constexpr (kApart) return with_sink_apart<kElement>(arguments, row, maximum, totals.normalizer, stores);
  return with_sink<kElement>(arguments, row, maximum, totals.normalizer, stores);
}

template <Element kElement, MaskKind kMask, int kVectors, bool kWhole, bool kDropout, typename Team>
__device__ __forceinline__ void hold_row_forward(const ForwardArguments& arguments, const Team& team) {
  constexpr bool kPreceded = holds_preceded(kWhole, kDropout, kVectors);
  using RowScores = Scores<kElement, kMask, kWarpLanes, kVectors>;
  using Real = typename RowScores::Real;
  const typename RowScores::Exponent exponent{arguments.packed};
  const auto normalizer_of_row = [&](const Totals<Real>& totals) {
    return normalizer_of<kElement, kIsOddAddend<kElement, kMask, kVectors, kWhole, kDropout>>(arguments, team.row(), totals,
                                                                                              exponent, team.first_thread());
  };
  const BlockSegment<kElement, kVectors, kPreceded> segment(arguments, team);
  const int bytes = segment.start * kBytesOf<kElement>;
  constexpr bool kKeepsExponentials = kDropout || !(kWhole ? RowScores::kIsPacked : RowScores::kComputesTwice);

  // With code of its own: what the loads of others need would take too many registers here. Measured on an H200 with
  // float16, causal under a float mask: .74 -> .78 of a copy's speed at 4,097 columns.
  if constexpr (kPreceded && kKeepsExponentials && Team::kHoldsDeadSegments) {
    if (segment.has_nothing_live()) {
      const Totals<Real> totals = team.totals(kNegativeInfinity<Real>, Real{0}, exponent);
      const Real normalizer = normalizer_of_row(totals);
      Real nothing[kCountOf<kElement>];
#pragma unroll
      for (int i = 0; i < kCountOf<kElement>; ++i) nothing[i] = multiply(Real{0}, normalizer);
      segment.fill(arguments.y + segment.place.output + bytes, pack<kElement>(nothing));
      return;
    }
  }

  RowScores scores;
  const char* x = arguments.x + segment.place.input + bytes;
  const int64_t mask_stride = kWhole ? mask_element_bytes(kMask, kElement) : arguments.mask_column_stride;
  const char* mask = arguments.mask + segment.place.second + segment.start * mask_stride;
  load_scores<Cache::stream, kWhole>(scores, arguments, segment.ahead.before(x, kBytesOf<kElement>),
                                     segment.ahead.before(mask, mask_stride), segment.place.inner, segment.extent,
                                     segment.ahead, segment.lane);

  // Exponentials against the warp's own maximum first, so that the block meets only once.
  Real maximum, sum;
  Shift<Real> shift;
  const auto shift_to_largest = [&](const typename RowScores::Key& largest) {
    maximum = warp_max(RowScores::maximum_of(largest));
    shift = exponent.shift(maximum);
  };
  if constexpr (kPreceded && kKeepsExponentials) {
    Real element_sum[kCountOf<kElement>];
    with_largest<Team::kHoldsDeadSegments ? 1 : 0, kVectors>(segment.live_vectors(), [&](auto count) {
      constexpr int kLive = decltype(count)::value;
      shift_to_largest(scores.template largest<kLive>());
      scores.template exponentiate_live<kLive>(shift, exponent);
      scores.template sum_elements<kLive>(element_sum, segment.extent, segment.ahead, segment.lane);
    });
    sum = segment.ahead.template sum<kWarpLanes>(segment.lane, [&](int i) { return element_sum[i]; });
  } else {
    shift_to_largest(scores.largest());
    if constexpr (kKeepsExponentials) {
      sum = scores.exponentiate(shift, exponent, segment.extent, segment.lane);
    } else {
      sum = scores.sum_exponentials(shift, exponent, segment.extent, segment.ahead, segment.lane);
    }
  }
  sum = warp_sum(sum);
  const Totals<Real> totals = team.totals(maximum, sum, exponent);
  const Real normalizer = normalizer_of_row(totals);
  const Real factor = exponent.rescale(normalizer, maximum, totals.maximum);
  char* y = arguments.y + segment.place.output + bytes;
  if constexpr (!kKeepsExponentials) {
    scores.become_probabilities(shift, factor, exponent, segment.extent);
    segment.ahead.template store<kWarpLanes, kWhole>(y, scores.packed, segment.extent, segment.lane);
  } else {
    Chunk<16> result[kVectors];
    scores.normalize(result, factor);
    if constexpr (kDropout) {
      if (blockIdx.x == 0 && threadIdx.x == 0) store_random_state(arguments);
      store_with_dropout<kElement, kWarpLanes>(result, factor != factor, arguments, segment.place.output + bytes,
                                               team.row(), segment.start, segment.extent, segment.lane);
    } else {
      segment.ahead.template store<kWarpLanes, kWhole>(y, result, segment.extent, segment.lane);
    }
  }
}

template <Element kElement, int kVectors, bool kWhole, bool kDropout, typename Team>
__device__ __forceinline__ void hold_row_backward(const BackwardArguments& arguments, const Team& team) {
  constexpr bool kPreceded = holds_preceded(kWhole, kDropout, kVectors);
  using Real = Accumulate<kElement>;
  using Segment = BlockSegment<kElement, kVectors, kPreceded>;
  const Segment segment(arguments, team);
  const int bytes = segment.start * kBytesOf<kElement>;
  const int grad_stride = arguments.grad_expanded ? 0 : kBytesOf<kElement>;

  // Here one way through takes fewer registers than two.
  const bool skips = kPreceded && segment.has_nothing_live();
  RawGradients<kElement, kWarpLanes, kVectors, kWhole, Segment::Columns::template kBehind<kVectors>> raw;
  Real dot = 0;
  if (!skips) {
    const char* y = segment.ahead.before(arguments.y + segment.place.input + bytes, kBytesOf<kElement>);
    const char* grad =
        segment.ahead.before(arguments.grad + segment.place.second + segment.start * grad_stride, grad_stride);
    raw.template load<Cache::stream>(arguments, y, grad, segment.place.inner, segment.extent, 0, segment.lane);
    keep_loads_together();
    raw.settle(segment.extent, segment.ahead, 0, segment.lane);
    if constexpr (kDropout) drop(raw, arguments, team.row(), segment.start, segment.extent, segment.lane);
    dot = warp_sum(raw.dot(segment.extent, segment.ahead, segment.lane));
    raw.keep_packed();
  }
  dot = team.sum(dot);
  if (arguments.dots.given) {
    if (team.first_thread()) store_row_value(arguments, arguments.dots, team.row(), dot);
    if (arguments.dx == nullptr) return;
  }
  char* dx = arguments.dx + segment.place.output + bytes;
  if (skips) {
    segment.fill(dx, {});
    return;
  }
  Chunk<16> result[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) result[k] = raw.result(k, dot, scale_of<Real>(arguments));
  segment.ahead.template store<kWarpLanes, kWhole>(dx, result, segment.extent, segment.lane);
}

// A block may hold two rows, of which the last one may not exist.
template <Element kElement, MaskKind kMask, int kVectors, int kRows, bool kWhole, bool kDropout>
__global__ void
__launch_bounds__(kIsOddAddend<kElement, kMask, kVectors, kWhole, kDropout>
                      ? kOddAddendThreads
                      : block_threads(kVectors, kRows, kDropout),
                  kMostResident<Direction::forward, kVectors, kRows, kDropout, is_packed(kElement, kMask) && kWhole>)
    block_row_forward(const __grid_constant__ ForwardArguments arguments) {
  const RowTeam<kMask, kVectors, kRows, kDropout> team(arguments);
  if (kRows > 1 && team.row() >= arguments.rows.rows) return;
  if constexpr (!kDropout) {
    prefetch_for_row<kElement>(arguments, team, columns_of_block<kElement, kVectors>());
    prefetch_mask_for_row<kElement, kMask>(arguments, team);
  }
  hold_row_forward<kElement, kMask, kVectors, kWhole, kDropout>(arguments, team);
}

template <Element kElement, int kVectors, int kRows, bool kWhole, bool kDropout>
__global__ void __launch_bounds__(block_threads(kVectors, kRows, kDropout),
                                  kMostResident<Direction::backward, kVectors, kRows, kDropout>)
    block_row_backward(const __grid_constant__ BackwardArguments arguments) {
  const RowTeam<MaskKind::none, kVectors, kRows, kDropout> team(arguments);
  if (kRows > 1 && team.row() >= arguments.rows.rows) return;
  if constexpr (!kDropout) prefetch_for_row<kElement>(arguments, team, columns_of_block<kElement, kVectors>());
  hold_row_backward<kElement, kVectors, kWhole, kDropout>(arguments, team);
}

// The same by a cluster of blocks; never launched where there are none.
template <Element kElement, MaskKind kMask, int kVectors, bool kWhole>
__global__ void __launch_bounds__(kBlockThreads, kBlocksResident)
    cluster_row_forward(const __grid_constant__ ForwardArguments arguments) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const ClusterTeam<Accumulate<kElement>, 2, false> team;
  prefetch_for_row<kElement>(arguments, team, columns_of_block<kElement, kVectors>());
  prefetch_mask_for_row<kElement, kMask>(arguments, team);
  hold_row_forward<kElement, kMask, kVectors, kWhole, false>(arguments, team);
#endif
}

template <Element kElement, int kVectors, bool kWhole>
__global__ void __launch_bounds__(kVectors == kBlockVectors ? kBlockThreads : kWideBackwardThreads,
                                  kVectors == kBlockVectors ? kBlocksResident : 1)
    cluster_row_backward(const __grid_constant__ BackwardArguments arguments) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const ClusterTeam<Accumulate<kElement>, 1, false> team;
  prefetch_for_row<kElement>(arguments, team, columns_of_block<kElement, kVectors>());
  hold_row_backward<kElement, kVectors, kWhole, false>(arguments, team);
#endif
}

}  // namespace sms::cuda
