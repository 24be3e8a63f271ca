#if defined(SMS_WITH_CUDA)

#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <atomic>
#include <mutex>

#include "../kernels_for_device.h"
#include "kernels.h"

namespace sms {
namespace {

constexpr int kMaxDevices = 128;

// The current device, asked once: an eager call must not pay for it.
cuda::Device current_device() {
  static std::array<std::atomic<cuda::Device>, kMaxDevices> known;  // threads that race write the same value
  const int index = c10::cuda::current_device();
  TORCH_CHECK(index < kMaxDevices, "scaled_mask_softmax: CUDA device index is ", index, "; expected less than ",
              kMaxDevices, ". Make fewer devices visible with CUDA_VISIBLE_DEVICES.");
  cuda::Device device = known[index].load(std::memory_order_relaxed);
  if (device.capability == 0) {  // not asked yet
    int major = 0;
    int minor = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&device.l2_bytes, cudaDevAttrL2CacheSize, index));
    device.capability = 10 * major + minor;
    known[index].store(device, std::memory_order_relaxed);
  }
  return device;
}

void check_launch(cudaError_t status, int capability) {
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorUnsupportedPtxVersion) {
    (void)cudaGetLastError();  // taken up by the exception
    const int major = capability / 10;
    const int minor = capability % 10;
    TORCH_CHECK(false, "scaled_mask_softmax: this build holds no kernel that runs on compute capability ", major, ".",
                minor, " with this driver (", cudaGetErrorString(status), "); expected one of the architectures in "
                "scaled_mask_softmax.build_info(). Install a wheel that has it, build one with TORCH_CUDA_ARCH_LIST=\"",
                major, ".", minor, "\", or update the driver.");
  }
  C10_CUDA_CHECK(status);
}

struct CudaLaunch {
  static at::Tensor empty_as(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }
  static void forward(const ForwardProblem& problem, const at::Tensor& x) {
    const c10::cuda::CUDAGuard guard(x.device());
    const cuda::Device device = current_device();
    check_launch(cuda::forward(problem, device, c10::cuda::getCurrentCUDAStream()), device.capability);
  }
  static void backward(const BackwardProblem& problem, const at::Tensor& y) {
    const c10::cuda::CUDAGuard guard(y.device());
    const cuda::Device device = current_device();
    check_launch(cuda::backward(problem, device, c10::cuda::getCurrentCUDAStream()), device.capability);
  }
  static bool takes(const MaskGradientProblem& problem) { return cuda::fits(problem); }
  static void mask_gradient(const MaskGradientProblem& problem, const at::Tensor& y) {
    const c10::cuda::CUDAGuard guard(y.device());
    check_launch(cuda::mask_gradient(problem, c10::cuda::getCurrentCUDAStream()), current_device().capability);
  }
  static void dropout_keep(const Dropout& dropout, int64_t rows, int64_t columns, uint8_t* keep, const at::Tensor& x) {
    const c10::cuda::CUDAGuard guard(x.device());
    check_launch(cuda::dropout_keep(dropout, rows, columns, keep, c10::cuda::getCurrentCUDAStream()),
                 current_device().capability);
  }
  // One number of each subsequence: a cell's four has one of its own. While a graph is captured the state lies on the
  // device, where each replay finds another offset.
  static RandomState random_state(const at::Tensor& x) {
    const c10::cuda::CUDAGuard guard(x.device());
    at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(x.get_device());
    const std::lock_guard<std::mutex> lock(generator.mutex());
    const at::PhiloxCudaState state =
        at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_cuda_state(/*increment=*/4);
    if (!state.captured_) return {state.seed_.val, state.offset_.val};
    return {0, state.offset_intragraph_, state.seed_.ptr, state.offset_.ptr};
  }
};

}  // namespace
}  // namespace sms

TORCH_LIBRARY_IMPL(scaled_mask_softmax, CUDA, library) {
  sms::KernelsForDevice<sms::CudaLaunch>::register_in(library);
}

#else

#include "../kernels_for_device.h"

namespace sms {
namespace {

// Without these a CUDA tensor would silently take the composite, the kernel for every other device.
struct NoCudaLaunch {
  static void forward(const ForwardProblem&, const at::Tensor&) { refuse(); }
  static void backward(const BackwardProblem&, const at::Tensor&) { refuse(); }
  static bool takes(const MaskGradientProblem&) { return true; }
  static void mask_gradient(const MaskGradientProblem&, const at::Tensor&) { refuse(); }
  static void dropout_keep(const Dropout&, int64_t, int64_t, uint8_t*, const at::Tensor&) { refuse(); }
  static RandomState random_state(const at::Tensor&) { refuse(); }
  [[noreturn]] static void refuse() {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "scaled_mask_softmax: x is on a CUDA device; this wheel was built without CUDA and "
                                "takes CPU tensors. Install the wheel that matches torch's CUDA, or use x.cpu().");
  }
};

}  // namespace
}  // namespace sms

TORCH_LIBRARY_IMPL(scaled_mask_softmax, CUDA, library) {
  sms::KernelsForDevice<sms::NoCudaLaunch>::register_in(library);
}

#endif
