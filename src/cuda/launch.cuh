// Finds and launches the kernel of a plan. Instantiates the kernels of policy.h's shapes and no others.
#pragma once

#include <iterator>
#include <utility>

#include "block_row.cuh"
#include "launch.h"
#include "stream_row.cuh"
#include "warp_rows.cuh"

namespace sms::cuda {

template <typename Arguments>
cudaError_t launch(void (*kernel)(Arguments), const Plan& plan, const Arguments& arguments, cudaStream_t stream) {
  const uint32_t per_block = static_cast<uint32_t>(plan.rows_per_block());
  const uint32_t blocks = (arguments.rows.rows - 1) / per_block + 1;
  void* parameters[] = {const_cast<Arguments*>(&arguments)};
  const uint32_t threads = static_cast<uint32_t>(plan.threads);
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads), parameters, 0, stream);
}

// Calls visit(constant I) for every index I of the shapes that are compiled for the element.
template <Element kElement, size_t... I, typename Visit>
void for_each_warp_shape(std::index_sequence<I...>, const Visit& visit) {
  const auto one = [&](auto index) {
    if constexpr (compiled(kElement, kWarpShapes[index])) visit(index);
  };
  (one(std::integral_constant<size_t, I>{}), ...);
}

template <Element kElement, size_t... I, typename Visit>
void for_each_block_shape(std::index_sequence<I...>, const Visit& visit) {
  const auto one = [&](auto index) {
    if constexpr (compiled(kElement, kBlockShapes[index])) visit(index);
  };
  (one(std::integral_constant<size_t, I>{}), ...);
}

// The kernel of `plan`, null if there is none: warp_rows(I), block_row(I) and stream_row() return kernels.
template <Element kElement, typename Kernel, typename WarpRows, typename BlockRow>
Kernel kernel_of(const Plan& plan, const WarpRows& warp_rows, const BlockRow& block_row, Kernel stream_row) {
  Kernel kernel = plan.strategy == Strategy::stream_row ? stream_row : nullptr;
  if (plan.strategy == Strategy::warp_rows) {
    for_each_warp_shape<kElement>(std::make_index_sequence<std::size(kWarpShapes)>{}, [&](auto index) {
      constexpr WarpShape shape = kWarpShapes[index];
      if (plan.lanes == shape.lanes && plan.vectors == shape.vectors && plan.rows == shape.rows) {
        kernel = warp_rows(index);
      }
    });
  } else if (plan.strategy == Strategy::block_row) {
    for_each_block_shape<kElement>(std::make_index_sequence<std::size(kBlockShapes)>{}, [&](auto index) {
      if (plan.vectors == kBlockShapes[index].vectors) kernel = block_row(index);
    });
  }
  return kernel;
}

template <Element kElement, MaskKind kMask>
cudaError_t launch_forward(const Plan& plan, const ForwardArguments& arguments, cudaStream_t stream) {
  using Kernel = void (*)(ForwardArguments);
  const auto warp_rows = [](auto index) -> Kernel {
    constexpr WarpShape shape = kWarpShapes[index];
    return warp_rows_forward<kElement, kMask, shape.lanes, shape.vectors, shape.rows>;
  };
  const auto block_row = [](auto index) -> Kernel {
    return block_row_forward<kElement, kMask, kBlockShapes[index].vectors>;
  };
  const Kernel stream_row = stream_row_forward<kElement, kMask>;
  const Kernel kernel = kernel_of<kElement>(plan, warp_rows, block_row, stream_row);
  return kernel == nullptr ? cudaErrorInvalidDeviceFunction : launch(kernel, plan, arguments, stream);
}

template <Element kElement>
cudaError_t launch_backward(const Plan& plan, const BackwardArguments& arguments, cudaStream_t stream) {
  using Kernel = void (*)(BackwardArguments);
  const auto warp_rows = [](auto index) -> Kernel {
    constexpr WarpShape shape = kWarpShapes[index];
    return warp_rows_backward<kElement, shape.lanes, shape.vectors, shape.rows>;
  };
  const auto block_row = [](auto index) -> Kernel {
    return block_row_backward<kElement, kBlockShapes[index].vectors>;
  };
  const Kernel stream_row = stream_row_backward<kElement>;
  const Kernel kernel = kernel_of<kElement>(plan, warp_rows, block_row, stream_row);
  return kernel == nullptr ? cudaErrorInvalidDeviceFunction : launch(kernel, plan, arguments, stream);
}

}  // namespace sms::cuda
