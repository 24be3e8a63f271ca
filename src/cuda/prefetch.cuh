// Brings what later blocks read into the L2 while this block's own rows are computed. Compute capability 9.0 and newer.
#pragma once

#include "arguments.h"
#include "elements.cuh"
#include "ptx.cuh"

namespace sms::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// The whole 16-byte pieces of [from, from + bytes).
__device__ __forceinline__ void prefetch_bytes(const char* from, uint32_t bytes) {
  const uint32_t before = static_cast<uint32_t>(-reinterpret_cast<uintptr_t>(from)) % kVectorBytes;
  const uint32_t pieces = bytes > before ? (bytes - before) / kVectorBytes : 0;
  if (pieces > 0) prefetch_to_l2(from + before, pieces * kVectorBytes);
}

// Columns from `begin` on of what is read once: x, or y and its gradient. A mask may be shared.
template <Element kElement>
__device__ __forceinline__ void prefetch_operands(const ForwardArguments& arguments, const RowPlace& place, int begin,
                                                  uint32_t columns) {
  constexpr int kBytes = kBytesOf<kElement>;
  prefetch_bytes(arguments.x + place.input + begin * kBytes, columns * kBytes);
}
template <Element kElement>
__device__ __forceinline__ void prefetch_operands(const BackwardArguments& arguments, const RowPlace& place, int begin,
                                                  uint32_t columns) {
  constexpr int kBytes = kBytesOf<kElement>;
  prefetch_bytes(arguments.y + place.input + begin * kBytes, columns * kBytes);
  if (!arguments.grad_expanded) prefetch_bytes(arguments.grad + place.second + begin * kBytes, columns * kBytes);
}

// Calls prefetch(place, begin, columns) for columns [begin, end) of a row, as far as they are live by position.
template <typename Arguments, typename Prefetch>
__device__ __forceinline__ void prefetch_live(const Arguments& arguments, uint32_t row, int begin, int end,
                                              const Prefetch& prefetch) {
  const RowPlace place = arguments.rows.locate(row);
  begin = max(begin, place.query + arguments.near.begin);
  end = min(min(end, static_cast<int>(arguments.columns)), place.query + arguments.near.end);
  if (begin < end) prefetch(place, begin, static_cast<uint32_t>(end - begin));
}

template <Element kElement, typename Arguments>
__device__ __forceinline__ void prefetch_columns(const Arguments& arguments, uint32_t row, int begin, int end) {
  prefetch_live(arguments, row, begin, end, [&](const RowPlace& place, int first, uint32_t columns) {
    prefetch_operands<kElement>(arguments, place, first, columns);
  });
}

template <Element kElement, MaskKind kMask>
__device__ __forceinline__ void prefetch_mask(const ForwardArguments& arguments, uint32_t row) {
  constexpr int kBytes = mask_element_bytes(kMask, kElement);
  prefetch_live(arguments, row, 0, static_cast<int>(arguments.columns),
                [&](const RowPlace& place, int first, uint32_t columns) {
                  prefetch_bytes(arguments.mask + place.second + first * kBytes, columns * kBytes);
                });
}

// Calls prefetch(later) for the row or pair that begins to share a mask, `count` of them in all, if it is so far ahead of
// `number`. Rows that share a mask are under way at once and would miss the L2 together: at 4,096 float16 columns the mask
// was read from memory four times (H200).
template <typename Prefetch>
__device__ __forceinline__ void prefetch_later_mask(const MaskPrefetch& ahead, uint32_t number, uint32_t count,
                                                    const Prefetch& prefetch) {
  const uint32_t later = number + ahead.rows;
  if (ahead.rows == 0 || later >= count) return;
  if (ahead.by_sharers.quotient(number) * ahead.sharers == number) prefetch(later);
}

#endif

// By a block that holds kRows rows.
template <Element kElement, uint32_t kRows, typename Arguments>
__device__ __forceinline__ void prefetch_for_rows(const Arguments& arguments) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const RowPrefetch& ahead = arguments.ahead;
  if (ahead.distance == 0 || threadIdx.x * ahead.rows >= kRows) return;
  const uint32_t row = (blockIdx.x + ahead.distance) * kRows + threadIdx.x * ahead.rows;
  if (row + ahead.rows > arguments.rows.rows) return;
  if (ahead.rows == 1) {
    prefetch_columns<kElement>(arguments, row, 0, static_cast<int>(arguments.columns));
  } else {
    prefetch_operands<kElement>(arguments, arguments.rows.locate(row), 0,
                                ahead.rows * static_cast<uint32_t>(arguments.columns));
  }
#endif
}

// By the blocks that share a row, each for its own `columns`.
template <Element kElement, typename Arguments, typename Team>
__device__ __forceinline__ void prefetch_for_row(const Arguments& arguments, const Team& team, int columns) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const uint32_t row = team.later_row(arguments.ahead.distance);
  if (!team.asks_for_block() || arguments.ahead.distance == 0 || row >= arguments.rows.rows) return;
  const int begin = static_cast<int>(team.block()) * columns;
  prefetch_columns<kElement>(arguments, row, begin, begin + columns);
#endif
}

template <Element kElement, MaskKind kMask, typename Team>
__device__ __forceinline__ void prefetch_mask_for_row(const ForwardArguments& arguments, const Team& team) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if constexpr (has_addend(kMask)) {
    if (!team.asks_for_row()) return;
    prefetch_later_mask(arguments.mask_prefetch, team.row(), arguments.rows.rows,
                        [&](uint32_t row) { prefetch_mask<kElement, kMask>(arguments, row); });
  }
#endif
}

// By the blocks that share a pair of rows: one thread for both.
template <Element kElement, MaskKind kMask, typename Team>
__device__ __forceinline__ void prefetch_for_pair(const ForwardArguments& arguments, const Team& team) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if (!team.asks_for_row()) return;
  const uint32_t rows = arguments.rows.rows;
  const auto of_both = [&](uint32_t pair, const auto& prefetch) {
    prefetch(pair);
    prefetch(rows - 1 - pair);
  };
  const uint32_t pair = team.pair() + arguments.ahead.distance;
  if (arguments.ahead.distance != 0 && pair < rows / 2) {
    of_both(pair, [&](uint32_t row) {
      prefetch_columns<kElement>(arguments, row, 0, static_cast<int>(arguments.columns));
    });
  }
  if constexpr (has_addend(kMask)) {
    prefetch_later_mask(arguments.mask_prefetch, team.pair(), rows / 2, [&](uint32_t later) {
      of_both(later, [&](uint32_t row) { prefetch_mask<kElement, kMask>(arguments, row); });
    });
  }
#endif
}

}  // namespace sms::cuda
