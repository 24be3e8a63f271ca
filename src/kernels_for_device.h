// The operators of one device, given its two launchers: checks, allocation and the problem are the same everywhere.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "canonicalize.h"

namespace sms {

// Launch provides static forward(const ForwardProblem&, const at::Tensor& x) and backward(const BackwardProblem&,
// const at::Tensor& y); the tensor tells the device.
template <typename Launch>
struct KernelsForDevice {
  static at::Tensor forward(const at::Tensor& x, const OptionalTensor& mask, double scale, bool is_causal,
                            int64_t diagonal, std::optional<int64_t> window, const OptionalTensor& key_lengths,
                            const OptionalTensor& sink) {
    const Options options{scale, is_causal, diagonal, window};
    check_forward(x, mask, options, key_lengths, sink);
    at::Tensor y = at::empty(x.sizes(), x.options());
    if (x.numel() == 0) return y;
    const at::Tensor readable = with_unit_column_stride(x);
    Launch::forward(forward_problem(readable, mask, options, key_lengths, y), x);
    return y;
  }

  static void forward_in_place(at::Tensor& x, const OptionalTensor& mask, double scale, bool is_causal,
                               int64_t diagonal, std::optional<int64_t> window, const OptionalTensor& key_lengths,
                               const OptionalTensor& sink) {
    const Options options{scale, is_causal, diagonal, window};
    check_forward(x, mask, options, key_lengths, sink);
    check_in_place(x, mask);
    if (x.numel() == 0) return;
    const at::Tensor rows = with_unit_column_stride(x);
    Launch::forward(forward_problem(rows, mask, options, key_lengths, rows), x);
    if (!rows.is_same(x)) x.copy_(rows);
  }

  static at::Tensor backward(const at::Tensor& grad, const at::Tensor& y, double scale, bool is_causal,
                             int64_t diagonal, std::optional<int64_t> window, const OptionalTensor& key_lengths) {
    const Options options{scale, is_causal, diagonal, window};
    check_backward(grad, y, options, key_lengths);
    at::Tensor dx = at::empty(y.sizes(), y.options());
    if (y.numel() == 0) return dx;
    const at::Tensor readable_grad = with_readable_columns(grad);
    const at::Tensor readable_y = with_unit_column_stride(y);
    Launch::backward(backward_problem(readable_grad, readable_y, options, key_lengths, dx), y);
    return dx;
  }

  static void register_in(torch::Library& library) {
    library.impl("scaled_mask_softmax", &forward);
    library.impl("scaled_mask_softmax_", &forward_in_place);
    library.impl("scaled_mask_softmax_backward", &backward);
  }
};

}  // namespace sms
