// All native argument checks, and the translation from tensors to problems: done once, for every device.
// The Python twin of the checks, for fake tensors and the composite, is python/scaled_mask_softmax/_checks.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "problem.h"

namespace sms {

using OptionalTensor = std::optional<at::Tensor>;

// The positional and keyword options that forward and backward share.
struct Options {
  double scale;
  bool is_causal;
  int64_t diagonal;
  std::optional<int64_t> window;
};

// For error texts: with as many digits as it takes to tell it from every other, and six at least.
std::string number(double value);

// Throws TypeError, ValueError or NotImplementedError on arguments that DESIGN does not allow.
void check_forward(const at::Tensor& x, const OptionalTensor& mask, const Options& options,
                   const OptionalTensor& key_lengths, const OptionalTensor& sink);

// The probability that a cell is dropped.
void check_dropout(double dropout_p);

// The cells of x that dropout keeps.
void check_keep(const at::Tensor& x, const at::Tensor& keep);

// Of what backward and dropout_keep need to draw what forward drew.
void check_random_state(const at::Tensor& x, const at::Tensor& state);

// Beyond check_forward: no two elements of x may share memory, nor may any other tensor share x's.
void check_in_place(const at::Tensor& x, const OptionalTensor& mask, const OptionalTensor& key_lengths,
                    const OptionalTensor& sink);

void check_backward(const at::Tensor& grad, const at::Tensor& y, const Options& options,
                    const OptionalTensor& key_lengths);

// Of the gradient of a mask, given each row's sum(grad * y); `size` is y's shape, with 1 where the mask broadcasts.
void check_mask_backward(const at::Tensor& y, const at::Tensor& dots, at::IntArrayRef size, at::ScalarType dtype);

// x whose rows the kernels can read in place (column stride 1): x itself, or a contiguous copy.
at::Tensor with_unit_column_stride(const at::Tensor& x);

// Likewise for a gradient, where a column stride of 0 (an expanded gradient) is read in place too.
at::Tensor with_readable_columns(const at::Tensor& grad);

// Uninitialized, for one number a row of x, in the type that rows are accumulated in.
at::Tensor empty_statistic(const at::Tensor& x);
at::TensorOptions statistic_options(const at::Tensor& x);

// The scale of a gradient with dropout, finite in the type that gradients of `dtype` are computed in, so that 0 times it
// is 0.
double scale_with_dropout(double scale, double factor, at::ScalarType dtype);

// A checked probability, without random numbers.
Dropout dropout_of(double dropout_p);

// With those of a checked state.
Dropout dropout_of(double dropout_p, const at::Tensor& state);

// The problems for checked, non-empty arguments. x, y and dx have column stride 1; y may be x itself. With dropout dots
// and gradients of masks are those of the problem with an active dropout: see problem.h.
ForwardProblem forward_problem(const at::Tensor& x, const OptionalTensor& mask, const Options& options,
                               const OptionalTensor& key_lengths, const OptionalTensor& sink, const at::Tensor& y,
                               const OptionalTensor& sink_probability, const Dropout& dropout = {},
                               const OptionalTensor& before_dropout = {}, const OptionalTensor& state = {});
BackwardProblem backward_problem(const at::Tensor& grad, const at::Tensor& y, const Options& options,
                                 const OptionalTensor& key_lengths, const OptionalTensor& dx,
                                 const OptionalTensor& dots, const Dropout& dropout = {});

// gradient is contiguous and has y's shape, with size 1 where the mask broadcasts.
MaskGradientProblem mask_gradient_problem(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& dots,
                                          const Options& options, const OptionalTensor& key_lengths,
                                          const at::Tensor& gradient, const Dropout& dropout = {});

}  // namespace sms
