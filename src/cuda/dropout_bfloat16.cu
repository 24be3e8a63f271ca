// Instantiates the kernels of bfloat16 rows with dropout.
#include "launch.cuh"
#include "mask_gradient.cuh"

namespace sms::cuda {

template cudaError_t launch_forward_dropout<Element::bfloat16, MaskKind::boolean>(const Plan&, const ForwardArguments&,
    cudaStream_t);
template cudaError_t launch_forward_dropout<Element::bfloat16, MaskKind::same>(const Plan&, const ForwardArguments&,
    cudaStream_t);
template cudaError_t launch_forward_dropout<Element::bfloat16, MaskKind::float32>(const Plan&, const ForwardArguments&,
    cudaStream_t);
template cudaError_t launch_backward_dropout<Element::bfloat16>(const Plan&, const BackwardArguments&, cudaStream_t);
template cudaError_t launch_mask_gradient<Element::bfloat16, true>(const MaskGradientArguments&, cudaStream_t);

}  // namespace sms::cuda
