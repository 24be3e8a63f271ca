// The operators of one device, given its two launchers: checks, allocation and the problem are the same everywhere.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>

#include "canonicalize.h"
#include "mask_pieces.h"

namespace sms {

// Launch provides static forward(const ForwardProblem&, const at::Tensor& x), backward(const BackwardProblem&,
// const at::Tensor& y), mask_gradient() and takes() (see mask_pieces.h), dropout_keep(const Dropout&, int64_t rows,
// int64_t columns, uint8_t* keep, const at::Tensor& x), and random_state(const at::Tensor& x), which advances torch's
// generator; the tensor tells the device.
template <typename Launch>
struct KernelsForDevice {
  static at::Tensor forward(const at::Tensor& x, const OptionalTensor& mask, double scale, bool is_causal,
                            int64_t diagonal, std::optional<int64_t> window, const OptionalTensor& key_lengths,
                            const OptionalTensor& sink) {
    const Options options{scale, is_causal, diagonal, window};
    check_forward(x, mask, options, key_lengths, sink);
    return run_forward(x, mask, options, key_lengths, sink, nullptr);
  }

  static std::tuple<at::Tensor, at::Tensor> forward_with_sink(const at::Tensor& x, const OptionalTensor& mask,
                                                              double scale, bool is_causal, int64_t diagonal,
                                                              std::optional<int64_t> window,
                                                              const OptionalTensor& key_lengths,
                                                              const at::Tensor& sink) {
    const Options options{scale, is_causal, diagonal, window};
    check_forward(x, mask, options, key_lengths, sink);
    at::Tensor sink_probability;
    at::Tensor y = run_forward(x, mask, options, key_lengths, sink, &sink_probability);
    return {std::move(y), std::move(sink_probability)};
  }

  static void forward_in_place(at::Tensor& x, const OptionalTensor& mask, double scale, bool is_causal,
                               int64_t diagonal, std::optional<int64_t> window, const OptionalTensor& key_lengths,
                               const OptionalTensor& sink) {
    const Options options{scale, is_causal, diagonal, window};
    check_forward(x, mask, options, key_lengths, sink);
    check_in_place(x, mask, key_lengths, sink);
    run_forward_in_place(x, mask, options, key_lengths, sink, nullptr);
  }

  static at::Tensor forward_in_place_with_sink(at::Tensor& x, const OptionalTensor& mask, double scale, bool is_causal,
                                               int64_t diagonal, std::optional<int64_t> window,
                                               const OptionalTensor& key_lengths, const at::Tensor& sink) {
    const Options options{scale, is_causal, diagonal, window};
    check_forward(x, mask, options, key_lengths, sink);
    check_in_place(x, mask, key_lengths, sink);
    at::Tensor sink_probability;
    run_forward_in_place(x, mask, options, key_lengths, sink, &sink_probability);
    return sink_probability;
  }

  static at::Tensor backward(const at::Tensor& grad, const at::Tensor& y, double scale, bool is_causal,
                             int64_t diagonal, std::optional<int64_t> window, const OptionalTensor& key_lengths) {
    const Options options{scale, is_causal, diagonal, window};
    check_backward(grad, y, options, key_lengths);
    at::Tensor dx = Launch::empty_as(y);
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
    return run_mask_backward(grad, y, dots, size, dtype, options, key_lengths, {});
  }

  static at::Tensor forward_dropout(const at::Tensor& x, const OptionalTensor& mask, double scale, bool is_causal,
                                    int64_t diagonal, std::optional<int64_t> window, const OptionalTensor& key_lengths,
                                    const OptionalTensor& sink, double dropout_p) {
    const Options options{scale, is_causal, diagonal, window};
    check_forward(x, mask, options, key_lengths, sink);
    check_dropout(dropout_p);
    return run_forward(x, mask, options, key_lengths, sink, nullptr, drawn(dropout_p, x));
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> forward_dropout_with_y(
      const at::Tensor& x, const OptionalTensor& mask, double scale, bool is_causal, int64_t diagonal,
      std::optional<int64_t> window, const OptionalTensor& key_lengths, const OptionalTensor& sink, double dropout_p,
      bool with_sink_probability) {
    const Options options{scale, is_causal, diagonal, window};
    check_forward(x, mask, options, key_lengths, sink);
    check_dropout(dropout_p);
    at::Tensor y = at::empty(x.sizes(), x.options());
    at::Tensor state = at::empty({2}, x.options().dtype(at::kLong));
    at::Tensor sink_probability;
    at::Tensor result = run_forward(x, mask, options, key_lengths, sink,
                                    with_sink_probability ? &sink_probability : nullptr, drawn(dropout_p, x), y, state);
    if (x.numel() == 0) state.zero_();
    if (!with_sink_probability) sink_probability = at::empty({0}, statistic_options(x));
    return {std::move(result), std::move(y), std::move(state), std::move(sink_probability)};
  }

  static void forward_in_place_dropout(at::Tensor& x, const OptionalTensor& mask, double scale, bool is_causal,
                                       int64_t diagonal, std::optional<int64_t> window,
                                       const OptionalTensor& key_lengths, const OptionalTensor& sink,
                                       double dropout_p) {
    const Options options{scale, is_causal, diagonal, window};
    check_forward(x, mask, options, key_lengths, sink);
    check_dropout(dropout_p);
    check_in_place(x, mask, key_lengths, sink);
    run_forward_in_place(x, mask, options, key_lengths, sink, nullptr, drawn(dropout_p, x));
  }

  static std::tuple<at::Tensor, at::Tensor> backward_dropout(const at::Tensor& grad, const at::Tensor& y,
                                                             const at::Tensor& state, double dropout_p, double scale,
                                                             bool is_causal, bool with_dx, bool with_dots,
                                                             int64_t diagonal, std::optional<int64_t> window,
                                                             const OptionalTensor& key_lengths) {
    const Options options{scale, is_causal, diagonal, window};
    check_backward(grad, y, options, key_lengths);
    check_dropout(dropout_p);
    check_random_state(y, state);
    at::Tensor dx = with_dx ? at::empty(y.sizes(), y.options()) : at::empty({0}, y.options());
    at::Tensor dots = with_dots ? empty_statistic(y) : at::empty({0}, statistic_options(y));
    if (!with_dx && !with_dots) return {std::move(dx), std::move(dots)};
    run_backward(grad, y, options, key_lengths, with_dx ? OptionalTensor(dx) : std::nullopt,
                 with_dots ? OptionalTensor(dots) : std::nullopt, dropout_of(dropout_p, state));
    return {std::move(dx), std::move(dots)};
  }

  static at::Tensor mask_backward_dropout(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& dots,
                                          const at::Tensor& state, double dropout_p, at::IntArrayRef size,
                                          at::ScalarType dtype, bool is_causal, int64_t diagonal,
                                          std::optional<int64_t> window, const OptionalTensor& key_lengths) {
    const Options options{1.0, is_causal, diagonal, window};
    check_backward(grad, y, options, key_lengths);
    check_dropout(dropout_p);
    check_random_state(y, state);
    return run_mask_backward(grad, y, dots, size, dtype, options, key_lengths, dropout_of(dropout_p, state));
  }

  static at::Tensor dropout_keep(const at::Tensor& x, double dropout_p) {
    check_dropout(dropout_p);
    return run_dropout_keep(x, drawn(dropout_p, x));
  }

  static at::Tensor dropout_keep_of_state(const at::Tensor& x, const at::Tensor& state, double dropout_p) {
    check_dropout(dropout_p);
    check_random_state(x, state);
    return run_dropout_keep(x, dropout_of(dropout_p, state));
  }

  static void register_in(torch::Library& library) {
    library.impl("scaled_mask_softmax", &forward);
    library.impl("scaled_mask_softmax_", &forward_in_place);
    library.impl("scaled_mask_softmax_backward", &backward);
    library.impl("scaled_mask_softmax.with_sink_probability", &forward_with_sink);
    library.impl("scaled_mask_softmax_.with_sink_probability", &forward_in_place_with_sink);
    library.impl("scaled_mask_softmax_backward.with_dots", &backward_with_dots);
    library.impl("scaled_mask_softmax_mask_backward", &mask_backward);
    library.impl("scaled_mask_softmax.dropout", &forward_dropout);
    library.impl("scaled_mask_softmax.dropout_with_y", &forward_dropout_with_y);
    library.impl("scaled_mask_softmax_.dropout", &forward_in_place_dropout);
    library.impl("scaled_mask_softmax_backward.dropout", &backward_dropout);
    library.impl("scaled_mask_softmax_mask_backward.dropout", &mask_backward_dropout);
    library.impl("dropout_keep", &dropout_keep);
    library.impl("dropout_keep.of_state", &dropout_keep_of_state);
  }

 private:
  // Draws nothing for no cells, as torch's dropout.
  static Dropout drawn(double dropout_p, const at::Tensor& x) {
    Dropout dropout = dropout_of(dropout_p);
    if (x.numel() > 0) dropout.random = Launch::random_state(x);
    return dropout;
  }

  // What sinks take of rows without a column: all, unless a sink is -inf, NaN or inf.
  static void fill_with_all(at::Tensor& sink_probability, const at::Tensor& sink) {
    const at::Tensor taken = sink.sub(sink).exp().masked_fill(sink.eq(-HUGE_VAL), 0);
    sink_probability.copy_(taken.unsqueeze(-1).expand(sink_probability.sizes()));
  }

  // sink_probability: null, or to be set to what each row's sink takes. before_dropout and state: to be filled.
  static at::Tensor run_forward(const at::Tensor& x, const OptionalTensor& mask, const Options& options,
                                const OptionalTensor& key_lengths, const OptionalTensor& sink,
                                at::Tensor* sink_probability, const Dropout& dropout = {},
                                const OptionalTensor& before_dropout = {}, const OptionalTensor& state = {}) {
    at::Tensor y = Launch::empty_as(x);
    OptionalTensor statistic;
    if (sink_probability != nullptr) statistic = *sink_probability = empty_statistic(x);
    if (x.numel() == 0) {
      if (statistic.has_value()) fill_with_all(*statistic, *sink);
      return y;
    }
    const at::Tensor readable = with_unit_column_stride(x);
    Launch::forward(forward_problem(readable, mask, options, key_lengths, sink, y, statistic, dropout, before_dropout,
                                    state),
                    x);
    return y;
  }

  static void run_forward_in_place(at::Tensor& x, const OptionalTensor& mask, const Options& options,
                                   const OptionalTensor& key_lengths, const OptionalTensor& sink,
                                   at::Tensor* sink_probability, const Dropout& dropout = {}) {
    OptionalTensor statistic;
    if (sink_probability != nullptr) statistic = *sink_probability = empty_statistic(x);
    if (x.numel() == 0) {
      if (statistic.has_value()) fill_with_all(*statistic, *sink);
      return;
    }
    const at::Tensor rows = with_unit_column_stride(x);
    Launch::forward(forward_problem(rows, mask, options, key_lengths, sink, rows, statistic, dropout), x);
    if (!rows.is_same(x)) x.copy_(rows);
  }

  static void run_backward(const at::Tensor& grad, const at::Tensor& y, const Options& options,
                           const OptionalTensor& key_lengths, const OptionalTensor& dx, const OptionalTensor& dots,
                           const Dropout& dropout = {}) {
    if (y.numel() == 0) {
      if (dots.has_value()) dots->zero_();
      return;
    }
    const at::Tensor readable_grad = with_readable_columns(grad);
    const at::Tensor readable_y = with_unit_column_stride(y);
    Launch::backward(backward_problem(readable_grad, readable_y, options, key_lengths, dx, dots, dropout), y);
  }

  static at::Tensor run_mask_backward(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& given_dots,
                                      at::IntArrayRef size, at::ScalarType dtype, const Options& options,
                                      const OptionalTensor& key_lengths, const Dropout& dropout) {
    check_mask_backward(y, given_dots, size, dtype);
    at::Tensor gradient = at::empty(size, y.options().dtype(dtype));
    if (y.numel() == 0) return gradient.zero_();
    const at::Tensor dots = given_dots.contiguous();
    const at::Tensor readable_grad = with_readable_columns(grad);
    const at::Tensor readable_y = with_unit_column_stride(y);
    launch_mask_gradient<Launch>(
        mask_gradient_problem(readable_grad, readable_y, dots, options, key_lengths, gradient, dropout), gradient, y);
    return gradient;
  }

  static at::Tensor run_dropout_keep(const at::Tensor& x, const Dropout& dropout) {
    at::Tensor keep = at::empty(x.sizes(), x.options().dtype(at::kBool));
    if (x.numel() == 0) return keep;
    const int64_t columns = x.size(-1);
    Launch::dropout_keep(dropout, x.numel() / columns, columns, static_cast<uint8_t*>(keep.mutable_data_ptr()), x);
    return keep;
  }
};

}  // namespace sms
