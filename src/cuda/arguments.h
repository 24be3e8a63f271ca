// What a kernel is given: one piece of a problem, ready for the device. Free of torch.
#pragma once

#include <cstdint>

#include "row_map.h"

namespace sms::cuda {

struct ForwardArguments {
  RowMap rows;      // input = x, second = mask, output = y
  const char* x;    // no restrict and no read-only loads: y may be x itself
  const char* mask;
  char* y;
  int64_t columns;
  int64_t mask_column_stride;  // bytes
  Band band;        // of query index 0; covers every column where nothing is excluded
  RowValues key_lengths;
  bool key_lengths_64;
  double scale;
};

struct BackwardArguments {
  RowMap rows;      // input = y, second = grad, output = dx
  const char* y;
  const char* grad;
  char* dx;
  int64_t columns;
  bool grad_expanded;  // column stride 0: one element serves the row
  Band band;
  RowValues key_lengths;
  bool key_lengths_64;
  double scale;
};

#if defined(__CUDACC__)
template <typename Arguments>
__device__ __forceinline__ ColumnRange live_columns(const Arguments& arguments, uint32_t row, const RowPlace& place) {
  const ColumnRange live = live_columns(arguments.band, arguments.columns, place.query);
  if (arguments.key_lengths.data == nullptr) return live;
  const char* length = arguments.rows.find(arguments.key_lengths, row);
  return shortened(live, read_key_length(length, arguments.key_lengths_64));
}
#endif

}  // namespace sms::cuda
