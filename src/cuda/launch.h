// The launches behind kernels.cu, one explicit instantiation a .cu file so that they compile in parallel.
#pragma once

#include <cuda_runtime_api.h>

#include "arguments.h"
#include "policy.h"

namespace sms::cuda {

template <Element kElement, MaskKind kMask>
cudaError_t launch_forward(const Plan& plan, const ForwardArguments& arguments, cudaStream_t stream);

template <Element kElement>
cudaError_t launch_backward(const Plan& plan, const BackwardArguments& arguments, cudaStream_t stream);

}  // namespace sms::cuda
