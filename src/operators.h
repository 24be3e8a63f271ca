// The operators as C++ functions that go through the dispatcher, for kernels that call them again.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <utility>

namespace sms {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalSymInt = std::optional<c10::SymInt>;

// What forward and backward share of their arguments, but for tensors.
struct SymOptions {
  double scale;
  bool is_causal;
  c10::SymInt diagonal;
  OptionalSymInt window;
};

using ForwardSignature = at::Tensor(const at::Tensor&, const OptionalTensor&, double, bool, c10::SymInt, OptionalSymInt,
                                    const OptionalTensor&, const OptionalTensor&);
using InPlaceSignature = void(at::Tensor&, const OptionalTensor&, double, bool, c10::SymInt, OptionalSymInt,
                              const OptionalTensor&, const OptionalTensor&);
using BackwardSignature = at::Tensor(const at::Tensor&, const at::Tensor&, double, bool, c10::SymInt, OptionalSymInt,
                                     const OptionalTensor&);

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
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

}  // namespace sms
