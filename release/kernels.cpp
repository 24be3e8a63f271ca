// Lists the kernels that the policy can choose, by how their symbols begin in a cubin. For release/verify.py.
#include <cstdio>

#include "../src/cuda/policy.h"

int main() {
  for (const sms::cuda::Kernel& kernel : sms::cuda::all_kernels()) std::puts(kernel.symbol_prefix().c_str());
}
