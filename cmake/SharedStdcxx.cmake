# torch uses the shared C++ library. A compiler without a shared one beside it links the static one instead, and a second
# copy of its locale tables in the process crashes at the first number that is formatted. Named before the compiler's
# own choice, the system's shared library serves every symbol.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  execute_process(
    COMMAND "${CMAKE_CXX_COMPILER}" -print-file-name=libstdc++.so
    OUTPUT_VARIABLE path
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(path STREQUAL "libstdc++.so")
    message(STATUS "${CMAKE_CXX_COMPILER} has no shared libstdc++: linking the system's libstdc++.so.6")
    target_link_libraries(sms_options INTERFACE "-l:libstdc++.so.6")
  endif()
endif()
