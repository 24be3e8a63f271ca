# Runs release/configure.py, the one place that finds torch and nvcc and reads TORCH_CUDA_ARCH_LIST.
set(SMS_FACTS_FILE "${PROJECT_BINARY_DIR}/build_facts.json")
execute_process(
  COMMAND "${Python_EXECUTABLE}" -m release configure --output "${SMS_FACTS_FILE}"
  WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
  RESULT_VARIABLE result
  ERROR_VARIABLE messages)
if(NOT result EQUAL 0)
  string(STRIP "${messages}" messages)
  message(FATAL_ERROR "${messages}")
endif()
message("${messages}")
include("${PROJECT_BINARY_DIR}/build_facts.cmake")
# The decisions follow the environment and the matrix, so look again whenever the rules change.
set_property(
  DIRECTORY APPEND
  PROPERTY CMAKE_CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/release/matrix.toml"
           "${PROJECT_SOURCE_DIR}/release/configure.py" "${PROJECT_SOURCE_DIR}/release/arch_list.py")

find_program(SMS_CCACHE ccache)
if(SMS_CCACHE)
  foreach(language CXX CUDA)
    if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
      set(CMAKE_${language}_COMPILER_LAUNCHER "${SMS_CCACHE}")
    endif()
  endforeach()
endif()
