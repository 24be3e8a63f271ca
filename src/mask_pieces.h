// The gradient of a mask in pieces that a kernel takes: for any number of dimensions and of rows.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>

#include "canonicalize.h"
#include "pieces.h"

namespace sms {

// Moves the origin of `problem` by `index` steps along `dim`.
inline void advance(MaskGradientProblem& problem, const RowDim& dim, int64_t index) {
  const int64_t bytes = element_bytes(problem.element);
  problem.y = offset_pointer(problem.y, index * dim.stride[kInput] * bytes);
  problem.grad = offset_pointer(problem.grad, index * dim.stride[kSecond] * bytes);
  problem.gradient =
      offset_pointer(problem.gradient, index * dim.stride[kOutput] * (problem.gradient_float32 ? 4 : bytes));
  problem.dots = offset_pointer(problem.dots, index * dim.stride[kStatistic] * statistic_bytes(problem.element));
  advance_cells(problem, dim, index);
}

inline void remove_dims(MaskGradientProblem& problem, int begin, int end) {
  RowDim* const dim = problem.rows.dim;
  std::copy(dim + end, dim + problem.rows.dims, dim + begin);
  problem.rows.dims -= end - begin;
  problem.mask_dims -= std::min(end, problem.mask_dims) - std::min(begin, problem.mask_dims);
}

// `problem` from `start` on along dimension d, with `size` of its indices.
inline MaskGradientProblem piece_of(MaskGradientProblem problem, int d, int64_t start, int64_t size) {
  advance(problem, problem.rows.dim[d], start);
  problem.rows.dim[d].size = size;
  if (size == 1) remove_dims(problem, d, d + 1);
  return problem;
}

// Launch provides static takes(const MaskGradientProblem&), true for every piece of what it takes, and static
// mask_gradient(const MaskGradientProblem&, const at::Tensor& y), for what it takes. `gradient` is contiguous, and the
// problem writes into it.
template <typename Launch>
void launch_mask_gradient(const MaskGradientProblem& problem, const at::Tensor& gradient, const at::Tensor& y) {
  if (Launch::takes(problem)) {
    Launch::mask_gradient(problem, y);
    return;
  }
  const auto takes_summed = [](MaskGradientProblem part) {
    remove_dims(part, 0, part.mask_dims);
    return Launch::takes(part);
  };
  // What is summed first, while the problem's gradient is all of `gradient`; then the mask's own rows.
  const bool of_mask = takes_summed(problem);
  const int d = of_mask ? 0 : problem.mask_dims;
  const int64_t size = problem.rows.dim[d].size;
  int64_t step = size;
  bool fits = false;
  while (step > 1 && !fits) {
    step = (step + 1) / 2;
    const MaskGradientProblem piece = piece_of(problem, d, 0, step);
    fits = of_mask ? Launch::takes(piece) : takes_summed(piece);
  }
  const int64_t count = (size + step - 1) / step;
  at::Tensor parts;  // of the sums, unrounded
  if (!of_mask) parts = at::empty({count, gradient.numel()}, statistic_options(y));
  for (int64_t i = 0; i < count; ++i) {
    MaskGradientProblem piece = piece_of(problem, d, i * step, std::min(step, size - i * step));
    if (of_mask) {
      launch_mask_gradient<Launch>(piece, gradient, y);
    } else {
      const at::Tensor part = parts.select(0, i);
      piece.gradient = part.mutable_data_ptr();
      piece.gradient_float32 = part.scalar_type() == at::kFloat;
      launch_mask_gradient<Launch>(piece, part, y);
    }
  }
  if (!of_mask) gradient.view(-1).copy_(parts.sum(0));
}

}  // namespace sms
