#if defined(__x86_64__)
#define SMS_VECTOR_BYTES 32
#include "rows_impl.h"

namespace sms::cpu {
constinit const RowKernels kAvx2Rows = make_row_kernels("AVX2");
}
#endif
