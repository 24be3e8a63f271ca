// Which kernel serves a row: a pure function of the row's length, its types, the exclusions and the device, never of
// the number of rows, strides or addresses (a row's bits must not depend on those). Free of torch and of CUDA, so a
// CPU-only build can answer for every device. All kernel constants come from here; kernel_list.h lists the kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../pieces.h"
#include "../problem.h"

namespace sms::cuda {

enum class Strategy : uint8_t {
  warp_rows,    // a warp, or a part of one, holds a row in registers; several rows in flight a lane
  block_row,    // a block holds a row in registers
  cluster_row,  // a cluster of blocks does
  pair_rows,    // a block, or a cluster of blocks, holds the live columns of two rows in registers
  shared_row,   // a block, or a cluster of blocks, holds a row in shared memory
  stream_row,   // a block reads a row twice: once for maximum and sum, once for the result
  sum_rows,     // a block sums a tile of many rows: the gradient of a mask, for which there is no other
  keep_rows,    // a thread takes four columns: which cells dropout keeps, as a tensor, for which there is no other
};

inline constexpr int kVectorBytes = 16;  // one load or store of a lane
inline constexpr int kWarpLanes = 32;

// A shape that warp_rows is compiled for. It serves rows of up to lanes * vectors 16-byte vectors.
struct WarpShape {
  int lanes;    // a row; a power of two, at most 32
  int vectors;  // a lane and row, in registers
  int rows;     // in flight a lane: hides the latency of short rows, without effect on the result
  bool few_masks = false;  // compiled without a mask and for one of the scores' type alone
  int least = 0;           // serves rows of so many vectors or more, each a whole number of them; 0: any
};

// In ascending order of capacity. Few lanes with several vectors each: what a row costs beside its elements is paid by
// every lane. A shape more where rows would fill little of the next one, which shows where they wait for arithmetic.
// Measured on an H200 with float16, share of a copy's speed, beside the next shape: 2x1 .97 (.69) at 16 columns, causal .94
// (.55); 4x2 causal .91 (.78) at 64; 8x2 causal .92 (.88, by 4x4) at 128; 32x3 .91 (.86) at 768 under a causal mask; 32x5
// .74 (.64) at 1,025 under a float mask; 32x6 .97 (.79, by two warps of a block) at 1,032. 8x5 and 16x5 are 32x5 for rows
// a little longer than 256 and 512. More than kBlockVectors are for 16-bit scores without a float32 mask alone: others
// take too many registers; float32 ones of 32x6 do not: causal .96 (.83, by two warps of a block) at 520 columns, .95 (.71)
// under a float mask too. 8x3 and 16x3 are for causal rows that would fill little more than half of the next shape: .87
// (.78) at 136 columns, .91 (.86) at 328, .78 (.67) and .87 (.76) under a float mask too. 16x2 reads twice as much of a row
// at once as 8x4: 1.00 (.98) at 256 columns, causal .95 (.94); but .77 (.83) at 200 under a causal float mask.
inline constexpr WarpShape kWarpShapes[] = {
    {1, 1, 2},  {2, 1, 4},           {4, 1, 4},  {4, 2, 1},  {8, 2, 1},  {8, 3, 1, true}, {16, 2, 1, true, 29}, {8, 4, 1},
    {8, 5, 1},  {16, 3, 1, true},    {16, 4, 1}, {16, 5, 1}, {32, 3, 1}, {32, 4, 1},      {32, 5, 1},           {32, 6, 1},
};

inline constexpr int kWarpRowsThreads = 128;

// Vectors of a lane of block_row. The number of warps is a run-time matter, so one kernel serves a range of lengths.
// Two of the largest blocks fit a multiprocessor: one reads while the other computes. Measured as above: .99 at 2,048
// columns, .97 at 4,096, .98 at 8,192 and 16,384.
inline constexpr int kBlockVectors = 4;

// A vector more, for rows that are no whole number of vectors, where they take a warp less then: what a warp does once is
// much of what it does. Measured as above, with 4 and with 5: float16 .895 and .94 at 4,097 columns under a boolean mask,
// .87 and .88 if causal; float32 .80 and .89 at 1,025 under a causal float mask, .79 and .87 at 4,097; but float16 under a
// float mask .90 and .79 at 4,097, or .85 with 64 registers.
inline constexpr int kOddBlockVectors = 5;
inline constexpr int kOddBlockThreads = 256;  // at most
inline constexpr int kOddBlocksResident = 4;          // forward: 64 registers
inline constexpr int kOddBackwardBlocksResident = 3;

inline constexpr int kBlockThreads = 512;  // at most
inline constexpr int kBlocksResident = 2;  // the register budget: 65,536 / (512 * 2) on every architecture
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr int kPackedBlocksResident = 2;  // of packed rows that are whole: as many threads as there can be
#else
inline constexpr int kPackedBlocksResident = 3;
#endif
// The register budget of 16-bit rows that are not whole, under a float mask of their type, is that of so many threads: 56
// registers, and seven blocks of five warps a multiprocessor in place of six. Measured as above, at 4,097 columns: .81 -> .83
// under a causal mask, .90 -> .89 under one alone.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr int kOddAddendThreads = kBlockThreads;  // as many threads as there can be
#else
inline constexpr int kOddAddendThreads = kBlockThreads + 2 * kWarpLanes;
#endif
inline constexpr int kDropoutBlockThreads = kBlockThreads * kBlocksResident;  // at most, with dropout

// Rows of so many warps share a block with another row, if they are causal, whole and of 16 bits: blocks of two warps begin
// and end too often. Measured as above, at 1,544 columns: causal .83 -> .94, with backward .89 -> .93; but without exclusions
// 1.00 -> .985 at 2,048 columns, and .90 -> .89 with three warps each.
inline constexpr int kSharingWarps = 2;
inline constexpr int kSharingRows = 2;

// Of a block, at most, given the rows that it holds.
SMS_HOST_DEVICE constexpr int block_threads(int vectors, int rows, bool dropout) {
  if (rows > 1) return rows * kSharingWarps * kWarpLanes;
  return vectors == kOddBlockVectors ? kOddBlockThreads : dropout ? kDropoutBlockThreads : kBlockThreads;
}

// 16-bit scores without a float mask are packed: they stay as they were loaded, two a register. Where rows are whole, or
// a cluster holds them, their exponentials are computed twice, for the sum and for the result, rather than kept, which
// leaves room for more of a row in flight: long rows wait for that. Others wait for arithmetic: .76 with exponentials that
// are kept and .70 without, at 4,097 columns, when every row was realigned.
SMS_HOST_DEVICE constexpr bool is_packed(Element element, MaskKind mask) {
  return element_bytes(element) == 2 && (mask == MaskKind::none || mask == MaskKind::boolean);
}

// Whether a mask is numbers to add.
SMS_HOST_DEVICE constexpr bool has_addend(MaskKind mask) { return mask == MaskKind::same || mask == MaskKind::float32; }

// Rows that wait for memory, as those do that are computed with more than a multiplication or are not whole, are brought
// into the L2 for the row that so many threads' blocks come before: a quarter of those that an H200 holds at once. With
// none, a half and a quarter (H200, float16), .86, .91, .92 of a copy's speed at 32,768 columns under a float mask, .84,
// .88, .89 if causal too; .84 -> .95 at 4,097 without a mask; .86 -> .92 at 131,072 causal; backward .92 -> .98 at 1,001.
// Whole rows without a mask, which are read at .97 to 1.00 without, lose up to .02. Nor is a row brought that is shorter
// than kPrefetchBytes, unless it is one with its block's others.
//
// Fewer rows than kPairedRows are not paired: there would be too few blocks. Nor are those of fewer segments than
// kPairedSegments: paired and not, under a causal float mask, .90 and .92 at 4,096 float16 columns, .87 and .89 at 4,160,
// .91 and .91 at 8,192, .93 and .93 at 4,096 float32 ones; or, where rows are not whole, than kOddPairedSegments: .75 and
// .77 at 8,193 float16 columns, .76 and .65 at 16,385, .79 and .81 at 4,097 float32 ones, .76 and .71 at 8,193.
#if defined(SMS_EMULATION)  // where problems have few rows
inline constexpr int64_t kPrefetchThreads = 1;
inline constexpr int64_t kPrefetchBytes = 1;
inline constexpr int64_t kPairedRows = 2;
inline constexpr int64_t kPairedSegments = 2;
inline constexpr int64_t kOddPairedSegments = 2;
#else
inline constexpr int64_t kPrefetchThreads = int64_t{1} << 16;
inline constexpr int64_t kPrefetchBytes = 1000;
inline constexpr int64_t kPairedRows = 512;
inline constexpr int64_t kPairedSegments = 8;
inline constexpr int64_t kOddPairedSegments = 12;
#endif

// Rows that share a row of a mask are walked one after the other, unless the mask stays in the L2 without: one of at most
// a kSmallMaskPart of it does, and so does, for rows of kLongRowBytes and more, what of it lies between two uses, up to a
// kSharedMaskPart. Memory order is faster then (H200, float16): .92 -> .99 at 128 columns under a mask [Sq, Sk], .93 -> .98
// at 1,024; under a causal one [B, 1, Sq, Sk] .91 -> .93 at 1,024, .90 -> .95 at 2,048, .89 -> .92 at 504, .67 -> .73 at 257,
// but .945 -> .934 at 256 and .90 -> .83 at 128.
inline constexpr int64_t kSmallMaskPart = 12;
inline constexpr int64_t kSharedMaskPart = 6;
inline constexpr int64_t kLongRowBytes = 512;

// Whether cluster_row and pair_rows are compiled for so many vectors of a lane: kBlockVectors, or twice as many, which is
// as many of one float operand as its registers hold. Measured as above, with 4 and kept exponentials, with 4, and with 8:
// .89, .99, .98 at 32,768 columns, .85, .97, .985 at 65,536, .81 (in shared memory), .90, .98 at 131,072; causal .84, .95,
// .97 at 32,768. float32 under a float mask has both, for its longest rows: .92 and .91 at 32,768, .90 and .92 at 65,536,
// .45 (in shared memory) and .88 at 131,072; causal too .89 and .85, .79 and .84, .37 and .78.
SMS_HOST_DEVICE constexpr bool in_clusters(Direction direction, Element element, MaskKind mask, int vectors) {
  const bool light = direction == Direction::forward && !has_addend(mask);
  const bool both = element_bytes(element) == 4 && !light;
  return vectors == kBlockVectors ? !light : vectors == 2 * kBlockVectors && (light || both);
}

// Blocks of cluster_row have at most so many warps, unless they are as many as there can be, of as many vectors: several
// of them fit a multiprocessor. With 12, 16 and 8 warps of 4 vectors a lane, under a float mask .86, .85, .83 at 32,768
// columns and .83, .79, .82 at 65,536; backward too, .96 and .94 at 32,768 and 65,536, against .88 and .83 in shared
// memory. With 16 and 8 warps of 8 vectors, .97 and .98 at 131,072; with 16 of them, float32, .97 there, .85 in shared
// memory.
SMS_HOST_DEVICE constexpr int cluster_warps(int lane_vectors) { return lane_vectors == kBlockVectors ? 12 : 8; }
inline constexpr int kClusterBlocks = 8;  // at most: what every device with clusters can schedule

// The register budget of backward's cluster_row with the more vectors: 20 warps of a multiprocessor, as each quarter of one
// has the registers of whole warps alone, so that two blocks of 9 or 10 fit. Measured as above, with the registers of 16 and
// of 20: .87 and 1.00 at 65,544 float32 columns, causal .73 and .86.
inline constexpr int kWideBackwardThreads = 640;

// Whether a cluster of pair_rows may have five blocks, of at most so many warps: for 37 to 65 segments, which is what two rows
// of 64 have and eight blocks leave 7 warps idle of. Measured as above, causal, at 65: float32 .89 -> .94, under a float mask
// .885 -> .866; float16 .93 -> .92. At 41, 49 and 57, float32: .91 -> .95, .88 -> .93, .93 -> .94.
SMS_HOST_DEVICE constexpr bool in_five_blocks(Element element, MaskKind mask) {
  return element == Element::float32 && !has_addend(mask);
}
inline constexpr int kFiveBlocks = 5;
inline constexpr int kFiveBlocksWarps = 13;

// A block of pair_rows, given the vectors of a lane: threads, at most, and how many of it the register budget lets a
// multiprocessor have. Two causal rows that have as many live columns together as one row has columns touch a segment more
// than that. Rows that are not whole take the registers of as many threads as a block of block_row has.
SMS_HOST_DEVICE constexpr int pair_threads(Element element, MaskKind mask, int vectors, bool whole) {
  if (vectors == kBlockVectors) return kBlockThreads + (whole ? kWarpLanes : 0);
  return (in_five_blocks(element, mask) ? kFiveBlocksWarps : cluster_warps(vectors) + 1) * kWarpLanes;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
// A multiprocessor may have no more threads.
SMS_HOST_DEVICE constexpr int pairs_resident(Element, MaskKind, int) { return 1; }
#else
SMS_HOST_DEVICE constexpr int pairs_resident(Element element, MaskKind mask, int vectors) {
  return vectors == kBlockVectors || in_five_blocks(element, mask) ? kBlocksResident : 3;
}
#endif

// Threads of a block of shared_row, and how many blocks the register budget lets a multiprocessor have. Measured as
// above: .84 at 65,536 columns in clusters of two (.74 with 512 threads), .81 at 131,072 in clusters of four (.79 in
// registers). A stream that reads rows twice stops at .61.
inline constexpr int kSharedThreads = 256;
inline constexpr int kSharedResident = 4;

// Shared memory of a block of shared_row, in bytes.
struct SharedBudget {
  int comfortable;  // so that two or three blocks fit a multiprocessor: one reads while the others compute
  int most;         // that a block can have
};

// What the CUDA programming guide gives as a multiprocessor's and a block's most, less 1 KB a block for the system;
// nothing before 8.0, which has no asynchronous copies.
constexpr SharedBudget shared_budget(int capability) {
  if (capability < 80) return {0, 0};
  if (capability == 80 || capability == 87) return {80 << 10, 160 << 10};
  if (capability < 90 || capability >= 120) return {48 << 10, 96 << 10};
  return {72 << 10, 224 << 10};
}

// What `columns` elements take in shared memory: at any distance from a 16-byte boundary, with two vectors to spare
// before and four after for reads that reach past an end.
constexpr int64_t shared_operand_bytes(int64_t columns, int bytes) {
  return (columns * bytes + kVectorBytes - 1) / kVectorBytes * kVectorBytes + 6 * kVectorBytes;
}

// Vectors of a lane of block_row or stream_row whose loads are in flight together, forward: all that the registers of the
// largest block allow without spilling. A float32 mask for 16-bit elements takes twice the registers of those.
template <MaskKind kMask>
inline constexpr int kVectorsInFlight = kMask == MaskKind::float32 ? 2 : 4;

// stream_row takes 4 vectors a lane at a time, as many as stay in flight in the register budget of 512 threads.
inline constexpr int kStreamVectors = 4;
inline constexpr int kStreamThreads = 512;

// The gradient of a mask: warps of a block share the rows to sum, so that a small mask still has rows in flight.
inline constexpr int kMaskGradientThreads = 256;

inline constexpr int kKeepThreads = 256;

// What is compiled: float64 rows are rare, so one shape of warp_rows serves them; the other elements get every shape.
// Masks multiply forward kernels only. Everything else (band, column stride, number of warps, row dimensions) is
// decided at run time, uniformly for a warp.
constexpr bool compiled(Element element, MaskKind mask, const WarpShape& shape) {
  if (element == Element::float64) return shape.lanes * shape.vectors == 128;
  const bool narrow = element_bytes(element) == 2;
  if (shape.few_masks) return (mask == MaskKind::none || mask == MaskKind::same) && (narrow || shape.lanes > 8);
  if (shape.vectors > kBlockVectors) return mask != MaskKind::float32 && (narrow || shape.vectors == 6);
  return true;
}

// Rows in flight where they are not whole: more code would not be worth it.
constexpr int odd_rows(const WarpShape& shape) { return std::min(shape.rows, 2); }

// Vectors that every row that such a shape serves has more than: as many as the shape before it holds.
constexpr int outgrown_vectors(Element element, MaskKind mask, int capacity) {
  int outgrown = 0;
  for (const WarpShape& shape : kWarpShapes) {
    const int vectors = shape.lanes * shape.vectors;
    if (vectors < capacity && shape.least == 0 && compiled(element, mask, shape)) outgrown = std::max(outgrown, vectors);
  }
  return outgrown;
}
template <Element kElement, MaskKind kMask, int kCapacity>
inline constexpr int kOutgrownVectors = outgrown_vectors(kElement, kMask, kCapacity);

constexpr bool compiled(Direction direction, Element element, MaskKind mask) {
  if (direction == Direction::backward) return mask == MaskKind::none;
  return mask != MaskKind::float32 || element_bytes(element) == 2;
}

// Dropout has kernels of its own, so that the others carry no random numbers, and few of them. No mask goes as a boolean
// one. None for whole rows, as all wait for arithmetic (five multiplications an element for Philox): float16 rows of 128
// to 4,096 columns take 1.7 to 2.0 times as long as without dropout, where a second pass takes 2.6 times. Two shapes of
// warp_rows: rows that fill half of one take half as long again, and a shape more takes 1.3 MB of a wheel for every
// architecture, which would be past its bound. A block of one warp serves what the longest would. Blocks of block_row may
// be larger, and longer rows are streamed, as are all but the shortest of float64.
constexpr bool compiled_for_dropout(Element element, const WarpShape& shape) {
  const int capacity = shape.lanes * shape.vectors;
  return element == Element::float64 ? capacity == 128 : capacity == 16 || capacity == 64;
}

// Which strategies for longer rows than those of warp_rows. Clusters hold no float64.
constexpr bool compiled(Element element, Strategy strategy, bool dropout) {
  switch (strategy) {
    case Strategy::block_row: return !dropout || element != Element::float64;
    case Strategy::cluster_row: return !dropout && element != Element::float64;
    case Strategy::pair_rows: return false;  // as compiled_for_pairs() says
    case Strategy::shared_row: return !dropout;
    default: return true;
  }
}

// For kOddBlockVectors: not 16-bit scores under a float mask.
constexpr bool compiled_for_odd_blocks(Element element, MaskKind mask) {
  return element == Element::float32 || is_packed(element, mask);
}

// Two rows a block.
constexpr bool compiled_for_sharing(Element element, MaskKind mask) {
  return element_bytes(element) == 2 && (mask == MaskKind::none || mask == MaskKind::same);
}

// Rows without a float mask are fast enough in a block, and rare where they are not whole.
constexpr bool compiled_for_pairs(Element element, MaskKind mask, int vectors, bool whole) {
  return element != Element::float64 && (has_addend(mask) || whole) &&
         in_clusters(Direction::forward, element, mask, vectors);
}

inline constexpr Strategy kLongStrategies[] = {Strategy::block_row, Strategy::cluster_row, Strategy::shared_row,
                                               Strategy::stream_row};

constexpr MaskKind mask_for_dropout(MaskKind mask) { return mask == MaskKind::none ? MaskKind::boolean : mask; }

// Rows that are whole vectors at vector boundaries have kernels of their own, with the same arithmetic and half the
// instructions (vectors.cuh); not for float64.
constexpr bool has_whole_kernels(Element element) { return element != Element::float64; }

// Whether a kernel holds its rows with columns before them, up to the vector boundary before their results (vectors.cuh).
// Not with dropout, which draws numbers for four columns at a time; nor where a lane has one vector, which would be two.
SMS_HOST_DEVICE constexpr bool holds_preceded(bool whole, bool dropout, int vectors) {
  return !whole && !dropout && vectors > 1;
}

// All that a choice may depend on.
struct Question {
  Direction direction;
  int64_t columns;
  Element element;
  MaskKind mask;   // none for backward, which never sees the mask
  bool band;       // exclusions by position
  int capability;  // 10 * major + minor; decides what fits shared memory
  bool dropout = false;
};

struct Plan {
  Strategy strategy;
  int lanes;    // threads that share a row
  int vectors;  // 16-byte vectors of the row that a lane holds at once
  int rows;     // in flight a lane
  int threads;        // a block
  int blocks;         // that share a row: a cluster
  int part_columns;   // of a row, for a block of shared_row, or for a warp of block_row, cluster_row, pair_rows; else 0

  int rows_per_block() const {  // or cluster
    if (strategy == Strategy::pair_rows) return 2;
    return blocks == 1 ? threads / lanes * rows : 1;
  }
};

constexpr int64_t shared_bytes(Direction direction, Element element, MaskKind mask, int64_t columns) {
  const int second = direction == Direction::backward ? element_bytes(element) : mask_element_bytes(mask, element);
  return shared_operand_bytes(columns, element_bytes(element)) +
         (direction == Direction::forward && mask == MaskKind::none ? 0 : shared_operand_bytes(columns, second));
}

// How many blocks of how many columns hold a row in shared memory; no columns if none can.
inline Plan choose_shared(const Question& question) {
  const SharedBudget budget = shared_budget(question.capability);
  const int most_blocks = question.capability >= 90 ? kClusterBlocks : 1;
  constexpr int64_t kGrain = 64;  // whole 128-byte lines of every element
  for (int blocks = 1; blocks <= most_blocks; blocks *= 2) {
    // As few blocks as are comfortable, or as many as there can be.
    const int limit = blocks < most_blocks ? budget.comfortable : budget.most;
    const int64_t columns = ((question.columns - 1) / blocks / kGrain + 1) * kGrain;
    if (columns <= limit && shared_bytes(question.direction, question.element, question.mask, columns) <= limit) {
      return {Strategy::shared_row, kSharedThreads * blocks, 1, 1, kSharedThreads, blocks, static_cast<int>(columns)};
    }
  }
  return {};
}

// How many columns a warp may hold together with columns before them (vectors.cuh).
constexpr int unfolded_columns(int per_vector, int vectors) { return (kWarpLanes * vectors - 1) * per_vector; }

// How many columns a warp holds of a row that several warps share: what its vectors hold, or one vector less where that
// takes no warp more. Columns before a segment (vectors.cuh) then have a place of their own, and its end is not folded.
// Measured as above, at 4,097 columns: .79 -> .88 under a boolean mask, .83 -> .88 under a float mask, .79 -> .86 under one
// [Sq, Sk]. A row that is a whole number of vectors has the segments of one that is whole in memory, so that their bits
// agree.
constexpr int segment_columns(int64_t columns, int per_vector, int vectors) {
  const int most = kWarpLanes * vectors * per_vector;
  const int less = unfolded_columns(per_vector, vectors);
  return columns % per_vector != 0 && (columns - 1) / less == (columns - 1) / most ? less : most;
}

inline Plan choose(const Question& question) {
  const int per_vector = kVectorBytes / element_bytes(question.element);
  const int64_t vectors = (question.columns - 1) / per_vector + 1;
  for (const WarpShape& shape : kWarpShapes) {
    const bool exists =
        question.dropout ? compiled_for_dropout(question.element, shape)
                         : compiled(question.element, question.mask, shape);
    const bool serves = shape.least == 0 || (vectors >= shape.least && question.columns % per_vector == 0);
    if (exists && serves && vectors <= shape.lanes * shape.vectors) {
      return {Strategy::warp_rows, shape.lanes, shape.vectors, shape.rows, kWarpRowsThreads, 1, 0};
    }
  }
  const auto exists = [&](Strategy strategy) { return compiled(question.element, strategy, question.dropout); };
  const Plan shared = exists(Strategy::shared_row) ? choose_shared(question) : Plan{};
  // With dropout there are no columns before a segment.
  const auto segment = [&](int lane_vectors) {
    return question.dropout ? kWarpLanes * lane_vectors * per_vector
                            : segment_columns(question.columns, per_vector, lane_vectors);
  };
  const auto block = [&](int lane_vectors, int columns) -> Plan {
    const int64_t threads = ((question.columns - 1) / columns + 1) * kWarpLanes;
    if (threads > block_threads(lane_vectors, 1, question.dropout)) return {};
    const int lanes = static_cast<int>(threads);
    return {Strategy::block_row, lanes, lane_vectors, 1, lanes, 1, columns};
  };
  if (exists(Strategy::block_row)) {
    const Plan own = block(kBlockVectors, segment(kBlockVectors));
    if (question.columns % per_vector != 0 && !question.dropout &&
        compiled_for_odd_blocks(question.element, question.mask)) {
      const Plan odd = block(kOddBlockVectors, unfolded_columns(per_vector, kOddBlockVectors));
      if (odd.threads > 0 && odd.threads < own.threads) return odd;
    }
    if (own.threads > 0) return own;
  }
  if (question.capability >= 90 && exists(Strategy::cluster_row)) {
    const auto holds = [&](int lane_vectors) {
      return in_clusters(question.direction, question.element, question.mask, lane_vectors);
    };
    for (const int lane_vectors : {kBlockVectors, 2 * kBlockVectors}) {
      if (!holds(lane_vectors)) continue;
      const int64_t team_warps = (vectors - 1) / (kWarpLanes * lane_vectors) + 1;
      // Of the two, more vectors in fewer blocks: .90 -> .91 at 32,768 columns, causal under a float mask, .75 -> .86 at 49,152.
      // But backward, causal .92 -> .88 at 65,536, and as fast where all is live.
      const bool has_longer = question.direction == Direction::forward && holds(2 * lane_vectors);
      for (int blocks = 2; blocks <= (has_longer ? kClusterBlocks / 2 : kClusterBlocks); blocks *= 2) {
        const int64_t block_warps = (team_warps - 1) / blocks + 1;
        const bool most_there_can_be = blocks == kClusterBlocks;
        if (block_warps > (most_there_can_be ? kBlockThreads / kWarpLanes : cluster_warps(lane_vectors))) continue;
        const int threads = static_cast<int>(block_warps) * kWarpLanes;
        return {Strategy::cluster_row, threads * blocks, lane_vectors, 1, threads, blocks, segment(lane_vectors)};
      }
    }
  }
  if (shared.part_columns > 0) return shared;
  return {Strategy::stream_row, kStreamThreads, kStreamVectors, 1, kStreamThreads, 1, 0};
}

// In how many segments of `length` columns two rows have live columns, at most, given the sum of their query indices.
constexpr int64_t segments_of_pair(const Band& band, int64_t queries, int64_t length) {
  // What two runs of columns can touch, `columns` in all, of which each begins with a segment, or one that need not.
  const auto touched = [length](int64_t columns) { return (std::max<int64_t>(columns, 2) - 2) / length + 2; };
  // Where one of the two rows has no live column, the other one may have more than they have else.
  const int64_t of_one = (std::max<int64_t>(queries + band.end, 1) - 1) / length + 1;
  const int64_t of_windows = 2 * touched(band.end - band.begin);
  return std::min(std::max(touched(queries + 2 * band.end), of_one), of_windows);
}

// The plan for `rows` rows in pairs, if a forward row's own plan allows it, and two of them hardly more live columns than
// one has columns; no threads otherwise. `queries` is the sum of a pair's query indices. Segments, and so a row's bits, are
// those of its own plan.
inline Plan choose_pairs(const Question& question, const Plan& own, bool whole, int64_t rows, const Band& band,
                         int64_t queries) {
  const bool holds_segments = own.strategy == Strategy::block_row || own.strategy == Strategy::cluster_row;
  if (!question.band || !holds_segments || question.dropout || rows < kPairedRows ||
      !compiled_for_pairs(question.element, question.mask, own.vectors, whole)) {
    return {};
  }
  const int64_t own_segments = (question.columns - 1) / own.part_columns + 1;
  const int64_t segments = segments_of_pair(band, queries, own.part_columns);
  if (own_segments < (whole ? kPairedSegments : kOddPairedSegments) || segments > own_segments + 1) return {};
  const bool wide = own.vectors != kBlockVectors;
  const auto most_warps = [&](int blocks) {
    if (wide) return blocks == kFiveBlocks ? kFiveBlocksWarps : cluster_warps(own.vectors) + 1;
    const bool as_can_be = blocks == 1 || blocks == kClusterBlocks;
    return as_can_be ? pair_threads(question.element, question.mask, own.vectors, whole) / kWarpLanes
                     : cluster_warps(own.vectors);
  };
  for (const int blocks : {1, 2, 4, kFiveBlocks, kClusterBlocks}) {
    if (blocks > 1 && question.capability < 90) break;
    if (blocks == kFiveBlocks && !(wide && in_five_blocks(question.element, question.mask))) continue;
    const int64_t warps = (std::max<int64_t>(segments, 1) - 1) / blocks + 1;
    if (warps > most_warps(blocks)) continue;
    const int threads = static_cast<int>(warps) * kWarpLanes;
    return {Strategy::pair_rows, threads * blocks, own.vectors, 1, threads, blocks, own.part_columns};
  }
  return {};
}

// Whether blocks of block_row take a row from the first on and one from the last on in turn, if rows are excluded by position.
// Causal rows that are short and wait are under way together with long ones that move bytes then. Measured as above: float16
// .90 -> .92 at 4,097 columns, .94 -> .97 at 4,160, with backward .90 -> .93 and .94 -> .97 at 4,096, .955 -> .97 at 8,192 and
// 16,384; float32 with backward .96 -> .975 at 4,096; but .92 -> .91 at 1,025 with two warps a row, and under a float mask,
// where different ways through the kernel are fetched in turn then, float16 .90 -> .89 at 4,160, .80 -> .78 at 4,097.
SMS_HOST_DEVICE constexpr bool may_take_from_both_ends(MaskKind mask, int rows, bool dropout) {
  return rows == 1 && !dropout && !has_addend(mask);
}
inline constexpr int kFromBothEndsWarps = 3;
constexpr bool takes_from_both_ends(const Question& question, const Plan& plan) {
  return question.band && plan.strategy == Strategy::block_row && plan.threads >= kFromBothEndsWarps * kWarpLanes &&
         may_take_from_both_ends(question.mask, plan.rows_per_block(), question.dropout);
}

// A plan as it is launched: how many rows a block holds may depend on more than their bits may.
inline Plan launched(const Question& question, Plan plan, bool whole) {
  whole = whole && has_whole_kernels(question.element) && !question.dropout;
  if (plan.strategy == Strategy::warp_rows && !whole) {
    plan.rows = odd_rows({plan.lanes, plan.vectors, plan.rows});
  } else if (plan.strategy == Strategy::block_row && whole && question.band &&
             compiled_for_sharing(question.element, question.mask) && plan.lanes == kSharingWarps * kWarpLanes) {
    plan.threads *= kSharingRows;
  }
  return plan;
}

}  // namespace sms::cuda
