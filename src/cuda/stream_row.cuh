// A block reads a row twice: once for its maximum and sum, once for the result. For rows too long to hold; no limit on
// their length. A block takes a row in chunks of one segment a warp. The second time it goes backwards, while the end
// of the row is still in the caches. In place is safe: the first reading ends at a barrier, and in the second every
// element is read by the lane that owns it before it is written (bytes of a neighbouring segment that an aligned load
// brings along are shifted out).
#pragma once

#include "dropout.cuh"
#include "segment.cuh"
#include "sink.cuh"
#include "team.cuh"

namespace sms::cuda {

// The chunks of a row, and this warp's segment of each.
template <Element kElement>
struct Chunks {
  static constexpr int kLength = kWarpLanes * kStreamVectors * kCountOf<kElement>;
  static constexpr int64_t kChunkLength = int64_t{kLength} * (kStreamThreads / kWarpLanes);

  int64_t first_live;  // chunks [first_live, last_live) hold the live columns
  int64_t last_live;
  int64_t count;
  ColumnRange live;
  int64_t columns;

  __device__ __forceinline__ Chunks(const ColumnRange& live_range, int64_t row_columns)
      : first_live(live_range.begin / kChunkLength),
        last_live(live_range.begin < live_range.end ? (live_range.end - 1) / kChunkLength + 1 : 0),
        count((row_columns - 1) / kChunkLength + 1),
        live(live_range),
        columns(row_columns) {}

  __device__ __forceinline__ int64_t start(int64_t chunk) const {
    return chunk * kChunkLength + static_cast<int>(threadIdx.x / kWarpLanes) * kLength;
  }

  __device__ __forceinline__ Extent extent(int64_t chunk) const {
    return far_extent(live, columns, start(chunk), kLength);
  }
};

template <Element kElement, MaskKind kMask, bool kWhole, bool kDropout>
__global__ void __launch_bounds__(kStreamThreads)
    stream_row_forward(const __grid_constant__ ForwardArguments arguments) {
  using RowScores = Scores<kElement, kMask, kWarpLanes, kStreamVectors>;
  using Real = typename RowScores::Real;
  constexpr int kBytes = kBytesOf<kElement>;
  const int lane = threadIdx.x % kWarpLanes;
  const int64_t mask_stride = arguments.mask_column_stride;
  const typename RowScores::Exponent exponent{arguments.packed};

  const RowPlace place = arguments.rows.locate(blockIdx.x);
  const Chunks<kElement> chunks(live_columns(arguments, blockIdx.x, place), arguments.columns);
  const char* x = arguments.x + place.input;
  const char* mask = arguments.mask + place.second;
  char* y = arguments.y + place.output;

  Real maximum = kNegativeInfinity<Real>;
  CompensatedSum<Real> sum;
#pragma unroll 1
  for (int64_t chunk = chunks.first_live; chunk < chunks.last_live; ++chunk) {
    const int64_t start = chunks.start(chunk);
    const Extent extent = chunks.extent(chunk);
    if (extent.begin >= extent.end) continue;
    RowScores scores;
    load_scores<Cache::keep, kWhole>(scores, arguments, x + start * kBytes, mask + start * mask_stride, place.inner,
                                     extent, Ahead<kElement, false>{}, lane);
    const Real larger = fmax(maximum, RowScores::maximum_of(scores.largest()));
    if (larger > maximum) {
      sum.sum = exponent.rescale(sum.sum, maximum, larger);
      sum.lost = exponent.rescale(sum.lost, maximum, larger);
      maximum = larger;
    }
    sum += scores.exponentiate(exponent.shift(maximum), exponent, extent, lane);
  }

  const Real warp_maximum = warp_max(maximum);
  const Real warp_part = warp_sum(exponent.rescale(sum.value(), maximum, warp_maximum));
  Totals<Real> totals = BlockTeam<kStreamThreads / kWarpLanes>().totals(warp_maximum, warp_part, exponent);
  if (arguments.sink.given) {
    totals.normalizer = with_sink<kElement>(arguments, blockIdx.x, exponent.score(totals.maximum), totals.normalizer,
                                            threadIdx.x == 0);
  }
  if constexpr (kDropout) {
    if (blockIdx.x == 0 && threadIdx.x == 0) store_random_state(arguments);
  }

  const Shift<Real> shift = exponent.shift(totals.maximum);
#pragma unroll 1
  for (int64_t chunk = chunks.count - 1; chunk >= 0; --chunk) {
    const int64_t start = chunks.start(chunk);
    const Extent extent = chunks.extent(chunk);
    if (extent.last == 0) continue;
    RowScores scores;
    if (extent.begin < extent.end) {
      load_scores<Cache::stream, kWhole>(scores, arguments, x + start * kBytes, mask + start * mask_stride, place.inner,
                                         extent, Ahead<kElement, false>{}, lane);
    }
    scores.exponentiate(shift, exponent, extent, lane);
    Chunk<16> result[kStreamVectors];
    scores.normalize(result, totals.normalizer);
    if constexpr (kDropout) {
      store_with_dropout<kElement, kWarpLanes>(result, totals.normalizer != totals.normalizer, arguments,
                                               place.output + start * kBytes, blockIdx.x, start, extent, lane);
    } else {
      store_vectors<kWarpLanes, kWhole, kBytes>(y + start * kBytes, result, extent, lane);
    }
  }
}

template <Element kElement, bool kWhole, bool kDropout>
__global__ void __launch_bounds__(kStreamThreads)
    stream_row_backward(const __grid_constant__ BackwardArguments arguments) {
  using Real = Accumulate<kElement>;
  constexpr int kBytes = kBytesOf<kElement>;
  const int lane = threadIdx.x % kWarpLanes;
  const int64_t grad_stride = arguments.grad_expanded ? 0 : kBytes;

  const RowPlace place = arguments.rows.locate(blockIdx.x);
  const Chunks<kElement> chunks(live_columns(arguments, blockIdx.x, place), arguments.columns);
  const char* y = arguments.y + place.input;
  const char* grad = arguments.grad + place.second;
  char* dx = arguments.dx + place.output;

  CompensatedSum<Real> sum;
#pragma unroll 1
  for (int64_t chunk = chunks.first_live; chunk < chunks.last_live; ++chunk) {
    const int64_t start = chunks.start(chunk);
    const Extent extent = chunks.extent(chunk);
    if (extent.begin >= extent.end) continue;
    RawGradients<kElement, kWarpLanes, kStreamVectors, kWhole> raw;
    raw.template load<Cache::keep>(arguments, y + start * kBytes, grad + start * grad_stride, place.inner, extent,
    0, lane);
    raw.settle(extent, 0, lane);
    if constexpr (kDropout) drop(raw, arguments, blockIdx.x, start, extent, lane);
    sum += raw.dot(extent, Ahead<kElement, false>{}, lane);
  }

  const Real dot = BlockTeam<kStreamThreads / kWarpLanes>().sum(warp_sum(sum.value()));
  if (arguments.dots.given) {
    if (threadIdx.x == 0) store_row_value(arguments, arguments.dots, blockIdx.x, dot);
    if (arguments.dx == nullptr) return;
  }

#pragma unroll 1
  for (int64_t chunk = chunks.count - 1; chunk >= 0; --chunk) {
    const int64_t start = chunks.start(chunk);
    const Extent extent = chunks.extent(chunk);
    if (extent.last == 0) continue;
    RawGradients<kElement, kWarpLanes, kStreamVectors, kWhole> raw;
    raw.template load<Cache::stream>(arguments, y + start * kBytes, grad + start * grad_stride, place.inner, extent,
    0, lane);
    raw.settle(extent, 0, lane);
    if constexpr (kDropout) drop(raw, arguments, blockIdx.x, start, extent, lane);
    Chunk<16> result[kStreamVectors];
#pragma unroll
    for (int k = 0; k < kStreamVectors; ++k) result[k] = raw.result(k, dot, scale_of<Real>(arguments));
    store_vectors<kWarpLanes, kWhole, kBytes>(dx + start * kBytes, result, extent, lane);
  }
}

}  // namespace sms::cuda
