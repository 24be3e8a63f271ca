// Instantiates the forward kernels of float16 rows, mask kind float32.
#include "launch.cuh"

namespace sms::cuda {

template cudaError_t launch_forward<Element::float16, MaskKind::float32>(const Plan&, bool, const ForwardArguments&,
    cudaStream_t);

}  // namespace sms::cuda
