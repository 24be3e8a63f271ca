#include "canonicalize.h"

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <string>

namespace sms {
namespace {

using at::ScalarType;
using at::Tensor;

constexpr const char* kPrefix = "scaled_mask_softmax: ";

std::string dtype_name(ScalarType dtype) { return "torch." + std::string(c10::getDtypeNames(dtype).first); }

bool is_16_bit(ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

bool is_supported(ScalarType dtype) { return is_16_bit(dtype) || dtype == at::kFloat || dtype == at::kDouble; }

Element element_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf: return Element::float16;
    case at::kBFloat16: return Element::bfloat16;
    case at::kFloat: return Element::float32;
    default: return Element::float64;
  }
}

MaskKind mask_kind_of(const OptionalTensor& mask, const Tensor& x) {
  if (!mask.has_value()) return MaskKind::none;
  if (mask->scalar_type() == at::kBool) return MaskKind::boolean;
  return mask->scalar_type() == x.scalar_type() ? MaskKind::same : MaskKind::float32;
}

// A 3-D mask for a 4-D x has one entry per sample: dimension 0 is the batch, and heads broadcast.
bool is_per_sample(const Tensor& x, const Tensor& mask) { return x.dim() == 4 && mask.dim() == 3; }

// The dimension of mask that lines up with dimension `dim` of x, or -1 where mask broadcasts by having none.
int64_t aligned_mask_dim(const Tensor& x, const Tensor& mask, int64_t dim) {
  if (is_per_sample(x, mask)) return dim == 0 ? 0 : dim - 1;  // dim 1 (heads) never asks: see mask_stride
  return dim - (x.dim() - mask.dim());
}

int64_t mask_stride(const Tensor& x, const Tensor& mask, int64_t dim) {
  if (is_per_sample(x, mask) && dim == 1) return 0;
  const int64_t mask_dim = aligned_mask_dim(x, mask, dim);
  return mask_dim < 0 || mask.size(mask_dim) == 1 ? 0 : mask.stride(mask_dim);
}

bool broadcasts(const Tensor& x, const Tensor& mask) {
  if (mask.dim() > x.dim()) return false;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    if (is_per_sample(x, mask) && dim == 1) continue;
    const int64_t mask_dim = aligned_mask_dim(x, mask, dim);
    if (mask_dim >= 0 && mask.size(mask_dim) != 1 && mask.size(mask_dim) != x.size(dim)) return false;
  }
  return true;
}

void check_element(const Tensor& x, const char* name) {
  TORCH_CHECK_TYPE(is_supported(x.scalar_type()), kPrefix, name, " has dtype ", dtype_name(x.scalar_type()),
                   "; expected torch.float16, torch.bfloat16, torch.float32 or torch.float64. Convert it, for example "
                   "with ", name, ".float().");
  TORCH_CHECK_VALUE(x.dim() > 0, kPrefix, name, " has shape [] (rank 0); expected at least one dimension, "
                    "[..., Sq, Sk]. Use ", name, ".unsqueeze(0) for a row of one score.");
}

// An operand with one element for each index of x's dimension `dim`.
void check_vector(const Tensor& x, const char* x_name, const Tensor& vector, const char* name, int64_t dim,
                  const char* x_shape, const char* role) {
  TORCH_CHECK_VALUE(vector.device() == x.device(), kPrefix, name, " is on ", vector.device(), "; expected ",
                    x.device(), ", the device of ", x_name, ". Use ", name, ".to(", x_name, ".device).");
  TORCH_CHECK_VALUE(x.dim() >= 3, kPrefix, name, " is given for ", x_name, " of shape ", x.sizes(), "; expected ",
                    x_shape, ". Use ", x_name, "[None].");
  TORCH_CHECK_VALUE(vector.dim() == 1 && vector.size(0) == x.size(dim), kPrefix, name, " has shape ", vector.sizes(),
                    " for ", x_name, " of shape ", x.sizes(), "; expected [", x.size(dim), "], ", role, ".");
}

void check_key_lengths(const Tensor& x, const char* x_name, const Tensor& key_lengths) {
  TORCH_CHECK_TYPE(key_lengths.scalar_type() == at::kInt || key_lengths.scalar_type() == at::kLong, kPrefix,
                   "key_lengths has dtype ", dtype_name(key_lengths.scalar_type()),
                   "; expected torch.int32 or torch.int64. Use key_lengths.long().");
  check_vector(x, x_name, key_lengths, "key_lengths", 0, "three dimensions or more, [B, ..., Sq, Sk]",
               "one length for each entry of the first dimension");
}

void check_sink(const Tensor& x, const Tensor& sink) {
  const ScalarType dtype = sink.scalar_type();
  TORCH_CHECK_TYPE(dtype == x.scalar_type() || (dtype == at::kFloat && is_16_bit(x.scalar_type())), kPrefix,
                   "sink has dtype ", dtype_name(dtype), " for x of dtype ", dtype_name(x.scalar_type()),
                   "; expected ", dtype_name(x.scalar_type()), is_16_bit(x.scalar_type()) ? " or torch.float32" : "",
                   ". Use sink.to(x.dtype).");
  check_vector(x, "x", sink, "sink", -3, "three dimensions or more, [..., H, Sq, Sk]",
               "one logit for each head, an entry of dimension -3");
}

void check_options(const Tensor& x, const char* name, const Options& options, const OptionalTensor& key_lengths) {
  TORCH_CHECK_VALUE(std::isfinite(options.scale), kPrefix, "scale is ", number(options.scale),
                    "; expected a finite number. Check how it is computed, for example d_k ** -0.5.");
  TORCH_CHECK_VALUE(x.scalar_type() == at::kDouble ||
                        std::abs(options.scale) <= double{std::numeric_limits<float>::max()},
                    kPrefix, "scale is ", number(options.scale),
                    "; expected a number in the range of float32, in which scores of dtype ",
                    dtype_name(x.scalar_type()), " are computed. Use float64 scores or a smaller scale.");
  TORCH_CHECK_VALUE(options.window.value_or(1) >= 1, kPrefix, "window is ", *options.window,
                    "; expected at least 1, the number of columns from the diagonal back, that one included. Use "
                    "window=None for no window.");
  if (key_lengths.has_value()) check_key_lengths(x, name, *key_lengths);
}

void check_mask(const Tensor& x, const Tensor& mask) {
  TORCH_CHECK_VALUE(mask.device() == x.device(), kPrefix, "mask is on ", mask.device(), "; expected ", x.device(),
                    ", the device of x. Use mask.to(x.device).");
  const ScalarType dtype = mask.scalar_type();
  const bool allowed =
      dtype == at::kBool || dtype == x.scalar_type() || (dtype == at::kFloat && is_16_bit(x.scalar_type()));
  TORCH_CHECK_TYPE(allowed, kPrefix, "mask has dtype ", dtype_name(dtype), " for x of dtype ",
                   dtype_name(x.scalar_type()), "; expected torch.bool (True = masked out) or ",
                   dtype_name(x.scalar_type()), is_16_bit(x.scalar_type()) ? " or torch.float32" : "",
                   at::isIntegralType(dtype, /*includeBool=*/false)
                       ? ". Use mask.bool() if nonzero means masked out."
                       : ". Use mask.to(x.dtype).");
  TORCH_CHECK_VALUE(mask.numel() > 0 || x.numel() == 0, kPrefix, "mask has shape ", mask.sizes(),
                    " (no elements) for x of shape ", x.sizes(), "; expected a shape that broadcasts to x. Use "
                    "mask=None for no mask.");
  if (broadcasts(x, mask)) return;
  if (is_per_sample(x, mask)) {
    TORCH_CHECK_VALUE(false, kPrefix, "mask has shape ", mask.sizes(), " for x of shape ", x.sizes(),
                      "; a 3-D mask for 4-D x is per sample, expected [", x.size(0), " or 1, ", x.size(2), " or 1, ",
                      x.size(3), " or 1]. ",
                      mask.size(0) == x.size(1) ? "For a mask per head use mask[None]."
                                                : "Insert dimensions of size 1 so that it broadcasts to x.");
  }
  const bool padding = x.dim() == 4 && mask.dim() == 2 && mask.size(0) == x.size(0) && mask.size(1) == x.size(3);
  TORCH_CHECK_VALUE(false, kPrefix, "mask has shape ", mask.sizes(), " for x of shape ", x.sizes(),
                    "; expected a shape that broadcasts to x without enlarging it. ",
                    padding ? "For a mask of keys, [B, Sk], use mask[:, None, None, :]."
                            : "Make each of its trailing dimensions equal to x's or 1.");
}

// The columns that causal and window leave, clamped so that adding a query index cannot overflow. Saturation is exact:
// past these bounds nothing (or everything) is excluded either way.
Band band_of(const Tensor& x, const Options& options) {
  const int64_t columns = x.size(-1);
  const int64_t queries = x.dim() >= 2 ? x.size(-2) : 1;
  const auto clamp = [&](int64_t bound) { return std::clamp(bound, -queries, columns); };
  Band band{false, -queries, columns};
  if (options.is_causal) {
    const int64_t diagonal = options.diagonal;
    band.end = clamp(diagonal == std::numeric_limits<int64_t>::max() ? diagonal : diagonal + 1);
  }
  if (options.window.has_value()) {
    int64_t begin;
    if (__builtin_sub_overflow(options.diagonal, *options.window - 1, &begin)) {
      begin = std::numeric_limits<int64_t>::min();
    }
    band.begin = clamp(begin);
  }
  band.active = band.end < columns || band.begin > 1 - queries;
  return band;
}

// Drops dimensions of size 1 and merges neighbours that every operand walks with one stride.
// Into `rows`, as they are large to copy.
void merge_rows(const Tensor& shape_of, const std::array<const int64_t*, kOperands>& strides, Rows& rows) {
  int& dims = rows.dims;
  dims = 0;
  for (int64_t d = shape_of.dim() - 2; d >= 0; --d) {
    const int64_t size = shape_of.size(d);
    if (size == 1) continue;
    if (dims > 0) {
      RowDim& inner = rows.dim[dims - 1];  // innermost first, for now
      bool merges = true;
      for (int operand = 0; operand < kOperands; ++operand) {
        merges = merges && strides[operand][d] == inner.stride[operand] * inner.size;
      }
      if (merges) {
        inner.size *= size;
        continue;
      }
    }
    RowDim& dim = rows.dim[dims++];
    dim.size = size;
    for (int operand = 0; operand < kOperands; ++operand) dim.stride[operand] = strides[operand][d];
  }
  std::reverse(rows.dim, rows.dim + dims);
}

using StrideBuffer = c10::SmallVector<int64_t, 8>;

StrideBuffer query_strides(const Tensor& x, const Band& band) {
  StrideBuffer strides(x.dim(), 0);
  if (band.active && x.dim() >= 2) strides[x.dim() - 2] = 1;
  return strides;
}

// Of an optional operand with one element for each index of x's dimension `dim`.
StrideBuffer vector_strides(const Tensor& x, const OptionalTensor& vector, int64_t dim) {
  StrideBuffer strides(x.dim(), 0);
  if (vector.has_value()) strides[dim] = vector->stride(0);
  return strides;
}

// Half-open range of bytes that a non-empty tensor touches within its storage.
std::pair<int64_t, int64_t> storage_bytes(const Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const int64_t bytes = static_cast<int64_t>(tensor.element_size());
  return {tensor.storage_offset() * bytes, (tensor.storage_offset() + last + 1) * bytes};
}

// True where some two elements may share memory: exact for layouts made by slicing, transposing and expanding.
bool may_overlap_itself(const Tensor& x) {
  c10::SmallVector<std::pair<int64_t, int64_t>, 8> dims;  // (stride, size)
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) > 1) dims.emplace_back(x.stride(d), x.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t extent = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= extent) return true;
    extent += stride * (size - 1);
  }
  return false;
}

// `other` is read while x is overwritten.
void check_apart(const Tensor& x, const Tensor& other, const char* name) {
  if (!other.is_alias_of(x)) return;
  const auto [x_begin, x_end] = storage_bytes(x);
  const auto [begin, end] = storage_bytes(other);
  TORCH_CHECK_VALUE(x_end <= begin || end <= x_begin, kPrefix, name,
                    " may share memory with x; expected separate memory, as scaled_mask_softmax_ overwrites x. Use ",
                    name, ".clone() or scaled_mask_softmax.");
}

// Of a contiguous tensor of x's shape without the last dimension, if the problem has such or numbers its rows.
StrideBuffer statistic_strides(const Tensor& x, bool used) {
  StrideBuffer strides(x.dim(), 0);
  int64_t step = 1;
  for (int64_t d = x.dim() - 2; used && d >= 0; --d) {
    strides[d] = step;
    step *= x.size(d);
  }
  return strides;
}

void* data_or_null(const OptionalTensor& tensor) {
  return tensor.has_value() ? tensor->mutable_data_ptr() : nullptr;
}

const void* const_data_or_null(const OptionalTensor& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr() : nullptr;
}

// What both gradients are given alike.
template <typename Problem>
Problem gradient_problem(const Tensor& grad, const Tensor& y, const Options& options,
                         const OptionalTensor& key_lengths) {
  Problem problem;
  problem.element = element_of(y);
  problem.band = band_of(y, options);
  problem.columns = y.size(-1);
  problem.y = y.const_data_ptr();
  problem.grad = grad.const_data_ptr();
  problem.grad_column_stride = grad.stride(-1) == 0 ? 0 : 1;
  problem.key_lengths = const_data_or_null(key_lengths);
  problem.key_lengths_64 = key_lengths.has_value() && key_lengths->scalar_type() == at::kLong;
  return problem;
}

}  // namespace

std::string number(double value) {
  if (std::isnan(value)) return "nan";
  std::array<char, 32> text;
  for (int digits = 6;; ++digits) {
    char* const end =
        std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::general, digits).ptr;
    double read = 0;
    std::from_chars(text.data(), end, read);
    if (read == value || digits == std::numeric_limits<double>::max_digits10) return {text.data(), end};
  }
}

void check_forward(const Tensor& x, const OptionalTensor& mask, const Options& options,
                   const OptionalTensor& key_lengths, const OptionalTensor& sink) {
  check_element(x, "x");
  check_options(x, "x", options, key_lengths);
  if (sink.has_value()) check_sink(x, *sink);
  if (mask.has_value()) check_mask(x, *mask);
}

void check_dropout(double dropout_p) {
  TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1, kPrefix, "dropout_p is ", number(dropout_p),
                    "; expected a probability, 0 <= dropout_p <= 1. Use 0 for no dropout.");
}

void check_keep(const Tensor& x, const Tensor& keep) {
  TORCH_CHECK_VALUE(keep.device() == x.device() && keep.scalar_type() == at::kBool && keep.sizes() == x.sizes(),
                    kPrefix, "keep has shape ", keep.sizes(), " and dtype ", dtype_name(keep.scalar_type()), " on ",
                    keep.device(), "; expected what dropout_keep returns for x.");
}

void check_random_state(const Tensor& x, const Tensor& state) {
  TORCH_CHECK_VALUE(state.device() == x.device() && state.scalar_type() == at::kLong && state.dim() == 1 &&
                        state.size(0) == 2 && state.is_contiguous(),
                    kPrefix, "state has shape ", state.sizes(), " and dtype ", dtype_name(state.scalar_type()), " on ",
                    state.device(), "; expected what scaled_mask_softmax.dropout_with_y returns.");
}

double scale_with_dropout(double scale, double factor, ScalarType dtype) {
  const double largest =
      dtype == at::kDouble ? std::numeric_limits<double>::max() : double{std::numeric_limits<float>::max()};
  return std::clamp(scale * factor, -largest, largest);
}

Dropout dropout_of(double dropout_p) {
  Dropout dropout;
  dropout.active = true;
  const double of_all = std::round(dropout_p * 0x1p32);
  dropout.threshold = static_cast<uint32_t>(std::min(of_all, double{std::numeric_limits<uint32_t>::max()}));
  dropout.factor = dropout_factor(dropout_p);
  return dropout;
}

Dropout dropout_of(double dropout_p, const Tensor& state) {
  Dropout dropout = dropout_of(dropout_p);
  dropout.random.seed_pointer = state.const_data_ptr<int64_t>();
  dropout.random.offset_pointer = dropout.random.seed_pointer + 1;
  return dropout;
}

void check_in_place(const Tensor& x, const OptionalTensor& mask, const OptionalTensor& key_lengths,
                    const OptionalTensor& sink) {
  if (x.numel() == 0) return;
  TORCH_CHECK_VALUE(!may_overlap_itself(x), kPrefix, "x has shape ", x.sizes(), " and strides ", x.strides(),
                    ", so elements may share memory; expected separate memory for each, as scaled_mask_softmax_ "
                    "overwrites x. Use x.contiguous() or scaled_mask_softmax.");
  if (mask.has_value()) check_apart(x, *mask, "mask");
  if (key_lengths.has_value()) check_apart(x, *key_lengths, "key_lengths");
  if (sink.has_value()) check_apart(x, *sink, "sink");
}

void check_backward(const Tensor& grad, const Tensor& y, const Options& options, const OptionalTensor& key_lengths) {
  check_element(y, "y");
  check_options(y, "y", options, key_lengths);
  TORCH_CHECK_VALUE(grad.device() == y.device(), kPrefix, "grad is on ", grad.device(), "; expected ", y.device(),
                    ", the device of y. Use grad.to(y.device).");
  TORCH_CHECK_TYPE(grad.scalar_type() == y.scalar_type(), kPrefix, "grad has dtype ", dtype_name(grad.scalar_type()),
                   "; expected ", dtype_name(y.scalar_type()), ", the dtype of y. Use grad.to(y.dtype).");
  TORCH_CHECK_VALUE(grad.sizes() == y.sizes(), kPrefix, "grad has shape ", grad.sizes(), "; expected ", y.sizes(),
                    ", the shape of y. Use grad.expand_as(y) if it broadcasts.");
}

void check_mask_backward(const Tensor& y, const Tensor& dots, at::IntArrayRef size, ScalarType dtype) {
  const ScalarType accumulated = y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK_VALUE(dots.device() == y.device() && dots.scalar_type() == accumulated &&
                        dots.sizes() == y.sizes().slice(0, y.dim() - 1),
                    kPrefix, "dots has shape ", dots.sizes(), " and dtype ", dtype_name(dots.scalar_type()), " on ",
                    dots.device(), "; expected what scaled_mask_softmax_backward.with_dots returns for y.");
  TORCH_CHECK_TYPE(dtype == y.scalar_type() || (dtype == at::kFloat && is_16_bit(y.scalar_type())), kPrefix,
                   "dtype is ", dtype_name(dtype), " for y of dtype ", dtype_name(y.scalar_type()),
                   "; expected a dtype that a float mask may have.");
  bool broadcasts = static_cast<int64_t>(size.size()) == y.dim() && size.back() == y.size(-1);
  for (int64_t d = 0; broadcasts && d < y.dim() - 1; ++d) broadcasts = size[d] == 1 || size[d] == y.size(d);
  TORCH_CHECK_VALUE(broadcasts, kPrefix, "size is ", size, " for y of shape ", y.sizes(),
                    "; expected y's shape, with 1 where the mask broadcasts, and y's columns.");
}

at::TensorOptions statistic_options(const Tensor& x) {
  return x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

Tensor empty_statistic(const Tensor& x) { return at::empty(x.sizes().slice(0, x.dim() - 1), statistic_options(x)); }

Tensor with_unit_column_stride(const Tensor& x) {
  return x.size(-1) == 1 || x.stride(-1) == 1 ? x : x.contiguous();
}

Tensor with_readable_columns(const Tensor& grad) {
  return grad.stride(-1) == 0 ? grad : with_unit_column_stride(grad);
}

ForwardProblem forward_problem(const Tensor& x, const OptionalTensor& mask, const Options& options,
                               const OptionalTensor& key_lengths, const OptionalTensor& sink, const Tensor& y,
                               const OptionalTensor& sink_probability, const Dropout& dropout,
                               const OptionalTensor& before_dropout, const OptionalTensor& state) {
  ForwardProblem problem;
  problem.element = element_of(x);
  problem.mask_kind = mask_kind_of(mask, x);
  problem.band = band_of(x, options);
  problem.columns = x.size(-1);
  problem.scale = options.scale;
  problem.x = x.const_data_ptr();
  problem.mask = const_data_or_null(mask);
  problem.mask_column_stride = mask.has_value() ? mask_stride(x, *mask, x.dim() - 1) : 0;
  problem.y = y.mutable_data_ptr();
  problem.key_lengths = const_data_or_null(key_lengths);
  problem.key_lengths_64 = key_lengths.has_value() && key_lengths->scalar_type() == at::kLong;
  problem.sink = const_data_or_null(sink);
  problem.sink_float32 = sink.has_value() && sink->scalar_type() == at::kFloat;
  problem.sink_probability = data_or_null(sink_probability);
  problem.dropout = dropout;
  problem.before_dropout = data_or_null(before_dropout);
  problem.random_state = static_cast<int64_t*>(data_or_null(state));
  StrideBuffer mask_strides(x.dim(), 0);
  if (mask.has_value()) {
    for (int64_t d = 0; d < x.dim() - 1; ++d) mask_strides[d] = mask_stride(x, *mask, d);
  }
  const StrideBuffer query = query_strides(x, problem.band);
  const StrideBuffer batch = vector_strides(x, key_lengths, 0);
  const StrideBuffer head = vector_strides(x, sink, x.dim() - 3);
  const StrideBuffer statistic = statistic_strides(x, sink_probability.has_value() || dropout.active);
  merge_rows(x,
             {x.strides().data(), mask_strides.data(), y.strides().data(), query.data(), batch.data(), head.data(),
              statistic.data()},
             problem.rows);
  return problem;
}

BackwardProblem backward_problem(const Tensor& grad, const Tensor& y, const Options& options,
                                 const OptionalTensor& key_lengths, const OptionalTensor& dx,
                                 const OptionalTensor& dots, const Dropout& dropout) {
  auto problem = gradient_problem<BackwardProblem>(grad, y, options, key_lengths);
  problem.dropout = dropout;
  problem.scale =
      dropout.active ? scale_with_dropout(options.scale, dropout.factor, y.scalar_type()) : options.scale;
  problem.dx = data_or_null(dx);
  problem.dots = data_or_null(dots);
  const StrideBuffer none(y.dim(), 0);
  const StrideBuffer statistic = statistic_strides(y, dots.has_value() || dropout.active);
  const StrideBuffer query = query_strides(y, problem.band);
  const StrideBuffer batch = vector_strides(y, key_lengths, 0);
  const int64_t* const output = dx.has_value() ? dx->strides().data() : none.data();
  merge_rows(y,
             {y.strides().data(), grad.strides().data(), output, query.data(), batch.data(), none.data(),
              statistic.data()},
             problem.rows);
  return problem;
}

MaskGradientProblem mask_gradient_problem(const Tensor& grad, const Tensor& y, const Tensor& dots,
                                          const Options& options, const OptionalTensor& key_lengths,
                                          const Tensor& gradient, const Dropout& dropout) {
  auto problem = gradient_problem<MaskGradientProblem>(grad, y, options, key_lengths);
  problem.dropout = dropout;
  problem.dots = dots.const_data_ptr();
  problem.gradient = gradient.mutable_data_ptr();
  problem.gradient_float32 = gradient.scalar_type() == at::kFloat;
  StrideBuffer output(y.dim(), 0);
  for (int64_t d = 0; d < y.dim() - 1; ++d) {
    if (gradient.size(d) == y.size(d)) output[d] = gradient.stride(d);
  }
  const StrideBuffer none(y.dim(), 0);
  const StrideBuffer statistic = statistic_strides(y, true);
  const StrideBuffer query = query_strides(y, problem.band);
  const StrideBuffer batch = vector_strides(y, key_lengths, 0);
  merge_rows(y,
             {y.strides().data(), grad.strides().data(), output.data(), query.data(), batch.data(), none.data(),
              statistic.data()},
             problem.rows);
  RowDim* const end = problem.rows.dim + problem.rows.dims;
  problem.mask_dims = static_cast<int>(
      std::stable_partition(problem.rows.dim, end, [](const RowDim& dim) { return dim.stride[kOutput] != 0; }) -
      problem.rows.dim);
  return problem;
}

}  // namespace sms
