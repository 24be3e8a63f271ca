// The operators as C++ functions that go through the dispatcher, for kernels that call them again.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <tuple>
#include <utility>

namespace sms {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalSymInt = std::optional<c10::SymInt>;

// How a mask lies against the scores, for its gradient.
struct MaskLayout {
  int64_t rank = 0;
  int64_t kept = 0;   // bit d: the mask has an element for each index of dimension d of the scores
  int64_t dtype = 0;  // an at::ScalarType
};

// What forward and backward share of their arguments, but for tensors.
struct SymOptions {
  double scale;
  bool is_causal;
  c10::SymInt diagonal;
  OptionalSymInt window;
  MaskLayout mask = {};  // where the mask has a gradient
  double dropout_p = 0;
};

using ForwardSignature = at::Tensor(const at::Tensor&, const OptionalTensor&, double, bool, c10::SymInt, OptionalSymInt,
                                    const OptionalTensor&, const OptionalTensor&);
using InPlaceSignature = void(at::Tensor&, const OptionalTensor&, double, bool, c10::SymInt, OptionalSymInt,
                              const OptionalTensor&, const OptionalTensor&);
using BackwardSignature = at::Tensor(const at::Tensor&, const at::Tensor&, double, bool, c10::SymInt, OptionalSymInt,
                                     const OptionalTensor&);

// With the probability of each row's sink; with each row's dot product: see library.cpp.
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using SinkSignature = TwoTensors(const at::Tensor&, const OptionalTensor&, double, bool, c10::SymInt, OptionalSymInt,
                                 const OptionalTensor&, const at::Tensor&);
using InPlaceSinkSignature = at::Tensor(at::Tensor&, const OptionalTensor&, double, bool, c10::SymInt, OptionalSymInt,
                                        const OptionalTensor&, const at::Tensor&);
using DotsSignature = TwoTensors(const at::Tensor&, const at::Tensor&, double, bool, bool, c10::SymInt, OptionalSymInt,
                                 const OptionalTensor&);
using MaskBackwardSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef,
                                         at::ScalarType, bool, c10::SymInt, OptionalSymInt, const OptionalTensor&);

using DropoutSignature = at::Tensor(const at::Tensor&, const OptionalTensor&, double, bool, c10::SymInt, OptionalSymInt,
                                    const OptionalTensor&, const OptionalTensor&, double);
using InPlaceDropoutSignature = void(at::Tensor&, const OptionalTensor&, double, bool, c10::SymInt, OptionalSymInt,
                                     const OptionalTensor&, const OptionalTensor&, double);
using FourTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using DropoutWithYSignature = FourTensors(const at::Tensor&, const OptionalTensor&, double, bool, c10::SymInt,
                                          OptionalSymInt, const OptionalTensor&, const OptionalTensor&, double, bool);
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using DropoutOfKeepSignature = ThreeTensors(const at::Tensor&, const OptionalTensor&, double, bool, c10::SymInt,
                                            OptionalSymInt, const OptionalTensor&, const OptionalTensor&,
                                            const at::Tensor&, double, bool);
using BackwardDropoutSignature = TwoTensors(const at::Tensor&, const at::Tensor&, const at::Tensor&, double, double,
                                            bool, bool, bool, c10::SymInt, OptionalSymInt, const OptionalTensor&);
using MaskBackwardDropoutSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                const at::Tensor&, double, c10::SymIntArrayRef, at::ScalarType, bool,
                                                c10::SymInt, OptionalSymInt, const OptionalTensor&);
using KeepSignature = at::Tensor(const at::Tensor&, double);
using KeepOfStateSignature = at::Tensor(const at::Tensor&, const at::Tensor&, double);

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Signature>();
}

inline at::Tensor call_forward(const at::Tensor& x, const OptionalTensor& mask, const SymOptions& options,
                               const OptionalTensor& key_lengths, const OptionalTensor& sink) {
  static const auto op = find_operator<ForwardSignature>("scaled_mask_softmax::scaled_mask_softmax");
  return op.call(x, mask, options.scale, options.is_causal, options.diagonal, options.window, key_lengths, sink);
}

inline void call_forward_in_place(at::Tensor& x, const OptionalTensor& mask, const SymOptions& options,
                                  const OptionalTensor& key_lengths, const OptionalTensor& sink) {
  static const auto op = find_operator<InPlaceSignature>("scaled_mask_softmax::scaled_mask_softmax_");
  op.call(x, mask, options.scale, options.is_causal, options.diagonal, options.window, key_lengths, sink);
}

inline at::Tensor call_backward(const at::Tensor& grad, const at::Tensor& y, const SymOptions& options,
                                const OptionalTensor& key_lengths) {
  static const auto op = find_operator<BackwardSignature>("scaled_mask_softmax::scaled_mask_softmax_backward");
  return op.call(grad, y, options.scale, options.is_causal, options.diagonal, options.window, key_lengths);
}

inline TwoTensors call_forward_with_sink(const at::Tensor& x, const OptionalTensor& mask, const SymOptions& options,
                                         const OptionalTensor& key_lengths, const at::Tensor& sink) {
  static const auto op =
      find_operator<SinkSignature>("scaled_mask_softmax::scaled_mask_softmax", "with_sink_probability");
  return op.call(x, mask, options.scale, options.is_causal, options.diagonal, options.window, key_lengths, sink);
}

inline at::Tensor call_forward_in_place_with_sink(at::Tensor& x, const OptionalTensor& mask, const SymOptions& options,
                                                  const OptionalTensor& key_lengths, const at::Tensor& sink) {
  static const auto op =
      find_operator<InPlaceSinkSignature>("scaled_mask_softmax::scaled_mask_softmax_", "with_sink_probability");
  return op.call(x, mask, options.scale, options.is_causal, options.diagonal, options.window, key_lengths, sink);
}

inline TwoTensors call_backward_with_dots(const at::Tensor& grad, const at::Tensor& y, const SymOptions& options,
                                          const OptionalTensor& key_lengths, bool with_dx) {
  static const auto op = find_operator<DotsSignature>("scaled_mask_softmax::scaled_mask_softmax_backward", "with_dots");
  return op.call(grad, y, options.scale, options.is_causal, with_dx, options.diagonal, options.window, key_lengths);
}

inline at::Tensor call_mask_backward(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& dots,
                                     c10::SymIntArrayRef size, at::ScalarType dtype, const SymOptions& options,
                                     const OptionalTensor& key_lengths) {
  static const auto op =
      find_operator<MaskBackwardSignature>("scaled_mask_softmax::scaled_mask_softmax_mask_backward");
  return op.call(grad, y, dots, size, dtype, options.is_causal, options.diagonal, options.window, key_lengths);
}

inline at::Tensor call_forward_dropout(const at::Tensor& x, const OptionalTensor& mask, const SymOptions& options,
                                       const OptionalTensor& key_lengths, const OptionalTensor& sink) {
  static const auto op = find_operator<DropoutSignature>("scaled_mask_softmax::scaled_mask_softmax", "dropout");
  return op.call(x, mask, options.scale, options.is_causal, options.diagonal, options.window, key_lengths, sink,
                 options.dropout_p);
}

inline void call_forward_in_place_dropout(at::Tensor& x, const OptionalTensor& mask, const SymOptions& options,
                                          const OptionalTensor& key_lengths, const OptionalTensor& sink) {
  static const auto op = find_operator<InPlaceDropoutSignature>("scaled_mask_softmax::scaled_mask_softmax_", "dropout");
  op.call(x, mask, options.scale, options.is_causal, options.diagonal, options.window, key_lengths, sink,
          options.dropout_p);
}

inline FourTensors call_forward_dropout_with_y(const at::Tensor& x, const OptionalTensor& mask,
                                               const SymOptions& options, const OptionalTensor& key_lengths,
                                               const OptionalTensor& sink, bool with_sink_probability) {
  static const auto op =
      find_operator<DropoutWithYSignature>("scaled_mask_softmax::scaled_mask_softmax", "dropout_with_y");
  return op.call(x, mask, options.scale, options.is_causal, options.diagonal, options.window, key_lengths, sink,
                 options.dropout_p, with_sink_probability);
}

inline ThreeTensors call_forward_dropout_of_keep(const at::Tensor& x, const OptionalTensor& mask,
                                                 const SymOptions& options, const OptionalTensor& key_lengths,
                                                 const OptionalTensor& sink, const at::Tensor& keep,
                                                 bool with_sink_probability) {
  static const auto op =
      find_operator<DropoutOfKeepSignature>("scaled_mask_softmax::scaled_mask_softmax", "dropout_of_keep");
  return op.call(x, mask, options.scale, options.is_causal, options.diagonal, options.window, key_lengths, sink, keep,
                 options.dropout_p, with_sink_probability);
}

inline TwoTensors call_backward_dropout(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& state,
                                        const SymOptions& options, const OptionalTensor& key_lengths, bool with_dx,
                                        bool with_dots) {
  static const auto op =
      find_operator<BackwardDropoutSignature>("scaled_mask_softmax::scaled_mask_softmax_backward", "dropout");
  return op.call(grad, y, state, options.dropout_p, options.scale, options.is_causal, with_dx, with_dots,
                 options.diagonal, options.window, key_lengths);
}

inline at::Tensor call_mask_backward_dropout(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& dots,
                                             const at::Tensor& state, c10::SymIntArrayRef size, at::ScalarType dtype,
                                             const SymOptions& options, const OptionalTensor& key_lengths) {
  static const auto op =
      find_operator<MaskBackwardDropoutSignature>("scaled_mask_softmax::scaled_mask_softmax_mask_backward", "dropout");
  return op.call(grad, y, dots, state, options.dropout_p, size, dtype, options.is_causal, options.diagonal,
                 options.window, key_lengths);
}

inline at::Tensor call_dropout_keep(const at::Tensor& x, double dropout_p) {
  static const auto op = find_operator<KeepSignature>("scaled_mask_softmax::dropout_keep");
  return op.call(x, dropout_p);
}

inline at::Tensor call_dropout_keep(const at::Tensor& x, const at::Tensor& state, double dropout_p) {
  static const auto op = find_operator<KeepOfStateSignature>("scaled_mask_softmax::dropout_keep", "of_state");
  return op.call(x, state, dropout_p);
}

}  // namespace sms
