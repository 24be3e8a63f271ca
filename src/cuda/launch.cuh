// Finds and launches the kernel of a plan. Instantiates the kernels of policy.h's shapes and no others.
#pragma once

#include <iterator>
#include <utility>

#include "block_row.cuh"
#include "launch.h"
#include "pair_rows.cuh"
#include "shared_row.cuh"
#include "stream_row.cuh"
#include "warp_rows.cuh"

namespace sms::cuda {

template <typename Arguments>
cudaError_t launch(void (*kernel)(Arguments), const Plan& plan, const Arguments& arguments, int64_t shared_bytes,
                   cudaStream_t stream) {
  if (shared_bytes > 0) {
    const cudaError_t status =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes));
    if (status != cudaSuccess) return status;
  }
  const uint32_t blocks = static_cast<uint32_t>(plan.blocks);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(((arguments.rows.rows - 1) / static_cast<uint32_t>(plan.rows_per_block()) + 1) * blocks);
  config.blockDim = dim3(static_cast<uint32_t>(plan.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = blocks;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = blocks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

// Calls visit(constant I) for every index I of the shapes that are compiled for this.
template <Element kElement, MaskKind kMask, bool kDropout, size_t... I, typename Visit>
void for_each_warp_shape(std::index_sequence<I...>, const Visit& visit) {
  const auto one = [&](auto index) {
    constexpr WarpShape shape = kWarpShapes[index];
    if constexpr (kDropout ? compiled_for_dropout(kElement, shape) : compiled(kElement, kMask, shape)) {
      visit(index);
    }
  };
  (one(std::integral_constant<size_t, I>{}), ...);
}

// The kernel of `plan`, null if there is none, as for one that is not as launched(); warp_rows(I, rows), both constant, is
// that of shape I.
template <Element kElement, MaskKind kMask, bool kWhole, bool kDropout, typename Kernel, typename WarpRows>
Kernel kernel_of(const Plan& plan, const WarpRows& warp_rows, Kernel block_row, Kernel cluster_row, Kernel pair_rows,
                 Kernel shared_row, Kernel stream_row) {
  Kernel kernel = nullptr;
  switch (plan.strategy) {
    case Strategy::warp_rows:
      for_each_warp_shape<kElement, kMask, kDropout>(
          std::make_index_sequence<std::size(kWarpShapes)>{}, [&](auto index) {
            constexpr WarpShape shape = kWarpShapes[index];
            constexpr std::integral_constant<int, kWhole ? shape.rows : odd_rows(shape)> rows;
            if (plan.lanes == shape.lanes && plan.vectors == shape.vectors && plan.rows == rows) {
              kernel = warp_rows(index, rows);
            }
          });
      break;
    case Strategy::block_row: kernel = block_row; break;
    case Strategy::cluster_row: kernel = cluster_row; break;
    case Strategy::pair_rows: kernel = pair_rows; break;
    case Strategy::shared_row: kernel = shared_row; break;
    case Strategy::stream_row: kernel = stream_row; break;
    case Strategy::sum_rows:
    case Strategy::keep_rows: break;  // have arguments of their own
  }
  return kernel;
}

template <Element kElement, MaskKind kMask, bool kWhole, bool kDropout>
auto forward_kernel(const Plan& plan) {
  using Kernel = void (*)(ForwardArguments);
  const auto warp_rows = [](auto index, auto rows) -> Kernel {
    constexpr WarpShape shape = kWarpShapes[index];
    return warp_rows_forward<kElement, kMask, shape.lanes, shape.vectors, rows, kWhole, kDropout>;
  };
  Kernel block_row = nullptr;
  Kernel cluster_row = nullptr;
  Kernel pair_rows = nullptr;
  Kernel shared_row = nullptr;
  if constexpr (compiled(kElement, Strategy::block_row, kDropout)) {
    block_row = block_row_forward<kElement, kMask, kBlockVectors, 1, kWhole, kDropout>;
  }
  if constexpr (kWhole && !kDropout && compiled_for_sharing(kElement, kMask)) {
    if (plan.threads > plan.lanes) {
      block_row = block_row_forward<kElement, kMask, kBlockVectors, kSharingRows, true, false>;
    }
  }
  if constexpr (!kWhole && !kDropout && compiled_for_odd_blocks(kElement, kMask)) {
    if (plan.vectors == kOddBlockVectors) block_row = block_row_forward<kElement, kMask, kOddBlockVectors, 1, false, false>;
  }
  const auto of_vectors = [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    if (plan.vectors != kVectors) return;
    if constexpr (compiled(kElement, Strategy::cluster_row, kDropout) &&
                  in_clusters(Direction::forward, kElement, kMask, kVectors)) {
      cluster_row = cluster_row_forward<kElement, kMask, kVectors, kWhole>;
    }
    if constexpr (compiled_for_pairs(kElement, kMask, kVectors, kWhole) && !kDropout) {
      pair_rows = pair_rows_forward<kElement, kMask, kVectors, kWhole>;
    }
  };
  of_vectors(std::integral_constant<int, kBlockVectors>{});
  of_vectors(std::integral_constant<int, 2 * kBlockVectors>{});
  if constexpr (compiled(kElement, Strategy::shared_row, kDropout)) {
    shared_row = shared_row_forward<kElement, kMask, kWhole>;
  }
  const Kernel stream_row = stream_row_forward<kElement, kMask, kWhole, kDropout>;
  return kernel_of<kElement, kMask, kWhole, kDropout>(plan, warp_rows, block_row, cluster_row, pair_rows, shared_row, stream_row);
}

template <Element kElement, bool kWhole, bool kDropout>
auto backward_kernel(const Plan& plan) {
  using Kernel = void (*)(BackwardArguments);
  const auto warp_rows = [](auto index, auto rows) -> Kernel {
    constexpr WarpShape shape = kWarpShapes[index];
    return warp_rows_backward<kElement, shape.lanes, shape.vectors, rows, kWhole, kDropout>;
  };
  Kernel block_row = nullptr;
  Kernel cluster_row = nullptr;
  Kernel shared_row = nullptr;
  if constexpr (compiled(kElement, Strategy::block_row, kDropout)) {
    block_row = block_row_backward<kElement, kBlockVectors, 1, kWhole, kDropout>;
  }
  if constexpr (kWhole && !kDropout && compiled_for_sharing(kElement, MaskKind::none)) {
    if (plan.threads > plan.lanes) block_row = block_row_backward<kElement, kBlockVectors, kSharingRows, true, false>;
  }
  if constexpr (!kWhole && !kDropout && compiled_for_odd_blocks(kElement, MaskKind::none)) {
    if (plan.vectors == kOddBlockVectors) block_row = block_row_backward<kElement, kOddBlockVectors, 1, false, false>;
  }
  if constexpr (compiled(kElement, Strategy::cluster_row, kDropout)) {
    cluster_row = cluster_row_backward<kElement, kBlockVectors, kWhole>;
    if constexpr (in_clusters(Direction::backward, kElement, MaskKind::none, 2 * kBlockVectors)) {
      if (plan.vectors != kBlockVectors) cluster_row = cluster_row_backward<kElement, 2 * kBlockVectors, kWhole>;
    }
  }
  if constexpr (compiled(kElement, Strategy::shared_row, kDropout)) {
    shared_row = shared_row_backward<kElement, kWhole>;
  }
  const Kernel stream_row = stream_row_backward<kElement, kWhole, kDropout>;
  const Kernel pair_rows = nullptr;
  return kernel_of<kElement, MaskKind::none, kWhole, kDropout>(plan, warp_rows, block_row, cluster_row, pair_rows, shared_row,
                                                       stream_row);
}

template <Element kElement, MaskKind kMask>
cudaError_t launch_forward(void (*kernel)(ForwardArguments), const Plan& plan, const ForwardArguments& arguments,
                           cudaStream_t stream) {
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  const bool shared = plan.strategy == Strategy::shared_row;
  return launch(kernel, plan, arguments,
                shared ? shared_bytes(Direction::forward, kElement, kMask, plan.part_columns) : 0, stream);
}

template <Element kElement, MaskKind kMask>
cudaError_t launch_forward(const Plan& plan, bool whole, const ForwardArguments& arguments, cudaStream_t stream) {
  constexpr bool kWhole = has_whole_kernels(kElement);
  const auto kernel = kWhole && whole ? forward_kernel<kElement, kMask, kWhole, false>(plan)
                                      : forward_kernel<kElement, kMask, false, false>(plan);
  return launch_forward<kElement, kMask>(kernel, plan, arguments, stream);
}

template <Element kElement, MaskKind kMask>
cudaError_t launch_forward_dropout(const Plan& plan, const ForwardArguments& arguments, cudaStream_t stream) {
  return launch_forward<kElement, kMask>(forward_kernel<kElement, kMask, false, true>(plan), plan, arguments, stream);
}

template <Element kElement>
cudaError_t launch_backward(void (*kernel)(BackwardArguments), const Plan& plan, const BackwardArguments& arguments,
                            cudaStream_t stream) {
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  const bool shared = plan.strategy == Strategy::shared_row;
  return launch(kernel, plan, arguments,
                shared ? shared_bytes(Direction::backward, kElement, MaskKind::none, plan.part_columns) : 0, stream);
}

template <Element kElement>
cudaError_t launch_backward(const Plan& plan, bool whole, const BackwardArguments& arguments, cudaStream_t stream) {
  constexpr bool kWhole = has_whole_kernels(kElement);
  const auto kernel = kWhole && whole ? backward_kernel<kElement, kWhole, false>(plan)
                                      : backward_kernel<kElement, false, false>(plan);
  return launch_backward<kElement>(kernel, plan, arguments, stream);
}

template <Element kElement>
cudaError_t launch_backward_dropout(const Plan& plan, const BackwardArguments& arguments, cudaStream_t stream) {
  return launch_backward<kElement>(backward_kernel<kElement, false, true>(plan), plan, arguments, stream);
}

}  // namespace sms::cuda
