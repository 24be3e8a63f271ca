// Autograd and version counting, for every device. Saved for backward: y only.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <optional>

namespace sms {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalSymInt = std::optional<c10::SymInt>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using ForwardSignature = Tensor(const Tensor&, const OptionalTensor&, double, bool, c10::SymInt, OptionalSymInt,
                                const OptionalTensor&, const OptionalTensor&);
using InPlaceSignature = void(Tensor&, const OptionalTensor&, double, bool, c10::SymInt, OptionalSymInt,
                              const OptionalTensor&, const OptionalTensor&);
using BackwardSignature = Tensor(const Tensor&, const Tensor&, double, bool, c10::SymInt, OptionalSymInt,
                                 const OptionalTensor&);

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

Tensor call_forward(const Tensor& x, const OptionalTensor& mask, double scale, bool is_causal, c10::SymInt diagonal,
                    OptionalSymInt window, const OptionalTensor& key_lengths, const OptionalTensor& sink) {
  static const auto op = find_operator<ForwardSignature>("scaled_mask_softmax::scaled_mask_softmax");
  return op.call(x, mask, scale, is_causal, std::move(diagonal), std::move(window), key_lengths, sink);
}

void call_forward_in_place(Tensor& x, const OptionalTensor& mask, double scale, bool is_causal, c10::SymInt diagonal,
                           OptionalSymInt window, const OptionalTensor& key_lengths, const OptionalTensor& sink) {
  static const auto op = find_operator<InPlaceSignature>("scaled_mask_softmax::scaled_mask_softmax_");
  op.call(x, mask, scale, is_causal, std::move(diagonal), std::move(window), key_lengths, sink);
}

Tensor call_backward(const Tensor& grad, const Tensor& y, double scale, bool is_causal, c10::SymInt diagonal,
                     OptionalSymInt window, const OptionalTensor& key_lengths) {
  static const auto op = find_operator<BackwardSignature>("scaled_mask_softmax::scaled_mask_softmax_backward");
  return op.call(grad, y, scale, is_causal, std::move(diagonal), std::move(window), key_lengths);
}

bool has_tangent(const Tensor& tensor) { return torch::autograd::isFwGradDefined(tensor); }
bool has_tangent(const OptionalTensor& tensor) { return tensor.has_value() && has_tangent(*tensor); }

// What has no derivative yet is refused: a silent zero would be worse.
void refuse_missing_derivatives(const Tensor& x, const OptionalTensor& mask) {
  TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent(x) && !has_tangent(mask),
                              "scaled_mask_softmax: forward-mode differentiation is not supported yet; expected x and "
                              "mask without tangents. Use reverse mode.");
  TORCH_CHECK_NOT_IMPLEMENTED(!(at::GradMode::is_enabled() && mask.has_value() && mask->requires_grad()),
                              "scaled_mask_softmax: mask requires a gradient, which is not supported yet; expected a "
                              "mask with requires_grad=False. Use mask.detach(), or add the mask to x beforehand.");
}

bool needs_grad(const Tensor& tensor) { return at::GradMode::is_enabled() && tensor.requires_grad(); }

void save_options(AutogradContext* ctx, double scale, bool is_causal, const c10::SymInt& diagonal,
                  const OptionalSymInt& window) {
  ctx->saved_data["scale"] = scale;
  // Without is_causal or window the diagonal has no effect.
  if (is_causal) ctx->saved_data["is_causal"] = true;
  if (is_causal || window.has_value()) ctx->saved_data["diagonal"] = diagonal;
  if (window.has_value()) ctx->saved_data["window"] = *window;
}

[[noreturn]] void refuse_second_derivative() {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "scaled_mask_softmax: a second derivative was asked for, which is not supported yet; "
                              "expected one differentiation. Use plain torch operators where two are needed.");
}

variable_list differentiate(AutogradContext* ctx, const variable_list& grads) {
  constexpr size_t kInputs = 8;
  variable_list result(kInputs);
  if (!grads[0].defined()) return result;
  const auto find = [&](const char* key) {
    const auto entry = ctx->saved_data.find(key);
    return entry == ctx->saved_data.end() ? nullptr : &entry->second;
  };
  const c10::IValue* diagonal = find("diagonal");
  const c10::IValue* window = find("window");
  result[0] = call_backward(grads[0], ctx->get_saved_variables()[0], find("scale")->toDouble(),
                            find("is_causal") != nullptr, diagonal == nullptr ? c10::SymInt(0) : diagonal->toSymInt(),
                            window == nullptr ? OptionalSymInt() : OptionalSymInt(window->toSymInt()), std::nullopt);
  return result;
}

struct Forward : torch::autograd::Function<Forward> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const OptionalTensor& mask, double scale,
                        bool is_causal, c10::SymInt diagonal, OptionalSymInt window, const OptionalTensor& key_lengths,
                        const OptionalTensor& sink) {
    const at::AutoDispatchBelowADInplaceOrView below;
    save_options(ctx, scale, is_causal, diagonal, window);
    Tensor y = call_forward(x, mask, scale, is_causal, std::move(diagonal), std::move(window), key_lengths, sink);
    ctx->save_for_backward({y});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) { return differentiate(ctx, grads); }
};

struct ForwardInPlace : torch::autograd::Function<ForwardInPlace> {
  static Tensor forward(AutogradContext* ctx, Tensor x, const OptionalTensor& mask, double scale, bool is_causal,
                        c10::SymInt diagonal, OptionalSymInt window, const OptionalTensor& key_lengths,
                        const OptionalTensor& sink) {
    // A view's history leads back to this node through its base, so saving the view would keep both alive forever
    // unless backward ran. Detached, it still shares the version counter.
    const Tensor saved = x.is_view() ? x.detach() : x;
    const at::AutoDispatchBelowADInplaceOrView below;
    save_options(ctx, scale, is_causal, diagonal, window);
    call_forward_in_place(x, mask, scale, is_causal, std::move(diagonal), std::move(window), key_lengths, sink);
    ctx->mark_dirty({x});
    ctx->save_for_backward({saved});
    return x;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    // The saved y of a view has lost its history (see forward): a second derivative would silently lack a term.
    if (at::GradMode::is_enabled() && !ctx->get_saved_variables()[0].requires_grad()) refuse_second_derivative();
    return differentiate(ctx, grads);
  }
};

struct Backward : torch::autograd::Function<Backward> {
  static Tensor forward(AutogradContext*, const Tensor& grad, const Tensor& y, double scale, bool is_causal,
                        c10::SymInt diagonal, OptionalSymInt window, const OptionalTensor& key_lengths) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_backward(grad, y, scale, is_causal, std::move(diagonal), std::move(window), key_lengths);
  }
  static variable_list backward(AutogradContext*, const variable_list&) { refuse_second_derivative(); }
};

Tensor forward(const Tensor& x, const OptionalTensor& mask, double scale, bool is_causal, c10::SymInt diagonal,
               OptionalSymInt window, const OptionalTensor& key_lengths, const OptionalTensor& sink) {
  refuse_missing_derivatives(x, mask);
  if (needs_grad(x)) return Forward::apply(x, mask, scale, is_causal, diagonal, window, key_lengths, sink);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_forward(x, mask, scale, is_causal, std::move(diagonal), std::move(window), key_lengths, sink);
}

void forward_in_place(Tensor& x, const OptionalTensor& mask, double scale, bool is_causal, c10::SymInt diagonal,
                      OptionalSymInt window, const OptionalTensor& key_lengths, const OptionalTensor& sink) {
  refuse_missing_derivatives(x, mask);
  if (needs_grad(x)) {
    torch::autograd::check_inplace(x, /*requires_grad=*/true);  // before x is overwritten
    ForwardInPlace::apply(x, mask, scale, is_causal, diagonal, window, key_lengths, sink);
    return;
  }
  const at::AutoDispatchBelowAutograd below;
  call_forward_in_place(x, mask, scale, is_causal, std::move(diagonal), std::move(window), key_lengths, sink);
}

// torch counts versions of its own in-place operators in generated code at this dispatch key; without it, backward
// could not notice that a saved tensor was overwritten.
void count_version(Tensor& x, const OptionalTensor& mask, double scale, bool is_causal, c10::SymInt diagonal,
                   OptionalSymInt window, const OptionalTensor& key_lengths, const OptionalTensor& sink) {
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_forward_in_place(x, mask, scale, is_causal, std::move(diagonal), std::move(window), key_lengths, sink);
  }
  torch::autograd::impl::bump_version(x);
}

Tensor backward(const Tensor& grad, const Tensor& y, double scale, bool is_causal, c10::SymInt diagonal,
                OptionalSymInt window, const OptionalTensor& key_lengths) {
  TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent(grad) && !has_tangent(y),
                              "scaled_mask_softmax: forward-mode differentiation of a backward pass is not supported "
                              "yet; expected grad and y without tangents. Use reverse mode.");
  if (needs_grad(grad) || needs_grad(y)) {
    return Backward::apply(grad, y, scale, is_causal, diagonal, window, key_lengths);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_backward(grad, y, scale, is_causal, std::move(diagonal), std::move(window), key_lengths);
}

}  // namespace
}  // namespace sms

TORCH_LIBRARY_IMPL(scaled_mask_softmax, Autograd, library) {
  library.impl("scaled_mask_softmax", &sms::forward);
  library.impl("scaled_mask_softmax_", &sms::forward_in_place);
  library.impl("scaled_mask_softmax_backward", &sms::backward);
}

TORCH_LIBRARY_IMPL(scaled_mask_softmax, ADInplaceOrView, library) {
  library.impl("scaled_mask_softmax_", &sms::count_version);
}
