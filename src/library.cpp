// The operators' schemas, and nothing else. Kernels: autograd.cpp, cpu/ops.cpp, cuda/ops.cpp; fake kernels and other
// devices: python/scaled_mask_softmax/_ops.py.
//
// The in-place form returns nothing: an operator that returns its mutated argument cannot be functionalized.
#include <torch/library.h>

#include <vector>

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

  // With dropout: overloads of their own, so that the others carry no tag of random numbers.
  const std::vector<at::Tag> random = {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded};
  library.def(
      "scaled_mask_softmax.dropout(Tensor x, Tensor? mask=None, float scale=1.0, bool is_causal=False, *, "
      "SymInt diagonal=0, SymInt? window=None, Tensor? key_lengths=None, Tensor? sink=None, float dropout_p) -> Tensor",
      random);
  library.def(
      "scaled_mask_softmax_.dropout(Tensor(a!) x, Tensor? mask=None, float scale=1.0, bool is_causal=False, *, "
      "SymInt diagonal=0, SymInt? window=None, Tensor? key_lengths=None, Tensor? sink=None, float dropout_p) -> ()",
      random);
  // As above, and what the derivatives need: y before dropout; the seed and offset of the random numbers; what each
  // row's sink takes, without elements unless with_sink_probability.
  library.def(
      "scaled_mask_softmax.dropout_with_y(Tensor x, Tensor? mask, float scale, bool is_causal, *, SymInt diagonal, "
      "SymInt? window, Tensor? key_lengths, Tensor? sink, float dropout_p, bool with_sink_probability) "
      "-> (Tensor, Tensor, Tensor, Tensor)",
      random);
  // Of given cells, as bool of x's shape, so that there is nothing random: for what differentiates or batches more than
  // once. Differentiable, y included.
  library.def(
      "scaled_mask_softmax.dropout_of_keep(Tensor x, Tensor? mask, float scale, bool is_causal, *, SymInt diagonal, "
      "SymInt? window, Tensor? key_lengths, Tensor? sink, Tensor keep, float dropout_p, bool with_sink_probability) "
      "-> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  // grad is that of the result of dropout. Without with_dx the first result has no elements, without with_dots the
  // second: each row's sum(grad * y) over the cells that were kept, not divided by 1 - p.
  library.def(
      "scaled_mask_softmax_backward.dropout(Tensor grad, Tensor y, Tensor state, float dropout_p, float scale, "
      "bool is_causal, bool with_dx, bool with_dots, *, SymInt diagonal, SymInt? window, Tensor? key_lengths) "
      "-> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  library.def(
      "scaled_mask_softmax_mask_backward.dropout(Tensor grad, Tensor y, Tensor dots, Tensor state, float dropout_p, "
      "SymInt[] size, ScalarType dtype, bool is_causal, *, SymInt diagonal, SymInt? window, Tensor? key_lengths) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
  // The cells of x's shape that dropout keeps, as bool: drawn as scaled_mask_softmax.dropout draws them, or those that it
  // drew.
  library.def("dropout_keep(Tensor x, float dropout_p) -> Tensor", random);
  library.def("dropout_keep.of_state(Tensor x, Tensor state, float dropout_p) -> Tensor",
              {at::Tag::pt2_compliant_tag});
}
