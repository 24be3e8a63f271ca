// The operators of one device, given its two launchers: checks, allocation and the problem are the same everywhere.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>

#include "canonicalize.h"

namespace sms {

// Launch provides static forward(const ForwardProblem&, const at::Tensor& x), backward(const BackwardProblem&,
// const at::Tensor& y) and mask_gradient(const MaskGradientProblem&, const at::Tensor& y); the tensor tells the device.
template <typename Launch>
struct KernelsForDevice {
  static at::Tensor forward(const at::Tensor& x, const OptionalTensor& mask, double scale, bool is_causal,
                            int64_t diagonal, std::optional<int64_t> window, const OptionalTensor& key_lengths,
                            const OptionalTensor& sink) {
    return run_forward(x, mask, {scale, is_causal, diagonal, window}, key_lengths, sink, nullptr);
  }

  static std::tuple<at::Tensor, at::Tensor> forward_with_sink(const at::Tensor& x, const OptionalTensor& mask,
                                                              double scale, bool is_causal, int64_t diagonal,
                                                              std::optional<int64_t> window,
                                                              const OptionalTensor& key_lengths,
                                                              const at::Tensor& sink) {
    at::Tensor sink_probability;
    at::Tensor y =
        run_forward(x, mask, {scale, is_causal, diagonal, window}, key_lengths, sink, &sink_probability);
    return {std::move(y), std::move(sink_probability)};
  }

  static void forward_in_place(at::Tensor& x, const OptionalTensor& mask, double scale, bool is_causal,
                               int64_t diagonal, std::optional<int64_t> window, const OptionalTensor& key_lengths,
                               const OptionalTensor& sink) {
    run_forward_in_place(x, mask, {scale, is_causal, diagonal, window}, key_lengths, sink, nullptr);
  }

  static at::Tensor forward_in_place_with_sink(at::Tensor& x, const OptionalTensor& mask, double scale, bool is_causal,
                                               int64_t diagonal, std::optional<int64_t> window,
                                               const OptionalTensor& key_lengths, const at::Tensor& sink) {
    at::Tensor sink_probability;
    run_forward_in_place(x, mask, {scale, is_causal, diagonal, window}, key_lengths, sink, &sink_probability);
    return sink_probability;
  }

  static at::Tensor backward(const at::Tensor& grad, const at::Tensor& y, double scale, bool is_causal,
                             int64_t diagonal, std::optional<int64_t> window, const OptionalTensor& key_lengths) {
    const Options options{scale, is_causal, diagonal, window};
    check_backward(grad, y, options, key_lengths);
    at::Tensor dx = at::empty(y.sizes(), y.options());
    run_backward(grad, y, options, key_lengths, dx, std::nullopt);
    return dx;
  }

  static std::tuple<at::Tensor, at::Tensor> backward_with_dots(const at::Tensor& grad, const at::Tensor& y,
                                                               double scale, bool is_causal, bool with_dx,
                                                               int64_t diagonal, std::optional<int64_t> window,
                                                               const OptionalTensor& key_lengths) {
    const Options options{scale, is_causal, diagonal, window};
    check_backward(grad, y, options, key_lengths);
    at::Tensor dx = with_dx ? at::empty(y.sizes(), y.options()) : at::empty({0}, y.options());
    at::Tensor dots = empty_statistic(y);
    run_backward(grad, y, options, key_lengths, with_dx ? OptionalTensor(dx) : std::nullopt, dots);
    return {std::move(dx), std::move(dots)};
  }

  static at::Tensor mask_backward(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& dots,
                                  at::IntArrayRef size, at::ScalarType dtype, bool is_causal, int64_t diagonal,
                                  std::optional<int64_t> window, const OptionalTensor& key_lengths) {
    const Options options{1.0, is_causal, diagonal, window};
    check_backward(grad, y, options, key_lengths);
    check_mask_backward(y, dots, size, dtype);
    at::Tensor gradient = at::empty(size, y.options().dtype(dtype));
    if (y.numel() == 0) return gradient.zero_();
    const at::Tensor readable_grad = with_readable_columns(grad);
    const at::Tensor readable_y = with_unit_column_stride(y);
    Launch::mask_gradient(mask_gradient_problem(readable_grad, readable_y, dots, options, key_lengths, gradient), y);
    return gradient;
  }

  static void register_in(torch::Library& library) {
    library.impl("scaled_mask_softmax", &forward);
    library.impl("scaled_mask_softmax_", &forward_in_place);
    library.impl("scaled_mask_softmax_backward", &backward);
    library.impl("scaled_mask_softmax.with_sink_probability", &forward_with_sink);
    library.impl("scaled_mask_softmax_.with_sink_probability", &forward_in_place_with_sink);
    library.impl("scaled_mask_softmax_backward.with_dots", &backward_with_dots);
    library.impl("scaled_mask_softmax_mask_backward", &mask_backward);
  }

 private:
  // sink_probability: null, or to be set to what each row's sink takes.
  static at::Tensor run_forward(const at::Tensor& x, const OptionalTensor& mask, const Options& options,
                                const OptionalTensor& key_lengths, const OptionalTensor& sink,
                                at::Tensor* sink_probability) {
    check_forward(x, mask, options, key_lengths, sink);
    at::Tensor y = at::empty(x.sizes(), x.options());
    OptionalTensor statistic;
    if (sink_probability != nullptr) statistic = *sink_probability = empty_statistic(x);
    if (x.numel() == 0) {
      if (statistic.has_value()) statistic->fill_(1);
      return y;
    }
    const at::Tensor readable = with_unit_column_stride(x);
    Launch::forward(forward_problem(readable, mask, options, key_lengths, sink, y, statistic), x);
    return y;
  }

  static void run_forward_in_place(at::Tensor& x, const OptionalTensor& mask, const Options& options,
                                   const OptionalTensor& key_lengths, const OptionalTensor& sink,
                                   at::Tensor* sink_probability) {
    check_forward(x, mask, options, key_lengths, sink);
    check_in_place(x, mask, sink);
    OptionalTensor statistic;
    if (sink_probability != nullptr) statistic = *sink_probability = empty_statistic(x);
    if (x.numel() == 0) {
      if (statistic.has_value()) statistic->fill_(1);
      return;
    }
    const at::Tensor rows = with_unit_column_stride(x);
    Launch::forward(forward_problem(rows, mask, options, key_lengths, sink, rows, statistic), x);
    if (!rows.is_same(x)) x.copy_(rows);
  }

  static void run_backward(const at::Tensor& grad, const at::Tensor& y, const Options& options,
                           const OptionalTensor& key_lengths, const OptionalTensor& dx, const OptionalTensor& dots) {
    if (y.numel() == 0) {
      if (dots.has_value()) dots->zero_();
      return;
    }
    const at::Tensor readable_grad = with_readable_columns(grad);
    const at::Tensor readable_y = with_unit_column_stride(y);
    Launch::backward(backward_problem(readable_grad, readable_y, options, key_lengths, dx, dots), y);
  }
};

}  // namespace sms
