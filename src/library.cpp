// The operators' schemas, and nothing else. Kernels: autograd.cpp, cpu/ops.cpp, cuda/ops.cpp; fake kernels and other
// devices: python/scaled_mask_softmax/_ops.py.
//
// The in-place form returns nothing: an operator that returns its mutated argument cannot be functionalized.
#include <torch/library.h>

TORCH_LIBRARY(scaled_mask_softmax, library) {
  library.def(
      "scaled_mask_softmax(Tensor x, Tensor? mask=None, float scale=1.0, bool is_causal=False, *, SymInt diagonal=0, "
      "SymInt? window=None, Tensor? key_lengths=None, Tensor? sink=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  library.def(
      "scaled_mask_softmax_(Tensor(a!) x, Tensor? mask=None, float scale=1.0, bool is_causal=False, *, "
      "SymInt diagonal=0, SymInt? window=None, Tensor? key_lengths=None, Tensor? sink=None) -> ()",
      {at::Tag::pt2_compliant_tag});
  // As above, and what each row's sink takes, of x's shape without the last dimension: sink's gradient needs it.
  library.def(
      "scaled_mask_softmax.with_sink_probability(Tensor x, Tensor? mask, float scale, bool is_causal, *, "
      "SymInt diagonal, SymInt? window, Tensor? key_lengths, Tensor sink) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  library.def(
      "scaled_mask_softmax_.with_sink_probability(Tensor(a!) x, Tensor? mask, float scale, bool is_causal, *, "
      "SymInt diagonal, SymInt? window, Tensor? key_lengths, Tensor sink) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  library.def(
      "scaled_mask_softmax_backward(Tensor grad, Tensor y, float scale, bool is_causal, *, SymInt diagonal=0, "
      "SymInt? window=None, Tensor? key_lengths=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  // As above, and each row's sum(grad * y), of y's shape without the last dimension. Without with_dx that alone: the
  // first result has no elements.
  library.def(
      "scaled_mask_softmax_backward.with_dots(Tensor grad, Tensor y, float scale, bool is_causal, bool with_dx, *, "
      "SymInt diagonal, SymInt? window, Tensor? key_lengths) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  // The gradient of a float mask, from those sums. `size` is y's shape, with 1 where the mask broadcasts; its last
  // element is y's.
  library.def(
      "scaled_mask_softmax_mask_backward(Tensor grad, Tensor y, Tensor dots, SymInt[] size, ScalarType dtype, "
      "bool is_causal, *, SymInt diagonal=0, SymInt? window=None, Tensor? key_lengths=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}
