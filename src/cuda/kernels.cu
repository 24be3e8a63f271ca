// From a problem to launches: order of rows, plan, pieces, dispatch on types.
#include "kernels.h"

#include "../pieces.h"
#include "launch.h"

namespace sms::cuda {
namespace {

// The bytes that the rows of an operand cover; a negative column stride reaches down from there.
Span span_of(const void* base, const Rows& rows, Operand operand, int64_t bytes, int64_t columns,
             int64_t column_stride) {
  int64_t low = std::min<int64_t>(0, (columns - 1) * column_stride) * bytes;
  int64_t high = (std::max<int64_t>(0, (columns - 1) * column_stride) + 1) * bytes;
  for (int d = 0; d < rows.dims; ++d) {
    const int64_t reach = (rows.dim[d].size - 1) * rows.dim[d].stride[operand] * bytes;
    (reach < 0 ? low : high) += reach;
  }
  const auto address = reinterpret_cast<uintptr_t>(base);
  return {address + low, address + high};
}

// Whether every row of an operand is whole vectors: `columns` of them, `per_vector` a vector, each of `bytes`.
bool whole_rows(const void* base, const Rows& rows, Operand operand, int64_t bytes, int64_t columns,
                int64_t per_vector) {
  const int64_t boundary = std::min<int64_t>(kVectorBytes, bytes * per_vector);
  bool whole = columns % per_vector == 0 && reinterpret_cast<uintptr_t>(base) % boundary == 0;
  for (int d = 0; d < rows.dims; ++d) whole = whole && rows.dim[d].stride[operand] * bytes % boundary == 0;
  return whole;
}

// The query index of the last row: the sum of those of every two rows that are as far from the first and from the last.
int64_t last_query(const Rows& rows) {
  int64_t query = 0;
  for (int d = 0; d < rows.dims; ++d) query += (rows.dim[d].size - 1) * rows.dim[d].stride[kQuery];
  return query;
}

bool is_held_by_blocks(const Plan& plan) {
  return plan.strategy == Strategy::block_row || plan.strategy == Strategy::cluster_row ||
         plan.strategy == Strategy::pair_rows || plan.strategy == Strategy::shared_row;
}

// How many blocks of warp_rows, or else rows or pairs, later what is brought into the L2 is read.
int64_t distance_ahead(const Plan& plan, int64_t columns, int bytes) {
  const int64_t threads = plan.strategy == Strategy::shared_row  ? columns * bytes / (kBlockVectors * kVectorBytes)
                          : plan.strategy == Strategy::warp_rows ? plan.threads
                                                                 : plan.lanes;
  return kPrefetchThreads / threads + 1;
}

// Of arguments that are complete otherwise. Rows from each end lie half as far ahead.
template <typename Arguments>
void take_from_both_ends(Arguments& arguments) {
  arguments.from_both_ends = true;
  arguments.ahead.distance = (arguments.ahead.distance + 1) / 2;
}

// Of a piece of either direction, whose rows are in the order in which they are walked. `waits`: for memory, even where
// all of a row is live and in registers. `second`: the second operand is to be brought too.
template <typename Problem>
RowPrefetch row_prefetch(const Plan& plan, const Problem& piece, bool waits, bool second) {
  if (plan.strategy != Strategy::warp_rows && !is_held_by_blocks(plan)) return {};
  if (!waits && !piece.band.active && plan.strategy != Strategy::shared_row) return {};
  if (piece.key_lengths != nullptr) return {};  // they would have to be read first
  const Rows& rows = piece.rows;
  const int bytes = element_bytes(piece.element);
  RowPrefetch ahead{static_cast<uint32_t>(distance_ahead(plan, piece.columns, bytes)), 1};
  if (plan.strategy == Strategy::warp_rows && rows.dims > 0) {
    const RowDim& inner = rows.dim[rows.dims - 1];
    const int64_t block_rows = plan.rows_per_block();
    const bool adjoin = inner.stride[kInput] == piece.columns && (!second || inner.stride[kSecond] == piece.columns) &&
                        (rows.dims == 1 || inner.size % block_rows == 0);
    if (adjoin && !piece.band.active) ahead.rows = static_cast<uint32_t>(block_rows);
  }
  return ahead.rows * piece.columns * bytes < kPrefetchBytes ? RowPrefetch{} : ahead;
}

// Of a float mask. `rows` in the order in which they are walked.
MaskPrefetch mask_prefetch(const Plan& plan, const Rows& rows, int64_t columns, int bytes) {
  if (!is_held_by_blocks(plan)) return {};
  int64_t sharers = 1;
  for (int d = rows.dims - 1; d >= 0 && rows.dim[d].stride[kSecond] == 0; --d) sharers *= rows.dim[d].size;
  if (sharers == 1) return {};
  const int64_t ahead = distance_ahead(plan, columns, bytes) / sharers + 1;
  return {static_cast<uint32_t>(ahead * sharers), static_cast<uint32_t>(sharers),
          Divisor(static_cast<uint32_t>(sharers))};
}

// Calls run(constant element).
template <typename Run>
cudaError_t with_element(Element element, const Run& run) {
  switch (element) {
    case Element::float16: return run(std::integral_constant<Element, Element::float16>{});
    case Element::bfloat16: return run(std::integral_constant<Element, Element::bfloat16>{});
    case Element::float32: return run(std::integral_constant<Element, Element::float32>{});
    case Element::float64: return run(std::integral_constant<Element, Element::float64>{});
  }
  return cudaErrorInvalidValue;
}

template <MaskKind kMask>
cudaError_t dispatch_forward(const ForwardProblem& piece, const Plan& plan, bool whole,
                             const ForwardArguments& arguments, cudaStream_t stream) {
  return with_element(piece.element, [&](auto element) {
    if constexpr (compiled(Direction::forward, element, kMask)) {
      return piece.dropout.active ? launch_forward_dropout<element, mask_for_dropout(kMask)>(plan, arguments, stream)
                                  : launch_forward<element, kMask>(plan, whole, arguments, stream);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

// `rows`: of which each has its number.
DropoutArguments dropout_arguments(const Dropout& dropout, const Rows& rows, int64_t columns) {
  return {dropout.random,
          dropout.threshold,
          static_cast<float>(dropout.factor),
          dropout.factor,
          dropout.first_row,
          fours_of(columns),
          make_row_values<const char>(rows, nullptr, kStatistic, 1)};
}

// What both directions are given alike.
template <typename Arguments, typename Problem>
Arguments common_arguments(const Plan& plan, const Problem& piece, int second_bytes) {
  const int bytes = element_bytes(piece.element);
  Arguments arguments{};
  arguments.rows = make_row_map(piece.rows, bytes, second_bytes, bytes, plan.rows_per_block());
  arguments.columns = piece.columns;
  arguments.part_columns = plan.part_columns;
  arguments.shared_second = static_cast<int>(shared_operand_bytes(plan.part_columns, bytes));
  arguments.band = piece.band;
  arguments.near = near_band(piece.band);
  arguments.key_lengths = make_row_values(piece.rows, static_cast<const char*>(piece.key_lengths), kBatch,
                                          key_length_bytes(piece.key_lengths_64));
  arguments.key_lengths_64 = piece.key_lengths_64;
  arguments.scale = static_cast<float>(piece.scale);
  arguments.scale64 = piece.scale;
  arguments.dropout = dropout_arguments(piece.dropout, piece.rows, piece.columns);
  return arguments;
}

cudaError_t launch_piece(const Question& question, const Plan& own, const ForwardProblem& piece, cudaStream_t stream) {
  const int bytes = element_bytes(piece.element);
  const int mask_bytes = mask_element_bytes(piece.mask_kind, piece.element);
  const int64_t per_vector = kVectorBytes / bytes;
  bool whole = whole_rows(piece.x, piece.rows, kInput, bytes, piece.columns, per_vector) &&
               whole_rows(piece.y, piece.rows, kOutput, bytes, piece.columns, per_vector);
  if (piece.mask_kind != MaskKind::none) {
    whole = whole && piece.mask_column_stride == 1 &&
            whole_rows(piece.mask, piece.rows, kSecond, mask_bytes, piece.columns, per_vector);
  }
  const Plan pairs = choose_pairs(question, own, whole, piece.rows.count(), piece.band, last_query(piece.rows));
  const Plan plan = pairs.threads > 0 ? pairs : launched(question, own, whole);
  auto arguments = common_arguments<ForwardArguments>(plan, piece, mask_bytes);
  if (pairs.threads > 0) arguments.by_part_columns = Divisor(static_cast<uint32_t>(pairs.part_columns));
  arguments.x = static_cast<const char*>(piece.x);
  arguments.mask = static_cast<const char*>(piece.mask);
  arguments.y = static_cast<char*>(piece.y);
  arguments.mask_column_stride = piece.mask == nullptr ? 0 : piece.mask_column_stride * mask_bytes;
  arguments.sink = make_row_values(piece.rows, static_cast<const char*>(piece.sink), kHead, sink_bytes(piece));
  arguments.sink_float32 = piece.sink_float32;
  arguments.sink_probability = make_row_values(piece.rows, static_cast<char*>(piece.sink_probability), kStatistic,
                                               statistic_bytes(piece.element));
  arguments.packed = packed_scale(piece.scale);
  arguments.before_dropout = static_cast<char*>(piece.before_dropout);
  arguments.random_state = piece.random_state;
  arguments.x_span = span_of(piece.x, piece.rows, kInput, bytes, piece.columns, 1);
  if (piece.mask_kind != MaskKind::none) {
    arguments.mask_span = span_of(piece.mask, piece.rows, kSecond, mask_bytes, piece.columns, piece.mask_column_stride);
    if (has_addend(piece.mask_kind) && piece.mask_column_stride == 1) {
      arguments.mask_prefetch = mask_prefetch(plan, piece.rows, piece.columns, bytes);
    }
  }
  arguments.ahead = row_prefetch(plan, piece, !whole || has_addend(piece.mask_kind), false);
  if (takes_from_both_ends(question, plan)) take_from_both_ends(arguments);
  switch (piece.mask_kind) {
    case MaskKind::none: return dispatch_forward<MaskKind::none>(piece, plan, whole, arguments, stream);
    case MaskKind::boolean: return dispatch_forward<MaskKind::boolean>(piece, plan, whole, arguments, stream);
    case MaskKind::same: return dispatch_forward<MaskKind::same>(piece, plan, whole, arguments, stream);
    case MaskKind::float32: return dispatch_forward<MaskKind::float32>(piece, plan, whole, arguments, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_piece(const Question& question, const Plan& own, const BackwardProblem& piece, cudaStream_t stream) {
  const int bytes = element_bytes(piece.element);
  const int64_t per_vector = kVectorBytes / bytes;
  const bool whole = piece.grad_column_stride == 1 &&
                     whole_rows(piece.y, piece.rows, kInput, bytes, piece.columns, per_vector) &&
                     whole_rows(piece.grad, piece.rows, kSecond, bytes, piece.columns, per_vector) &&
                     whole_rows(piece.dx, piece.rows, kOutput, bytes, piece.columns, per_vector);
  const Plan plan = launched(question, own, whole);
  auto arguments = common_arguments<BackwardArguments>(plan, piece, bytes);
  arguments.y = static_cast<const char*>(piece.y);
  arguments.grad = static_cast<const char*>(piece.grad);
  arguments.dx = static_cast<char*>(piece.dx);
  arguments.grad_expanded = piece.grad_column_stride == 0;
  arguments.dots =
      make_row_values(piece.rows, static_cast<char*>(piece.dots), kStatistic, statistic_bytes(piece.element));
  arguments.y_span = span_of(piece.y, piece.rows, kInput, bytes, piece.columns, 1);
  arguments.grad_span = span_of(piece.grad, piece.rows, kSecond, bytes, piece.columns, piece.grad_column_stride);
  arguments.ahead = row_prefetch(plan, piece, !whole, !arguments.grad_expanded);
  if (takes_from_both_ends(question, plan)) take_from_both_ends(arguments);
  return with_element(piece.element, [&](auto element) {
    return piece.dropout.active ? launch_backward_dropout<element>(plan, arguments, stream)
                                : launch_backward<element>(plan, whole, arguments, stream);
  });
}

// Whether a mask that rows share is still in the L2 when it is needed again, if rows are walked in memory order.
bool mask_stays_in_l2(const ForwardProblem& problem, int64_t l2_bytes) {
  const int64_t mask_row = problem.columns * mask_element_bytes(problem.mask_kind, problem.element);
  int64_t all = mask_row, between = mask_row;
  for (int d = problem.rows.dims - 1; d >= 0; --d) {
    const RowDim& dim = problem.rows.dim[d];
    if (dim.stride[kSecond] != 0) {
      all *= dim.size;
    } else if (dim.size > 1) {
      between = all;
    }
  }
  const int64_t row = problem.columns * element_bytes(problem.element);
  return all <= l2_bytes / kSmallMaskPart || (row >= kLongRowBytes && between <= l2_bytes / kSharedMaskPart);
}

// The rows along dimensions [begin, end) of a problem.
Rows part_of(const Rows& rows, int begin, int end) {
  Rows part;
  part.dims = end - begin;
  std::copy(rows.dim + begin, rows.dim + end, part.dim);
  return part;
}

constexpr int64_t tiles_of(const MaskGradientProblem& problem) {
  const int64_t length = kWarpLanes * kVectorBytes / element_bytes(problem.element);
  return (problem.columns - 1) / length + 1;
}

// Calls launch(piece) for the pieces of a problem, as long as all goes well.
template <typename Problem, typename Launch>
cudaError_t for_each_launch(const Problem& problem, const Launch& launch) {
  cudaError_t status = cudaSuccess;
  for_each_piece(problem, dim_to_split, [&](const Problem& piece) {
    if (status == cudaSuccess) status = launch(piece);
  });
  return status;
}

}  // namespace

cudaError_t forward(const ForwardProblem& problem, const Device& device, cudaStream_t stream) {
  const bool masked = problem.mask_kind != MaskKind::none;
  ForwardProblem ordered = problem;
  const bool used[kOperands] = {true,
                                 masked,
                                 true,
                                 problem.band.active,
                                 problem.key_lengths != nullptr,
                                 problem.sink != nullptr,
                                 problem.sink_probability != nullptr || problem.dropout.active};
  ordered.rows = walk_order(problem.rows, used, masked && !mask_stays_in_l2(problem, device.l2_bytes));
  const Question question{Direction::forward,  problem.columns, problem.element,       problem.mask_kind,
                          problem.band.active, device.capability, problem.dropout.active};
  const Plan plan = choose(question);
  return for_each_launch(ordered,
                         [&](const ForwardProblem& piece) { return launch_piece(question, plan, piece, stream); });
}

cudaError_t backward(const BackwardProblem& problem, const Device& device, cudaStream_t stream) {
  BackwardProblem ordered = problem;
  const bool used[kOperands] = {true,
                                 true,
                                 problem.dx != nullptr,
                                 problem.band.active,
                                 problem.key_lengths != nullptr,
                                 false,
                                 problem.dots != nullptr || problem.dropout.active};
  ordered.rows = walk_order(problem.rows, used, false);
  const Question question{Direction::backward, problem.columns,   problem.element,       MaskKind::none,
                          problem.band.active, device.capability, problem.dropout.active};
  const Plan plan = choose(question);
  return for_each_launch(ordered,
                         [&](const BackwardProblem& piece) { return launch_piece(question, plan, piece, stream); });
}

bool fits(const MaskGradientProblem& problem) {
  const Rows mask_rows = part_of(problem.rows, 0, problem.mask_dims);
  const Rows summed_rows = part_of(problem.rows, problem.mask_dims, problem.rows.dims);
  return dim_to_split(mask_rows) < 0 && dim_to_split(summed_rows) < 0 &&
         mask_rows.count() <= kMapRows / tiles_of(problem);
}

cudaError_t mask_gradient(const MaskGradientProblem& problem, cudaStream_t stream) {
  const int bytes = element_bytes(problem.element);
  const int output_bytes = problem.gradient_float32 ? 4 : bytes;
  const Rows parts[2] = {part_of(problem.rows, 0, problem.mask_dims),
                         part_of(problem.rows, problem.mask_dims, problem.rows.dims)};
  MaskGradientArguments arguments{};
  arguments.mask_rows = make_row_map(parts[0], bytes, bytes, output_bytes, 1);
  arguments.summed_rows = make_row_map(parts[1], bytes, bytes, output_bytes, 1);
  arguments.tiles = static_cast<uint32_t>(tiles_of(problem));
  arguments.y = static_cast<const char*>(problem.y);
  arguments.grad = static_cast<const char*>(problem.grad);
  arguments.gradient = static_cast<char*>(problem.gradient);
  arguments.y_span = span_of(problem.y, problem.rows, kInput, bytes, problem.columns, 1);
  arguments.grad_span =
      span_of(problem.grad, problem.rows, kSecond, bytes, problem.columns, problem.grad_column_stride);
  arguments.columns = problem.columns;
  arguments.grad_expanded = problem.grad_column_stride == 0;
  arguments.gradient_float32 = problem.gradient_float32;
  arguments.band = problem.band;
  arguments.key_lengths_64 = problem.key_lengths_64;
  for (int part = 0; part < 2; ++part) {
    const bool data = part == 0;
    arguments.key_lengths[part] =
        make_row_values(parts[part], data ? static_cast<const char*>(problem.key_lengths) : nullptr, kBatch,
                        key_length_bytes(problem.key_lengths_64));
    arguments.dots[part] = make_row_values(parts[part], data ? static_cast<const char*>(problem.dots) : nullptr,
                                           kStatistic, statistic_bytes(problem.element));
  }
  arguments.dropout = dropout_arguments(problem.dropout, parts[0], problem.columns);
  arguments.summed_row_number = make_row_values<const char>(parts[1], nullptr, kStatistic, 1);
  return with_element(problem.element, [&](auto element) {
    return problem.dropout.active ? launch_mask_gradient<element, true>(arguments, stream)
                                  : launch_mask_gradient<element, false>(arguments, stream);
  });
}

cudaError_t dropout_keep(const Dropout& dropout, int64_t rows, int64_t columns, uint8_t* keep, cudaStream_t stream) {
  return launch_keep(dropout_arguments(dropout, Rows{}, columns), rows, columns, keep, stream);
}

}  // namespace sms::cuda
