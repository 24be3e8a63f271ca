// Nested tensors are refused by name, before torch says only that it has no kernel.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace sms {
namespace {

void refuse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto given = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    TORCH_CHECK_VALUE(!(given[i].isTensor() && given[i].toTensor().is_nested()), "scaled_mask_softmax: ",
                      arguments[i].name(), " is a nested tensor; expected a dense (strided) tensor. Use ",
                      "torch.nested.to_padded_tensor, and a mask that is True at the padding.");
  }
  TORCH_INTERNAL_ASSERT(false, "dispatched without a nested tensor");
}

void register_in(torch::Library& library) {
  for (const char* name : {"scaled_mask_softmax", "scaled_mask_softmax_", "scaled_mask_softmax_backward",
                           "scaled_mask_softmax.with_sink_probability", "scaled_mask_softmax_.with_sink_probability",
                           "scaled_mask_softmax_backward.with_dots", "scaled_mask_softmax_mask_backward",
                           "scaled_mask_softmax.dropout", "scaled_mask_softmax_.dropout"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
}

}  // namespace
}  // namespace sms

// The first for tensors of both layouts, the second in inference mode.
TORCH_LIBRARY_IMPL(scaled_mask_softmax, AutogradNestedTensor, library) { sms::register_in(library); }
TORCH_LIBRARY_IMPL(scaled_mask_softmax, NestedTensor, library) { sms::register_in(library); }
