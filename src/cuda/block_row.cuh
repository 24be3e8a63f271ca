// A block, or a cluster of blocks, holds a row in registers: each warp a segment of kBlockVectors vectors a lane, the
// number of warps as the row is long. The row is read and written once, and read whole before any of it is written. The
// warps meet once.
#pragma once

#include "dropout.cuh"
#include "segment.cuh"
#include "sink.cuh"
#include "team.cuh"

namespace sms::cuda {

template <bool kDropout>
inline constexpr int kMostThreads = kDropout ? kDropoutBlockThreads : kBlockThreads;
template <bool kDropout>
inline constexpr int kMostResident = kDropout ? 1 : kBlocksResident;

// A warp's segment of its team's row.
template <Element kElement>
struct BlockSegment {
  static constexpr int kLength = kWarpLanes * kBlockVectors * kCountOf<kElement>;

  RowPlace place;
  int start;  // its first column
  int lane;
  Extent extent;

  template <typename Arguments, typename Team>
  __device__ __forceinline__ BlockSegment(const Arguments& arguments, const Team& team) {
    place = arguments.rows.locate(team.row());
    start = team.warp() * kLength;
    lane = threadIdx.x % kWarpLanes;
    extent = near_extent(arguments, team.row(), place, true, start);
  }
};

template <Element kElement, MaskKind kMask, bool kWhole, bool kDropout, typename Team>
__device__ __forceinline__ void hold_row_forward(const ForwardArguments& arguments, const Team& team) {
  using RowScores = Scores<kElement, kMask, kWarpLanes, kBlockVectors>;
  using Real = typename RowScores::Real;
  const typename RowScores::Exponent exponent{arguments.packed};
  const BlockSegment<kElement> segment(arguments, team);
  const int bytes = segment.start * kBytesOf<kElement>;

  RowScores scores;
  const char* mask = arguments.mask + segment.place.second + segment.start * arguments.mask_column_stride;
  load_scores<Cache::stream, kWhole>(scores, arguments, arguments.x + segment.place.input + bytes, mask, segment.extent,
                                     segment.lane);

  // Exponentials against the warp's own maximum first, so that the block meets only once.
  const Real maximum = RowScores::maximum_of(warp_reduce(scores.largest(), RowScores::larger));
  const Real sum = warp_sum(scores.exponentiate(maximum, exponent, segment.extent, segment.lane));
  Totals<Real> totals = team.totals(maximum, sum, exponent);
  if (arguments.sink.data != nullptr) {
    totals.normalizer = with_sink<kElement>(arguments, team.row(), exponent.score(totals.maximum), totals.normalizer,
                                            team.first_thread());
  }
  Chunk<16> result[kBlockVectors];
  const Real factor = exponent.rescale(totals.normalizer, maximum, totals.maximum);
  scores.normalize(result, factor);
  if constexpr (kDropout) {
    if (blockIdx.x == 0 && threadIdx.x == 0) store_random_state(arguments);
    store_with_dropout<kElement, kWarpLanes>(result, factor != factor, arguments, segment.place.output + bytes,
                                             team.row(), segment.start, segment.extent, segment.lane);
  } else {
    store_vectors<kWarpLanes, kWhole, kBytesOf<kElement>>(arguments.y + segment.place.output + bytes, result,
                                                          segment.extent, segment.lane);
  }
}

template <Element kElement, bool kWhole, bool kDropout, typename Team>
__device__ __forceinline__ void hold_row_backward(const BackwardArguments& arguments, const Team& team) {
  using Real = Accumulate<kElement>;
  const BlockSegment<kElement> segment(arguments, team);
  const int bytes = segment.start * kBytesOf<kElement>;

  RawGradients<kElement, kWarpLanes, kBlockVectors, kWhole> raw;
  raw.template load<Cache::stream>(arguments, arguments.y + segment.place.input + bytes,
                                   arguments.grad + segment.place.second + (arguments.grad_expanded ? 0 : bytes),
                                   segment.extent, segment.lane);
  keep_loads_together();
  raw.settle(segment.extent, segment.lane);
  if constexpr (kDropout) drop(raw, arguments, team.row(), segment.start, segment.extent, segment.lane);
  Real dot = 0;
#pragma unroll
  for (int k = 0; k < kBlockVectors; ++k) dot = add(dot, raw.dot(k));
  raw.keep_packed();
  dot = team.sum(warp_sum(dot));
  if (arguments.dots.data != nullptr) {
    if (team.first_thread()) store_row_value(arguments, arguments.dots, team.row(), dot);
    if (arguments.dx == nullptr) return;
  }
  Chunk<16> result[kBlockVectors];
#pragma unroll
  for (int k = 0; k < kBlockVectors; ++k) result[k] = raw.result(k, dot, scale_of<Real>(arguments));
  store_vectors<kWarpLanes, kWhole, kBytesOf<kElement>>(arguments.dx + segment.place.output + bytes, result,
                                                        segment.extent, segment.lane);
}

template <Element kElement, MaskKind kMask, bool kWhole, bool kDropout>
__global__ void __launch_bounds__(kMostThreads<kDropout>, kMostResident<kDropout>)
    block_row_forward(const __grid_constant__ ForwardArguments arguments) {
  hold_row_forward<kElement, kMask, kWhole, kDropout>(arguments, BlockTeam());
}

template <Element kElement, bool kWhole, bool kDropout>
__global__ void __launch_bounds__(kMostThreads<kDropout>, kMostResident<kDropout>)
    block_row_backward(const __grid_constant__ BackwardArguments arguments) {
  hold_row_backward<kElement, kWhole, kDropout>(arguments, BlockTeam());
}

// The same by a cluster of blocks; never launched where there are none.
template <Element kElement, MaskKind kMask, bool kWhole>
__global__ void __launch_bounds__(kBlockThreads, kBlocksResident)
    cluster_row_forward(const __grid_constant__ ForwardArguments arguments) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  hold_row_forward<kElement, kMask, kWhole, false>(arguments, ClusterTeam<Accumulate<kElement>, 2, false>());
#endif
}

template <Element kElement, bool kWhole>
__global__ void __launch_bounds__(kBlockThreads, kBlocksResident)
    cluster_row_backward(const __grid_constant__ BackwardArguments arguments) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  hold_row_backward<kElement, kWhole, false>(arguments, ClusterTeam<Accumulate<kElement>, 1, false>());
#endif
}

}  // namespace sms::cuda
