#include "../kernels_for_device.h"
#include "kernels.h"

namespace sms {
namespace {

struct CpuLaunch {
  static void forward(const ForwardProblem& problem, const at::Tensor&) { cpu::forward(problem); }
  static void backward(const BackwardProblem& problem, const at::Tensor&) { cpu::backward(problem); }
  static void mask_gradient(const MaskGradientProblem& problem, const at::Tensor&) { cpu::mask_gradient(problem); }
};

}  // namespace
}  // namespace sms

TORCH_LIBRARY_IMPL(scaled_mask_softmax, CPU, library) { sms::KernelsForDevice<sms::CpuLaunch>::register_in(library); }
