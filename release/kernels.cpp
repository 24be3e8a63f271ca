// Lists the kernels that the policy can choose: how their symbols begin in a cubin, and the threads of their largest
// block. For release/verify.py.
#include <cstdio>

#include "../src/cuda/kernel_list.h"

int main() {
  for (const sms::cuda::Kernel& kernel : sms::cuda::all_kernels()) {
    std::printf("%s %d\n", kernel.symbol_prefix().c_str(), kernel.threads());
  }
}
