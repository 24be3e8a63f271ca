// Instantiates the forward kernels of float64 rows, of every mask kind: they are few.
#include "launch.cuh"

namespace sms::cuda {

template cudaError_t launch_forward<Element::float64, MaskKind::none>(const Plan&, bool, const ForwardArguments&,
    cudaStream_t);
template cudaError_t launch_forward<Element::float64, MaskKind::boolean>(const Plan&, bool, const ForwardArguments&,
    cudaStream_t);
template cudaError_t launch_forward<Element::float64, MaskKind::same>(const Plan&, bool, const ForwardArguments&,
    cudaStream_t);

}  // namespace sms::cuda
