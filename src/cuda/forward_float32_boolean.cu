// Instantiates the forward kernels of float32 rows, mask kind boolean.
#include "launch.cuh"

namespace sms::cuda {

template cudaError_t launch_forward<Element::float32, MaskKind::boolean>(const Plan&, bool, const ForwardArguments&,
    cudaStream_t);

}  // namespace sms::cuda
