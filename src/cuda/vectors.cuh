// Loads and stores of a row's 16-byte vectors at any alignment.
//
// A *segment* is a run of consecutive columns that `lanes` neighbouring lanes of one warp hold together: lane l holds
// vectors l, l + lanes, l + 2 * lanes, ... of it. Which column lies in which lane depends on the column alone. Where a
// row does not begin on a vector boundary, a load reads the two aligned vectors that overlap the wanted one (the second
// comes from L1) and shifts them together; a store sends each lane's end to the lane before it. At the ends of a row,
// where an aligned vector would reach past it, single elements are moved instead: no byte outside the row is touched.
#pragma once

#include <cstdint>

#include "../problem.h"
#include "policy.h"

namespace sms::cuda {

inline constexpr uint32_t kFullWarp = 0xffffffffu;

// Up to 16 bytes in registers; the first byte in memory is the lowest of word 0.
template <int kBytes>
struct Chunk {
  uint32_t word[(kBytes + 3) / 4] = {};
};

enum class Cache { keep, stream };

template <int kBytes, Cache kCache>
__device__ __forceinline__ Chunk<kBytes> load_aligned(const char* address) {
  Chunk<kBytes> chunk;
  if constexpr (kBytes == 16) {
    const uint4* source = reinterpret_cast<const uint4*>(address);
    const uint4 value = kCache == Cache::stream ? __ldcs(source) : *source;
    chunk.word[0] = value.x;
    chunk.word[1] = value.y;
    chunk.word[2] = value.z;
    chunk.word[3] = value.w;
  } else if constexpr (kBytes == 8) {
    const uint2 value = *reinterpret_cast<const uint2*>(address);
    chunk.word[0] = value.x;
    chunk.word[1] = value.y;
  } else if constexpr (kBytes == 4) {
    chunk.word[0] = *reinterpret_cast<const uint32_t*>(address);
  } else if constexpr (kBytes == 2) {
    chunk.word[0] = *reinterpret_cast<const uint16_t*>(address);
  } else {
    chunk.word[0] = *reinterpret_cast<const uint8_t*>(address);
  }
  return chunk;
}

__device__ __forceinline__ void store_aligned(char* address, const Chunk<16>& chunk) {
  __stcs(reinterpret_cast<uint4*>(address), make_uint4(chunk.word[0], chunk.word[1], chunk.word[2], chunk.word[3]));
}

// Bytes [shift, shift + kBytes) of `low` followed by `high`; 0 <= shift < kBytes, a multiple of kElementBytes.
template <int kElementBytes, int kBytes>
__device__ __forceinline__ Chunk<kBytes> realign(const Chunk<kBytes>& low, const Chunk<kBytes>& high, int shift) {
  Chunk<kBytes> result;
  if constexpr (kBytes < 4) {
    result.word[0] = ((low.word[0] | (high.word[0] << (8 * kBytes))) >> (8 * shift)) & ((1u << (8 * kBytes)) - 1);
  } else {
    constexpr int kWords = kBytes / 4;
    uint32_t word[2 * kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      word[w] = low.word[w];
      word[kWords + w] = high.word[w];
    }
#pragma unroll
    for (int step = kWords / 2; step >= 1; step /= 2) {
      if (4 * step >= kElementBytes) {
        const bool move = (shift & (4 * step)) != 0;
#pragma unroll
        for (int w = 0; w + step < 2 * kWords; ++w) word[w] = move ? word[w + step] : word[w];
      }
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      result.word[w] = kElementBytes < 4 ? __funnelshift_r(word[w], word[w + 1], 8 * (shift & 3)) : word[w];
    }
  }
  return result;
}

// Element `index` (known at compile time after unrolling) of a chunk that is still zero there.
template <int kElementBytes, int kBytes>
__device__ __forceinline__ void load_element(Chunk<kBytes>& chunk, int index, const char* address) {
  const Chunk<kElementBytes> element = load_aligned<kElementBytes, Cache::keep>(address);
  if constexpr (kElementBytes >= 4) {
#pragma unroll
    for (int w = 0; w < kElementBytes / 4; ++w) chunk.word[index * (kElementBytes / 4) + w] = element.word[w];
  } else {
    constexpr int kPerWord = 4 / kElementBytes;
    chunk.word[index / kPerWord] |= element.word[0] << (8 * kElementBytes * (index % kPerWord));
  }
}

template <int kElementBytes>
__device__ __forceinline__ void store_element(char* address, const Chunk<16>& chunk, int index) {
  if constexpr (kElementBytes == 8) {
    *reinterpret_cast<uint2*>(address) = make_uint2(chunk.word[2 * index], chunk.word[2 * index + 1]);
  } else if constexpr (kElementBytes == 4) {
    *reinterpret_cast<uint32_t*>(address) = chunk.word[index];
  } else {
    *reinterpret_cast<uint16_t*>(address) = static_cast<uint16_t>(chunk.word[index / 2] >> (16 * (index % 2)));
  }
}

// The whole chunk filled with the element at `address`.
template <int kElementBytes, int kBytes>
__device__ __forceinline__ Chunk<kBytes> load_filled(const char* address) {
  const Chunk<kElementBytes> element = load_aligned<kElementBytes, Cache::keep>(address);
  constexpr int kWords = (kBytes + 3) / 4;
  Chunk<kBytes> chunk;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    if constexpr (kElementBytes == 8) {
      chunk.word[w] = element.word[w % 2];
    } else {
      chunk.word[w] = element.word[0] * (kElementBytes == 4 ? 1u : kElementBytes == 2 ? 0x00010001u : 0x01010101u);
    }
  }
  return chunk;
}

// What of a segment exists, in columns relative to its first (or, moved(), to the first of a lane).
struct Extent {
  int before;   // minus the number of columns of the row before the segment, as far as a load may reach
  int columns;  // of the row from the segment on, as far as a load may reach
  int begin;    // live columns are [begin, end), inside the segment
  int end;

  // Relative to a later column: the columns of a lane's vectors are compile-time constants then.
  __device__ __forceinline__ Extent moved(int columns_on) const {
    return {before - columns_on, columns - columns_on, begin - columns_on, end - columns_on};
  }
};

inline constexpr int kReach = 16;  // no load reaches further past a segment, in elements

// The segment of `length` columns that begins at column `start` of a row. A row with no columns has no bytes at all.
__device__ __forceinline__ Extent make_extent(const ColumnRange& live, int64_t columns, int64_t start, int length) {
  const auto clip = [](int64_t value, int limit) {
    return static_cast<int>(value < 0 ? 0 : value < limit ? value : limit);
  };
  return {start > 0 ? -kReach : 0, clip(columns - start, length + kReach), clip(live.begin - start, length),
          clip(live.end - start, length)};
}

// An operand's share of one lane's vectors: kCount elements a vector, in one or two chunks of at most 16 bytes.
template <int kElementBytes, int kCount>
struct Shape {
  static constexpr int kBytes = kElementBytes * kCount;
  static constexpr int kChunkBytes = kBytes < 16 ? kBytes : 16;
  static constexpr int kPieces = kBytes / kChunkBytes;
  static constexpr int kPieceCount = kChunkBytes / kElementBytes;  // elements a chunk
  using Piece = Chunk<kChunkBytes>;
};

// Loads vectors first, first + 1, ... (in steps of kLanes) of a segment whose column 0 is at `base`. Vectors without a
// live column are not read and stay zero; cells outside the live columns hold anything.
template <int kLanes, Cache kCache, int kElementBytes, int kCount, int kVectors,
          typename S = Shape<kElementBytes, kCount>>
__device__ __forceinline__ void load_vectors(typename S::Piece (&out)[kVectors][S::kPieces], const char* segment_base,
                                             const Extent& segment_extent, int first, int lane) {
  constexpr int kPieceCount = S::kPieceCount;
  constexpr int kChunkBytes = S::kChunkBytes;
  const char* base = segment_base + lane * S::kBytes;
  const Extent extent = segment_extent.moved(lane * kCount);
  const auto column = [&](int k, int p) { return (first + k) * kLanes * kCount + p * kPieceCount; };
  const auto live = [&](int a) { return a < extent.end && a + kPieceCount > extent.begin; };
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(base) % kChunkBytes);
  const int shift_count = shift / kElementBytes;
  bool edge = false;
  if (shift == 0) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int p = 0; p < S::kPieces; ++p) {
        const int a = column(k, p);
        const bool inside = a + kPieceCount <= extent.columns;
        out[k][p] = typename S::Piece{};
        if (live(a) && inside) out[k][p] = load_aligned<kChunkBytes, kCache>(base + a * kElementBytes);
        edge = edge || (live(a) && !inside);
      }
    }
  } else {
    // A few at a time: each takes twice its registers until it is shifted.
    constexpr int kBatch = kVectors * S::kPieces <= 4 ? kVectors : 4 / S::kPieces;
#pragma unroll
    for (int start = 0; start < kVectors; start += kBatch) {
      typename S::Piece high[kBatch][S::kPieces];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
#pragma unroll
        for (int p = 0; p < S::kPieces; ++p) {
          const int a = column(start + k, p);
          const bool inside = a - shift_count >= extent.before && a - shift_count + 2 * kPieceCount <= extent.columns;
          out[start + k][p] = typename S::Piece{};
          high[k][p] = typename S::Piece{};
          if (live(a) && inside) {
            const char* address = base + a * kElementBytes - shift;
            out[start + k][p] = load_aligned<kChunkBytes, Cache::keep>(address);
            high[k][p] = load_aligned<kChunkBytes, Cache::keep>(address + kChunkBytes);
          }
          edge = edge || (live(a) && !inside);
        }
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
#pragma unroll
        for (int p = 0; p < S::kPieces; ++p) {
          out[start + k][p] = realign<kElementBytes>(out[start + k][p], high[k][p], shift);
        }
      }
    }
  }
  if (edge) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int p = 0; p < S::kPieces; ++p) {
        const int a = column(k, p);
        const bool inside = a - shift_count >= extent.before &&
                            a - shift_count + (shift == 0 ? 1 : 2) * kPieceCount <= extent.columns;
        if (live(a) && !inside) {
          out[k][p] = typename S::Piece{};
#pragma unroll
          for (int i = 0; i < kPieceCount; ++i) {
            if (a + i >= extent.begin && a + i < extent.end) {
              load_element<kElementBytes>(out[k][p], i, base + (a + i) * kElementBytes);
            }
          }
        }
      }
    }
  }
}

// The same for elements `column_stride` bytes apart. One load each; a stride of 0 needs one load in all.
template <int kLanes, int kElementBytes, int kCount, int kVectors, typename S = Shape<kElementBytes, kCount>>
__device__ __forceinline__ void load_strided(typename S::Piece (&out)[kVectors][S::kPieces], const char* segment_base,
                                             int64_t column_stride, const Extent& segment_extent, int first, int lane) {
  if (column_stride == 0) {
    typename S::Piece filled;
    if (segment_extent.begin < segment_extent.end) {
      filled = load_filled<kElementBytes, S::kChunkBytes>(segment_base);
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int p = 0; p < S::kPieces; ++p) out[k][p] = filled;
    }
    return;
  }
  const Extent extent = segment_extent.moved(lane * kCount);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
#pragma unroll
    for (int p = 0; p < S::kPieces; ++p) {
      const int a = (first + k) * kLanes * kCount + p * S::kPieceCount;
      out[k][p] = typename S::Piece{};
      // One address moves along: an address for every element would fill the registers.
      const char* address = segment_base + (lane * kCount + a) * column_stride;
#pragma unroll
      for (int i = 0; i < S::kPieceCount; ++i) {
        if (a + i >= extent.begin && a + i < extent.end) load_element<kElementBytes>(out[k][p], i, address);
        address += column_stride;
      }
    }
  }
}

// Stores the kVectors vectors of each lane that make up a whole segment, as far as the row has columns. Every lane of
// the warp calls it, each group of kLanes with its own segment.
template <int kLanes, int kElementBytes, int kVectors>
__device__ __forceinline__ void store_vectors(char* segment_base, const Chunk<16> (&value)[kVectors],
                                              const Extent& segment_extent, int lane) {
  constexpr int kCount = kVectorBytes / kElementBytes;
  char* base = segment_base + lane * kVectorBytes;
  const Extent extent = segment_extent.moved(lane * kCount);
  const auto column = [&](int k) { return k * kLanes * kCount; };
  // Elements [low, high) of the vector whose first column is a.
  const auto store_elements = [&](int a, const Chunk<16>& chunk, int low, int high) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i >= low && i < high) store_element<kElementBytes>(base + (a + i) * kElementBytes, chunk, i);
    }
  };
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(base) % kVectorBytes);
  if (!__any_sync(kFullWarp, shift != 0)) {
    bool edge = false;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int a = column(k);
      if (a + kCount <= extent.columns) store_aligned(base + a * kElementBytes, value[k]);
      edge = edge || (a < extent.columns && a + kCount > extent.columns);
    }
    if (edge) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int a = column(k);
        if (a + kCount > extent.columns) store_elements(a, value[k], 0, extent.columns - a);
      }
    }
    return;
  }
  // A vector boundary cuts each vector after its first `head` elements. The tail goes out together with the head of
  // the next vector, which the next lane hands over, or on its own where the segment or the row ends.
  const int head = kCount - shift / kElementBytes;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int a = column(k);
    const bool last = k == kVectors - 1 && lane == kLanes - 1;
    Chunk<16> next;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t offered = lane == 0 && k + 1 < kVectors ? value[k + 1].word[w] : value[k].word[w];
      next.word[w] = __shfl_sync(kFullWarp, offered, (lane + 1) % kLanes, kLanes);
    }
    if (shift == 0) {
      if (a + kCount <= extent.columns) {
        store_aligned(base + a * kElementBytes, value[k]);
      } else {
        store_elements(a, value[k], 0, extent.columns - a);
      }
    } else {
      const bool joined = !last && a + kCount + head <= extent.columns;         // the tail, with the next vector's head
      const bool headless = (k > 0 || lane > 0) && a + head <= extent.columns;  // the vector before takes the head
      if (joined) {
        store_aligned(base + a * kElementBytes + (kVectorBytes - shift),
                      realign<kElementBytes>(value[k], next, kVectorBytes - shift));
      }
      const int low = headless ? head : 0;
      const int high = joined ? head : min(kCount, extent.columns - a);
      if (low < high) store_elements(a, value[k], low, high);
    }
  }
}

}  // namespace sms::cuda
