// Entry points of the CUDA kernels: everything between the ATen side (ops.cpp) and the launches (.cu). Free of torch.
#pragma once

#include <cuda_runtime_api.h>

#include "../problem.h"

namespace sms::cuda {

// What a launch needs to know of the device.
struct Device {
  int capability;                 // 10 * major + minor
  int multiprocessors;
  int max_shared_memory_per_block;  // opt-in limit, bytes
};

// Launch on `stream` of the current device. Return the first launch error; never synchronize.
cudaError_t forward(const ForwardProblem& problem, const Device& device, cudaStream_t stream);
cudaError_t backward(const BackwardProblem& problem, const Device& device, cudaStream_t stream);

}  // namespace sms::cuda
