// A block, or a cluster of blocks, holds the live columns of two rows in registers: of the first row and the last, of the
// second and the last but one, and so on. Under causality two such rows have as many live columns as one row has
// columns. A warp holds a segment with a live column; what lies outside of those is only written, by all warps alike.
// So no warp waits for others with nothing to load. Segments are those of block_row and cluster_row, and so are a row's
// bits.
#pragma once

#include "block_row.cuh"
#include "team.cuh"

namespace sms::cuda {

// The segments of a row that have a live column: [begin, end). Those of whole rows have kWholeLength columns, others, where
// that is 0, as many as the arguments say: a division would keep every warp from its loads.
class LiveSegments {
 public:
  template <int kWholeLength>
  static __device__ __forceinline__ LiveSegments of(const ForwardArguments& arguments, uint32_t row,
                                                    const RowPlace& place, bool exists) {
    const Extent live = near_extent(arguments, row, place, exists, 0);
    const auto segment = [&](int column) {
      if constexpr (kWholeLength > 0) {
        return static_cast<uint32_t>(column / kWholeLength);
      } else {
        return arguments.by_part_columns.quotient(static_cast<uint32_t>(column));
      }
    };
    LiveSegments segments;
    segments.bits_ = live.begin >= live.end ? 0 : segment(live.begin) | (segment(live.end - 1) + 1) << 16;
    return segments;
  }

  // One of two, by value: a choice of one of two places would have both in memory.
  __device__ __forceinline__ LiveSegments or_second(const LiveSegments& second, bool is_second) const {
    const uint32_t other = second.bits_;
    LiveSegments chosen = *this;
    if (is_second) chosen.bits_ = other;
    return chosen;
  }

  __device__ __forceinline__ int begin() const { return static_cast<int>(bits_ & 0xffff); }
  __device__ __forceinline__ int end() const { return static_cast<int>(bits_ >> 16); }
  __device__ __forceinline__ int count() const { return end() - begin(); }
  __device__ __forceinline__ bool has(int segment) const { return segment >= begin() && segment < end(); }

 private:
  uint32_t bits_;  // both in one register
};

// The warps of one or more blocks that share a pair of rows: the first ones hold segments of its first row, the next ones
// of its second. To be made at the start of a kernel.
template <typename Real, int kWholeLength>
class PairTeam {
 public:
  // Read anew wherever they are asked for, as ClusterTeam's. The pair's number is that of its first row.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ uint32_t block() { return cluster_block(); }
  static __device__ __forceinline__ uint32_t blocks() { return cluster_blocks(); }
  static __device__ __forceinline__ uint32_t pair() { return cluster_number(); }
#else
  static __device__ __forceinline__ constexpr uint32_t block() { return 0; }
  static __device__ __forceinline__ constexpr uint32_t blocks() { return 1; }
  static __device__ __forceinline__ uint32_t pair() { return blockIdx.x; }
#endif

  __device__ __forceinline__ explicit PairTeam(const ForwardArguments& arguments) : arguments_(arguments) {
    place_ = arguments.rows.locate(row_of(false));
    const RowPlace second_place = arguments.rows.locate(row_of(true));
    first_ = LiveSegments::of<kWholeLength>(arguments, row_of(false), place_, true);
    second_ = LiveSegments::of<kWholeLength>(arguments, row_of(true), second_place, row_of(true) != row_of(false));
    if (is_second()) place_ = second_place;
    if (blocks() == 1) return;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) barrier().expect((first_.count() + second_.count()) * sizeof(Part));
    cluster_arrive_unordered();
#endif
  }

  // Of all the threads that share the pair.
  __device__ __forceinline__ uint32_t thread() const { return block() * blockDim.x + threadIdx.x; }
  __device__ __forceinline__ uint32_t threads() const { return blocks() * blockDim.x; }

  // The row, and its segment, of this thread's warp.
  __device__ __forceinline__ uint32_t row() const { return row_of(is_second()); }
  __device__ __forceinline__ RowPlace place(const ForwardArguments&) const { return place_; }
  __device__ __forceinline__ int segment() const {
    return is_second() ? second_.begin() + warp() - first_.count() : first_.begin() + warp();
  }
  __device__ __forceinline__ bool holds_segment() const { return warp() < first_.count() + second_.count(); }
  static constexpr bool kHoldsDeadSegments = false;
  // The thread that asks for later pairs, as ClusterTeam's.
  __device__ __forceinline__ bool asks_for_row() const { return thread() == threads() - kWarpLanes; }
  // What one thread of a row does is left to write_outside().
  static __device__ __forceinline__ constexpr bool first_thread() { return false; }

  // As BlockTeam's, of the warp's own row.
  template <typename Exponent>
  __device__ __forceinline__ Totals<Real> totals(Real maximum, Real sum, const Exponent& exponent) const {
    meet({maximum, sum});
    return totals_of(is_second(), exponent);
  }

  // Calls use(second, row, live segments) for both rows.
  template <typename Use>
  __device__ __forceinline__ void for_each_row(const Use& use) const {
    const int rows = row_of(true) != row_of(false) ? 2 : 1;
#pragma unroll 1
    for (int r = 0; r < rows; ++r) use(r == 1, row_of(r == 1), live_of(r == 1));
  }

  // Once they have met, those of the pair's first row or its second: in the order of ClusterTeam, which is that of BlockTeam
  // too where no lane has a second part.
  template <typename Exponent>
  __device__ __forceinline__ Totals<Real> totals_of(bool second, const Exponent& exponent) const {
    const LiveSegments live = live_of(second);
    const Part* parts = parts_of(second);
    const int lane = static_cast<int>(threadIdx.x % kWarpLanes);
    const auto part_of = [&](int segment) {
      return live.has(segment) ? parts[segment] : Part{kNegativeInfinity<Real>, Real{0}};
    };
    const Part first = part_of(lane);
    Real maximum = first.maximum;
#pragma unroll 1
    for (int s = lane + kWarpLanes; s < live.end(); s += kWarpLanes) maximum = fmax(maximum, part_of(s).maximum);
    maximum = warp_max(maximum);
    Real sum = exponent.rescale(first.sum, first.maximum, maximum);
#pragma unroll 1
    for (int s = lane + kWarpLanes; s < live.end(); s += kWarpLanes) {
      const Part part = part_of(s);
      sum = add(sum, exponent.rescale(part.sum, part.maximum, maximum));
    }
    return {maximum, normalizer(warp_sum(sum))};
  }

  // Whether it is a NaN row, as is one of which a segment's sum is NaN: less work than its totals. Measured on an H200, with
  // one place found for each row and that hint to ByteBarrier: causal under a float mask .87 -> .90 of a copy's speed at
  // 32,768 float16 columns, .91 -> .93 at 8,192.
  __device__ __forceinline__ bool is_nan(bool second) const {
    const LiveSegments live = live_of(second);
    const Part* parts = parts_of(second);
    bool nan = false;
#pragma unroll 1
    for (int s = live.begin() + static_cast<int>(threadIdx.x % kWarpLanes); s < live.end(); s += kWarpLanes) {
      nan |= parts[s].sum != parts[s].sum;
    }
    return __any_sync(kFullWarp, nan);
  }

 private:
  static constexpr int kMostSegments = kClusterBlocks * kBlockThreads / kWarpLanes;  // of a row
  struct alignas(2 * sizeof(Real)) Part {
    Real maximum;
    Real sum;
  };

  const ForwardArguments& arguments_;
  LiveSegments first_;
  LiveSegments second_;
  RowPlace place_;  // of this thread's row

  // The pair's first row or its second.
  __device__ __forceinline__ uint32_t row_of(bool second) const {
    return second ? arguments_.rows.rows - 1 - pair() : pair();
  }
  __device__ __forceinline__ LiveSegments live_of(bool second) const { return first_.or_second(second_, second); }
  __device__ __forceinline__ int warp() const { return static_cast<int>(thread() / kWarpLanes); }
  __device__ __forceinline__ bool is_second() const { return warp() >= first_.count(); }

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  static __device__ __forceinline__ ByteBarrier& barrier() {
    __shared__ ByteBarrier memory;
    return memory;
  }
#endif

  // Of a row, by segment.
  static __device__ __forceinline__ Part* parts_of(bool second) {
    __shared__ Part memory[2 * kMostSegments];
    return memory + (second ? kMostSegments : 0);
  }

  __device__ __forceinline__ void meet(const Part& part) const {
    const uint32_t lane = threadIdx.x % kWarpLanes;
    Part* place = parts_of(is_second()) + segment();
    if (blocks() == 1) {
      if (lane == 0 && holds_segment()) *place = part;
      __syncthreads();
      return;
    }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    cluster_wait();
    if (lane < blocks() && holds_segment()) send_to_block(place, &barrier(), lane, part);
    barrier().wait();
#endif
  }
};

// Fills columns [begin, end) of the row at `row` with the elements of `value`, which are all the same: a thread's share.
template <bool kWhole, int kElementBytes>
__device__ __forceinline__ void fill_columns(char* row, int begin, int end, const Chunk<16>& value, uint32_t thread,
                                             uint32_t threads) {
  constexpr int kCount = kVectorBytes / kElementBytes;
  const int ahead = kWhole ? 0 : elements_ahead<kElementBytes>(row);
  char* boundary = row - ahead * kElementBytes;
  // Of elements from the vector boundary before the row on.
  const int low = begin + ahead;
  const int high = end + ahead;
  const int first = (low + kCount - 1) / kCount;
  for (int v = first + static_cast<int>(thread); v < high / kCount; v += static_cast<int>(threads)) {
    store_aligned(boundary + int64_t{v} * kVectorBytes, value);
  }
  if constexpr (!kWhole) {
    // What is left before the first whole vector and behind the last, less than a vector each.
    const auto fill_elements = [&](int from, int to) {
      const int element = from + static_cast<int>(thread);
      if (element < to) store_element<kElementBytes>(boundary + int64_t{element} * kElementBytes, value, 0);
    };
    fill_elements(low, min(first * kCount, high));
    if (high / kCount >= first) fill_elements(high / kCount * kCount, high);
  }
}

// Writes the columns of both rows that lie outside of their segments with a live column: 0, or NaN in a NaN row.
template <Element kElement, bool kWhole, typename Team, typename Exponent>
__device__ __forceinline__ void write_outside(const ForwardArguments& arguments, const Team& team, int length,
                                              const Exponent& exponent) {
  using Real = Accumulate<kElement>;
  const int columns = static_cast<int>(arguments.columns);
  team.for_each_row([&](bool second, uint32_t row, const LiveSegments& live) {
    Real nothing = 0;
    if (arguments.sink.given) {
      const Totals<Real> totals = team.totals_of(second, exponent);
      nothing = multiply(nothing, normalizer_of<kElement>(arguments, row, totals, exponent, team.thread() == 0));
    } else if (team.is_nan(second)) {
      nothing = __uint_as_float(0x7fffffffu);  // the NaN of a device's arithmetic, which the other cells are
    }
    Real value[kCountOf<kElement>];
#pragma unroll
    for (int i = 0; i < kCountOf<kElement>; ++i) value[i] = nothing;
    const Chunk<16> chunk = pack<kElement>(value);
    char* y = arguments.y + arguments.rows.locate(row).output;
    const auto fill = [&](int begin, int end) {
      fill_columns<kWhole, kBytesOf<kElement>>(y, begin, end, chunk, team.thread(), team.threads());
    };
    if (live.begin() > 0) fill(0, live.begin() * length);
    if (live.end() * length < columns) fill(live.end() * length, columns);
  });
}

template <Element kElement, MaskKind kMask, int kVectors, bool kWhole>
__global__ void
__launch_bounds__(pair_threads(kElement, kMask, kVectors, kWhole), pairs_resident(kElement, kMask, kVectors))
    pair_rows_forward(const __grid_constant__ ForwardArguments arguments) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kVectors != kBlockVectors) return;  // such rows take a cluster
#endif
  using Real = Accumulate<kElement>;
  constexpr int kLength = kWarpLanes * kVectors * kCountOf<kElement>;
  const PairTeam<Real, kWhole ? kLength : 0> team(arguments);
  prefetch_for_pair<kElement, kMask>(arguments, team);
  hold_row_forward<kElement, kMask, kVectors, kWhole, false>(arguments, team);
  write_outside<kElement, kWhole>(arguments, team, kWhole ? kLength : arguments.part_columns,
                                  typename Scores<kElement, kMask, kWarpLanes, kVectors>::Exponent{arguments.packed});
}

}  // namespace sms::cuda
