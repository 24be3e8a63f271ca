// Splits a problem into pieces that a kernel can take: few row dimensions, what is counted within 32 bits. Free of torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "problem.h"

namespace sms {

inline const void* offset_pointer(const void* pointer, int64_t bytes) {
  return pointer == nullptr ? nullptr : static_cast<const char*>(pointer) + bytes;
}

inline void* offset_pointer(void* pointer, int64_t bytes) {
  return pointer == nullptr ? nullptr : static_cast<char*>(pointer) + bytes;
}

SMS_HOST_DEVICE constexpr int mask_element_bytes(MaskKind kind, Element element) {
  return kind == MaskKind::boolean ? 1 : kind == MaskKind::float32 ? 4 : element_bytes(element);
}

inline int sink_bytes(const ForwardProblem& problem) {
  return problem.sink_float32 ? 4 : element_bytes(problem.element);
}

// Moves what says which cells take part, the same of every problem. The query index moves through the band.
template <typename Problem>
void advance_cells(Problem& problem, const RowDim& dim, int64_t index) {
  problem.band.begin += index * dim.stride[kQuery];
  problem.band.end += index * dim.stride[kQuery];
  problem.key_lengths =
      offset_pointer(problem.key_lengths, index * dim.stride[kBatch] * key_length_bytes(problem.key_lengths_64));
  problem.dropout.first_row += index * dim.stride[kStatistic];
}

// Moves the origin of `problem` by `index` steps along `dim`.
inline void advance(ForwardProblem& problem, const RowDim& dim, int64_t index) {
  const int64_t bytes = element_bytes(problem.element);
  problem.x = offset_pointer(problem.x, index * dim.stride[kInput] * bytes);
  problem.mask = offset_pointer(
      problem.mask, index * dim.stride[kSecond] * mask_element_bytes(problem.mask_kind, problem.element));
  problem.y = offset_pointer(problem.y, index * dim.stride[kOutput] * bytes);
  problem.sink = offset_pointer(problem.sink, index * dim.stride[kHead] * sink_bytes(problem));
  problem.sink_probability =
      offset_pointer(problem.sink_probability, index * dim.stride[kStatistic] * statistic_bytes(problem.element));
  problem.before_dropout = offset_pointer(problem.before_dropout, index * dim.stride[kOutput] * bytes);
  advance_cells(problem, dim, index);
}

inline void advance(BackwardProblem& problem, const RowDim& dim, int64_t index) {
  const int64_t bytes = element_bytes(problem.element);
  problem.y = offset_pointer(problem.y, index * dim.stride[kInput] * bytes);
  problem.grad = offset_pointer(problem.grad, index * dim.stride[kSecond] * bytes);
  problem.dx = offset_pointer(problem.dx, index * dim.stride[kOutput] * bytes);
  problem.dots = offset_pointer(problem.dots, index * dim.stride[kStatistic] * statistic_bytes(problem.element));
  advance_cells(problem, dim, index);
}

// Calls run(piece) on problems that together cover `problem`. dim_to_split(rows) is the dimension along which to split
// rows that a launch does not take, -1 for others.
template <typename Problem, typename DimToSplit, typename Run>
void for_each_piece(const Problem& problem, const DimToSplit& dim_to_split, const Run& run) {
  const int d = dim_to_split(problem.rows);
  if (d < 0) {
    run(problem);
    return;
  }
  const RowDim split = problem.rows.dim[d];
  Rows part = problem.rows;
  int64_t& step = part.dim[d].size;
  do {
    step = (step + 1) / 2;
  } while (step > 1 && dim_to_split(part) == d);
  for (int64_t start = 0; start < split.size; start += step) {
    Problem piece = problem;
    advance(piece, split, start);
    piece.rows.dim[d].size = std::min(step, split.size - start);
    if (piece.rows.dim[d].size == 1) {
      std::copy(piece.rows.dim + d + 1, piece.rows.dim + piece.rows.dims, piece.rows.dim + d);
      --piece.rows.dims;
    }
    for_each_piece(piece, dim_to_split, run);
  }
}

}  // namespace sms
