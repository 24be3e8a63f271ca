// A program without Python: loads the library of operators, runs forward and backward, and prints the results.
//
//   use_library LIBRARY
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/autograd.h>

#include <iostream>
#include <optional>

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Forward = Tensor(const Tensor&, const OptionalTensor&, double, bool, c10::SymInt, std::optional<c10::SymInt>,
                       const OptionalTensor&, const OptionalTensor&);

namespace {

void print(const char* name, const Tensor& tensor) {
  std::cout << name;
  const Tensor flat = tensor.detach().flatten();
  for (int64_t i = 0; i < flat.numel(); ++i) std::cout << ' ' << flat[i].item<double>();
  std::cout << '\n';
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2 || dlopen(arguments[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::cerr << "usage: use_library LIBRARY; " << (count == 2 ? dlerror() : "no library given") << '\n';
    return 1;
  }
  const auto softmax = c10::Dispatcher::singleton()
                           .findSchemaOrThrow("scaled_mask_softmax::scaled_mask_softmax", "")
                           .typed<Forward>();
  std::cout.precision(17);
  Tensor x = at::arange(12, at::kDouble).reshape({3, 4});
  x.set_requires_grad(true);
  const Tensor mask = at::tensor({0, 0, 1, 0}, at::kInt).to(at::kBool);
  const Tensor y = softmax.call(x, mask, 0.5, true, 1, std::nullopt, std::nullopt, std::nullopt);
  print("y", y);
  print("dx", torch::autograd::grad({y}, {x}, {x.detach()})[0]);
  return 0;
}
