// Kernels on one piece of one row, compiled once per instruction set (rows_*.cpp); kernels.cpp picks the set and walks
// the rows. Free of torch, and of inline functions: what is compiled for AVX512 must not be picked by the linker for
// an older CPU.
#pragma once

#include <cstdint>

#include "../philox.h"
#include "../problem.h"

namespace sms::cpu {

// Rows are cut into pieces at multiples of this many columns. A piece's scores fit the second-level cache as float32.
// Sums are folded piece by piece, so a row's bits depend on this constant and not on the number of threads.
inline constexpr int64_t kPieceColumns = 65536;

// Scratch holds a piece's scores in the compute type, rounded up to this many.
inline constexpr int64_t kScratchMultiple = 64;

// Of whole rows scratch holds as many scores, at least: several short rows.
inline constexpr int64_t kBatchScores = 1024;

// What dropout keeps of a piece, one byte a column: 0xff, or 0 where it is dropped.
struct Kept {
  const uint8_t* bytes;
  double factor;
};

// A piece of a row. Pointers are to the piece's first column; all column strides are 1.
struct ForwardPiece {
  const void* x;
  const void* mask;
  void* y;
  int64_t columns;
  int64_t begin;  // live columns of the piece; 0, 0 where there are none
  int64_t end;
  void* before_dropout = nullptr;  // or where y goes as it was
};

struct BackwardPiece {
  const void* y;
  const void* grad;  // column stride 1, or 0
  void* dx;
  int64_t columns;
  int64_t begin;
  int64_t end;
  const uint8_t* kept = nullptr;  // as in Kept; for kernels with dropout
};

// Live columns of rows that follow each other: [begin, end) of the first row, `step` further from row to row, as far as
// they lie in [0, limit).
struct LiveColumns {
  int64_t begin;
  int64_t end;
  int64_t step;
  int64_t limit;
};

// Rows of one piece that follow each other in memory, by steps of so many bytes.
struct ForwardRun {
  const void* x;
  const void* mask;
  void* y;
  int64_t x_step;
  int64_t mask_step;
  int64_t y_step;
  int64_t rows;
  int64_t columns;
  LiveColumns live;
  double scale;
};

struct BackwardRun {
  const void* y;
  const void* grad;  // column stride 1, or 0
  void* dx;
  int64_t y_step;
  int64_t grad_step;
  int64_t dx_step;
  int64_t rows;
  int64_t columns;
  LiveColumns live;
  double scale;
};

// sum(exp(s - maximum)) over a piece. No live score above -inf: sum is 0. A NaN or +inf score: sum is NaN.
struct ExpSum {
  double maximum;  // 0 where the piece has no score above -inf
  double sum;
};

struct ForwardKernel {
  // Whole rows, without sink and dropout. Scratch is for one row and for kBatchScores.
  void (*rows)(const ForwardRun& run, void* scratch);
  // Fills scratch with exp(s - maximum).
  ExpSum (*exponentials)(const ForwardPiece& piece, double scale, void* scratch);
  // Writes the piece of y: scratch times `factor`, which is NaN in a row of NaN.
  void (*store)(const ForwardPiece& piece, const void* scratch, double factor);
  // The same with dropout. `kept` tells of live columns; of all where the factor is NaN.
  void (*store_dropped)(const ForwardPiece& piece, const void* scratch, double factor, const Kept& kept);
  // The number at `address`, a float or an element.
  double (*number)(const void* address, bool is_float32);
};

// With dropout: grad counts as 0 where a cell was dropped.
struct BackwardKernel {
  // Whole rows, without dropout (null with it).
  void (*rows)(const BackwardRun& run);
  // sum(grad * y) over the piece's cells with y != 0.
  double (*dot)(const BackwardPiece& piece);
  // Writes the piece of dx, given the dot product over the whole row.
  void (*store)(const BackwardPiece& piece, double scale, double dot);
  // Adds y * (grad - dot) of the piece's live columns to sums, one a column.
  void (*accumulate)(const BackwardPiece& piece, double dot, double* sums);
  // Writes `columns` numbers, as floats or elements.
  void (*write)(const double* sums, int64_t columns, bool as_float32, void* target);
};

struct RowKernels {
  const char* instruction_set;
  ForwardKernel forward[4][4];       // [Element][MaskKind]
  BackwardKernel backward[4][2][2];  // [Element][column stride of grad][dropout]
  // Kept's bytes of columns [first, last) of a row whose first four has number `four`, written from bytes[first / 4 * 4]
  // up to kScratchMultiple past the last.
  void (*keep)(const Draw& draw, uint64_t four, uint32_t threshold, int64_t first, int64_t last, uint8_t* bytes);
};

extern const RowKernels kDefaultRows;
#if defined(__x86_64__)
extern const RowKernels kAvx2Rows;
extern const RowKernels kAvx512Rows;
#endif

}  // namespace sms::cpu
