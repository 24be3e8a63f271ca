# Imported targets for torch's libraries: sms_torch, and with CUDA sms_torch_cuda. torch's own package configuration
# would find and configure CUDA a second time, with global flags, and fails on newer toolkits.
set(torch_library_dir "${SMS_TORCH_DIR}/lib")

function(sms_import_torch_library name)
  add_library(${name} SHARED IMPORTED)
  set_target_properties(${name} PROPERTIES IMPORTED_LOCATION "${torch_library_dir}/lib${name}.so")
  if(NOT EXISTS "${torch_library_dir}/lib${name}.so")
    message(FATAL_ERROR "torch ${SMS_TORCH} lacks ${torch_library_dir}/lib${name}.so")
  endif()
endfunction()

add_library(sms_torch INTERFACE)
# SYSTEM: our warnings are not about torch's headers.
target_include_directories(
  sms_torch SYSTEM INTERFACE "${SMS_TORCH_DIR}/include" "${SMS_TORCH_DIR}/include/torch/csrc/api/include")
foreach(library c10 torch_cpu)
  sms_import_torch_library(${library})
  target_link_libraries(sms_torch INTERFACE ${library})
endforeach()

set(SMS_TORCH_RPATH "$ORIGIN/../torch/lib")
if(SMS_CUDA)
  add_library(sms_torch_cuda INTERFACE)
  foreach(library c10_cuda torch_cuda)
    sms_import_torch_library(${library})
    target_link_libraries(sms_torch_cuda INTERFACE ${library})
  endforeach()
  # Where torch's own dependencies put the CUDA runtime.
  if(SMS_CUDA_MAJOR GREATER_EQUAL 13)
    list(APPEND SMS_TORCH_RPATH "$ORIGIN/../nvidia/cu${SMS_CUDA_MAJOR}/lib")
  else()
    list(APPEND SMS_TORCH_RPATH "$ORIGIN/../nvidia/cuda_runtime/lib")
  endif()
endif()
