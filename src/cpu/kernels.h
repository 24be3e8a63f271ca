// Entry points of the CPU kernels. Free of torch.
#pragma once

#include "../problem.h"

namespace sms::cpu {

// Parallel over rows with torch's thread pool (and over fixed column chunks where rows are few and long).
void forward(const ForwardProblem& problem);
void backward(const BackwardProblem& problem);
void mask_gradient(const MaskGradientProblem& problem);

// One byte a cell, dense: 1 where dropout keeps it.
void dropout_keep(const Dropout& dropout, int64_t rows, int64_t columns, uint8_t* keep);

// The instruction set chosen at run time: "DEFAULT", "AVX2" or "AVX512" (torch's names, torch's choice).
const char* instruction_set();

}  // namespace sms::cpu
