// Splits a problem into pieces that a kernel can take: few row dimensions, row indices within 32 bits. Free of torch.
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

constexpr int mask_element_bytes(MaskKind kind, Element element) {
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

// Calls run(piece) on problems that together cover `problem`, each with at most max_dims row dimensions and at most
// max_rows rows. Splits outermost dimensions first.
template <typename Problem, typename Run>
void for_each_piece(const Problem& problem, int max_dims, int64_t max_rows, const Run& run) {
  const Rows& rows = problem.rows;
  const int64_t count = rows.count();
  if (rows.dims <= max_dims && count <= max_rows) {
    run(problem);
    return;
  }
  const RowDim outer = rows.dim[0];
  const int64_t inner_count = count / outer.size;
  const bool keep_dim = rows.dims <= max_dims && inner_count <= max_rows;
  const int64_t step = keep_dim ? std::max<int64_t>(1, max_rows / inner_count) : 1;
  for (int64_t start = 0; start < outer.size; start += step) {
    Problem piece = problem;
    advance(piece, outer, start);
    if (keep_dim) {
      piece.rows.dim[0].size = std::min(step, outer.size - start);
    } else {
      --piece.rows.dims;
      std::copy(rows.dim + 1, rows.dim + rows.dims, piece.rows.dim);
    }
    for_each_piece(piece, max_dims, max_rows, run);
  }
}

}  // namespace sms
