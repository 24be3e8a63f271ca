// The gradient of a float mask: y * (grad - dot) summed over the rows that share a row of the mask. A block takes a tile of
// a row of the mask; its warps share the rows to sum, and then their sums are added in order, so that the result is the
// same in every run. Every element of y and grad is read once.
#pragma once

#include "dropout.cuh"
#include "reduce.cuh"
#include "segment.cuh"

namespace sms::cuda {

template <Element kElement, bool kDropout>
__global__ void __launch_bounds__(kMaskGradientThreads)
    sum_rows_mask_gradient(const __grid_constant__ MaskGradientArguments arguments) {
  using Real = Accumulate<kElement>;
  constexpr int kBytes = kBytesOf<kElement>;
  constexpr int kCount = kCountOf<kElement>;
  constexpr int kLength = kWarpLanes * kCount;
  const int lane = threadIdx.x % kWarpLanes;
  const uint32_t warp = threadIdx.x / kWarpLanes;
  const uint32_t warps = blockDim.x / kWarpLanes;
  const uint32_t mask_row = blockIdx.x / arguments.tiles;
  const int64_t start = int64_t{blockIdx.x % arguments.tiles} * kLength;

  const RowPlace place = arguments.mask_rows.locate(mask_row);
  const char* key_length = arguments.mask_rows.find(arguments.key_lengths[0], mask_row);
  const char* dots = arguments.mask_rows.find(arguments.dots[0], mask_row);
  CompensatedSum<Real> sum[kCount];
#pragma unroll 2
  for (uint32_t row = warp; row < arguments.summed_rows.rows; row += warps) {
    const RowPlace summed = arguments.summed_rows.locate(row);
    ColumnRange live = live_columns(arguments.band, arguments.columns, place.query + summed.query);
    if (arguments.key_lengths[0].given) {
      const char* address = key_length + arguments.summed_rows.offset(arguments.key_lengths[1], row);
      live = shortened(live, read_key_length(address, arguments.key_lengths_64));
    }
    const Extent extent = far_extent(live, arguments.columns, start, kLength);
    if (extent.begin >= extent.end) continue;
    RawGradients<kElement, kWarpLanes, 1, false> raw;
    raw.template load<Cache::stream>(
        arguments, arguments.y + place.input + summed.input + start * kBytes,
        arguments.grad + place.second + summed.second + (arguments.grad_expanded ? 0 : start * kBytes), Inner{},
        extent, 0, lane);
    raw.settle(extent, 0, lane);
    Real factor = 1;
    if constexpr (kDropout) {
      const int64_t number = arguments.dropout.first_row +
                             arguments.mask_rows.offset(arguments.dropout.row_number, mask_row) +
                             arguments.summed_rows.offset(arguments.summed_row_number, row);
      drop_gradients(raw, RowDropout(arguments.dropout, number), start, extent, lane);
      factor = dropout_factor<Real>(arguments.dropout);
    }
    const Real dot =
        *reinterpret_cast<const Real*>(dots + arguments.summed_rows.offset(arguments.dots[1], row));
    Real probability[kCount], gradient[kCount];
    unpack<kElement>(raw.y[0][0], probability);
    unpack<kElement>(raw.grad[0][0], gradient);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] += score_gradient(probability[i], gradient[i], dot, factor);
  }

  __shared__ Real shared[kMaskGradientThreads / kWarpLanes][kLength];
#pragma unroll
  for (int i = 0; i < kCount; ++i) shared[warp][lane * kCount + i] = sum[i].value();
  __syncthreads();
  for (int column = threadIdx.x; column < kLength && start + column < arguments.columns; column += blockDim.x) {
    Real total[kCount] = {};
    for (uint32_t w = 0; w < warps; ++w) total[0] = add(total[0], shared[w][column]);
    if (arguments.gradient_float32) {
      reinterpret_cast<float*>(arguments.gradient + place.output)[start + column] = static_cast<float>(total[0]);
    } else {
      store_element<kBytes>(arguments.gradient + place.output + (start + column) * kBytes, pack<kElement>(total), 0);
    }
  }
}

template <Element kElement, bool kDropout>
cudaError_t launch_mask_gradient(const MaskGradientArguments& arguments, cudaStream_t stream) {
  // No more warps than rows to sum.
  const uint32_t warps = std::min<uint32_t>(kMaskGradientThreads / kWarpLanes, arguments.summed_rows.rows);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(arguments.mask_rows.rows * arguments.tiles);
  config.blockDim = dim3(warps * kWarpLanes);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, sum_rows_mask_gradient<kElement, kDropout>, arguments);
}

}  // namespace sms::cuda
