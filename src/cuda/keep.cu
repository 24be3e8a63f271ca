// The pattern of dropout as a tensor: for derivatives that plain torch operators compute.
#include "dropout.cuh"
#include "launch.h"

namespace sms::cuda {

// Each thread takes fours of columns in turn.
__global__ void __launch_bounds__(kKeepThreads)
    keep_rows(const __grid_constant__ DropoutArguments arguments, int64_t fours, int64_t columns, uint8_t* keep) {
  const Draw draw = draw_of(arguments.random);
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t four = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; four < fours; four += step) {
    const int64_t row = four / arguments.fours;
    const int64_t column = (four - row * arguments.fours) * kFour;
    uint32_t word[kFour];
    random_four(word, draw, static_cast<uint64_t>(four));
    for (int i = 0; i < kFour && column + i < columns; ++i) {
      keep[row * columns + column + i] = word[i] >= arguments.threshold ? 1 : 0;
    }
  }
}

cudaError_t launch_keep(const DropoutArguments& dropout, int64_t rows, int64_t columns, uint8_t* keep,
                        cudaStream_t stream) {
  const int64_t fours = rows * dropout.fours;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(std::min<int64_t>((fours - 1) / kKeepThreads + 1, 1 << 16)));
  config.blockDim = dim3(kKeepThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, keep_rows, dropout, fours, columns, keep);
}

}  // namespace sms::cuda
