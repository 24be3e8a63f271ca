// Walks the rows of a problem, in parallel, and calls the row kernels of the instruction set that torch chose.
#include "kernels.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "../pieces.h"
#include "rows.h"

namespace sms::cpu {
namespace {

// Columns of work in a unit of rows, and units in the least task worth a thread: together torch's own grain, 32,768
// elements. Units are smaller so that threads can be dealt equal shares of a triangle.
constexpr int64_t kUnitColumns = 8192;
constexpr int64_t kUnitsPerTask = 4;

// Columns of a mask's row whose gradients a thread sums at a time: 8 KiB of sums stay in the first-level cache.
constexpr int64_t kSumColumns = 1024;

// Fewer long rows than this per thread are cut into pieces, each row in turn shared by all threads.
constexpr int64_t kLongRowsPerThread = 4;

const RowKernels& row_kernels() {
  static const RowKernels* const chosen = [] {
#if defined(__x86_64__)
    // torch detects the processor and obeys the environment variable ATEN_CPU_CAPABILITY.
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512") return &kAvx512Rows;
    if (capability == "AVX2") return &kAvx2Rows;
#endif
    return &kDefaultRows;
  }();
  return *chosen;
}

// A thread's buffer, kept between calls: the scores of one piece and, if it has to be gathered, the mask.
class Scratch {
 public:
  void* reserve(size_t bytes) {
    if (bytes > capacity_) {
      buffer_.reset();
      capacity_ = 0;
      buffer_.reset(::operator new(bytes, kAlignment));
      capacity_ = bytes;
    }
    return buffer_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(void* buffer) const { ::operator delete(buffer, kAlignment); }
  };
  std::unique_ptr<void, Free> buffer_;
  size_t capacity_ = 0;
};

thread_local Scratch thread_scratch;
thread_local Scratch thread_row_scratch;

// Of a row of several pieces, exponentials up to this many bytes are kept from the first step to the second. Those of
// more would come from memory, and take longer than to compute them again.
constexpr int64_t kRowScratchBytes = int64_t{2} << 20;

struct PieceScratch {
  void* scores;
  uint8_t* kept;  // by dropout
  void* mask;     // gathered
};

// Iterates over rows in order, keeping each operand's element offset.
class RowCursor {
 public:
  RowCursor(const Rows& rows, int64_t row) : rows_(rows) {
    for (int64_t& offset : offset_) offset = 0;
    for (int d = rows.dims - 1; d >= 0; --d) {
      const RowDim& dim = rows.dim[d];
      index_[d] = row % dim.size;
      row /= dim.size;
      for (int k = 0; k < kOperands; ++k) offset_[k] += index_[d] * dim.stride[k];
    }
  }

  int64_t offset(Operand operand) const { return offset_[operand]; }

  // How many rows follow in the innermost dimension, this one included.
  int64_t left() const { return rows_.dims == 0 ? 1 : rows_.dim[rows_.dims - 1].size - index_[rows_.dims - 1]; }

  // From row to row in it.
  int64_t step(Operand operand) const { return rows_.dims == 0 ? 0 : rows_.dim[rows_.dims - 1].stride[operand]; }

  // Past `count` rows of those left.
  void skip(int64_t count) {
    if (rows_.dims == 0) return;
    const int d = rows_.dims - 1;
    index_[d] += count - 1;
    for (int k = 0; k < kOperands; ++k) offset_[k] += (count - 1) * rows_.dim[d].stride[k];
    next();
  }

  void next() {
    for (int d = rows_.dims - 1; d >= 0; --d) {
      const RowDim& dim = rows_.dim[d];
      for (int k = 0; k < kOperands; ++k) offset_[k] += dim.stride[k];
      if (++index_[d] < dim.size) return;
      for (int k = 0; k < kOperands; ++k) offset_[k] -= dim.size * dim.stride[k];
      index_[d] = 0;
    }
  }

 private:
  const Rows& rows_;
  int64_t index_[kMaxRowDims];
  int64_t offset_[kOperands];
};

template <typename Storage>
void gather(const void* source, int64_t stride, int64_t begin, int64_t end, void* target) {
  const Storage* const from = static_cast<const Storage*>(source);
  Storage* const to = static_cast<Storage*>(target);
  for (int64_t column = begin; column < end; ++column) to[column] = from[column * stride];
}

// sum(exp(s - maximum)) of pieces, folded from left to right.
class ExpSumFold {
 public:
  void add(const ExpSum& piece) {
    if (piece.sum == 0) return;
    if (result_.sum == 0) {
      result_ = piece;
    } else if (piece.maximum > result_.maximum) {
      result_ = {piece.maximum, result_.sum * std::exp(result_.maximum - piece.maximum) + piece.sum};
    } else {
      result_.sum += piece.sum * std::exp(piece.maximum - result_.maximum);
    }
  }
  const ExpSum& result() const { return result_; }

 private:
  ExpSum result_ = {0, 0};
};

int64_t piece_count(int64_t columns) { return (columns + kPieceColumns - 1) / kPieceColumns; }

template <typename Piece>
void set_columns(Piece& piece, int64_t columns, const ColumnRange& live, int64_t first) {
  piece.columns = std::min(columns - first, kPieceColumns);
  piece.begin = std::max<int64_t>(live.begin - first, 0);
  piece.end = std::min(live.end - first, piece.columns);
  if (piece.begin >= piece.end) piece.begin = piece.end = 0;
}

template <typename Problem>
ColumnRange live_columns_at(const Problem& problem, int64_t query, int64_t batch) {
  const ColumnRange live =
      problem.band.active ? live_columns(problem.band, problem.columns, query) : ColumnRange{0, problem.columns};
  if (problem.key_lengths == nullptr) return live;
  const int64_t bytes = key_length_bytes(problem.key_lengths_64);
  const void* const length = offset_pointer(problem.key_lengths, batch * bytes);
  return shortened(live, read_key_length(length, problem.key_lengths_64));
}

template <typename Problem>
ColumnRange live_columns_of(const Problem& problem, const RowCursor& row) {
  return live_columns_at(problem, row.offset(kQuery), row.offset(kBatch));
}

// Of rows that follow this one within the innermost dimension.
template <typename Problem>
LiveColumns live_columns_from(const Problem& problem, const RowCursor& row) {
  LiveColumns live = {0, problem.columns, 0, problem.columns};
  if (problem.band.active) {
    const int64_t query = row.offset(kQuery);
    live = {query + problem.band.begin, query + problem.band.end, row.step(kQuery), problem.columns};
  }
  if (problem.key_lengths != nullptr) {
    const int64_t bytes = key_length_bytes(problem.key_lengths_64);
    const void* const length = offset_pointer(problem.key_lengths, row.offset(kBatch) * bytes);
    live.limit = std::min(live.limit, read_key_length(length, problem.key_lengths_64));
  }
  return live;
}

// Whether rows that follow this one within the innermost dimension differ in their key length.
template <typename Problem>
bool changes_length(const Problem& problem, const RowCursor& row) {
  return problem.key_lengths != nullptr && row.step(kBatch) != 0;
}

// Where `statistic`, results of one number a row, is not null.
void store_statistic(Element element, void* statistic, const RowCursor& row, double value) {
  if (statistic == nullptr) return;
  void* const place = offset_pointer(statistic, row.offset(kStatistic) * statistic_bytes(element));
  if (element == Element::float64) {
    *static_cast<double*>(place) = value;
  } else {
    *static_cast<float*>(place) = static_cast<float>(value);
  }
}

// Which columns of a row's pieces dropout keeps.
class DropoutRows {
 public:
  DropoutRows(const Dropout& dropout, int64_t columns)
      : dropout_(dropout), draw_(dropout.active ? draw_of(dropout.random) : Draw{}), fours_(fours_of(columns)) {}

  // Of scratch for as many columns, 0 without dropout.
  int64_t bytes(int64_t columns) const {
    return dropout_.active ? (columns + kScratchMultiple - 1) / kScratchMultiple * kScratchMultiple + kScratchMultiple
                           : 0;
  }

  // Of columns [begin, end) of the piece whose first column is `first`, of the row at statistic `number`.
  void keep(int64_t number, int64_t first, int64_t begin, int64_t end, uint8_t* bytes) const {
    const uint64_t four = static_cast<uint64_t>(dropout_.first_row + number) * static_cast<uint64_t>(fours_) +
                          static_cast<uint64_t>(first / kFour);
    row_kernels().keep(draw_, four, dropout_.threshold, begin, end, bytes);
  }

  bool active() const { return dropout_.active; }
  double factor() const { return dropout_.factor; }
  const Draw& draw() const { return draw_; }

 private:
  const Dropout& dropout_;
  const Draw draw_;
  const int64_t fours_;
};

// The pieces of a row and the two steps over them. Each step must get the scratch of the thread it runs on.
class ForwardRows {
 public:
  using Problem = ForwardProblem;
  using Partial = ExpSum;

  explicit ForwardRows(const Problem& problem)
      : problem_(problem),
        kernel_(row_kernels().forward[static_cast<int>(problem.element)][static_cast<int>(problem.mask_kind)]),
        element_bytes_(element_bytes(problem.element)),
        mask_bytes_(mask_element_bytes(problem.mask_kind, problem.element)),
        score_bytes_(problem.element == Element::float64 ? 8 : 4),
        gathered_(problem.mask_kind != MaskKind::none && problem.mask_column_stride != 1),
        dropout_(problem.dropout, problem.columns) {
    if (problem.random_state != nullptr) {
      problem.random_state[0] = static_cast<int64_t>(dropout_.draw().seed);
      problem.random_state[1] = static_cast<int64_t>(dropout_.draw().offset);
    }
  }

  // Scores, then what dropout keeps, then the mask if it has to be gathered.
  PieceScratch scratch() const {
    const int64_t columns = std::min(problem_.columns, kPieceColumns);
    const int64_t scores = score_bytes(std::max(columns, kBatchScores));
    const int64_t kept = dropout_.bytes(columns);
    void* const start =
        thread_scratch.reserve(static_cast<size_t>(scores + kept + (gathered_ ? columns * mask_bytes_ : 0)));
    return {start, static_cast<uint8_t*>(offset_pointer(start, scores)), offset_pointer(start, scores + kept)};
  }

  // Scores of all pieces of a row; null where they are too many.
  void* row_scratch() const {
    const int64_t bytes = score_bytes(problem_.columns);
    return bytes <= kRowScratchBytes ? thread_row_scratch.reserve(static_cast<size_t>(bytes)) : nullptr;
  }

  void* scores_at(void* row_scratch, int64_t first) const { return offset_pointer(row_scratch, first * score_bytes_); }

  // Whether rows can be computed at once, as far as they follow each other.
  bool has_runs(const RowCursor& row) const {
    return problem_.sink == nullptr && !dropout_.active() && !gathered_ && !changes_length(problem_, row);
  }

  void run(const RowCursor& row, int64_t rows, const PieceScratch& scratch) const {
    const ForwardPiece first = place(row, 0);
    kernel_.rows({first.x, first.mask, first.y, row.step(kInput) * element_bytes_, row.step(kSecond) * mask_bytes_,
                  row.step(kOutput) * element_bytes_, rows, problem_.columns, live_columns_from(problem_, row),
                  problem_.scale},
                 scratch.scores);
  }

  ForwardPiece piece_at(const RowCursor& row, int64_t first, const PieceScratch& scratch) const {
    ForwardPiece piece = place(row, first);
    set_columns(piece, problem_.columns, live_columns_of(problem_, row), first);
    if (gathered_) gather_mask(piece, scratch.mask);
    return piece;
  }

  // The first step; leaves the piece's exponentials in scratch.
  ExpSum reduce(const ForwardPiece& piece, const PieceScratch& scratch) const {
    return kernel_.exponentials(piece, problem_.scale, scratch.scores);
  }

  // The second step, given what the first found for the piece and the total over the row, where scratch holds the
  // piece's exponentials.
  void store(const ForwardPiece& piece, const RowCursor& row, int64_t first, const ExpSum& partial, const ExpSum& total,
             const PieceScratch& scratch) const {
    const double factor = factor_of(partial, total);
    if (!dropout_.active()) {
      kernel_.store(piece, scratch.scores, factor);
      return;
    }
    const bool is_nan = factor != factor;
    dropout_.keep(row.offset(kStatistic), first, is_nan ? 0 : piece.begin, is_nan ? piece.columns : piece.end,
                  scratch.kept);
    kernel_.store_dropped(piece, scratch.scores, factor, {scratch.kept, dropout_.factor()});
  }

  // Between the two where scratch holds others since.
  void restore(const ForwardPiece& piece, const PieceScratch& scratch) const { reduce(piece, scratch); }

  // The row's total, given that over its columns: the sink takes part. Its probability is stored if that is wanted.
  ExpSum complete(ExpSum total, const RowCursor& row) const {
    if (problem_.sink == nullptr) return total;
    const double sink =
        kernel_.number(offset_pointer(problem_.sink, row.offset(kHead) * sink_bytes(problem_)), problem_.sink_float32);
    double probability;
    if (!(sink < HUGE_VAL)) {
      total.sum = probability = std::nan("");
    } else if (total.sum == 0) {  // no column has any weight
      probability = sink == -HUGE_VAL ? 0 : 1;
    } else if (sink > total.maximum) {
      probability = 1 / (1 + total.sum * std::exp(total.maximum - sink));
      total.sum += std::exp(sink - total.maximum);  // infinite where every column's probability is 0
    } else {
      const double weight = std::exp(sink - total.maximum);
      total.sum += weight;
      probability = weight / total.sum;
    }
    store_statistic(problem_.element, problem_.sink_probability, row, probability);
    return total;
  }

  static ExpSum fold(const ExpSum* partials, int64_t count) {
    ExpSumFold fold;
    for (int64_t i = 0; i < count; ++i) fold.add(partials[i]);
    return fold.result();
  }

 private:
  int64_t score_bytes(int64_t columns) const {
    return (columns + kScratchMultiple - 1) / kScratchMultiple * kScratchMultiple * score_bytes_;
  }

  // From a piece's exponentials to probabilities.
  static double factor_of(const ExpSum& partial, const ExpSum& total) {
    if (total.sum != total.sum) return total.sum;
    return partial.sum == 0 ? 0 : std::exp(partial.maximum - total.maximum) / total.sum;
  }

  ForwardPiece place(const RowCursor& row, int64_t first) const {
    ForwardPiece piece;
    piece.x = offset_pointer(problem_.x, (row.offset(kInput) + first) * element_bytes_);
    piece.mask = offset_pointer(problem_.mask,
                                (row.offset(kSecond) + first * problem_.mask_column_stride) * mask_bytes_);
    piece.y = offset_pointer(problem_.y, (row.offset(kOutput) + first) * element_bytes_);
    piece.before_dropout =
        offset_pointer(problem_.before_dropout, (row.offset(kOutput) + first) * element_bytes_);
    return piece;
  }

  void gather_mask(ForwardPiece& piece, void* target) const {
    const auto run = mask_bytes_ == 1   ? gather<uint8_t>
                     : mask_bytes_ == 2 ? gather<uint16_t>
                     : mask_bytes_ == 4 ? gather<uint32_t>
                                        : gather<uint64_t>;
    run(piece.mask, problem_.mask_column_stride, piece.begin, piece.end, target);
    piece.mask = target;
  }

  const Problem& problem_;
  const ForwardKernel kernel_;
  const int64_t element_bytes_;
  const int64_t mask_bytes_;
  const int64_t score_bytes_;
  const bool gathered_;
  const DropoutRows dropout_;
};

const BackwardKernel& backward_kernel(Element element, int64_t grad_column_stride, bool dropout) {
  return row_kernels().backward[static_cast<int>(element)][grad_column_stride == 0 ? 0 : 1][dropout ? 1 : 0];
}

class BackwardRows {
 public:
  using Problem = BackwardProblem;
  using Partial = double;

  explicit BackwardRows(const Problem& problem)
      : problem_(problem),
        kernel_(backward_kernel(problem.element, problem.grad_column_stride, problem.dropout.active)),
        element_bytes_(element_bytes(problem.element)),
        dropout_(problem.dropout, problem.columns) {}

  // What dropout keeps.
  PieceScratch scratch() const {
    PieceScratch scratch = {};
    if (dropout_.active()) {
      const int64_t bytes = dropout_.bytes(std::min(problem_.columns, kPieceColumns));
      scratch.kept = static_cast<uint8_t*>(thread_scratch.reserve(static_cast<size_t>(bytes)));
    }
    return scratch;
  }

  static void* row_scratch() { return nullptr; }
  static void* scores_at(void*, int64_t) { return nullptr; }

  bool has_runs(const RowCursor& row) const {
    return problem_.dx != nullptr && problem_.dots == nullptr && !dropout_.active() && !changes_length(problem_, row);
  }

  void run(const RowCursor& row, int64_t rows, const PieceScratch&) const {
    const BackwardPiece first = place(row, 0);
    kernel_.rows({first.y, first.grad, first.dx, row.step(kInput) * element_bytes_, row.step(kSecond) * element_bytes_,
                  row.step(kOutput) * element_bytes_, rows, problem_.columns, live_columns_from(problem_, row),
                  problem_.scale});
  }

  BackwardPiece piece_at(const RowCursor& row, int64_t first, const PieceScratch& scratch) const {
    BackwardPiece piece = place(row, first);
    set_columns(piece, problem_.columns, live_columns_of(problem_, row), first);
    piece.kept = scratch.kept;
    if (dropout_.active()) dropout_.keep(row.offset(kStatistic), first, piece.begin, piece.end, scratch.kept);
    return piece;
  }

  double reduce(const BackwardPiece& piece, const PieceScratch&) const { return kernel_.dot(piece); }

  void store(const BackwardPiece& piece, const RowCursor&, int64_t, double, double total, const PieceScratch&) const {
    if (problem_.dx != nullptr) kernel_.store(piece, problem_.scale, total);
  }

  static void restore(const BackwardPiece&, const PieceScratch&) {}

  double complete(double total, const RowCursor& row) const {
    store_statistic(problem_.element, problem_.dots, row, total);
    return total;
  }

  static double fold(const double* partials, int64_t count) {
    double total = 0;
    for (int64_t i = 0; i < count; ++i) total += partials[i];
    return total;
  }

 private:
  BackwardPiece place(const RowCursor& row, int64_t first) const {
    BackwardPiece piece;
    piece.y = offset_pointer(problem_.y, (row.offset(kInput) + first) * element_bytes_);
    piece.grad = offset_pointer(problem_.grad,
                                (row.offset(kSecond) + first * problem_.grad_column_stride) * element_bytes_);
    piece.dx = offset_pointer(problem_.dx, (row.offset(kOutput) + first) * element_bytes_);
    return piece;
  }

  const Problem& problem_;
  const BackwardKernel kernel_;
  const int64_t element_bytes_;
  const DropoutRows dropout_;
};

// Rows of one piece each.
template <typename Direction>
void run_short_rows(const Direction& direction, const Rows& rows, int64_t begin, int64_t end) {
  const PieceScratch scratch = direction.scratch();
  RowCursor row(rows, begin);
  const bool has_runs = direction.has_runs(row);
  for (int64_t i = begin, count; i < end; i += count, row.skip(count)) {
    count = 1;
    if (has_runs) {
      count = std::min(row.left(), end - i);
      direction.run(row, count, scratch);
      continue;
    }
    const auto piece = direction.piece_at(row, 0, scratch);
    const typename Direction::Partial partial = direction.reduce(piece, scratch);
    direction.store(piece, row, 0, partial, direction.complete(partial, row), scratch);
  }
}

// One row of several pieces, by as many threads as parallel_for gives: `partials` has room for each piece.
template <typename Direction>
void run_long_row(const Direction& direction, const RowCursor& row, typename Direction::Partial* partials,
                  int64_t pieces) {
  void* const row_scratch = direction.row_scratch();
  const auto for_pieces = [&](const auto& step) {
    at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
      PieceScratch scratch = direction.scratch();
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i * kPieceColumns;
        if (row_scratch != nullptr) scratch.scores = direction.scores_at(row_scratch, first);
        step(direction.piece_at(row, first, scratch), i, first, scratch);
      }
    });
  };
  for_pieces([&](const auto& piece, int64_t i, int64_t, const PieceScratch& scratch) {
    partials[i] = direction.reduce(piece, scratch);
  });
  const typename Direction::Partial total = direction.complete(Direction::fold(partials, pieces), row);
  for_pieces([&](const auto& piece, int64_t i, int64_t first, const PieceScratch& scratch) {
    if (row_scratch == nullptr) direction.restore(piece, scratch);
    direction.store(piece, row, first, partials[i], total, scratch);
  });
}

template <typename Direction>
void run_long_rows(const Direction& direction, const Rows& rows, int64_t begin, int64_t end, int64_t pieces) {
  std::vector<typename Direction::Partial> partials(static_cast<size_t>(pieces));
  RowCursor row(rows, begin);
  for (int64_t i = begin; i < end; ++i, row.next()) run_long_row(direction, row, partials.data(), pieces);
}

template <typename Direction>
void run(const typename Direction::Problem& problem) {
  const Direction direction(problem);
  const Rows& rows = problem.rows;
  const int64_t count = rows.count();
  const int64_t pieces = piece_count(problem.columns);
  if (pieces > 1) {
    if (count < kLongRowsPerThread * at::get_num_threads()) {
      run_long_rows(direction, rows, 0, count, pieces);
    } else {
      // parallel_for within parallel_for runs on the calling thread.
      at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
        run_long_rows(direction, rows, begin, end, pieces);
      });
    }
    return;
  }
  const int64_t unit = std::max<int64_t>(1, kUnitColumns / problem.columns);
  const int64_t units = (count + unit - 1) / unit;
  at::parallel_for(0, units, kUnitsPerTask, [&](int64_t begin, int64_t end) {
    const auto run_units = [&](int64_t first, int64_t last) {
      run_short_rows(direction, rows, first * unit, std::min(count, last * unit));
    };
    if (!problem.band.active) {
      run_units(begin, end);
    } else {
      // Half of the share from the front of the units and half from their back: short and long rows of a triangle.
      run_units((begin + 1) / 2, (end + 1) / 2);
      run_units(units - end / 2, units - begin / 2);
    }
  });
}

}  // namespace

void forward(const ForwardProblem& problem) { run<ForwardRows>(problem); }

void backward(const BackwardProblem& problem) { run<BackwardRows>(problem); }

void mask_gradient(const MaskGradientProblem& problem) {
  const BackwardKernel kernel =
      backward_kernel(problem.element, problem.grad_column_stride, problem.dropout.active);
  const DropoutRows dropout(problem.dropout, problem.columns);
  const int64_t bytes = element_bytes(problem.element);
  const int64_t output_bytes = problem.gradient_float32 ? 4 : bytes;
  Rows mask_rows, summed_rows;
  mask_rows.dims = problem.mask_dims;
  summed_rows.dims = problem.rows.dims - problem.mask_dims;
  std::copy_n(problem.rows.dim, mask_rows.dims, mask_rows.dim);
  std::copy_n(problem.rows.dim + mask_rows.dims, summed_rows.dims, summed_rows.dim);
  const int64_t chunks = (problem.columns + kSumColumns - 1) / kSumColumns;
  const int64_t summed = summed_rows.count();
  at::parallel_for(0, mask_rows.count() * chunks, 1, [&](int64_t begin, int64_t end) {
    std::array<double, kSumColumns> sums;
    std::array<uint8_t, kSumColumns + kScratchMultiple> kept;
    for (int64_t task = begin; task < end; ++task) {
      const RowCursor outer(mask_rows, task / chunks);
      const int64_t first = task % chunks * kSumColumns;
      const int64_t columns = std::min(kSumColumns, problem.columns - first);
      sums.fill(0);
      RowCursor inner(summed_rows, 0);
      for (int64_t i = 0; i < summed; ++i, inner.next()) {
        const auto offset = [&](Operand operand) { return outer.offset(operand) + inner.offset(operand); };
        const ColumnRange live = live_columns_at(problem, offset(kQuery), offset(kBatch));
        BackwardPiece piece;
        piece.columns = columns;
        piece.begin = std::max<int64_t>(live.begin - first, 0);
        piece.end = std::min(live.end - first, columns);
        if (piece.begin >= piece.end) continue;
        piece.y = offset_pointer(problem.y, (offset(kInput) + first) * bytes);
        piece.grad = offset_pointer(problem.grad, (offset(kSecond) + first * problem.grad_column_stride) * bytes);
        piece.kept = kept.data();
        if (dropout.active()) dropout.keep(offset(kStatistic), first, piece.begin, piece.end, kept.data());
        const void* const dot =
            offset_pointer(problem.dots, offset(kStatistic) * statistic_bytes(problem.element));
        kernel.accumulate(piece,
                          problem.element == Element::float64 ? *static_cast<const double*>(dot)
                                                              : *static_cast<const float*>(dot),
                          sums.data());
      }
      if (dropout.active()) {
        for (double& sum : sums) sum *= dropout.factor();
      }
      kernel.write(sums.data(), columns, problem.gradient_float32,
                   offset_pointer(problem.gradient, (outer.offset(kOutput) + first) * output_bytes));
    }
  });
}

void dropout_keep(const Dropout& dropout, int64_t rows, int64_t columns, uint8_t* keep) {
  const DropoutRows of_rows(dropout, columns);
  const int64_t pieces = piece_count(columns);
  const int64_t grain = std::max<int64_t>(1, kUnitColumns * kUnitsPerTask / std::min(columns, kPieceColumns));
  at::parallel_for(0, rows * pieces, grain, [&](int64_t begin, int64_t end) {
    auto* const kept = static_cast<uint8_t*>(
        thread_scratch.reserve(static_cast<size_t>(of_rows.bytes(std::min(columns, kPieceColumns)))));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % pieces * kPieceColumns;
      const int64_t count = std::min(columns - first, kPieceColumns);
      of_rows.keep(i / pieces, first, 0, count, kept);
      uint8_t* const target = keep + i / pieces * columns + first;
      for (int64_t column = 0; column < count; ++column) target[column] = kept[column] & 1;
    }
  });
}

const char* instruction_set() { return row_kernels().instruction_set; }

}  // namespace sms::cpu
