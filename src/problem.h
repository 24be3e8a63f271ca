// What the kernels compute, as plain structs that host and device share. Free of torch and of CUDA.
//
// A problem is a set of rows, each `columns` long. Rows are addressed by a short list of dimensions with one stride per
// operand, so masks broadcast (stride 0), transposed leading dimensions and storage offsets need no copy. The query
// index of a row (dim -2 of x) is an operand too, with strides like any other: the dimension that is dim -2 of x has query
// stride 1, every other has 0. So are the places of a row in key_lengths (batch), in sink (head) and in results of one
// number a row (statistic), whose strides are 0 where a problem lacks them. Statistics are contiguous, so that a row's
// place among them is also its number, by which dropout draws.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define SMS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SMS_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace sms {

enum class Element : uint8_t { float16, bfloat16, float32, float64 };

// `same` is a float mask in x's dtype; `float32` a float32 mask for a 16-bit x.
enum class MaskKind : uint8_t { none, boolean, same, float32 };

enum class Direction : uint8_t { forward, backward };

SMS_HOST_DEVICE constexpr int element_bytes(Element element) {
  return element == Element::float64 ? 8 : element == Element::float32 ? 4 : 2;
}

// Of a number that belongs to a whole row, in the type that rows are accumulated in.
constexpr int statistic_bytes(Element element) { return element == Element::float64 ? 8 : 4; }

// Operands of a row. Forward: input = x, second = mask, output = y. Backward: input = y, second = grad, output = dx.
enum Operand : int { kInput, kSecond, kOutput, kQuery, kBatch, kHead, kStatistic, kOperands };

// One dimension of the row index; strides in elements of the operand (bytes are the kernel's affair).
struct RowDim {
  int64_t size;
  int64_t stride[kOperands];
};

// No tensor has more: dimensions of size 1 are dropped, and 64 others would hold more elements than 64 bits count.
inline constexpr int kMaxRowDims = 64;

// The row index space, outermost dimension first; no dimensions means one row. Entries past `dims` are unset.
struct Rows {
  int dims = 0;
  RowDim dim[kMaxRowDims];

  int64_t count() const {
    int64_t rows = 1;
    for (int d = 0; d < dims; ++d) rows *= dim[d].size;
    return rows;
  }
};

// Live columns of row i are [max(0, i + begin), min(columns, i + end)), i the query index: the exclusions by position
// (is_causal, window, both with diagonal) as one interval. Canonicalization clamps begin and end to about
// [-Sq, columns], so sums with a query index cannot overflow. Nothing is excluded where begin <= -(Sq - 1) and
// end >= columns; `active` is false then.
struct Band {
  bool active;
  int64_t begin;
  int64_t end;
};

struct ColumnRange {
  int64_t begin;  // first live column
  int64_t end;    // one past the last live column; end <= begin: no column is live
};

SMS_HOST_DEVICE ColumnRange live_columns(const Band& band, int64_t columns, int64_t query) {
  int64_t begin = query + band.begin;
  int64_t end = query + band.end;
  return {begin > 0 ? begin : 0, end < columns ? (end > 0 ? end : 0) : columns};
}

// The live columns of a row whose keys end at `length`, any number: what lies past it is not live.
SMS_HOST_DEVICE ColumnRange shortened(const ColumnRange& live, int64_t length) {
  return {live.begin, length < live.end ? (length > 0 ? length : 0) : live.end};
}

constexpr int key_length_bytes(bool is_64) { return is_64 ? 8 : 4; }

SMS_HOST_DEVICE int64_t read_key_length(const void* length, bool is_64) {
  return is_64 ? *static_cast<const int64_t*>(length) : *static_cast<const int32_t*>(length);
}

// Where random numbers come from: torch's seed, and an offset in that seed's stream, in numbers of 32 bits.
struct RandomState {
  uint64_t seed = 0;
  uint64_t offset = 0;
  const int64_t* seed_pointer = nullptr;    // where given, read where the kernel runs, instead of seed
  const int64_t* offset_pointer = nullptr;  // where given, read there and added to offset
};

// Of probabilities, each on its own (philox.h). Statistic strides number the rows.
struct Dropout {
  bool active = false;
  uint32_t threshold = 0;  // a cell is kept where its random number is at least this
  double factor = 1;       // of kept cells: 1 / (1 - p), or 0 for p = 1
  RandomState random;
  int64_t first_row = 0;   // the number of the problem's first row
};

// 1 / (1 - p), of the cells that dropout keeps; 0 where it keeps none, as where p is 1 to the nearest multiple of 2^-32.
inline double dropout_factor(double dropout_p) { return dropout_p >= 1 - 0x1p-33 ? 0 : 1 / (1 - dropout_p); }

struct ForwardProblem {
  Element element;       // dtype of x and y
  MaskKind mask_kind;
  Band band;
  int64_t columns;       // Sk, >= 1
  double scale;          // finite; multiplied in float32 (float64 for float64 x)
  const void* x;         // column stride is 1
  const void* mask;      // null where mask_kind is none; true = excluded for boolean
  int64_t mask_column_stride;  // any value, 0 included
  void* y;               // column stride is 1; may be x itself with the same strides (in-place form)
  const void* key_lengths;     // null, or a number per batch index (kBatch strides): columns past it are not live
  bool key_lengths_64;         // int64, else int32
  const void* sink;            // null, or a logit per head index (kHead strides), a score of each row without a column
  bool sink_float32;           // else x's dtype
  void* sink_probability;      // null, or where each row's goes (kStatistic strides): float, double for float64 x
  Dropout dropout;
  void* before_dropout;        // null, or where y goes as it was before dropout, laid out and aligned as y
  int64_t* random_state;       // null, or where the seed and the offset of dropout go
  Rows rows;             // count() >= 1
};

// dx = scale * y * (grad - sum(grad * y)) over the live columns, where a cell with y == 0 takes part as if its grad
// were 0 (an excluded cell's gradient is zero whatever grad holds there, NaN included); columns that are not live get 0.
struct BackwardProblem {
  Element element;       // dtype of grad, y and dx
  Band band;
  int64_t columns;
  double scale;
  const void* y;         // column stride is 1
  const void* grad;
  int64_t grad_column_stride;  // 1, or 0 for an expanded gradient
  void* dx;              // column stride is 1; never aliases grad or y. Null if dots alone are wanted
  const void* key_lengths;     // as forward
  bool key_lengths_64;
  void* dots;                  // null, or where each row's sum(grad * y) goes: as sink_probability
  Dropout dropout;             // grad counts as 0 in cells that were dropped; its factor is in `scale`, and not in dots
  Rows rows;
};

// The gradient of a float mask, y * (grad - dot) summed over the rows that share one of the mask's: those along
// dimensions whose kOutput stride is 0. For masks with a column for each of y's.
struct MaskGradientProblem {
  Element element;       // dtype of grad and y
  Band band;
  int64_t columns;
  const void* y;         // column stride is 1
  const void* grad;
  int64_t grad_column_stride;  // 1, or 0 for an expanded gradient
  const void* dots;            // as BackwardProblem stores them
  void* gradient;        // column stride is 1
  bool gradient_float32;       // else dtype of y
  const void* key_lengths;     // as forward
  bool key_lengths_64;
  Dropout dropout;       // as backward; the factor is not applied elsewhere
  Rows rows;             // dimensions of the mask's rows first, then those that are summed
  int mask_dims;         // how many are the mask's
};

}  // namespace sms
