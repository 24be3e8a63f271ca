// Instantiates the backward kernels of bfloat16 rows.
#include "launch.cuh"

namespace sms::cuda {

template cudaError_t launch_backward<Element::bfloat16>(const Plan&, bool, const BackwardArguments&, cudaStream_t);

}  // namespace sms::cuda
