// The gradient of a mask by a launcher with narrow limits, against one without any. Exits with 1 where they differ.
#include <ATen/ATen.h>

#include <cstdio>
#include <vector>

#include "mask_pieces.h"

namespace {

// Of dimensions and of rows, those of the mask and those that are summed each.
constexpr int kDims = 2;
constexpr int64_t kRows = 7;

int launches = 0;

// By definition, for float and double. An active dropout multiplies by a number that follows from the row's own.
template <typename Real>
void compute(const sms::MaskGradientProblem& problem) {
  const auto walk = [&](auto&& self, int d, int end, std::vector<int64_t> offsets, const auto& visit) -> void {
    if (d == end) return visit(offsets);
    const sms::RowDim& dim = problem.rows.dim[d];
    for (int64_t i = 0; i < dim.size; ++i) {
      self(self, d + 1, end, offsets, visit);
      for (int k = 0; k < sms::kOperands; ++k) offsets[k] += dim.stride[k];
    }
  };
  const auto* const y = static_cast<const Real*>(problem.y);
  const auto* const grad = static_cast<const Real*>(problem.grad);
  const auto* const dots = static_cast<const Real*>(problem.dots);
  auto* const gradient = static_cast<Real*>(problem.gradient);
  walk(walk, 0, problem.mask_dims, std::vector<int64_t>(sms::kOperands), [&](const std::vector<int64_t>& row) {
    std::vector<double> sums(problem.columns);
    walk(walk, problem.mask_dims, problem.rows.dims, row, [&](const std::vector<int64_t>& at) {
      sms::ColumnRange live = sms::live_columns(problem.band, problem.columns, at[sms::kQuery]);
      if (problem.key_lengths != nullptr) {
        live = sms::shortened(live, static_cast<const int64_t*>(problem.key_lengths)[at[sms::kBatch]]);
      }
      const int64_t number = problem.dropout.first_row + at[sms::kStatistic];
      const double weight = problem.dropout.active ? 1 + number % 7 : 1;
      for (int64_t j = live.begin; j < live.end; ++j) {
        const double change = grad[at[sms::kSecond] + j] - dots[at[sms::kStatistic]];
        sums[j] += weight * y[at[sms::kInput] + j] * change;
      }
    });
    for (int64_t j = 0; j < problem.columns; ++j) gradient[row[sms::kOutput] + j] = static_cast<Real>(sums[j]);
  });
}

void compute_any(const sms::MaskGradientProblem& problem) {
  problem.element == sms::Element::float64 ? compute<double>(problem) : compute<float>(problem);
}

struct Limited {
  static bool takes(const sms::MaskGradientProblem& problem) {
    sms::Rows parts[2];
    parts[0].dims = problem.mask_dims;
    parts[1].dims = problem.rows.dims - problem.mask_dims;
    std::copy_n(problem.rows.dim, parts[0].dims, parts[0].dim);
    std::copy_n(problem.rows.dim + parts[0].dims, parts[1].dims, parts[1].dim);
    for (const sms::Rows& part : parts) {
      if (part.dims > kDims || part.count() > kRows) return false;
    }
    return true;
  }
  static void mask_gradient(const sms::MaskGradientProblem& problem, const at::Tensor&) {
    TORCH_CHECK(takes(problem));
    ++launches;
    compute_any(problem);
  }
};

struct Unlimited {
  static bool takes(const sms::MaskGradientProblem&) { return true; }
  static void mask_gradient(const sms::MaskGradientProblem& problem, const at::Tensor&) {
    compute_any(problem);
  }
};

template <typename Launch>
at::Tensor run(const at::Tensor& grad, const at::Tensor& y, const at::Tensor& dots, const sms::Options& options,
               const sms::OptionalTensor& key_lengths, const std::vector<int64_t>& size, const sms::Dropout& dropout) {
  at::Tensor gradient = at::full(size, NAN, y.options());
  const auto problem = sms::mask_gradient_problem(grad, y, dots, options, key_lengths, gradient, dropout);
  sms::launch_mask_gradient<Launch>(problem, gradient, y);
  return gradient;
}

}  // namespace

int main() {
  at::manual_seed(0);
  const std::vector<int64_t> shape = {3, 4, 2, 3, 2, 11, 5};
  const at::Tensor state = at::tensor({int64_t{7}, int64_t{8}});
  int wrong = 0;
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    const at::Tensor y = at::softmax(at::randn(shape, at::kDouble), -1).to(dtype);
    const at::Tensor grad = at::randn({5, 11, 2, 3, 2, 4, 3}, at::kDouble).to(dtype).permute({6, 5, 4, 3, 2, 1, 0}).clone();
    const at::Tensor lengths = at::tensor({int64_t{5}, int64_t{2}, int64_t{0}});
    for (int kept = 0; kept < 64; ++kept) {  // which dimensions of the rows the mask has
      std::vector<int64_t> size = shape;
      for (int d = 0; d < 6; ++d) {
        if ((kept >> d & 1) == 0) size[d] = 1;
      }
      for (int variant = 0; variant < 4; ++variant) {
        const sms::Options options{1.0, variant % 2 == 1, -4, std::nullopt};
        const sms::OptionalTensor key_lengths = variant >= 2 ? sms::OptionalTensor(lengths) : std::nullopt;
        const sms::Dropout dropout = variant == 3 ? sms::dropout_of(0.5, state) : sms::Dropout{};
        const at::Tensor dots = at::randn({3, 4, 2, 3, 2, 11}, sms::statistic_options(y));
        const at::Tensor got = run<Limited>(grad, y, dots, options, key_lengths, size, dropout);
        const at::Tensor expected = run<Unlimited>(grad, y, dots, options, key_lengths, size, dropout);
        const double eps = dtype == at::kDouble ? 1e-15 : 1e-7;
        if (!at::allclose(got, expected, 64 * eps, 64 * eps)) {
          std::printf("wrong: dtype %s, kept %d, variant %d\n", c10::toString(dtype), kept, variant);
          ++wrong;
        }
      }
    }
  }
  std::printf("%d launches, %d wrong\n", launches, wrong);
  return wrong != 0 || launches == 0;
}
