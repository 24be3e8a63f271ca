// Instantiates the kernel for the gradient of a mask of bfloat16 rows.
#include "mask_gradient.cuh"

namespace sms::cuda {

template cudaError_t launch_mask_gradient<Element::bfloat16, false>(const MaskGradientArguments&, cudaStream_t);

}  // namespace sms::cuda
