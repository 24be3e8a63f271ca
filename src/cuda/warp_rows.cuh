// A warp, or kLanes lanes of one, holds a row in registers; kRows rows are in flight together. Each row is read and
// written once, and read whole before any of it is written.
#pragma once

#include "reduce.cuh"
#include "segment.cuh"

namespace sms::cuda {

// The rows of one group of lanes: kRows of them, as far apart as the block has groups, so that a warp's rows adjoin.
template <int kLanes, int kRows>
struct GroupRows {
  static constexpr uint32_t kGroups = kWarpRowsThreads / kLanes;
  uint32_t first = blockIdx.x * (kGroups * kRows) + threadIdx.x / kLanes;

  __device__ __forceinline__ uint32_t operator[](int r) const { return first + static_cast<uint32_t>(r) * kGroups; }
};

template <Element kElement, MaskKind kMask, int kLanes, int kVectors, int kRows>
__global__ void __launch_bounds__(kWarpRowsThreads)
    warp_rows_forward(const __grid_constant__ ForwardArguments arguments) {
  using Real = Accumulate<kElement>;
  constexpr int kCount = kCountOf<kElement>;
  constexpr int kLength = kLanes * kVectors * kCount;
  const int lane = threadIdx.x % kLanes;
  const GroupRows<kLanes, kRows> rows;

  RawScores<kElement, kMask, kLanes, kVectors> raw[kRows];
  Extent extent[kRows];
  char* y[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // Lanes past the last row go through the motions with a row of no columns: the warp stays whole for its shuffles.
    extent[r] = Extent{};
    RowPlace place{};
    if (rows[r] < arguments.rows.rows) {
      place = arguments.rows.locate(rows[r]);
      const ColumnRange live = live_columns(arguments, rows[r], place);
      extent[r] = make_extent(live, arguments.columns, 0, kLength);
    }
    y[r] = arguments.y + place.output;
    raw[r].template load<Cache::stream>(arguments.x + place.input, arguments.mask + place.second,
                                        arguments.mask_column_stride, extent[r], 0, lane);
  }

  Real score[kRows][kVectors][kCount];
  Real maximum[kRows];
  Real sum[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    raw[r].scores(score[r], static_cast<Real>(arguments.scale), extent[r], 0, lane);
    maximum[r] = largest(score[r]);
  }
  group_max<kLanes>(maximum);
#pragma unroll
  for (int r = 0; r < kRows; ++r) sum[r] = exponentiate(score[r], maximum[r]);
  group_sum<kLanes>(sum);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Chunk<16> result[kVectors];
    normalize<kElement>(result, score[r], normalizer(sum[r]));
    store_vectors<kLanes, kBytesOf<kElement>>(y[r], result, extent[r], lane);
  }
}

template <Element kElement, int kLanes, int kVectors, int kRows>
__global__ void __launch_bounds__(kWarpRowsThreads)
    warp_rows_backward(const __grid_constant__ BackwardArguments arguments) {
  using Real = Accumulate<kElement>;
  constexpr int kLength = kLanes * kVectors * kCountOf<kElement>;
  const int lane = threadIdx.x % kLanes;
  const GroupRows<kLanes, kRows> rows;

  RawGradients<kElement, kLanes, kVectors> raw[kRows];
  Extent extent[kRows];
  char* dx[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    extent[r] = Extent{};
    RowPlace place{};
    if (rows[r] < arguments.rows.rows) {
      place = arguments.rows.locate(rows[r]);
      const ColumnRange live = live_columns(arguments, rows[r], place);
      extent[r] = make_extent(live, arguments.columns, 0, kLength);
    }
    dx[r] = arguments.dx + place.output;
    raw[r].template load<Cache::stream>(arguments.y + place.input, arguments.grad + place.second,
                                        arguments.grad_expanded, extent[r], lane);
  }

  Real dot[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    dot[r] = 0;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) dot[r] = add(dot[r], raw[r].dot(k, extent[r], lane));
    raw[r].keep_packed();
  }
  group_sum<kLanes>(dot);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    Chunk<16> result[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      result[k] = raw[r].result(k, dot[r], static_cast<Real>(arguments.scale), extent[r], lane);
    }
    store_vectors<kLanes, kBytesOf<kElement>>(dx[r], result, extent[r], lane);
  }
}

}  // namespace sms::cuda
