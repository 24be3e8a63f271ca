#if defined(__x86_64__)
#define SMS_VECTOR_BYTES 64
#include "rows_impl.h"

namespace sms::cpu {
constinit const RowKernels kAvx512Rows = make_row_kernels("AVX512");
}
#endif
