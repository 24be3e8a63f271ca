// Entry points of the CUDA kernels: everything between the ATen side (ops.cpp) and the launches (.cu). Free of torch.
#pragma once

#include <cuda_runtime_api.h>

#include "../problem.h"

namespace sms::cuda {

struct Device {
  int capability;  // 10 * major + minor
  int l2_bytes;    // the size of its L2 cache
};

// Launch on `stream` of `device`, the current one. Return the first launch error; never synchronize.
cudaError_t forward(const ForwardProblem& problem, const Device& device, cudaStream_t stream);
cudaError_t backward(const BackwardProblem& problem, const Device& device, cudaStream_t stream);
cudaError_t mask_gradient(const MaskGradientProblem& problem, cudaStream_t stream);

// One byte a cell, dense: 1 where dropout keeps it.
cudaError_t dropout_keep(const Dropout& dropout, int64_t rows, int64_t columns, uint8_t* keep, cudaStream_t stream);

// Whether mask_gradient() takes the problem: few dimensions, and rows that 32 bits count.
bool fits(const MaskGradientProblem& problem);

}  // namespace sms::cuda
