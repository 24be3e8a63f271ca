// Instantiates the kernels for the gradient of a mask.
#include "mask_gradient.cuh"

namespace sms::cuda {

template cudaError_t launch_mask_gradient<Element::float16, false>(const MaskGradientArguments&, cudaStream_t);
template cudaError_t launch_mask_gradient<Element::bfloat16, false>(const MaskGradientArguments&, cudaStream_t);
template cudaError_t launch_mask_gradient<Element::float32, false>(const MaskGradientArguments&, cudaStream_t);
template cudaError_t launch_mask_gradient<Element::float64, false>(const MaskGradientArguments&, cudaStream_t);

}  // namespace sms::cuda
