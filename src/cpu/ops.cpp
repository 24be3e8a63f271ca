#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>

#include <mutex>

#include "../kernels_for_device.h"
#include "kernels.h"

namespace sms {
namespace {

struct CpuLaunch {
  // Without the dispatcher, whose way is a part of what a small call takes.
  static at::Tensor empty_as(const at::Tensor& x) { return at::detail::empty_cpu(x.sizes(), x.scalar_type()); }
  static void forward(const ForwardProblem& problem, const at::Tensor&) { cpu::forward(problem); }
  static void backward(const BackwardProblem& problem, const at::Tensor&) { cpu::backward(problem); }
  static bool takes(const MaskGradientProblem&) { return true; }
  static void mask_gradient(const MaskGradientProblem& problem, const at::Tensor&) { cpu::mask_gradient(problem); }
  static void dropout_keep(const Dropout& dropout, int64_t rows, int64_t columns, uint8_t* keep, const at::Tensor&) {
    cpu::dropout_keep(dropout, rows, columns, keep);
  }
  // A seed for each call.
  static RandomState random_state(const at::Tensor&) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    return {at::check_generator<at::CPUGeneratorImpl>(generator)->random64(), 0};
  }
};

}  // namespace
}  // namespace sms

TORCH_LIBRARY_IMPL(scaled_mask_softmax, CPU, library) { sms::KernelsForDevice<sms::CpuLaunch>::register_in(library); }
