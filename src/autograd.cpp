// Derivatives of every order in both modes, and version counting, for every device. Saved for backward: y (before
// dropout), key_lengths where they are given, one number a row where sink has a gradient, and the two that dropout was
// drawn from.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <tuple>
#include <utility>

#include "canonicalize.h"
#include "derivative.h"
#include "operators.h"
#include "problem.h"

namespace sms {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

bool needs_grad(const Tensor& tensor) { return at::GradMode::is_enabled() && tensor.requires_grad(); }
bool needs_grad(const OptionalTensor& tensor) { return tensor.has_value() && needs_grad(*tensor); }

bool has_tangent(const Tensor& tensor) { return torch::autograd::isFwGradDefined(tensor); }
bool has_tangent(const OptionalTensor& tensor) { return tensor.has_value() && has_tangent(*tensor); }

OptionalTensor optional(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

// Undefined where there is none.
Tensor tangent_of(const Tensor& tensor) { return tensor._fw_grad(/*level=*/0); }
Tensor without_tangent(const Tensor& tensor) { return has_tangent(tensor) ? tensor._fw_primal(/*level=*/0) : tensor; }

// The backward operator dx = scale * y * (grad - sum(grad * y)) as a function of y, where a cell with y == 0 takes part
// as if its grad were 0. Its derivatives need no exclusion by position: outside the band y is 0 or the row is NaN.
struct DependenceOnY {
  Tensor live;
  Tensor y;
  Tensor grad;
  double scale;

  DependenceOnY(const Tensor& grad_, const Tensor& y_, double scale_)
      : live(y_.ne(0)), y(accumulated(y_)), grad(only_live(grad_)), scale(scale_) {}

  // Jacobian times a tangent of y.
  Tensor forward(const Tensor& tangent) const {
    const Tensor t = only_live(tangent);
    const Tensor change = t * (grad - sum(grad * y)) - y * sum(grad * t);
    return (change * scale).to(tangent.scalar_type());
  }

  // Its transpose times a gradient of dx.
  Tensor backward(const Tensor& incoming) const {
    const Tensor v = only_live(incoming);
    const Tensor change = v * (grad - sum(grad * y)) - grad * sum(v * y);
    return (change * scale).to(incoming.scalar_type());
  }

  static Tensor accumulated(const Tensor& tensor) {
    return tensor.to(tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  }
  static Tensor sum(const Tensor& products) { return products.sum(-1, /*keepdim=*/true); }
  // Selected, not multiplied, so that a NaN that arrives where the derivative is zero stays out.
  Tensor only_live(const Tensor& tensor) const { return at::where(live, accumulated(tensor), 0.0); }
};

// Of a row's sink: its probability, as a function of y with the value that forward found.
struct DependenceOnSink {
  Tensor live;
  Tensor y;
  Tensor probability;  // 1 less the sum of y

  DependenceOnSink(const Tensor& y_, const Tensor& found) : live(y_.ne(0)), y(DependenceOnY::accumulated(y_)) {
    const Tensor sum = y.sum(-1);
    probability = found + (sum.detach() - sum);
  }

  // The tangent of y, given that of sink.
  Tensor forward(const Tensor& tangent, at::ScalarType dtype) const {
    const Tensor share = probability * tangent.unsqueeze(-1);
    return at::where(live, -y * share.unsqueeze(-1), 0.0).to(dtype);
  }

  // Each row's sum(grad * y).
  Tensor dots(const Tensor& grad) const {
    return (at::where(live, DependenceOnY::accumulated(grad), 0.0) * y).sum(-1);
  }
};

// The gradient of a sink [H], from values of rows [..., H, Sq] and a factor of their dots.
Tensor sink_gradient(const Tensor& probability, const Tensor& dots, double factor = 1.0) {
  c10::SmallVector<int64_t, 8> others;
  for (int64_t dim = 0; dim < dots.dim(); ++dim) {
    if (dim != dots.dim() - 2) others.push_back(dim);
  }
  return at::mul(probability, dots).sum(others).mul(-factor);
}

// Gradients of a float mask.
struct DependenceOnMask {
  const Tensor& y;
  const MaskLayout& mask;

  static MaskLayout layout(const Tensor& x, const Tensor& given) {
    const bool per_sample = x.dim() == 4 && given.dim() == 3;
    const Tensor aligned = per_sample ? given.unsqueeze(1) : given;
    MaskLayout layout{given.dim(), 0, static_cast<int64_t>(given.scalar_type())};
    for (int64_t d = 0; d < aligned.dim(); ++d) {
      if (aligned.sym_size(d) != 1) layout.kept |= int64_t{1} << (x.dim() - aligned.dim() + d);
    }
    return layout;
  }

  bool keeps(int64_t dim) const { return (mask.kept >> dim & 1) != 0; }
  bool keeps_columns() const { return keeps(y.dim() - 1); }
  at::ScalarType dtype() const { return static_cast<at::ScalarType>(mask.dtype); }

  // The mask is of y's own shape and dtype.
  bool is_like_y() const {
    for (int64_t d = 0; d < y.dim(); ++d) {
      if (!keeps(d) && y.sym_size(d) != 1) return false;
    }
    return dtype() == y.scalar_type();
  }

  c10::SymDimVector size() const {
    c10::SymDimVector size;
    for (int64_t d = 0; d < y.dim(); ++d) size.push_back(keeps(d) ? y.sym_size(d) : c10::SymInt(1));
    return size;
  }

  // Values of cells, or of rows with a last dimension of 1, summed over the dimensions that the mask lacks.
  Tensor sum(const Tensor& values) const {
    c10::SmallVector<int64_t, 8> dims;
    for (int64_t d = 0; d < y.dim(); ++d) {
      if (!keeps(d) && !(d == y.dim() - 1 && values.sym_size(d) == 1)) dims.push_back(d);
    }
    return dims.empty() ? values : values.sum(dims, /*keepdim=*/true);
  }

  // From a tensor of size() to the mask's own shape and dtype.
  Tensor finish(const Tensor& gradient) const {
    const Tensor converted = gradient.to(dtype());
    if (mask.rank == y.dim()) return converted;
    if (y.dim() == 4 && mask.rank == 3) return converted.squeeze(1);
    return converted.reshape_symint(c10::SymIntArrayRef(size()).slice(y.dim() - mask.rank));
  }
};

// A tensor that the operators' kernels see as it is: nothing differentiates or batches what is computed from it.
bool is_plain(const Tensor& tensor) {
  return !has_tangent(tensor) && !tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::FuncTorchBatched);
}

// The backward kernels of one call. `grad` is that of the result of dropout, if there is a state.
struct BackwardKernels {
  const Tensor& grad;
  const Tensor& y;
  const OptionalTensor& key_lengths;
  const Tensor& state;  // of dropout; undefined without

  Tensor dx(const SymOptions& options) const {
    if (!state.defined()) return call_backward(grad, y, options, key_lengths);
    return std::get<0>(call_backward_dropout(grad, y, state, options, key_lengths, /*with_dx=*/true,
                                             /*with_dots=*/false));
  }

  // dots: each row's, but for the factor of dropout.
  TwoTensors dx_and_dots(const SymOptions& options, bool with_dx) const {
    if (!state.defined()) return call_backward_with_dots(grad, y, options, key_lengths, with_dx);
    return call_backward_dropout(grad, y, state, options, key_lengths, with_dx, /*with_dots=*/true);
  }

  Tensor mask_gradient(const SymOptions& options, const Tensor& dots, c10::SymIntArrayRef size,
                       at::ScalarType dtype) const {
    if (!state.defined()) return call_mask_backward(grad, y, dots, size, dtype, options, key_lengths);
    return call_mask_backward_dropout(grad, y, dots, state, size, dtype, options, key_lengths);
  }

  double factor(const SymOptions& options) const { return state.defined() ? dropout_factor(options.dropout_p) : 1.0; }
};

struct Forward {
  static constexpr const char* kName = "ScaledMaskSoftmaxBackward";
  static constexpr size_t kSaved = 3;   // y, key_lengths, sink's probability
  static constexpr size_t kInputs = 3;  // x, mask, sink

  static variable_list differentiate(const variable_list& grads, const std::array<Tensor, kSaved>& saved,
                                     const SymOptions& options, int64_t needs) {
    return differentiate(grads[0], saved, Tensor(), options, needs);
  }

  // grad_factor multiplies grad, but not before the probabilities have: grad may be near the largest number of its type.
  static variable_list differentiate(const Tensor& grad, const std::array<Tensor, kSaved>& saved, const Tensor& state,
                                     const SymOptions& options, int64_t needs, double grad_factor = 1.0) {
    const auto& [y, key_lengths_, sink_probability] = saved;
    const OptionalTensor key_lengths = optional(key_lengths_);
    const BackwardKernels kernels{grad, y, key_lengths, state};
    const bool of_x = (needs & 1) != 0;
    const bool of_mask = (needs & 2) != 0;
    const bool of_sink = (needs & 4) != 0;
    const DependenceOnMask mask{y, options.mask};
    SymOptions scaled = options;
    if (grad_factor != 1.0) scaled.scale = scale_with_dropout(options.scale, grad_factor, y.scalar_type());
    SymOptions unscaled = options;
    unscaled.scale = grad_factor;
    variable_list result(kInputs);
    if ((!of_mask || mask.is_like_y()) && !of_sink) {
      if (of_x) result[0] = kernels.dx(scaled);
      if (of_mask) result[1] = mask.finish(of_x && options.scale == 1.0 ? result[0] : kernels.dx(unscaled));
    } else if (at::GradMode::is_enabled() || !is_plain(grad) || !is_plain(y) || grad_factor != 1.0) {
      // In differentiable operators, and without dropout: see ForwardDropout. What a mask sums is not rounded before.
      if (of_x) result[0] = call_backward(grad, y, scaled, key_lengths);
      if (of_mask) {
        unscaled.scale = 1.0;
        const Tensor scores =
            call_backward(DependenceOnY::accumulated(grad), DependenceOnY::accumulated(y), unscaled, key_lengths);
        const Tensor sums = mask.sum(scores);
        result[1] = mask.finish(grad_factor == 1.0 ? sums : sums * grad_factor);
      }
      if (of_sink) {
        const DependenceOnSink sink(y, sink_probability);
        result[2] = sink_gradient(sink.probability, sink.dots(grad), grad_factor);
      }
    } else {
      const auto [dx, dots] = kernels.dx_and_dots(options, of_x);
      const double factor = kernels.factor(options);
      if (of_x) result[0] = dx;
      if (of_mask && mask.keeps_columns()) {
        const c10::SymDimVector size = mask.size();
        result[1] = mask.finish(kernels.mask_gradient(options, dots, size, mask.dtype()));
      } else if (of_mask) {
        // What is added to a whole row moves probability between its columns and its sink only: without a sink there
        // is nothing to gain, but a NaN stays one. Of a row without a live column a NaN in the sink does not matter.
        const Tensor rows = sink_probability.defined()
                                ? at::where(dots.eq(0), 0.0, at::mul(sink_probability, dots).mul(factor))
                                : at::mul(dots, 0.0);
        result[1] = mask.finish(mask.sum(rows.unsqueeze(-1)));
      }
      if (of_sink) result[2] = sink_gradient(sink_probability, dots, factor);
    }
    return result;
  }
};

// With dropout. A node of two results: that of dropout, and y before it, which only derivatives see.
struct ForwardDropout {
  static constexpr const char* kName = "ScaledMaskSoftmaxDropoutBackward";
  static constexpr size_t kSaved = 4;   // y, key_lengths, sink's probability, and the state or the cells that it kept
  static constexpr size_t kInputs = 3;  // x, mask, sink

  static variable_list differentiate(const variable_list& grads, const std::array<Tensor, kSaved>& saved,
                                     const SymOptions& options, int64_t needs) {
    const auto& [y, key_lengths, sink_probability, drawn] = saved;
    const std::array<Tensor, 3> before = {y, key_lengths, sink_probability};
    const Tensor& grad = grads[0];
    const Tensor of_y = grads.size() > 1 ? grads[1] : Tensor();
    const bool is_state = drawn.scalar_type() != at::kBool;
    variable_list result(kInputs);
    if (grad.defined() && is_state && !at::GradMode::is_enabled() && is_plain(grad) && is_plain(y)) {
      result = Forward::differentiate(grad, before, drawn, options, needs);
    } else if (grad.defined()) {
      const Tensor keep = is_state ? call_dropout_keep(y.detach(), drawn, options.dropout_p) : drawn;
      result = Forward::differentiate(at::where(keep, grad, 0.0), before, Tensor(), options, needs,
                                      dropout_factor(options.dropout_p));
    }
    if (of_y.defined()) {
      const variable_list others = Forward::differentiate(of_y, before, Tensor(), options, needs);
      for (size_t i = 0; i < kInputs; ++i) {
        if (others[i].defined()) result[i] = result[i].defined() ? result[i] + others[i] : others[i];
      }
    }
    return result;
  }
};

struct Backward {
  static constexpr const char* kName = "ScaledMaskSoftmaxBackwardBackward";
  static constexpr size_t kSaved = 3;   // grad, y, key_lengths
  static constexpr size_t kInputs = 2;  // grad, y

  static variable_list differentiate(const variable_list& grads, const std::array<Tensor, kSaved>& saved,
                                     const SymOptions& options, int64_t needs) {
    const Tensor& incoming = grads[0];
    const auto& [grad, y, key_lengths] = saved;
    variable_list result(kInputs);
    // dx is a symmetric matrix times grad.
    if ((needs & 1) != 0) result[0] = call_backward(incoming, y, options, optional(key_lengths));
    if ((needs & 2) != 0) result[1] = DependenceOnY(grad, y, options.scale).backward(incoming);
    return result;
  }
};

// The tangent of y, given that of x, if it has one, and mask and sink with their own, if they have one.
Tensor tangent_of_result(const Tensor& y, const Tensor& x_tangent, const OptionalTensor& mask,
                         const SymOptions& options, const OptionalTensor& key_lengths, const OptionalTensor& sink,
                         const Tensor& sink_probability) {
  Tensor result;
  const auto add = [&](const Tensor& part) { result = result.defined() ? result + part : part; };
  if (x_tangent.defined()) add(call_backward(x_tangent, y, options, key_lengths));
  if (has_tangent(mask)) {
    Tensor tangent = tangent_of(*mask).to(y.scalar_type());
    if (y.dim() == 4 && tangent.dim() == 3) tangent = tangent.unsqueeze(1);
    SymOptions unscaled = options;
    unscaled.scale = 1.0;
    add(call_backward(tangent.expand_symint(y.sym_sizes()), y, unscaled, key_lengths));
  }
  if (has_tangent(sink)) add(DependenceOnSink(y, sink_probability).forward(tangent_of(*sink), y.scalar_type()));
  return result;
}

// Whether a derivative needs to know what each row's sink took.
bool needs_sink_probability(const Tensor& x, const OptionalTensor& mask, const OptionalTensor& sink) {
  if (!sink.has_value()) return false;
  if (needs_grad(sink) || has_tangent(sink)) return true;
  return needs_grad(mask) && !DependenceOnMask{x, DependenceOnMask::layout(x, *mask)}.keeps_columns();
}

template <typename Node>
void save(Node& node, SavedVariable y, const OptionalTensor& key_lengths, const Tensor& sink_probability) {
  node.saved[0] = std::move(y);
  if (key_lengths.has_value()) node.saved[1] = SavedVariable(*key_lengths, /*is_output=*/false);
  if (sink_probability.defined()) node.saved[2] = SavedVariable(sink_probability, /*is_output=*/false);
}

Tensor forward(const Tensor& x, const OptionalTensor& mask, double scale, bool is_causal, c10::SymInt diagonal,
               OptionalSymInt window, const OptionalTensor& key_lengths, const OptionalTensor& sink) {
  SymOptions options{scale, is_causal, std::move(diagonal), std::move(window)};
  Tensor y;
  Tensor sink_probability;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (needs_sink_probability(x, mask, sink)) {
      std::tie(y, sink_probability) = call_forward_with_sink(x, mask, options, key_lengths, *sink);
    } else {
      y = call_forward(x, mask, options, key_lengths, sink);
    }
  }
  const bool differentiable = needs_grad(x) || needs_grad(mask) || needs_grad(sink);
  DerivativePointer<Forward> node;
  if (differentiable) {
    if (needs_grad(mask)) options.mask = DependenceOnMask::layout(x, *mask);
    node = make_derivative<Forward>(options, x, mask, sink);
    torch::autograd::set_history(y, node);
  }
  if (has_tangent(x) || has_tangent(mask) || has_tangent(sink)) {
    y._set_fw_grad(tangent_of_result(y, tangent_of(x), mask, options, key_lengths, sink, sink_probability), 0,
                   /*is_inplace_op=*/false);
  }
  if (differentiable) {
    save(*node, SavedVariable(y, /*is_output=*/true), key_lengths, sink_probability);  // y with its tangent
    announce(node);
  }
  return y;
}

void forward_in_place(Tensor& x, const OptionalTensor& mask, double scale, bool is_causal, c10::SymInt diagonal,
                      OptionalSymInt window, const OptionalTensor& key_lengths, const OptionalTensor& sink) {
  SymOptions options{scale, is_causal, std::move(diagonal), std::move(window)};
  const bool differentiable = needs_grad(x) || needs_grad(mask) || needs_grad(sink);
  torch::autograd::check_inplace(x, differentiable);
  DerivativePointer<Forward> node;
  if (differentiable) {
    if (needs_grad(mask)) options.mask = DependenceOnMask::layout(x, *mask);
    node = make_derivative<Forward>(options, x, mask, sink);
  }
  const Tensor x_tangent = tangent_of(x);
  Tensor sink_probability;
  {
    const at::AutoDispatchBelowAutograd below;
    if (needs_sink_probability(x, mask, sink)) {
      sink_probability = call_forward_in_place_with_sink(x, mask, options, key_lengths, *sink);
    } else {
      call_forward_in_place(x, mask, options, key_lengths, sink);
    }
  }
  if (differentiable) torch::autograd::rebase_history(x, node);
  if (x_tangent.defined() || has_tangent(mask) || has_tangent(sink)) {
    const Tensor tangent =
        tangent_of_result(without_tangent(x), x_tangent, mask, options, key_lengths, sink, sink_probability);
    // Written into the tangent that was there, as its views must see it.
    x._set_fw_grad(x_tangent.defined() ? x_tangent.copy_(tangent) : tangent, 0, /*is_inplace_op=*/true);
  }
  if (differentiable) {
    save(*node, SavedVariable(x, /*is_output=*/true, /*is_inplace_on_view=*/x.is_view()), key_lengths,
         sink_probability);
    announce(node);
  }
}

// `drawn`: the state, or the cells that were kept.
void record_dropout(SymOptions& options, const Tensor& x, const OptionalTensor& mask, const OptionalTensor& sink,
                    Tensor& result, Tensor& y, const OptionalTensor& key_lengths, const Tensor& sink_probability,
                    const Tensor& drawn) {
  if (needs_grad(mask)) options.mask = DependenceOnMask::layout(x, *mask);
  const auto node = make_derivative<ForwardDropout>(options, x, mask, sink);
  torch::autograd::set_history(result, node);
  torch::autograd::set_history(y, node);
  save(*node, SavedVariable(y, /*is_output=*/true), key_lengths, sink_probability);
  node->saved[3] = SavedVariable(drawn, /*is_output=*/false);
  announce(node);
}

ThreeTensors forward_dropout_of_keep(const Tensor& x, const OptionalTensor& mask, double scale, bool is_causal,
                                     c10::SymInt diagonal, OptionalSymInt window, const OptionalTensor& key_lengths,
                                     const OptionalTensor& sink, const Tensor& keep, double dropout_p,
                                     bool with_sink_probability) {
  SymOptions options{scale, is_causal, std::move(diagonal), std::move(window)};
  options.dropout_p = dropout_p;
  const bool needs_probability = needs_sink_probability(x, mask, sink);
  Tensor result, y, sink_probability;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::tie(result, y, sink_probability) = call_forward_dropout_of_keep(
        x, mask, options, key_lengths, sink, keep, with_sink_probability || needs_probability);
  }
  const Tensor probability = needs_probability ? sink_probability : Tensor();
  if (has_tangent(x) || has_tangent(mask) || has_tangent(sink)) {
    const Tensor tangent = tangent_of_result(y, tangent_of(x), mask, options, key_lengths, sink, probability);
    y._set_fw_grad(tangent, 0, /*is_inplace_op=*/false);
    result._set_fw_grad(at::where(keep, tangent * dropout_factor(dropout_p), 0.0), 0, /*is_inplace_op=*/false);
  }
  if (needs_grad(x) || needs_grad(mask) || needs_grad(sink)) {
    record_dropout(options, x, mask, sink, result, y, key_lengths, probability, keep);
  }
  return {std::move(result), std::move(y), std::move(sink_probability)};
}

bool is_transformed(const Tensor& tensor) {
  return has_tangent(tensor) || tensor.unsafeGetTensorImpl()->key_set().has_any(c10::DispatchKeySet(
                                    {c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched}));
}
bool is_transformed(const OptionalTensor& tensor) { return tensor.has_value() && is_transformed(*tensor); }

Tensor forward_dropout(const Tensor& x, const OptionalTensor& mask, double scale, bool is_causal, c10::SymInt diagonal,
                       OptionalSymInt window, const OptionalTensor& key_lengths, const OptionalTensor& sink,
                       double dropout_p) {
  SymOptions options{scale, is_causal, std::move(diagonal), std::move(window)};
  options.dropout_p = dropout_p;
  if (is_transformed(x) || is_transformed(mask) || is_transformed(sink)) {
    const Tensor keep = call_dropout_keep(x.detach(), dropout_p);
    return std::get<0>(call_forward_dropout_of_keep(x, mask, options, key_lengths, sink, keep,
                                                    /*with_sink_probability=*/false));
  }
  if (!(needs_grad(x) || needs_grad(mask) || needs_grad(sink))) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_forward_dropout(x, mask, options, key_lengths, sink);
  }
  const bool with_sink_probability = needs_sink_probability(x, mask, sink);
  Tensor result, y, state, sink_probability;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::tie(result, y, state, sink_probability) =
        call_forward_dropout_with_y(x, mask, options, key_lengths, sink, with_sink_probability);
  }
  record_dropout(options, x, mask, sink, result, y, key_lengths, with_sink_probability ? sink_probability : Tensor(),
                 state);
  return result;
}

void forward_in_place_dropout(Tensor& x, const OptionalTensor& mask, double scale, bool is_causal,
                              c10::SymInt diagonal, OptionalSymInt window, const OptionalTensor& key_lengths,
                              const OptionalTensor& sink, double dropout_p) {
  const auto differentiated = [](const auto& tensor) { return needs_grad(tensor) || has_tangent(tensor); };
  TORCH_CHECK_NOT_IMPLEMENTED(!(differentiated(x) || differentiated(mask) || differentiated(sink)),
                              "scaled_mask_softmax: dropout_p is ", number(dropout_p), " for scaled_mask_softmax_ where a "
                              "gradient is needed; expected 0, as the gradient needs the probabilities before dropout. "
                              "Use scaled_mask_softmax.");
  SymOptions options{scale, is_causal, std::move(diagonal), std::move(window)};
  options.dropout_p = dropout_p;
  const at::AutoDispatchBelowAutograd below;
  call_forward_in_place_dropout(x, mask, options, key_lengths, sink);
}

// torch counts versions of its own in-place operators in generated code at this dispatch key; without it, backward
// could not notice that a saved tensor was overwritten.
void count_version(Tensor& x, const OptionalTensor& mask, double scale, bool is_causal, c10::SymInt diagonal,
                   OptionalSymInt window, const OptionalTensor& key_lengths, const OptionalTensor& sink) {
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_forward_in_place(x, mask, {scale, is_causal, std::move(diagonal), std::move(window)}, key_lengths, sink);
  }
  torch::autograd::increment_version(x);
}

Tensor count_version_with_sink(Tensor& x, const OptionalTensor& mask, double scale, bool is_causal,
                               c10::SymInt diagonal, OptionalSymInt window, const OptionalTensor& key_lengths,
                               const Tensor& sink) {
  Tensor sink_probability;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    sink_probability = call_forward_in_place_with_sink(
        x, mask, {scale, is_causal, std::move(diagonal), std::move(window)}, key_lengths, sink);
  }
  torch::autograd::increment_version(x);
  return sink_probability;
}

void count_version_dropout(Tensor& x, const OptionalTensor& mask, double scale, bool is_causal, c10::SymInt diagonal,
                           OptionalSymInt window, const OptionalTensor& key_lengths, const OptionalTensor& sink,
                           double dropout_p) {
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    SymOptions options{scale, is_causal, std::move(diagonal), std::move(window)};
    options.dropout_p = dropout_p;
    call_forward_in_place_dropout(x, mask, options, key_lengths, sink);
  }
  torch::autograd::increment_version(x);
}

Tensor backward(const Tensor& grad, const Tensor& y, double scale, bool is_causal, c10::SymInt diagonal,
                OptionalSymInt window, const OptionalTensor& key_lengths) {
  const SymOptions options{scale, is_causal, std::move(diagonal), std::move(window)};
  Tensor dx;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    dx = call_backward(grad, y, options, key_lengths);
  }
  if (needs_grad(grad) || needs_grad(y)) {
    const auto node = make_derivative<Backward>(options, grad, y);
    torch::autograd::set_history(dx, node);
    node->saved[0] = SavedVariable(grad, /*is_output=*/false);
    node->saved[1] = SavedVariable(y, /*is_output=*/false);
    if (key_lengths.has_value()) node->saved[2] = SavedVariable(*key_lengths, /*is_output=*/false);
    announce(node);
  }
  const bool grad_has_tangent = has_tangent(grad);
  const bool y_has_tangent = has_tangent(y);
  if (grad_has_tangent || y_has_tangent) {
    Tensor tangent;
    const Tensor y_alone = without_tangent(y);
    if (grad_has_tangent) tangent = call_backward(tangent_of(grad), y_alone, options, key_lengths);
    if (y_has_tangent) {
      const Tensor by_y = DependenceOnY(without_tangent(grad), y_alone, options.scale).forward(tangent_of(y));
      tangent = tangent.defined() ? tangent + by_y : by_y;
    }
    dx._set_fw_grad(tangent, 0, /*is_inplace_op=*/false);
  }
  return dx;
}

// These serve the derivatives above, and have none of their own.
void refuse_derivative(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !argument.isTensor() || !(needs_grad(argument.toTensor()) || has_tangent(argument.toTensor())),
        "scaled_mask_softmax: ", op.schema().name(), " ", op.schema().overload_name(), " has no derivative; expected "
        "arguments without gradients. Use scaled_mask_softmax, and torch.autograd.grad with create_graph=True in place "
        "of transforms of torch.func nested over its sink.");
  }
  const at::AutoDispatchBelowAutograd below;
  op.callBoxed(stack);
}

}  // namespace
}  // namespace sms

TORCH_LIBRARY_IMPL(scaled_mask_softmax, Autograd, library) {
  library.impl("scaled_mask_softmax", &sms::forward);
  library.impl("scaled_mask_softmax_", &sms::forward_in_place);
  library.impl("scaled_mask_softmax_backward", &sms::backward);
  library.impl("scaled_mask_softmax.dropout", &sms::forward_dropout);
  library.impl("scaled_mask_softmax.dropout_of_keep", &sms::forward_dropout_of_keep);
  library.impl("scaled_mask_softmax_.dropout", &sms::forward_in_place_dropout);
  // Truth values have no derivative.
  library.impl("dropout_keep", torch::CppFunction::makeFallthrough());
  library.impl("dropout_keep.of_state", torch::CppFunction::makeFallthrough());
  for (const char* name : {"scaled_mask_softmax.with_sink_probability", "scaled_mask_softmax_.with_sink_probability",
                           "scaled_mask_softmax_backward.with_dots", "scaled_mask_softmax_mask_backward",
                           "scaled_mask_softmax.dropout_with_y", "scaled_mask_softmax_backward.dropout",
                           "scaled_mask_softmax_mask_backward.dropout"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&sms::refuse_derivative>());
  }
}

TORCH_LIBRARY_IMPL(scaled_mask_softmax, ADInplaceOrView, library) {
  library.impl("scaled_mask_softmax_", &sms::count_version);
  library.impl("scaled_mask_softmax_.with_sink_probability", &sms::count_version_with_sink);
  library.impl("scaled_mask_softmax_.dropout", &sms::count_version_dropout);
}
