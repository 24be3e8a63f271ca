// Instantiates the forward kernels of float64 rows, mask kind none.
#include "launch.cuh"

namespace sms::cuda {

template cudaError_t launch_forward<Element::float64, MaskKind::none>(const Plan&, bool, const ForwardArguments&,
    cudaStream_t);

}  // namespace sms::cuda
