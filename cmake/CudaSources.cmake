# The CUDA part of the library: the compiler that release/configure.py chose, its architectures, a shared runtime.

# CMake's test of the compiler links a program, for which nvcc looks for folders and unversioned names that toolkits
# installed from a package registry lack. A folder of our own holds the links.
set(links "${PROJECT_BINARY_DIR}/cuda_links")
file(MAKE_DIRECTORY "${links}")
cmake_path(GET SMS_CUDART PARENT_PATH cuda_library_dir)
file(CREATE_LINK "${SMS_CUDART}" "${links}/libcudart.so" SYMBOLIC)
foreach(library cudart_static cudadevrt)
  if(EXISTS "${cuda_library_dir}/lib${library}.a")
    file(CREATE_LINK "${cuda_library_dir}/lib${library}.a" "${links}/lib${library}.a" SYMBOLIC)
  endif()
endforeach()

# A build folder would keep the compiler that it met first, whatever is chosen now: forget another one.
set(remembered "${CMAKE_PLATFORM_INFO_DIR}/CMakeCUDACompiler.cmake")
if(EXISTS "${remembered}")
  file(STRINGS "${remembered}" lines REGEX "^set\\(CMAKE_CUDA_COMPILER(_VERSION)? ")
  set(chosen "set(CMAKE_CUDA_COMPILER \"${SMS_NVCC}\")" "set(CMAKE_CUDA_COMPILER_VERSION \"${SMS_CUDA_COMPILER}\")")
  if(NOT lines STREQUAL chosen)
    file(REMOVE "${remembered}")
    unset(CMAKE_CUDA_COMPILER CACHE)
  endif()
endif()
set(CMAKE_CUDA_COMPILER "${SMS_NVCC}")
if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})
  set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
endif()
# The architectures are options of our target, in spellings that CMake does not know.
set(CMAKE_CUDA_ARCHITECTURES OFF)
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
set(ENV{LIBRARY_PATH} "${links}:$ENV{LIBRARY_PATH}")
enable_language(CUDA)

add_library(sms_cudart SHARED IMPORTED)
set_target_properties(sms_cudart PROPERTIES IMPORTED_LOCATION "${SMS_CUDART}")

function(sms_add_cuda target)
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES OFF)
  target_include_directories(${target} SYSTEM PRIVATE "${SMS_CUDA_INCLUDE}")
  target_link_libraries(${target} PRIVATE sms_torch_cuda sms_cudart)
  target_compile_definitions(${target} PRIVATE SMS_WITH_CUDA=1)
  foreach(code IN LISTS SMS_GENCODE)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=${code}>")
  endforeach()
  # A GPU that NVIDIA is about to drop is still one that we serve.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Wno-deprecated-gpu-targets>)
  # A third of the wheel and three quarters of the library. Not with CUDA 12: what its compilers compress, drivers older
  # than CUDA 12.4's do not read, and release/matrix.toml promises older ones; those of CUDA 13 read it all.
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
  endif()
  if("$ENV{NVCC_THREADS}" MATCHES "^[1-9][0-9]*$")
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--threads=$ENV{NVCC_THREADS}>")
  endif()
endfunction()
