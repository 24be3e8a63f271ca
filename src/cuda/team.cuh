// The warps that share a row, and how they share its maximum and its sums: a block's, or those of a cluster of blocks.
#pragma once

#include "ptx.cuh"
#include "reduce.cuh"

namespace sms::cuda {

// A row's maximum and the normalizer of its sum.
template <typename Real>
struct Totals {
  Real maximum;     // may be -inf
  Real normalizer;  // 0 for a dead row, NaN for a NaN row
};

// The warps of a block, at most kMostWarps, that share a row, or those of a half of it, kMostWarps then, that share one of
// kRows rows. They meet once in a kernel. kMayTakeFromBothEnds: as of the arguments.
template <int kMostWarps, int kRows = 1, bool kMayTakeFromBothEnds = false>
class BlockTeam {
 public:
  __device__ __forceinline__ BlockTeam() : row_(blockIdx.x * kRows + row_of_block()) {}
  template <typename Arguments>
  __device__ __forceinline__ explicit BlockTeam(const Arguments& arguments) : BlockTeam() {
    if (!kMayTakeFromBothEnds || !arguments.from_both_ends) return;
    from_end_ = blockIdx.x % 2 != 0;
    row_ = from_end_ ? arguments.rows.rows - 1 - blockIdx.x / 2 : blockIdx.x / 2;
  }

  static __device__ __forceinline__ uint32_t block() { return 0; }
  __device__ __forceinline__ uint32_t row() const { return row_; }
  // The row that is taken so many rows later, of those from the same end; none of that number, if there is none.
  __device__ __forceinline__ uint32_t later_row(uint32_t distance) const {
    return from_end_ ? row_ - distance : row_ + distance;
  }
  template <typename Arguments>
  __device__ __forceinline__ RowPlace place(const Arguments& arguments) const {
    return arguments.rows.locate(row());
  }
  __device__ __forceinline__ bool first_thread() const {
    return thread_of_row() == 0;
  }
  // The thread that asks for later rows, of those that the block's threads hold, and of masks, once a row. It is of the last
  // warp, which has the fewest columns, and none that are live in most causal rows: others wait for the first one.
  __device__ __forceinline__ bool asks_for_block() const {
    const uint32_t threads = kRows == 1 ? blockDim.x : kMostThreads;
    return thread_of_row() == threads - kWarpLanes;
  }
  __device__ __forceinline__ bool asks_for_row() const { return asks_for_block(); }
  __device__ __forceinline__ int segment() const {
    return static_cast<int>(threadIdx.x / kWarpLanes - row_of_block() * kMostWarps);
  }
  static __device__ __forceinline__ constexpr bool holds_segment() { return true; }
  static constexpr bool kHoldsDeadSegments = true;

  // From each warp's maximum and sum of exponentials against it, the same in all lanes of the warp. Every thread holds
  // the result.
  template <typename Real, typename Exponent>
  __device__ __forceinline__ Totals<Real> totals(Real maximum, Real sum, const Exponent& exponent) const {
    struct alignas(2 * sizeof(Real)) Part {
      Real maximum;
      Real sum;
    };
    const Part part = gathered(Part{maximum, sum}, Part{kNegativeInfinity<Real>, Real{0}});
    const Real row_maximum = warp_max(part.maximum);
    return {row_maximum, normalizer(sum_of_parts(exponent.rescale(part.sum, part.maximum, row_maximum)))};
  }

  // The sum of each warp's sum. Every thread holds the result.
  template <typename Real>
  __device__ __forceinline__ Real sum(Real value) const {
    return sum_of_parts(gathered(value, Real{0}));
  }

 private:
  static constexpr uint32_t kMostThreads = kMostWarps * kWarpLanes;

  static __device__ __forceinline__ uint32_t thread_of_row() {
    return kRows == 1 ? threadIdx.x : threadIdx.x % kMostThreads;
  }
  static __device__ __forceinline__ uint32_t row_of_block() { return kRows == 1 ? 0 : threadIdx.x / kMostThreads; }

  // A lane's part: that of one of the warps, the same as every kMostWarps lanes; `none` where there is no such warp.
  template <typename Part>
  __device__ __forceinline__ Part gathered(const Part& mine, const Part& none) const {
    __shared__ Part shared[kRows * kMostWarps];
    if (threadIdx.x % kWarpLanes == 0) shared[threadIdx.x / kWarpLanes] = mine;
    const uint32_t other = threadIdx.x % kMostWarps;
    if constexpr (kRows == 1) {
      __syncthreads();
      return other < blockDim.x / kWarpLanes ? shared[other] : none;
    } else {
      static_assert(kRows == 2);
      wait_for_half_of_block<kMostThreads>(row_of_block() == 0);
      return shared[row_of_block() * kMostWarps + other];
    }
  }

  template <typename Real>
  __device__ __forceinline__ Real sum_of_parts(Real part) const {
    Real parts[1] = {part};
    group_sum<kMostWarps>(parts);
    return parts[0];
  }

  uint32_t row_;
  bool from_end_ = false;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// The warps of a cluster of blocks that share a row, or, if kMayBeAlone, of a block without a cluster. Each warp hands
// its kNumbers numbers to every block, so that each can combine all of them in the same order. To be made at the start of
// a kernel.
template <typename Real, int kNumbers, bool kMayBeAlone>
class ClusterTeam {
 public:
  // Read anew wherever they are asked for: registers are scarcer.
  static __device__ __forceinline__ uint32_t block() { return cluster_block(); }
  static __device__ __forceinline__ uint32_t blocks() { return cluster_blocks(); }

  __device__ __forceinline__ ClusterTeam() {
    if (alone()) return;
    if (threadIdx.x == 0) barrier().expect(warps() * kNumbers * sizeof(Real));
    cluster_arrive_unordered();
  }

  __device__ __forceinline__ uint32_t row() const { return cluster_number(); }
  __device__ __forceinline__ uint32_t later_row(uint32_t distance) const { return row() + distance; }
  template <typename Arguments>
  __device__ __forceinline__ RowPlace place(const Arguments& arguments) const {
    return arguments.rows.locate(row());
  }
  __device__ __forceinline__ bool first_thread() const { return block() == 0 && threadIdx.x == 0; }
  __device__ __forceinline__ bool asks_for_block() const { return threadIdx.x == blockDim.x - kWarpLanes; }
  __device__ __forceinline__ bool asks_for_row() const { return block() == blocks() - 1 && asks_for_block(); }
  __device__ __forceinline__ int warp() const {
    return static_cast<int>((block() * blockDim.x + threadIdx.x) / kWarpLanes);
  }
  __device__ __forceinline__ int segment() const { return warp(); }
  static __device__ __forceinline__ constexpr bool holds_segment() { return true; }
  static constexpr bool kHoldsDeadSegments = true;
  __device__ __forceinline__ uint32_t warps() const { return blocks() * blockDim.x / kWarpLanes; }

  // As BlockTeam's.
  template <typename Exponent>
  __device__ __forceinline__ Totals<Real> totals(Real maximum, Real sum, const Exponent& exponent) const {
    const Part first = gathered({{maximum, sum}}, {{kNegativeInfinity<Real>, Real{0}}});
    Real row_maximum = first.number[0];
    for_each_further([&](const Part& part) { row_maximum = fmax(row_maximum, part.number[0]); });
    row_maximum = warp_max(row_maximum);
    const auto rescaled = [&](const Part& part) {
      return exponent.rescale(part.number[1], part.number[0], row_maximum);
    };
    Real row_sum = rescaled(first);
    for_each_further([&](const Part& part) { row_sum = add(row_sum, rescaled(part)); });
    return {row_maximum, normalizer(warp_sum(row_sum))};
  }

  __device__ __forceinline__ Real sum(Real value) const {
    Real row_sum = gathered({{value}}, {{Real{0}}}).number[0];
    for_each_further([&](const Part& part) { row_sum = add(row_sum, part.number[0]); });
    return warp_sum(row_sum);
  }

 private:
  static constexpr int kMaxWarps = kClusterBlocks * kBlockThreads / kWarpLanes;
  struct alignas(kNumbers * sizeof(Real)) Part {
    Real number[kNumbers];
  };

  // A send without a cluster is an illegal instruction.
  static __device__ __forceinline__ bool alone() { return kMayBeAlone && blocks() == 1; }

  static __device__ __forceinline__ Part* parts() {
    __shared__ Part memory[kMaxWarps];
    return memory;
  }

  static __device__ __forceinline__ ByteBarrier& barrier() {
    __shared__ ByteBarrier memory;
    return memory;
  }

  // A lane's first part, that of the warp of its number; `none` where there is no such warp.
  __device__ __forceinline__ Part gathered(const Part& mine, const Part& none) const {
    const uint32_t lane = threadIdx.x % kWarpLanes;
    if (alone()) {
      if (lane == 0) parts()[warp()] = mine;
      __syncthreads();
    } else {
      cluster_wait();
      if (lane < blocks()) send_to_block(&parts()[warp()], &barrier(), lane, mine);
      barrier().wait();
    }
    return lane < warps() ? parts()[lane] : none;
  }

  // A lane's other parts: of every warp whose number is as far again as a warp has lanes.
  template <typename Use>
  __device__ __forceinline__ void for_each_further(const Use& use) const {
#pragma unroll 1
    for (uint32_t w = threadIdx.x % kWarpLanes + kWarpLanes; w < warps(); w += kWarpLanes) use(parts()[w]);
  }
};

// The warps of one or more blocks that share a row; one, where there are no clusters.
template <typename Real, int kNumbers>
using BlocksTeam = ClusterTeam<Real, kNumbers, true>;

#else

template <typename Real, int kNumbers>
using BlocksTeam = BlockTeam<kSharedThreads / kWarpLanes>;

#endif

}  // namespace sms::cuda
