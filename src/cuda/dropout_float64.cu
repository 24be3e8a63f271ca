// Instantiates the kernels of float64 rows with dropout.
#include "launch.cuh"
#include "mask_gradient.cuh"

namespace sms::cuda {

template cudaError_t launch_forward_dropout<Element::float64, MaskKind::boolean>(const Plan&, const ForwardArguments&,
    cudaStream_t);
template cudaError_t launch_forward_dropout<Element::float64, MaskKind::same>(const Plan&, const ForwardArguments&,
    cudaStream_t);
template cudaError_t launch_backward_dropout<Element::float64>(const Plan&, const BackwardArguments&, cudaStream_t);
template cudaError_t launch_mask_gradient<Element::float64, true>(const MaskGradientArguments&, cudaStream_t);

}  // namespace sms::cuda
