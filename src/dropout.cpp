// Dropout of given cells, in terms of other operators: for every device.
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <tuple>
#include <utility>

#include "canonicalize.h"
#include "operators.h"
#include "problem.h"

namespace sms {
namespace {

ThreeTensors dropout_of_keep(const at::Tensor& x, const OptionalTensor& mask, double scale, bool is_causal,
                             c10::SymInt diagonal, OptionalSymInt window, const OptionalTensor& key_lengths,
                             const OptionalTensor& sink, const at::Tensor& keep, double dropout_p,
                             bool with_sink_probability) {
  check_dropout(dropout_p);
  check_keep(x, keep);
  const SymOptions options{scale, is_causal, std::move(diagonal), std::move(window)};
  at::Tensor y, sink_probability;
  if (with_sink_probability) {
    std::tie(y, sink_probability) = call_forward_with_sink(x, mask, options, key_lengths, sink.value());
  } else {
    y = call_forward(x, mask, options, key_lengths, sink);
    sink_probability = at::empty({0}, statistic_options(x));
  }
  at::Tensor result = at::where(keep, at::mul(y, dropout_factor(dropout_p)), 0.0);
  return {std::move(result), std::move(y), std::move(sink_probability)};
}

}  // namespace
}  // namespace sms

TORCH_LIBRARY_IMPL(scaled_mask_softmax, CompositeExplicitAutograd, library) {
  library.impl("scaled_mask_softmax.dropout_of_keep", &sms::dropout_of_keep);
}
