#include "build_info.h"

#include "cpu/kernels.h"

// The build passes these to this file alone, so that a new compiler or torch recompiles little.
#if !defined(SMS_TORCH_VERSION) || !defined(SMS_HOST_COMPILER) || !defined(SMS_CXX11_ABI)
#error "build_info.cpp needs SMS_TORCH_VERSION, SMS_HOST_COMPILER and SMS_CXX11_ABI from the build"
#endif
#if !defined(SMS_CUDA_VERSION)
#define SMS_CUDA_VERSION nullptr
#endif
#if !defined(SMS_CUDA_COMPILER)
#define SMS_CUDA_COMPILER nullptr
#endif

namespace sms {

BuildInfo build_info() {
  return {SMS_TORCH_VERSION, SMS_CUDA_VERSION,   SMS_CUDA_COMPILER,
          SMS_HOST_COMPILER, SMS_CXX11_ABI != 0, cpu::instruction_set()};
}

}  // namespace sms
