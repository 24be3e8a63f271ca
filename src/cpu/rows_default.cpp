#define SMS_VECTOR_BYTES 16
#include "rows_impl.h"

namespace sms::cpu {
constinit const RowKernels kDefaultRows = make_row_kernels("DEFAULT");
}
