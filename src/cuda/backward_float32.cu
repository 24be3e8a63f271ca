// Instantiates the backward kernels of float32 rows.
#include "launch.cuh"

namespace sms::cuda {

template cudaError_t launch_backward<Element::float32>(const Plan&, bool, const BackwardArguments&, cudaStream_t);

}  // namespace sms::cuda
