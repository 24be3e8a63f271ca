// The launches behind kernels.cu, one explicit instantiation a .cu file so that they compile in parallel. `whole`:
// every row of every operand begins on a vector boundary and is a whole number of vectors, with column stride 1.
#pragma once

#include <cuda_runtime_api.h>

#include "arguments.h"
#include "policy.h"

namespace sms::cuda {

template <Element kElement, MaskKind kMask>
cudaError_t launch_forward(const Plan& plan, bool whole, const ForwardArguments& arguments, cudaStream_t stream);

template <Element kElement>
cudaError_t launch_backward(const Plan& plan, bool whole, const BackwardArguments& arguments, cudaStream_t stream);

// With dropout, for rows of any layout.
template <Element kElement, MaskKind kMask>
cudaError_t launch_forward_dropout(const Plan& plan, const ForwardArguments& arguments, cudaStream_t stream);

template <Element kElement>
cudaError_t launch_backward_dropout(const Plan& plan, const BackwardArguments& arguments, cudaStream_t stream);

template <Element kElement, bool kDropout>
cudaError_t launch_mask_gradient(const MaskGradientArguments& arguments, cudaStream_t stream);

// One byte a cell, dense: 1 where dropout keeps it.
cudaError_t launch_keep(const DropoutArguments& dropout, int64_t rows, int64_t columns, uint8_t* keep,
                        cudaStream_t stream);

}  // namespace sms::cuda
