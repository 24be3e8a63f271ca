// One derivative as a node of torch's graph, written as torch writes those of its own operators:
// torch::autograd::Function refuses function transforms and costs more.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>

#include "operators.h"

namespace sms {

// Formula provides
//   kName, of the node; kSaved, how many tensors it keeps; kInputs, how many tensors of the operator it differentiates;
//   differentiate(grads, saved, options, needs), which returns kInputs gradients, undefined where bit i of needs is 0,
//   given those of the node's results, of which at least one is defined.
//   It is made of differentiable operators, so that derivatives of every order follow.
template <typename Formula>
struct Derivative final : torch::autograd::TraceableFunction {
  using CompiledNodeArgs = torch::dynamo::autograd::CompiledNodeArgs;
  using SwapSavedVariables = torch::dynamo::autograd::SwapSavedVariables;
  using variable_list = torch::autograd::variable_list;
  using SavedTensors = std::array<at::Tensor, Formula::kSaved>;

  SymOptions options;
  std::array<torch::autograd::SavedVariable, Formula::kSaved> saved;

  std::string name() const override { return Formula::kName; }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (none_defined(grads)) return variable_list(Formula::kInputs);
    return Formula::differentiate(grads, unpacked(), options, needs());
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& tensor : saved) tensor.reset_data();
  }

  // Compiled autograd: the attributes are arguments of the traced graph, and the formula is traced through.
  void compiled_args(CompiledNodeArgs& args) const override {
    for (const auto& tensor : saved) args.collect(tensor, /*is_output=*/true);
    args.collect(options.scale);
    args.collect(options.is_causal);
    args.collect(options.diagonal);
    args.collect(options.window);
    args.collect(options.mask.rank);
    args.collect(options.mask.kept);
    args.collect(options.mask.dtype);
    args.collect(options.dropout_p);
  }

  variable_list apply_with_saved(const variable_list& grads, SwapSavedVariables& swap) override {
    namespace dynamo = torch::dynamo::autograd;
    for (auto& tensor : saved) swap.before(tensor);
    swap.before(options.diagonal);
    swap.before(options.window);

    dynamo::PackedArgs packed;
    for (const at::Tensor& tensor : unpacked()) packed.pack(tensor);
    packed.pack(options.scale);
    packed.pack(options.is_causal);
    packed.pack(options.diagonal);
    packed.pack(options.window);
    packed.pack(options.mask.rank);
    packed.pack(options.mask.kept);
    packed.pack(options.mask.dtype);
    packed.pack(options.dropout_p);
    packed.pack(needs());
    const std::vector<at::IValue>& args = packed.vec();
    std::vector<at::TypePtr> schema;
    for (const at::IValue& arg : args) schema.push_back(arg.isTensor() ? at::TensorType::get() : arg.type());

    const auto& compiler = dynamo::getPyCompilerInterface();
    // Bound anew each time, as a custom function may be: an argument may be an integer now and symbolic then.
    const std::string function = compiler->bind_function(swap.get_py_compiler(), name(), &apply_packed,
                                                         std::move(schema), /*is_custom_function=*/true);
    variable_list result = compiler->call_function(
        swap.get_py_compiler(), "apply_functional", function, grads, args,
        dynamo::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            dynamo::get_input_metadata(next_edges())));

    for (auto& tensor : saved) swap.after(tensor);
    swap.after(options.diagonal);
    swap.after(options.window);
    return result;
  }

 private:
  static bool none_defined(const variable_list& grads) {
    return std::none_of(grads.begin(), grads.end(), [](const at::Tensor& grad) { return grad.defined(); });
  }

  SavedTensors unpacked() {
    SavedTensors tensors;
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i] = saved[i].unpack(getptr());
    return tensors;
  }

  int64_t needs() const {
    int64_t bits = 0;
    for (size_t i = 0; i < Formula::kInputs; ++i) bits |= int64_t{task_should_compute_output(i)} << i;
    return bits;
  }

  static variable_list apply_packed(const variable_list& grads, const std::vector<at::IValue>& args) {
    if (none_defined(grads)) return variable_list(Formula::kInputs);
    torch::dynamo::autograd::PackedArgs packed(args);
    SavedTensors tensors;
    for (at::Tensor& tensor : tensors) tensor = packed.unpack<at::Tensor>();
    SymOptions options;
    options.scale = packed.unpack<double>();
    options.is_causal = packed.unpack<bool>();
    options.diagonal = packed.unpack<c10::SymInt>();
    options.window = packed.unpack<OptionalSymInt>();
    options.mask.rank = packed.unpack<int64_t>();
    options.mask.kept = packed.unpack<int64_t>();
    options.mask.dtype = packed.unpack<int64_t>();
    options.dropout_p = packed.unpack<double>();
    return Formula::differentiate(grads, tensors, options, packed.unpack<int64_t>());
  }
};

// A node without edges. Torch releases differ in how they count references to nodes.
template <typename Node>
auto make_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<Node>();
  } else {
    return std::shared_ptr<Node>(new Node, [](Node* dying) { deleteNode(dying); });
  }
}

template <typename Formula>
using DerivativePointer = decltype(make_node<Derivative<Formula>>());

// A node whose edges lead to `inputs`, without what it saves.
template <typename Formula, typename... Inputs>
DerivativePointer<Formula> make_derivative(const SymOptions& options, const Inputs&... inputs) {
  static_assert(sizeof...(inputs) == Formula::kInputs);
  auto node = make_node<Derivative<Formula>>();
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  node->options = options;
  return node;
}

// Tells the hooks of torch.autograd.graph, where torch has them, of a node that is complete.
template <typename Pointer>
void announce(const Pointer& node) {
  if constexpr (requires { fire_node_creation_hooks(node); }) fire_node_creation_hooks(node);
}

}  // namespace sms
