// Instantiates the kernel for the gradient of a mask of float16 rows.
#include "mask_gradient.cuh"

namespace sms::cuda {

template cudaError_t launch_mask_gradient<Element::float16, false>(const MaskGradientArguments&, cudaStream_t);

}  // namespace sms::cuda
