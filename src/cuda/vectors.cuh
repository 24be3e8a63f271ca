// Loads and stores of a row's 16-byte vectors.
//
// A *segment* is a run of consecutive columns that `lanes` neighbouring lanes of one warp hold together: lane l holds
// vectors l, l + lanes, l + 2 * lanes, ... of it. Which column lies in which lane depends on the column alone.
//
// Where every row is *whole* (it begins on a vector boundary and is a whole number of vectors, for every operand) a
// vector is one access. Elsewhere a segment is held as if it began on the vector boundary before the place of its result,
// with `ahead` dead columns before its first: a store is one access again, and so is the load of an operand that lies at
// the same distance from a boundary. The segment's last `ahead` columns, which lie past its vectors then, take the place of
// the dead ones: they are *folded* into the first lane's first vector (segment.cuh). The load of another operand reads the
// aligned pieces that overlap the wanted vector, half vectors or vectors, and shifts them together (what
// neighbours share comes from L1). Loads stay inside the bytes of their operand, stores inside the row: parts of vectors are
// moved at the edges.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../problem.h"
#include "arguments.h"
#include "policy.h"
#include "ptx.cuh"

namespace sms::cuda {

inline constexpr uint32_t kFullWarp = 0xffffffffu;

// Up to 16 bytes in registers; the first byte in memory is the lowest of word 0.
template <int kBytes>
struct Chunk {
  uint32_t word[(kBytes + 3) / 4] = {};
};

enum class Cache { keep, stream };

// Keeps what was loaded before from being loaded after: the assembler would otherwise move a load behind the first use
// of another one, to save registers, and the warp would wait for each in turn. Measured on an H200: .75 instead of .90
// of a copy's speed at 2,048 columns of float16 under a float mask.
__device__ __forceinline__ void keep_loads_together() { __syncwarp(); }

template <int kBytes, Cache kCache>
__device__ __forceinline__ Chunk<kBytes> load_aligned(const char* address) {
  Chunk<kBytes> chunk;
  if constexpr (kBytes == 16) {
    load_16(chunk.word, address, kCache == Cache::stream);
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
  store_16(address, chunk.word);
}

// Bytes [shift, shift + kBytes) of `low` followed by `high`, where shift = 4 * kWordShift + bits / 8.
template <int kElementBytes, int kWordShift, int kBytes>
__device__ __forceinline__ Chunk<kBytes> realign_words(const Chunk<kBytes>& low, const Chunk<kBytes>& high, int bits) {
  constexpr int kWords = kBytes / 4;
  const auto word = [&](int w) { return w < kWords ? low.word[w] : high.word[w - kWords]; };
  Chunk<kBytes> result;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const int from = w + kWordShift;
    result.word[w] = kElementBytes < 4 && from + 1 < 2 * kWords ? __funnelshift_r(word(from), word(from + 1), bits)
                                                                : word(from);
  }
  return result;
}

// Calls run(constant word shift) for the word shift of `shift` bytes: all vectors of a row share it, so that a warp
// that holds one row takes one way.
template <int kBytes, typename Run>
__device__ __forceinline__ void with_word_shift(int shift, const Run& run) {
  const int words = shift / 4;
  if constexpr (kBytes == 16) {
    if (words >= 2) {
      if (words == 3) {
        run(std::integral_constant<int, 3>{});
      } else {
        run(std::integral_constant<int, 2>{});
      }
      return;
    }
  }
  if constexpr (kBytes >= 8) {
    if (words == 1) {
      run(std::integral_constant<int, 1>{});
      return;
    }
  }
  run(std::integral_constant<int, 0>{});
}

// The same for one pair of chunks, 0 <= shift < kBytes, a multiple of kElementBytes.
template <int kElementBytes, int kBytes>
__device__ __forceinline__ Chunk<kBytes> realign(const Chunk<kBytes>& low, const Chunk<kBytes>& high, int shift) {
  if constexpr (kBytes < 4) {
    Chunk<kBytes> result;
    result.word[0] = ((low.word[0] | (high.word[0] << (8 * kBytes))) >> (8 * shift)) & ((1u << (8 * kBytes)) - 1);
    return result;
  } else {
    Chunk<kBytes> result;
    with_word_shift<kBytes>(shift, [&](auto word_shift) {
      result = realign_words<kElementBytes, word_shift>(low, high, 8 * (shift & 3));
    });
    return result;
  }
}

// The aligned half vectors that overlap 16 bytes which lie at a boundary of their elements alone. Beside two whole vectors
// they take 6 registers, not 8, until they are realigned, and half the code then. Measured on an H200, under a float mask:
// .80 -> .83 of a copy's speed at 257 float16 columns, .90 -> .95 at 1,001 float32 ones; and registers are left to other
// warps (kOddAddendThreads).
template <int kElementBytes>
struct HalfVectors {
  static constexpr int kBytes = kVectorBytes / 2;
  static constexpr int kMostShift = kElementBytes < kBytes ? kBytes : 0;  // of the 16 bytes in the first one, less than this
  using Joined = Chunk<kVectorBytes + kMostShift>;

  // From the first one's place on.
  static __device__ __forceinline__ void load(Joined& halves, const char* first) {
#pragma unroll
    for (int w = 0; w < (kVectorBytes + kMostShift) / 4; w += 2) load_8(halves.word[w], halves.word[w + 1], first + 4 * w);
  }

  // As realign_words(). Copies of one word stay as they are.
  template <int kWordShift>
  static __device__ __forceinline__ Chunk<16> realigned(const Joined& halves, int bits) {
    Chunk<16> result;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int from = w + kWordShift;
      result.word[w] =
          kElementBytes < 4 ? __funnelshift_r(halves.word[from], halves.word[from + 1], bits) : halves.word[from];
    }
    return result;
  }
};

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

// Replaces element `index`, known as above, of a chunk.
template <int kElementBytes, int kBytes>
__device__ __forceinline__ void replace_element(Chunk<kBytes>& chunk, int index, const Chunk<kElementBytes>& element) {
  if constexpr (kElementBytes >= 4) {
#pragma unroll
    for (int w = 0; w < kElementBytes / 4; ++w) chunk.word[index * (kElementBytes / 4) + w] = element.word[w];
  } else {
    constexpr int kPerWord = 4 / kElementBytes;
    const int bits = 8 * kElementBytes * (index % kPerWord);
    uint32_t& word = chunk.word[index / kPerWord];
    word = (word & ~(((1u << (8 * kElementBytes)) - 1) << bits)) | (element.word[0] << bits);
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

template <int kElementBytes>
__device__ __forceinline__ void store_element(char* address, const Chunk<kElementBytes>& element) {
  if constexpr (kElementBytes == 8) {
    *reinterpret_cast<uint2*>(address) = make_uint2(element.word[0], element.word[1]);
  } else if constexpr (kElementBytes == 4) {
    *reinterpret_cast<uint32_t*>(address) = element.word[0];
  } else if constexpr (kElementBytes == 2) {
    *reinterpret_cast<uint16_t*>(address) = static_cast<uint16_t>(element.word[0]);
  } else {
    *reinterpret_cast<uint8_t*>(address) = static_cast<uint8_t>(element.word[0]);
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

// Elements between a place of memory and the vector boundary before it.
template <int kElementBytes>
__device__ __forceinline__ int elements_ahead(const char* place) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(place) % kVectorBytes) / kElementBytes;
}

// What of a segment exists, in columns relative to its first (or, moved(), to the first of a lane). Numbers far outside
// the segment may be cut short.
struct Extent {
  int first;  // the row's first column, which no load needs to reach past
  int last;   // one past the row's last column
  int begin;  // live columns are [begin, end)
  int end;

  // Relative to a later column: the columns of a lane's vectors are compile-time constants then.
  __device__ __forceinline__ Extent moved(int columns_on) const {
    return {first - columns_on, last - columns_on, begin - columns_on, end - columns_on};
  }

  // The same segment, of `length` columns, with `ahead` dead ones before it and nothing behind.
  __device__ __forceinline__ Extent preceded(int ahead, int length) const {
    return {first + ahead, min(last, length) + ahead, max(begin, 0) + ahead, min(end, length) + ahead};
  }

  // Whether any of the `count` columns from `column` on is live; whether all are.
  __device__ __forceinline__ bool any_live(int column, int count) const {
    return column < end && column + count > begin;
  }
  __device__ __forceinline__ bool all_live(int column, int count) const {
    return column >= begin && column + count <= end;
  }
};

// Calls run(begin, end), both constant, for batches of kMost of kCount things, the last one of what is left.
template <int kCount, int kMost, int kBegin = 0, typename Run>
__device__ __forceinline__ void in_batches(const Run& run) {
  if constexpr (kBegin < kCount) {
    constexpr int kEnd = kBegin + kMost < kCount ? kBegin + kMost : kCount;
    run(std::integral_constant<int, kBegin>{}, std::integral_constant<int, kEnd>{});
    in_batches<kCount, kMost, kEnd>(run);
  }
}

// Calls run(k), constant, for kFirst and the next kCount - 1 numbers, kStep apart, until it returns true.
template <int kFirst, int kStep, int kCount, typename Run>
__device__ __forceinline__ void in_turn(const Run& run) {
  if constexpr (kCount > 0) {
    if (!run(std::integral_constant<int, kFirst>{})) in_turn<kFirst + kStep, kStep, kCount - 1>(run);
  }
}

// Calls run(count), constant, for the largest number of a warp, which is between kLeast and kMost; for kLeast or kMost
// where it is not. Every lane of the warp calls it, and takes the same way.
template <int kLeast, int kMost, typename Run>
__device__ __forceinline__ void with_largest(int number, const Run& run) {
  if constexpr (kMost <= kLeast) {
    run(std::integral_constant<int, kLeast>{});
  } else if (__any_sync(kFullWarp, number >= kMost)) {
    run(std::integral_constant<int, kMost>{});
  } else {
    with_largest<kLeast, kMost - 1>(number, run);
  }
}

// Which elements of a vector are live at an edge of a row's live columns: those before element `count`, or the others.
template <bool kBefore>
struct EdgeElements {
  int count;  // 0 to the vector's elements

  __device__ __forceinline__ bool is_live(int element) const { return (element < count) == kBefore; }

  // The bits of word `w` of the vector that belong to live elements.
  template <int kElementBytes>
  __device__ __forceinline__ uint32_t live_bits(int w) const {
    if constexpr (kElementBytes == 2) return halves_at<kBefore>(2 * w, count);
    const int bits = 8 * kElementBytes * count - 32 * w;
    const uint32_t behind = __funnelshift_lc(0, ~0u, w == 0 ? bits : max(bits, 0));
    return kBefore ? ~behind : behind;
  }
};

// Which elements of the first lane's first vector are live where it holds the segment's end besides its beginning: those
// from the first live column on, and those of the end before its last one.
struct FoldedElements {
  EdgeElements<false> own;
  EdgeElements<true> folded;

  __device__ __forceinline__ bool is_live(int element) const { return own.is_live(element) | folded.is_live(element); }

  template <int kElementBytes>
  __device__ __forceinline__ uint32_t live_bits(int w) const {
    return own.live_bits<kElementBytes>(w) | folded.live_bits<kElementBytes>(w);
  }
};

// The same where the end may begin before its first live column.
struct LateFoldedElements {
  FoldedElements elements;
  EdgeElements<false> late;  // of the end, those from its first live column on

  __device__ __forceinline__ bool is_live(int element) const {
    return elements.own.is_live(element) | (elements.folded.is_live(element) & late.is_live(element));
  }

  template <int kElementBytes>
  __device__ __forceinline__ uint32_t live_bits(int w) const {
    return elements.own.live_bits<kElementBytes>(w) |
           (elements.folded.live_bits<kElementBytes>(w) & late.live_bits<kElementBytes>(w));
  }
};

// Calls run(k, edge) for the vectors first + k, k < kVectors, of a lane that may be live in part, or, unless rows are
// whole, hold what load_vectors() read for a lane with nothing live; perhaps for others. `extent` is the segment's. Where
// a lane has several vectors, every lane of the warp calls it. `kBehind`: that of the vectors, whose end may be folded.
template <int kLanes, int kCount, int kVectors, bool kWhole, bool kPreceded, int kBehind, typename Run>
__device__ __forceinline__ void at_edges(const Extent& extent, int first, int lane, const Run& run) {
  constexpr int kLength = kLanes * kCount;
  constexpr std::true_type end;
  constexpr std::false_type begin;
  const auto limit_of = [&](auto before) { return decltype(before)::value ? extent.end : max(extent.begin, 0); };
  const auto elements = [&](auto before, int column) {
    return EdgeElements<decltype(before)::value>{max(0, min(limit_of(before) - column, kCount))};
  };
  const auto vector = [&](auto before, int k) {
    run(k, elements(before, ((first + k) * kLanes + lane) * kCount));
  };
  if constexpr (kPreceded) {
    // Fewest instructions: most segments begin in their first vector and end in their last.
    vector(end, kVectors - 1);
    const bool late = kVectors > 1 && extent.begin > (first + 1) * kLength;
    const bool early = kVectors > 1 && extent.end < (first + kVectors - 1) * kLength;
    const bool folds = kBehind > 0 && extent.end > kBehind * kLength;
    if (!__any_sync(kFullWarp, late | early | folds)) {
      vector(begin, 0);
      return;
    }
    if constexpr (kBehind > 0) {
      constexpr int kColumn = kBehind * kLength;
      EdgeElements<true> folded = elements(end, kColumn);
      if (lane != 0) folded.count = 0;
      run(0, LateFoldedElements{{elements(begin, lane * kCount), folded}, elements(begin, kColumn)});
    } else {
      vector(begin, 0);
    }
    if constexpr (kVectors == 1) return;
    if constexpr (kLanes == kWarpLanes) {
      if (early) {
        in_turn<kVectors - 2, -1, kVectors - 1>([&](auto number) {
          constexpr int k = decltype(number)::value;
          if (extent.end < (first + k) * kLength) return false;
          vector(end, k);
          keep_apart<k>();
          return true;
        });
      }
      if (late) {
        in_turn<1, 1, kVectors - 1>([&](auto number) {
          constexpr int k = decltype(number)::value;
          if (extent.begin >= (first + k + 1) * kLength) return false;
          vector(begin, k);
          keep_apart<k>();
          return true;
        });
      }
    } else {
#pragma unroll
      for (int k = 0; k < kVectors - 1; ++k) vector(end, k);
      if (!__any_sync(kFullWarp, late)) return;
#pragma unroll
      for (int k = 1; k < kVectors; ++k) vector(begin, k);
    }
  } else {
    const auto edge = [&](auto before) {
      constexpr int kGrain = kWhole ? kCount : kLength;
      const int limit = limit_of(before);
      if constexpr (kVectors == 1) {
        if (limit % kGrain != 0) vector(before, 0);
      } else if constexpr (kLanes == kWarpLanes) {
        // Fewest registers.
        if (limit % kGrain == 0) return;
        const uint32_t at = static_cast<uint32_t>(limit) / kLength;  // far outside for negative limits
        in_batches<kVectors, 1>([&](auto number, auto) {
          constexpr int k = decltype(number)::value;
          if (at == static_cast<uint32_t>(first) + k) {
            vector(before, k);
            keep_apart<k>();
          }
        });
      } else if (__any_sync(kFullWarp, limit % kGrain != 0)) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) vector(before, k);
      }
    };
    edge(end);
    edge(begin);
  }
}

// How many vectors a lane has from a segment's first column to its last live one, whatever the segment has before it; 0
// where nothing is live.
template <int kLanes, int kCount>
__device__ __forceinline__ int live_vectors(const Extent& extent) {
  return extent.begin < extent.end ? (extent.end - 1) / (kLanes * kCount) + 1 : 0;
}

// Calls run(k, edge) for the vectors kFirst + k, k < kLive, of a lane that may be live in part, or dead, where those before
// kFirst + kLive are as many as live_vectors() of one of the warp's segments, if not more. These have columns before them.
// Every lane of the warp calls it. `kVectors`: of the segment, whose end may be folded, if kMayFold.
template <int kLanes, int kCount, int kVectors, int kFirst, int kLive, bool kMayFold, typename Run>
__device__ __forceinline__ void at_live_edges(const Extent& extent, int lane, const Run& run) {
  if constexpr (kLive == 0) return;
  constexpr int kLength = kLanes * kCount;
  constexpr std::true_type end;
  constexpr std::false_type begin;
  const auto elements = [&](auto before, int column) {
    const int limit = decltype(before)::value ? extent.end : extent.begin;
    return EdgeElements<decltype(before)::value>{max(0, min(limit - column, kCount))};
  };
  const auto vector = [&](auto before, int k) {
    run(k, elements(before, ((kFirst + k) * kLanes + lane) * kCount));
  };
  vector(end, kLive - 1);
  const auto folded_elements = [&] {
    EdgeElements<true> folded = elements(end, kVectors * kLength);
    if (lane != 0) folded.count = 0;
    return FoldedElements{elements(begin, lane * kCount), folded};
  };
  // Few segments begin behind their first vector, or end before the last of another of the warp.
  constexpr bool kMayBeEarly = kLanes < kWarpLanes && kLive > 1;
  constexpr bool kMayBeLate = kFirst > 0 || kLive > 1;
  const bool early = kMayBeEarly && extent.end <= (kFirst + kLive - 1) * kLength;
  const bool late = kMayBeLate && extent.begin > (kFirst + (kFirst == 0)) * kLength;
  const bool folds = kMayFold && __any_sync(kFullWarp, extent.end > kVectors * kLength);
  if (!__any_sync(kFullWarp, early | late)) {
    if (folds) {
      run(0, folded_elements());
    } else if (kFirst == 0) {
      vector(begin, 0);
    }
    return;
  }
  if (folds) {
    run(0, LateFoldedElements{folded_elements(), elements(begin, kVectors * kLength)});
  } else {
    vector(begin, 0);
  }
  if constexpr (kMayBeEarly) {
#pragma unroll
    for (int k = 0; k < kLive - 1; ++k) vector(end, k);
  }
#pragma unroll
  for (int k = 1; k < kLive; ++k) vector(begin, k);
}

// The segment that begins at column `start` of a row held in registers; of a row of no columns if it does not exist.
template <typename Arguments>
__device__ __forceinline__ Extent near_extent(const Arguments& arguments, uint32_t row, const RowPlace& place,
                                              bool exists, int start) {
  const int columns = exists ? static_cast<int>(arguments.columns) : 0;
  int end = min(place.query + arguments.near.end, columns);
  if (arguments.key_lengths.given && exists) {
    end = static_cast<int>(shortened({0, end}, key_length(arguments, row)).end);
  }
  return {-start, columns - start, max(place.query + arguments.near.begin, 0) - start, end - start};
}

inline constexpr int kReach = 16;  // no load reaches further past a segment, in elements

// The segment of `length` columns that begins at column `start` of a row of any length.
__device__ __forceinline__ Extent far_extent(const ColumnRange& live, int64_t columns, int64_t start, int length) {
  const auto clip = [](int64_t value, int limit) {
    return static_cast<int>(value < 0 ? 0 : value < limit ? value : limit);
  };
  const int begin = clip(live.begin - start, length);
  const int end = clip(live.end - start, length);
  // Nothing is live where a range ends before it begins; Extent would take columns between the two for live ones.
  const bool empty = begin >= end;
  return {-clip(start, kReach), clip(columns - start, length + kReach), empty ? 0 : begin, empty ? 0 : end};
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

// A chunk of which nothing is known.
template <int kBytes>
__device__ __forceinline__ Chunk<kBytes> any_chunk() {
  Chunk<kBytes> chunk;
#pragma unroll
  for (int w = 0; w < (kBytes + 3) / 4; ++w) chunk.word[w] = any_word();
  return chunk;
}

// A chunk of copies of one word.
template <int kBytes>
__device__ __forceinline__ Chunk<kBytes> filled_with(uint32_t word) {
  Chunk<kBytes> chunk;
#pragma unroll
  for (int w = 0; w < (kBytes + 3) / 4; ++w) chunk.word[w] = word;
  return chunk;
}

// Whether what few rows of warp_rows need lies in functions of its own, away from the code of all others, which then waits
// less for instructions (15% of what a warp of 1,025 float16 columns waited for, causal under a float mask). Measured on an
// H200, there: .81 -> .84 of a copy's speed, .91 -> .93 if it is not causal, causal backward .873 -> .877. But .95 -> .90
// under a boolean mask, and .805 -> .79 in blocks, at 4,097 columns, of kernels that take all their registers as it is.
SMS_HOST_DEVICE constexpr bool is_apart(Element element, MaskKind mask, int lanes, int vectors) {
  return element_bytes(element) == 2 && mask != MaskKind::boolean && lanes == kWarpLanes && vectors > kBlockVectors;
}

// What load_elements() loads. Not an array: the compiler gives arrays of functions that it inlines one memory, and would keep
// others there with this one that are in registers else.
template <typename S, int kVectors>
struct alignas(kVectorBytes) Elements {
  typename S::Piece piece[kVectors][S::kPieces];
};

// Loads a piece of which the first element is at `address`, and column `a` of those that `extent` knows, an element at a time:
// an address for every element would fill the registers. Without a live column its words are `dead`.
template <int kElementBytes, int kBytes>
__device__ __forceinline__ void load_piece(Chunk<kBytes>& piece, const char* address, int64_t column_stride,
                                           const Extent& extent, int a, uint32_t dead) {
  constexpr int kPieceCount = kBytes / kElementBytes;
  piece = filled_with<kBytes>(extent.any_live(a, kPieceCount) ? 0 : dead);
#pragma unroll
  for (int i = 0; i < kPieceCount; ++i) {
    if (extent.any_live(a + i, 1)) load_element<kElementBytes>(piece, i, address);
    address += column_stride;
  }
}

// As load_strided() with any stride, given the place of the lane's own column 0 and what is live from there on.
template <int kLength, int kElementBytes, int kCount, int kVectors, typename S>
__device__ __attribute__((noinline)) void load_elements(Elements<S, kVectors>& out, const char* base, int64_t column_stride,
                                                        int begin, int end, int first, uint32_t dead) {
  const Extent extent{0, 0, begin, end};
#pragma unroll 1
  for (int k = 0; k < kVectors; ++k) {
#pragma unroll
    for (int p = 0; p < S::kPieces; ++p) {
      const int a = (first + k) * kLength + p * S::kPieceCount;
      typename S::Piece piece;
      load_piece<kElementBytes>(piece, base + a * column_stride, column_stride, extent, a, dead);
      out.piece[k][p] = piece;
    }
  }
}

// The same, into registers.
template <int kLength, int kElementBytes, int kCount, int kVectors, typename S = Shape<kElementBytes, kCount>>
__device__ __forceinline__ void load_apart(typename S::Piece (&out)[kVectors][S::kPieces], const char* base,
                                           int64_t column_stride, const Extent& extent, int first, uint32_t dead) {
  Elements<S, kVectors> elements;
  load_elements<kLength, kElementBytes, kCount>(elements, base, column_stride, extent.begin, extent.end, first, dead);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
#pragma unroll
    for (int p = 0; p < S::kPieces; ++p) out[k][p] = elements.piece[k][p];
  }
}

// Loads vectors first, first + 1, ... (in steps of kLanes) of a segment whose column 0 is at `base`. Vectors without a live
// column are not read, and their words are `dead`, or anything unless kFills: a lane's where rows are whole or not kFills,
// those of all its lanes elsewhere. Other cells outside the live columns hold anything. `inner`: as in RowPlace.
template <int kLanes, Cache kCache, bool kWhole, int kElementBytes, int kCount, bool kFills, bool kApart = false,
          int kVectors, typename S = Shape<kElementBytes, kCount>>
__device__ __forceinline__ void load_vectors(typename S::Piece (&out)[kVectors][S::kPieces], const char* segment_base,
                                             const Span& span, bool inner, const Extent& segment_extent, int first,
                                             int lane, uint32_t dead) {
  constexpr int kPieceCount = S::kPieceCount;
  constexpr int kChunkBytes = S::kChunkBytes;
  constexpr int kLength = kLanes * kCount;
  Extent extent = segment_extent.moved(lane * kCount);
  if constexpr (!kFills) {
    // What is found of one operand is not kept for the next.
    extent.begin = one_number(extent.begin);
    extent.end = one_number(extent.end);
  }
  const auto column = [&](int k, int p) { return (first + k) * kLength + p * kPieceCount; };
  // What is not read.
  const auto fill_chunk = [&]<int kBytes>(Chunk<kBytes>& chunk) {
    chunk = kFills ? filled_with<kBytes>(dead) : any_chunk<kBytes>();
  };
  const auto fill = [&](int k, int p) { fill_chunk(out[k][p]); };
  // Calls each(k, p) for the pieces of all vectors.
  const auto for_pieces = [&](const auto& each) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int p = 0; p < S::kPieces; ++p) each(k, p);
    }
  };
  if constexpr (kWhole) {
    const char* base = one_address(segment_base + lane * S::kBytes);
    const auto load = [&](int k, int p) {
      out[k][p] = load_aligned<kChunkBytes, kCache>(base + column(k, p) * kElementBytes);
    };
    const auto load_live = [&](int k, int p) {
      fill(k, p);
      if (extent.any_live(column(k, p), kPieceCount)) load(k, p);
    };
    // With one vector a lane, a warp may come here in part.
    if (kVectors > 1 && __all_sync(kFullWarp, segment_extent.all_live(first * kLength, kVectors * kLength))) {
      for_pieces(load);
    } else {
      for_pieces(load_live);
    }
    return;
  }
  constexpr uintptr_t kMask = kChunkBytes - 1;
  const auto segment_address = reinterpret_cast<uintptr_t>(segment_base);
  const int shift = static_cast<int>(segment_address & kMask);
  const char* boundary = one_address(segment_base - shift);
  // Where the last piece with a live column begins. Of several rows in a warp some may have none.
  const int end_of_live = min(segment_extent.end, (first + kVectors) * kLength);
  const int last_piece = one_number((end_of_live - 1) & -kPieceCount);
  const int last = kLanes == kWarpLanes ? last_piece : max(last_piece, 0);
  // A warp takes one way, and is told so. With one vector a lane it may come here in part.
  constexpr bool kTogether = kVectors > 1;
  const auto all_of = [&](bool value) { return kTogether ? static_cast<bool>(__all_sync(kFullWarp, value)) : value; };
  const auto any_of = [&](bool value) { return kTogether ? static_cast<bool>(__any_sync(kFullWarp, value)) : value; };
  const bool aligned = all_of(shift == 0);
  if (!all_of(inner)) {
    // Few rows. Whether the aligned vectors that overlap the live columns lie inside the operand.
    const uintptr_t first_load = segment_address - shift;
    const bool inside =
        inner | ((first_load >= span.low) &
                 (first_load + last * kElementBytes + (aligned ? kChunkBytes : 2 * kChunkBytes) <= span.high));
    if (!all_of(inside)) {
      // Few segments of them.
      const char* base = segment_base + lane * S::kBytes;
      if constexpr (kApart) {
        load_apart<kLength, kElementBytes, kCount>(out, base, kElementBytes, extent, first, kFills ? dead : 0);
      } else {
        for_pieces([&](int k, int p) {
          const int a = column(k, p);
          fill(k, p);
          if (!extent.any_live(a, kPieceCount)) return;
          out[k][p] = typename S::Piece{};
#pragma unroll
          for (int i = 0; i < kPieceCount; ++i) {
            if (extent.any_live(a + i, 1)) load_element<kElementBytes>(out[k][p], i, base + (a + i) * kElementBytes);
          }
        });
      }
      return;
    }
  }
  const char* lane_boundary = one_address(boundary + lane * S::kBytes);
  // The second one of each piece, where two overlap it.
  typename S::Piece high[kVectors][S::kPieces];
  const auto read = [&](int k, int p, const char* from) { out[k][p] = load_aligned<kChunkBytes, kCache>(from); };
  const auto read_two = [&](int k, int p, const char* from) {
    out[k][p] = load_aligned<kChunkBytes, Cache::keep>(from);
    high[k][p] = load_aligned<kChunkBytes, Cache::keep>(from + kChunkBytes);
  };
  const auto realign_all = [&] {
    with_word_shift<kChunkBytes>(shift, [&](auto word_shift) {
      for_pieces([&](int k, int p) {
        if constexpr (kChunkBytes < 4) {
          out[k][p] = realign<kElementBytes>(out[k][p], high[k][p], shift);
        } else {
          out[k][p] = realign_words<kElementBytes, word_shift>(out[k][p], high[k][p], 8 * (shift & 3));
        }
      });
    });
  };
  // All lanes read a vector with a live column, and of all rows of the warp: what lies past the last one is read there.
  const auto place = [&](int a) { return boundary + int64_t{min(a, last)} * kElementBytes; };
  const auto read_all = [&](const auto& each) {
    if constexpr (!kFills) {
      // Lanes without a live column read nothing.
      for_pieces([&](int k, int p) {
        fill(k, p);
        high[k][p] = out[k][p];
        if (extent.any_live(column(k, p), kPieceCount)) each(k, p, lane_boundary + column(k, p) * kElementBytes);
      });
      return;
    }
    // Few segments begin behind their first vector or end before their last.
    if (all_of((segment_extent.begin < (first + 1) * kLength) &
               (segment_extent.end > (first + kVectors - 1) * kLength))) {
      for_pieces([&](int k, int p) {
        const int a = column(k, p);
        each(k, p, k < kVectors - 1 ? lane_boundary + a * kElementBytes : place(a + lane * kCount));
      });
    } else {
      for_pieces([&](int k, int p) {
        if (any_of(segment_extent.any_live((first + k) * kLength, kLength))) {
          each(k, p, place(column(k, p) + lane * kCount));
        } else {
          fill(k, p);
          high[k][p] = out[k][p];
        }
      });
    }
  };
  if (aligned) {
    read_all(read);
  } else if constexpr (kVectors > 1 && kChunkBytes == kVectorBytes) {
    using Halves = HalfVectors<kElementBytes>;
    const int half_shift = shift % Halves::kBytes;
    const char* lane_half = one_address(lane_boundary + (shift - half_shift));
    typename Halves::Joined halves[kVectors][S::kPieces];
    for_pieces([&](int k, int p) {
      const int a = column(k, p);
      fill_chunk(halves[k][p]);
      if (extent.any_live(a, kPieceCount)) Halves::load(halves[k][p], lane_half + a * kElementBytes);
    });
    with_word_shift<Halves::kMostShift>(half_shift, [&](auto word_shift) {
      for_pieces([&](int k, int p) {
        out[k][p] = Halves::template realigned<word_shift>(halves[k][p], 8 * (shift & 3));
      });
    });
  } else if constexpr (kChunkBytes > kElementBytes) {
    read_all(read_two);
    realign_all();
  }
}

// The same for elements `column_stride` bytes apart. One load each; a stride of 0 needs one load in all.
template <int kLanes, int kElementBytes, int kCount, bool kApart = false, int kVectors,
          typename S = Shape<kElementBytes, kCount>>
__device__ __forceinline__ void load_strided(typename S::Piece (&out)[kVectors][S::kPieces], const char* segment_base,
                                             int64_t column_stride, const Extent& segment_extent, int first, int lane,
                                             uint32_t dead) {
  const Extent extent = segment_extent.moved(lane * kCount);
  const auto column = [&](int k) { return (first + k) * kLanes * kCount; };
  if (column_stride == 0) {
    typename S::Piece filled;
    // Null: a boolean mask that excludes nothing.
    if (segment_base != nullptr && segment_extent.begin < segment_extent.end) {
      filled = load_filled<kElementBytes, S::kChunkBytes>(segment_base);
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const bool live = extent.any_live(column(k), kCount);
#pragma unroll
      for (int p = 0; p < S::kPieces; ++p) out[k][p] = live ? filled : filled_with<S::kChunkBytes>(dead);
    }
    return;
  }
  if constexpr (kApart) {
    load_apart<kLanes * kCount, kElementBytes, kCount>(out, segment_base + lane * kCount * column_stride, column_stride,
                                                       extent, first, dead);
  } else {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int p = 0; p < S::kPieces; ++p) {
        const int a = column(k) + p * S::kPieceCount;
        load_piece<kElementBytes>(out[k][p], segment_base + (lane * kCount + a) * column_stride, column_stride, extent, a,
                                  dead);
      }
    }
  }
}

// Stores the kVectors vectors of each lane that make up a whole segment, as far as the row has columns. Every lane of
// the warp calls it, each group of kLanes with its own segment.
template <int kLanes, bool kWhole, int kElementBytes, int kVectors>
__device__ __forceinline__ void store_vectors(char* segment_base, const Chunk<16> (&value)[kVectors],
                                              const Extent& segment_extent, int lane) {
  constexpr int kCount = kVectorBytes / kElementBytes;
  char* base = const_cast<char*>(one_address(segment_base + lane * kVectorBytes));
  const int last = segment_extent.last - lane * kCount;
  const auto column = [&](int k) { return k * kLanes * kCount; };
  // Elements [low, high) of the vector whose first column is a.
  const auto store_elements = [&](int a, const Chunk<16>& chunk, int low, int high) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i >= low && i < high) store_element<kElementBytes>(base + (a + i) * kElementBytes, chunk, i);
    }
  };
  if constexpr (kWhole) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (column(k) < last) store_aligned(base + column(k) * kElementBytes, value[k]);
    }
    return;
  }
  const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(base) % kVectorBytes);
  if (!__any_sync(kFullWarp, shift != 0)) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int a = column(k);
      if (a + kCount <= last) {
        store_aligned(base + a * kElementBytes, value[k]);
      } else if (a < last) {
        store_elements(a, value[k], 0, last - a);
      }
    }
    return;
  }
  // A vector boundary cuts each vector after its first `head` elements. The tail goes out together with the head of
  // the next vector, which the next lane hands over, or on its own where the segment or the row ends.
  const int head = kCount - shift / kElementBytes;
  // A few at a time: each takes twice its registers meanwhile.
  Chunk<16> tail[kVectors];
  in_batches<kVectors, 4>([&](auto begin, auto end) {
#pragma unroll
    for (int k = decltype(begin)::value; k < decltype(end)::value; ++k) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t offered = lane == 0 && k + 1 < kVectors ? value[k + 1].word[w] : value[k].word[w];
        tail[k].word[w] = __shfl_sync(kFullWarp, offered, (lane + 1) % kLanes, kLanes);
      }
    }
    if (shift == 0) {
      // Another group's row is shifted, this one's is not.
#pragma unroll
      for (int k = decltype(begin)::value; k < decltype(end)::value; ++k) tail[k] = value[k];
    } else {
      with_word_shift<16>(kVectorBytes - shift, [&](auto word_shift) {
#pragma unroll
        for (int k = decltype(begin)::value; k < decltype(end)::value; ++k) {
          tail[k] = realign_words<kElementBytes, word_shift>(value[k], tail[k], 8 * ((kVectorBytes - shift) & 3));
        }
      });
    }
#pragma unroll
    for (int k = decltype(begin)::value; k < decltype(end)::value; ++k) {
      const int a = column(k);
      const bool segment_end = k == kVectors - 1 && lane == kLanes - 1;
      const bool segment_begin = k == 0 && lane == 0;
      const bool joined = shift == 0 ? a + kCount <= last : !segment_end && a + kCount + head <= last;
      const bool headless = shift == 0 || (!segment_begin && a + head <= last);  // the vector before takes the head
      if (joined) store_aligned(base + a * kElementBytes + (kVectorBytes - shift) % kVectorBytes, tail[k]);
      const int low = headless ? head % kCount : 0;
      const int high = joined ? (shift == 0 ? 0 : head) : min(kCount, last - a);
      if (low < high) store_elements(a, value[k], low, high);
    }
  });
}

struct alignas(kVectorBytes) Vector {
  char byte[kVectorBytes];
};

// Stores the vectors of each lane that hold a segment with `ahead` columns before it, from a vector boundary on. Every
// lane of the warp calls it. The first and the last vector, of which only a part may be the segment's, go through shared
// memory: a lane stores one element of them, instead of one lane all. Where they are one vector it is stored twice. The last
// one is none of the lanes' first kFull vectors.
template <int kLanes, int kElementBytes, int kFull, int kVectors>
__device__ __forceinline__ void store_preceded(char* boundary, const Chunk<16> (&value)[kVectors],
                                               const Extent& segment_extent, int ahead, int lane) {
  constexpr int kCount = kVectorBytes / kElementBytes;
  constexpr int kLength = kLanes * kCount;
  constexpr int kThreads = kLanes < kWarpLanes ? kWarpRowsThreads : kBlockThreads;  // of the largest block
  __shared__ Vector edges[kThreads / kLanes][2];
  char* const edge = edges[threadIdx.x / kLanes][0].byte;
  const int last = segment_extent.last;
  const int tail = last & -kCount;  // the first column of the last vector
  const int lane_tail = tail - lane * kCount;
  boundary = const_cast<char*>(one_address(boundary));
  char* base = const_cast<char*>(one_address(boundary + lane * kVectorBytes));
  if (lane == 0) *reinterpret_cast<Chunk<16>*>(edge) = value[0];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const bool precedes_tail = k < kFull ? last > ahead : lane_tail > k * kLength;
    if (precedes_tail && (k > 0 || lane > 0)) store_aligned(base + k * kLanes * kVectorBytes, value[k]);
    const bool is_folded = k == 0 && lane_tail == kVectors * kLength;
    if ((k >= kFull && lane_tail == k * kLength) || is_folded) {
      *reinterpret_cast<Chunk<16>*>(edge + kVectorBytes) = value[k];
    }
  }
  __syncwarp();
#pragma unroll
  for (int e = 0; e < 2 * kCount; e += kLanes) {
    const int index = e + lane;
    const int column = index < kCount ? index : tail + index % kCount;
    if ((kLanes <= 2 * kCount || index < 2 * kCount) && column >= ahead && column < last) {
      const auto piece = load_aligned<kElementBytes, Cache::keep>(edge + index * kElementBytes);
      store_element<kElementBytes>(boundary + column * kElementBytes, piece);
    }
  }
  __syncwarp();  // before the next row's
}

}  // namespace sms::cuda
