// A block holds a row in registers: each warp a segment of kVectors vectors a lane, the number of warps as the row is
// long. The row is read and written once, and read whole before any of it is written. One barrier.
#pragma once

#include "reduce.cuh"
#include "segment.cuh"

namespace sms::cuda {

template <Element kElement, MaskKind kMask, int kVectors>
__global__ void __launch_bounds__(block_row_threads(kVectors))
    block_row_forward(const __grid_constant__ ForwardArguments arguments) {
  using Real = Accumulate<kElement>;
  constexpr int kCount = kCountOf<kElement>;
  constexpr int kLength = kWarpLanes * kVectors * kCount;
  const int lane = threadIdx.x % kWarpLanes;
  const int start = static_cast<int>(threadIdx.x / kWarpLanes) * kLength;

  const RowPlace place = arguments.rows.locate(blockIdx.x);
  const ColumnRange live = live_columns(arguments, blockIdx.x, place);
  const Extent extent = make_extent(live, arguments.columns, start, kLength);
  const char* x = arguments.x + place.input + start * kBytesOf<kElement>;
  const char* mask = arguments.mask + place.second + start * arguments.mask_column_stride;
  char* y = arguments.y + place.output + start * kBytesOf<kElement>;

  Real score[kVectors][kCount];
  load_scores<Cache::stream, kElement, kMask>(score, x, mask, arguments.mask_column_stride,
                                              static_cast<Real>(arguments.scale), extent, lane);

  // Exponentials against the warp's own maximum first, so that the block meets only once.
  const Real maximum = warp_max(largest(score));
  const Real sum = warp_sum(exponentiate(score, maximum));
  const Totals<Real> totals = block_totals(maximum, sum);
  Chunk<16> result[kVectors];
  normalize<kElement>(result, score, rescale(totals.normalizer, maximum, totals.maximum));
  store_vectors<kWarpLanes, kBytesOf<kElement>>(y, result, extent, lane);
}

template <Element kElement, int kVectors>
__global__ void __launch_bounds__(block_row_threads(kVectors))
    block_row_backward(const __grid_constant__ BackwardArguments arguments) {
  using Real = Accumulate<kElement>;
  constexpr int kBytes = kBytesOf<kElement>;
  constexpr int kLength = kWarpLanes * kVectors * kCountOf<kElement>;
  const int lane = threadIdx.x % kWarpLanes;
  const int start = static_cast<int>(threadIdx.x / kWarpLanes) * kLength;

  const RowPlace place = arguments.rows.locate(blockIdx.x);
  const ColumnRange live = live_columns(arguments, blockIdx.x, place);
  const Extent extent = make_extent(live, arguments.columns, start, kLength);
  const char* grad = arguments.grad + place.second + (arguments.grad_expanded ? 0 : start * kBytes);

  RawGradients<kElement, kWarpLanes, kVectors> raw;
  raw.template load<Cache::stream>(arguments.y + place.input + start * kBytes, grad, arguments.grad_expanded, extent,
                                   lane);
  Real dot = 0;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) dot = add(dot, raw.dot(k, extent, lane));
  raw.keep_packed();
  dot = block_sum(warp_sum(dot));
  Chunk<16> result[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    result[k] = raw.result(k, dot, static_cast<Real>(arguments.scale), extent, lane);
  }
  store_vectors<kWarpLanes, kBytes>(arguments.dx + place.output + start * kBytes, result, extent, lane);
}

}  // namespace sms::cuda
