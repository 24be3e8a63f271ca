# The same rows compiled once an instruction set; which one runs is decided when it runs.
function(sms_cpu_options folder)
  # Compiled for OpenMP but not linked to it: torch brings the runtime, and two in one process would not share threads.
  set_source_files_properties(${folder}/kernels.cpp PROPERTIES COMPILE_OPTIONS -fopenmp)
  set(rows -ffp-contract=off) # every instruction set rounds alike
  set(avx2 -mavx2 -mfma -mf16c -mprfchw)
  set(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl ${avx2})
  set(default -O2) # a third less code, where few processors lack AVX2
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    set(avx2)
    set(avx512)
    set(default)
  endif()
  set_source_files_properties(${folder}/rows_default.cpp PROPERTIES COMPILE_OPTIONS "${rows};${default}")
  set_source_files_properties(${folder}/rows_avx2.cpp PROPERTIES COMPILE_OPTIONS "${rows};${avx2}")
  set_source_files_properties(${folder}/rows_avx512.cpp PROPERTIES COMPILE_OPTIONS "${rows};${avx512}")
endfunction()
