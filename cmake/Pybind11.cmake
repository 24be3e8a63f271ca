# sms_pybind11: the headers of the installed pybind11.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import pybind11; print(pybind11.get_include())"
  RESULT_VARIABLE result
  OUTPUT_VARIABLE pybind11_include
  OUTPUT_STRIP_TRAILING_WHITESPACE
  ERROR_QUIET)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no pybind11: pip install pybind11")
endif()
add_library(sms_pybind11 INTERFACE)
target_include_directories(sms_pybind11 SYSTEM INTERFACE "${pybind11_include}")
