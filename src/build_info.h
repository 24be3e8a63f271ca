// What the library was built from, for _C. Free of torch.
#pragma once

namespace sms {

struct BuildInfo {
  const char* torch;          // exact version built against
  const char* cuda;           // torch's CUDA release; null in a build without CUDA
  const char* cuda_compiler;  // version of nvcc; null in a build without CUDA
  const char* host_compiler;  // name and version
  bool cxx11_abi;
  const char* instruction_set;  // that the CPU kernels use on this machine
};

// The one function that the library exports besides its operators.
__attribute__((visibility("default"))) BuildInfo build_info();

}  // namespace sms
