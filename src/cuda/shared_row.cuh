// A block, or a cluster of blocks, holds a row in shared memory: for rows too long for registers. All of a row's loads
// are in flight together and take no registers; the row is read and written once. Each block holds the same number of
// columns, and its threads take their vectors in turn, so that a row of which only a part is live keeps all of them
// busy. The block meets when the row has come, and once more for its maximum and sum.
#pragma once

#include "prefetch.cuh"
#include "ptx.cuh"
#include "segment.cuh"
#include "sink.cuh"
#include "team.cuh"

namespace sms::cuda {

// An operand's part of a row in shared memory, as it lies in device memory: at the same distance from a 16-byte
// boundary. Reads of vectors that overlap it stay inside.
template <int kElementBytes, int kCount>
struct SharedOperand {
  using Parts = Shape<kElementBytes, kCount>;
  static constexpr int kSpare = 2 * kVectorBytes;  // before the first column, for reads that reach past it
  char* first;                                     // where the first column lies

  // Copies columns [begin, end) of those from `source` on, one thread's share.
  __device__ __forceinline__ void copy(char* memory, const char* source, const Span& span, int begin, int end) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(source);
    const uintptr_t boundary = kVectorBytes - 1;
    first = memory + kSpare + (address & boundary);
    if (begin >= end) return;
    const uintptr_t low = (address + begin * kElementBytes) & ~boundary;
    const uintptr_t high = (address + end * kElementBytes + boundary) & ~boundary;
    for (uintptr_t at = low + threadIdx.x * kVectorBytes; at < high; at += blockDim.x * kVectorBytes) {
      char* target = first + static_cast<int64_t>(at - address);
      if (at >= span.low && at + kVectorBytes <= span.high) {
        copy_16(target, reinterpret_cast<const char*>(at));
      } else {
        copy_elements(target, at, address + begin * kElementBytes, address + end * kElementBytes);
      }
    }
  }

  // The same for columns `column_stride` bytes apart.
  __device__ __forceinline__ void copy_strided(char* memory, const char* source, int64_t column_stride, int begin,
                                               int end) {
    first = memory + kSpare;
    for (int column = begin + static_cast<int>(threadIdx.x); column < end; column += static_cast<int>(blockDim.x)) {
      const Chunk<kElementBytes> element = load_aligned<kElementBytes, Cache::keep>(source + column * column_stride);
      store_element<kElementBytes>(first + column * kElementBytes, element);
    }
  }

  // kCount columns from `column` on, which may be a few before the first.
  template <bool kWhole>
  __device__ __forceinline__ void load(typename Parts::Piece (&out)[Parts::kPieces], int column) const {
    const char* address = first + column * kElementBytes;
#pragma unroll
    for (int p = 0; p < Parts::kPieces; ++p) {
      const char* piece = address + p * Parts::kChunkBytes;
      const int shift = kWhole ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(piece) % Parts::kChunkBytes);
      out[p] = read(piece - shift);
      if constexpr (!kWhole && Parts::kChunkBytes > kElementBytes) {
        out[p] = realign<kElementBytes>(out[p], read(piece - shift + Parts::kChunkBytes), shift);
      }
    }
  }

 private:
  static __device__ __forceinline__ typename Parts::Piece read(const char* address) {
    typename Parts::Piece piece;
    if constexpr (Parts::kChunkBytes == 16) {
      const uint4 value = *reinterpret_cast<const uint4*>(address);
      piece.word[0] = value.x;
      piece.word[1] = value.y;
      piece.word[2] = value.z;
      piece.word[3] = value.w;
    } else {
      piece = load_aligned<Parts::kChunkBytes, Cache::keep>(address);
    }
    return piece;
  }

  static __device__ __forceinline__ void copy_elements(char* target, uintptr_t at, uintptr_t low, uintptr_t high) {
    for (int offset = 0; offset < kVectorBytes; offset += kElementBytes) {
      if (at + offset < low || at + offset >= high) continue;
      store_element<kElementBytes>(
          target + offset, load_aligned<kElementBytes, Cache::keep>(reinterpret_cast<const char*>(at + offset)));
    }
  }
};

// Which columns of its row a block holds, relative to the first of them.
struct BlockColumns {
  int64_t start;  // the first one's column in the row
  int count;
  int begin;  // live ones: [begin, end)
  int end;

  __device__ __forceinline__ BlockColumns(const ColumnRange& live, int64_t columns, uint32_t block, int block_columns)
      : start(static_cast<int64_t>(block) * block_columns) {
    const auto clip = [](int64_t value, int64_t limit) {
      return static_cast<int>(value < 0 ? 0 : value < limit ? value : limit);
    };
    count = clip(columns - start, block_columns);
    begin = clip(live.begin - start, count);
    end = clip(live.end - start, count);
  }

  // What of the vector whose first column is `column` exists, relative to it.
  __device__ __forceinline__ Extent extent(int column) const {
    return {-column, count - column, begin - column, end - column};
  }
};

// An extent that the compiler knows: of a vector that is live as a whole.
template <int kCount>
__device__ __forceinline__ constexpr Extent whole_extent() {
  return {0, kCount, 0, kCount};
}

// This thread's share of the vectors that begin at columns -ahead, kCount - ahead, ..., of those with a live column:
// calls use(load(column), column, extent) in ascending order. Vectors that are live as a whole come two at a time, both
// loaded before the first is used.
template <int kCount, typename Load, typename Use>
__device__ __forceinline__ void visit_live(const BlockColumns& columns, int ahead, const Load& load, const Use& use) {
  if (columns.begin >= columns.end) return;
  const int threads = static_cast<int>(blockDim.x);
  const int mine = static_cast<int>(threadIdx.x);
  const int begin = columns.begin + ahead;
  const int end = columns.end + ahead;
  const int first = begin / kCount;              // the first vector with a live column
  const int whole = (begin + kCount - 1) / kCount;  // [whole, whole_end): live as a whole
  const int whole_end = end / kCount;
  const auto partly = [&](int vector) {
    const int column = vector * kCount - ahead;
    if (vector % threads == mine) use(load(column), column, columns.extent(column));
  };
  if (first < whole) partly(first);
  int vector = whole / threads * threads + mine;
  if (vector < whole) vector += threads;
  for (; vector + threads < whole_end; vector += 2 * threads) {
    const int column = vector * kCount - ahead;
    const int next = column + threads * kCount;
    const auto one = load(column);
    const auto other = load(next);
    use(one, column, whole_extent<kCount>());
    use(other, next, whole_extent<kCount>());
  }
  if (vector < whole_end) use(load(vector * kCount - ahead), vector * kCount - ahead, whole_extent<kCount>());
  if (whole_end * kCount < end && whole_end >= whole) partly(whole_end);
}

// Stores a vector of the output, as far as it lies in the block's columns.
template <int kElementBytes>
__device__ __forceinline__ void store_inside(const BlockColumns& columns, char* output, int column,
                                             const Chunk<16>& result) {
  constexpr int kCount = kVectorBytes / kElementBytes;
  char* target = output + static_cast<int64_t>(column) * kElementBytes;
  if (column >= 0 && column + kCount <= columns.count) {
    store_aligned(target, result);
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (column + i >= 0 && column + i < columns.count) {
      store_element<kElementBytes>(target + i * kElementBytes, result, i);
    }
  }
}

// This thread's share of the output's vectors without a live column: calls none() for each and stores what it returns.
template <int kElementBytes, typename None>
__device__ __forceinline__ void store_rest(const BlockColumns& columns, char* output, int ahead, const None& none) {
  constexpr int kCount = kVectorBytes / kElementBytes;
  const int step = static_cast<int>(blockDim.x) * kCount;
  for (int column = static_cast<int>(threadIdx.x) * kCount - ahead; column < columns.count; column += step) {
    const bool live = columns.begin < columns.end && columns.extent(column).any_live(0, kCount);
    if (!live) store_inside<kElementBytes>(columns, output, column, none());
  }
}

template <Element kElement, MaskKind kMask, bool kWhole>
struct SharedForward {
  using RowScores = Scores<kElement, kMask, 1, 1>;
  using Raw = RawScores<kElement, kMask, 1, 1, kWhole>;
  using Real = typename RowScores::Real;
  static constexpr int kCount = kCountOf<kElement>;
  static constexpr int kMaskBytes = mask_element_bytes(kMask, kElement);
  using X = SharedOperand<kBytesOf<kElement>, kCount>;
  using Mask = SharedOperand<kMaskBytes, kCount>;

  const ForwardArguments& arguments;
  X x;
  Mask mask;

  __device__ __forceinline__ RowScores scores(const Raw& raw, const Extent& extent) const {
    RowScores row_scores;
    row_scores.take(raw, arguments, extent, 0, 0);
    return row_scores;
  }

  template <typename Team>
  __device__ __forceinline__ void run(const Team& team) {
    constexpr int kBytes = kBytesOf<kElement>;
    const typename RowScores::Exponent exponent{arguments.packed};
    const RowPlace place = arguments.rows.locate(team.row());
    const BlockColumns columns(live_columns(arguments, team.row(), place), arguments.columns, team.block(),
                               arguments.part_columns);
    x.copy(launched_memory(), arguments.x + place.input + columns.start * kBytes, arguments.x_span, columns.begin,
           columns.end);
    if constexpr (kMask != MaskKind::none) {
      char* memory = launched_memory() + arguments.shared_second;
      const char* source = arguments.mask + place.second + columns.start * arguments.mask_column_stride;
      if (kWhole || arguments.mask_column_stride == kMaskBytes) {
        mask.copy(memory, source, arguments.mask_span, columns.begin, columns.end);
      } else {
        mask.copy_strided(memory, source, arguments.mask_column_stride, columns.begin, columns.end);
      }
    }
    wait_for_copies();
    __syncthreads();

    const auto load = [&](int column) {
      Raw raw;
      x.template load<kWhole>(raw.x[0], column);
      if constexpr (kMask != MaskKind::none) mask.template load<kWhole>(raw.mask[0], column);
      return raw;
    };
    typename RowScores::Key key = RowScores::smallest_key();
    visit_live<kCount>(columns, 0, load, [&](const Raw& raw, int, const Extent& extent) {
      key = RowScores::larger(key, scores(raw, extent).largest());
    });
    // Exponentials against the warp's own maximum first, so that the team meets only once.
    const Real maximum = warp_max(RowScores::maximum_of(key));
    const Shift<Real> warp_shift = exponent.shift(maximum);
    CompensatedSum<Real> sum;
    visit_live<kCount>(columns, 0, load, [&](const Raw& raw, int, const Extent& extent) {
      sum += scores(raw, extent).exponentiate(warp_shift, exponent, extent, 0);
    });
    Totals<Real> totals = team.totals(maximum, warp_sum(sum.value()), exponent);
    if (arguments.sink.given) {
      totals.normalizer = with_sink<kElement>(arguments, team.row(), exponent.score(totals.maximum), totals.normalizer,
                                              team.first_thread());
    }

    const Shift<Real> shift = exponent.shift(totals.maximum);
    char* y = arguments.y + place.output + columns.start * kBytes;
    const int ahead = kWhole ? 0 : elements_ahead<kBytes>(y);
    visit_live<kCount>(columns, ahead, load, [&](const Raw& raw, int column, const Extent& extent) {
      RowScores row_scores = scores(raw, extent);
      row_scores.exponentiate(shift, exponent, extent, 0);
      Chunk<16> result[1];
      row_scores.normalize(result, totals.normalizer);
      store_inside<kBytes>(columns, y, column, result[0]);
    });
    store_rest<kBytes>(columns, y, ahead, [&]() {
      Real none[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) none[i] = multiply(Real{0}, totals.normalizer);  // NaN in a NaN row
      return pack<kElement>(none);
    });
  }
};

template <Element kElement, bool kWhole>
struct SharedBackward {
  using Raw = RawGradients<kElement, 1, 1, kWhole>;
  using Real = Accumulate<kElement>;
  static constexpr int kCount = kCountOf<kElement>;
  using Operand = SharedOperand<kBytesOf<kElement>, kCount>;

  const BackwardArguments& arguments;
  Operand y;
  Operand grad;
  Chunk<16> grad_everywhere;  // where it is expanded

  template <typename Team>
  __device__ __forceinline__ void run(const Team& team) {
    constexpr int kBytes = kBytesOf<kElement>;
    const RowPlace place = arguments.rows.locate(team.row());
    const BlockColumns columns(live_columns(arguments, team.row(), place), arguments.columns, team.block(),
                               arguments.part_columns);
    y.copy(launched_memory(), arguments.y + place.input + columns.start * kBytes, arguments.y_span, columns.begin,
           columns.end);
    const char* source = arguments.grad + place.second;
    if (!kWhole && arguments.grad_expanded) {
      grad_everywhere = load_filled<kBytes, kVectorBytes>(source);
    } else {
      grad.copy(launched_memory() + arguments.shared_second, source + columns.start * kBytes,
                arguments.grad_span, columns.begin, columns.end);
    }
    wait_for_copies();
    __syncthreads();

    const auto load = [&](int column) {
      Raw raw;
      y.template load<kWhole>(raw.y[0], column);
      if (!kWhole && arguments.grad_expanded) {
        raw.grad[0][0] = grad_everywhere;
      } else {
        grad.template load<kWhole>(raw.grad[0], column);
      }
      return raw;
    };
    CompensatedSum<Real> sum;
    visit_live<kCount>(columns, 0, load, [&](Raw raw, int, const Extent& extent) {
      raw.settle(extent, 0, 0);
      sum += raw.dot(extent, Ahead<kElement, false>{}, 0);
    });
    const Real dot = team.sum(warp_sum(sum.value()));
    if (arguments.dots.given) {
      if (team.first_thread()) store_row_value(arguments, arguments.dots, team.row(), dot);
      if (arguments.dx == nullptr) return;
    }

    char* dx = arguments.dx + place.output + columns.start * kBytes;
    const int ahead = kWhole ? 0 : elements_ahead<kBytes>(dx);
    const Real scale = scale_of<Real>(arguments);
    visit_live<kCount>(columns, ahead, load, [&](Raw raw, int column, const Extent& extent) {
      raw.settle(extent, 0, 0);
      store_inside<kBytes>(columns, dx, column, raw.result(0, dot, scale));
    });
    store_rest<kBytes>(columns, dx, ahead, []() { return Chunk<16>{}; });
  }
};

template <Element kElement, MaskKind kMask, bool kWhole>
__global__ void __launch_bounds__(kSharedThreads, kSharedResident)
    shared_row_forward(const __grid_constant__ ForwardArguments arguments) {
  const BlocksTeam<Accumulate<kElement>, 2> team;
  prefetch_for_row<kElement>(arguments, team, arguments.part_columns);
  prefetch_mask_for_row<kElement, kMask>(arguments, team);
  SharedForward<kElement, kMask, kWhole>{arguments}.run(team);
}

template <Element kElement, bool kWhole>
__global__ void __launch_bounds__(kSharedThreads, kSharedResident)
    shared_row_backward(const __grid_constant__ BackwardArguments arguments) {
  const BlocksTeam<Accumulate<kElement>, 1> team;
  prefetch_for_row<kElement>(arguments, team, arguments.part_columns);
  SharedBackward<kElement, kWhole>{arguments}.run(team);
}

}  // namespace sms::cuda
