// What a kernel is given: one piece of a problem, ready for the device. Free of torch.
#pragma once

#include <cstdint>
#include <limits>

#include "../philox.h"
#include "../row_math.h"
#include "row_map.h"

namespace sms::cuda {

// The exclusions by position, as live_columns() takes them, where every sum fits 32 bits: for rows held on chip.
struct NearBand {
  int begin;
  int end;
};

inline NearBand near_band(const Band& band) {
  const auto clamp = [](int64_t value) {
    return static_cast<int>(std::clamp<int64_t>(value, -kMapRows, kMapRows));
  };
  return {clamp(band.begin), clamp(band.end)};
}

// How 16-bit scores without a float mask become exponents without being scaled first: the sign of the scale is moved
// into the elements, so that the largest element is the largest score, and the rest of it into the change of base.
struct PackedScale {
  uint32_t flip;  // sign bits of a pair of elements to invert: those of a negative scale
  bool zero;      // scale 0: each element becomes 0, or NaN where 0 * element is; the others are as for scale 1
  float unit;     // |scale|
  float factor;   // |scale| * log2(e), finite
};

inline PackedScale packed_scale(double scale) {
  const bool zero = static_cast<float>(scale) == 0.0f;
  const double unit = zero ? 1.0 : std::abs(scale);
  const double largest = std::numeric_limits<float>::max();
  return {scale < 0 && !zero ? 0x80008000u : 0u, zero, static_cast<float>(unit),
          static_cast<float>(std::min(unit * kLog2E, largest))};
}

// The bytes [low, high) from the first to the last of an operand. Loads of whole vectors stay inside.
struct Span {
  uintptr_t low;
  uintptr_t high;
};

// How far ahead rows are brought into the L2.
struct RowPrefetch {
  uint32_t distance;  // in blocks of warp_rows, or rows or pairs of the others; 0: not at all
  uint32_t rows;      // at once: 1, or all of a block where they lie one behind the other
};

// How far ahead a mask that neighbouring rows share is brought into the L2.
struct MaskPrefetch {
  uint32_t rows;  // 0: not at all
  uint32_t sharers;
  Divisor by_sharers;
};

// Which cells dropout keeps.
struct DropoutArguments {
  RandomState random;
  uint32_t threshold;  // as in Dropout
  float factor;
  double factor64;
  int64_t first_row;
  int64_t fours;  // in a row
  RowValues<const char> row_number;  // less first_row; no data
};

struct ForwardArguments {
  RowMap rows;      // input = x, second = mask, output = y
  const char* x;    // no restrict and no read-only loads: y may be x itself
  const char* mask;
  char* y;
  Span x_span;
  Span mask_span;
  int64_t columns;
  int64_t mask_column_stride;  // bytes
  RowPrefetch ahead;
  bool from_both_ends;  // as takes_from_both_ends()
  MaskPrefetch mask_prefetch;
  int part_columns;            // as in Plan
  Divisor by_part_columns;     // for pair_rows
  int shared_second;           // where the mask begins there, in bytes
  Band band;        // of query index 0; covers every column where nothing is excluded
  NearBand near;
  RowValues<const char> key_lengths;
  bool key_lengths_64;
  RowValues<const char> sink;
  bool sink_float32;           // else x's dtype
  RowValues<char> sink_probability;
  PackedScale packed;
  float scale;
  double scale64;
  DropoutArguments dropout;
  char* before_dropout;   // null, or where y goes as it was before dropout, laid out and aligned as y
  int64_t* random_state;  // null, or where seed and offset go
};

struct BackwardArguments {
  RowMap rows;      // input = y, second = grad, output = dx
  const char* y;
  const char* grad;
  char* dx;
  Span y_span;
  Span grad_span;
  int64_t columns;
  int part_columns;
  int shared_second;   // where grad begins
  bool grad_expanded;  // column stride 0: one element serves the row
  RowPrefetch ahead;
  bool from_both_ends;
  Band band;
  NearBand near;
  RowValues<const char> key_lengths;
  bool key_lengths_64;
  RowValues<char> dots;
  float scale;
  double scale64;
  DropoutArguments dropout;
};

struct MaskGradientArguments {
  RowMap mask_rows;    // input = y, second = grad, output = gradient, as are those of:
  RowMap summed_rows;  // the rows that share one of the mask's
  uint32_t tiles;      // a block takes one of them from a row of the mask
  const char* y;
  const char* grad;
  char* gradient;
  Span y_span;
  Span grad_span;
  int64_t columns;
  bool grad_expanded;
  bool gradient_float32;  // else dtype of y
  Band band;
  RowValues<const char> key_lengths[2];  // by row of the mask, and by summed row; the data in the first alone
  bool key_lengths_64;
  RowValues<const char> dots[2];
  DropoutArguments dropout;
  RowValues<const char> summed_row_number;  // less those of the mask's rows
};

#if defined(__CUDACC__)
// Where the row's keys end, any number.
template <typename Arguments>
__device__ __forceinline__ int64_t key_length(const Arguments& arguments, uint32_t row) {
  return read_key_length(arguments.rows.find(arguments.key_lengths, row), arguments.key_lengths_64);
}

// Of a row of any length.
template <typename Arguments>
__device__ __forceinline__ ColumnRange live_columns(const Arguments& arguments, uint32_t row, const RowPlace& place) {
  const ColumnRange live = live_columns(arguments.band, arguments.columns, place.query);
  return arguments.key_lengths.given ? shortened(live, key_length(arguments, row)) : live;
}
#endif

// The scale in the numbers that a row is computed with.
template <typename Real, typename Arguments>
SMS_HOST_DEVICE Real scale_of(const Arguments& arguments) {
  return sizeof(Real) == 4 ? static_cast<Real>(arguments.scale) : static_cast<Real>(arguments.scale64);
}

}  // namespace sms::cuda
