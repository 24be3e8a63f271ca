// Which kernel serves a row: a pure function of the row's length, its types, the exclusions and the device, never of
// the number of rows, strides or addresses (a row's bits must not depend on those). Free of torch and of CUDA, so a
// CPU-only build can answer for every device. All kernel constants come from here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../problem.h"

namespace sms::cuda {

enum class Strategy : uint8_t {
  warp_rows,   // a warp, or a part of one, holds a row in registers; several rows in flight a lane
  block_row,   // a block holds a row in registers
  stream_row,  // a block reads a row twice: once for maximum and sum, once for the result
};

inline constexpr int kVectorBytes = 16;  // one load or store of a lane
inline constexpr int kWarpLanes = 32;

// A shape that warp_rows is compiled for. It serves rows of up to lanes * vectors 16-byte vectors.
struct WarpShape {
  int lanes;    // a row; a power of two, at most 32
  int vectors;  // a lane and row, in registers
  int rows;     // in flight a lane: hides the latency of short rows, without effect on the result
};

// In ascending order of capacity. Measured on an H200 with float16 rows without mask, share of a copy's speed: 8x2
// with two rows in flight .94 at 128 columns, 16x2 .95 at 256, 32x2 .95 at 512, 32x4 .94 at 1,024; one vector a lane
// stops at .90. The first two are for rows below 64 bytes, where more lanes would idle: not measured yet.
inline constexpr WarpShape kWarpShapes[] = {
    {1, 1, 2}, {4, 1, 4}, {8, 2, 2}, {16, 2, 2}, {32, 2, 2}, {32, 4, 1},
};

inline constexpr int kWarpRowsThreads = 128;

// A shape that block_row is compiled for; the number of warps is a run-time matter, so one kernel serves a range.
struct BlockShape {
  int vectors;      // a lane, in registers
  int max_threads;  // the register budget: 65,536 / max_threads on every architecture
};

// In ascending order of capacity. Measured as above: 128x4 .92 at 4,096 columns, 256x4 .92 at 8,192, 256x8 .93 at
// 16,384. 512x8 holds 64 floats of a 16-bit row in 128 registers, the most that does not spill.
inline constexpr BlockShape kBlockShapes[] = {{4, 256}, {8, 512}};

// The largest block of the shape of block_row that holds `vectors` vectors a lane.
constexpr int block_row_threads(int vectors) {
  for (const BlockShape& shape : kBlockShapes) {
    if (shape.vectors == vectors) return shape.max_threads;
  }
  return 0;
}

// Vectors of a lane of block_row or stream_row whose loads are in flight together, forward: all that the registers of
// the largest block allow without spilling. A float32 mask for 16-bit elements takes twice the registers of those.
template <MaskKind kMask>
inline constexpr int kVectorsInFlight = kMask == MaskKind::float32 ? 2 : 4;

// stream_row takes 4 vectors a lane at a time, as many as stay in flight in the register budget of 512 threads.
inline constexpr int kStreamVectors = 4;
inline constexpr int kStreamThreads = 512;

// What is compiled: float64 rows are rare, so one shape of warp_rows and one of block_row serve them; the other
// elements get every shape. Masks multiply forward kernels only. Everything else (band, column stride and alignment of
// operands, number of warps, row dimensions) is decided at run time, uniformly for a warp.
constexpr bool compiled(Element element, const WarpShape& shape) {
  return element != Element::float64 || shape.lanes * shape.vectors == 128;
}
constexpr bool compiled(Element element, const BlockShape& shape) {
  return element != Element::float64 || shape.vectors == 4;
}
constexpr bool compiled(Direction direction, Element element, MaskKind mask) {
  if (direction == Direction::backward) return mask == MaskKind::none;
  return mask != MaskKind::float32 || element_bytes(element) == 2;
}

// All that a choice may depend on.
struct Question {
  Direction direction;
  int64_t columns;
  Element element;
  MaskKind mask;   // none for backward, which never sees the mask
  bool band;       // exclusions by position
  int capability;  // 10 * major + minor; no threshold depends on it yet
};

struct Plan {
  Strategy strategy;
  int lanes;    // that share a row
  int vectors;  // 16-byte vectors of the row that a lane holds at once
  int rows;     // in flight a lane
  int threads;  // a block

  int rows_per_block() const { return strategy == Strategy::warp_rows ? threads / lanes * rows : 1; }
};

inline Plan choose(const Question& question) {
  const int per_vector = kVectorBytes / element_bytes(question.element);
  const int64_t vectors = (question.columns - 1) / per_vector + 1;
  for (const WarpShape& shape : kWarpShapes) {
    if (compiled(question.element, shape) && vectors <= shape.lanes * shape.vectors) {
      return {Strategy::warp_rows, shape.lanes, shape.vectors, shape.rows, kWarpRowsThreads};
    }
  }
  for (const BlockShape& shape : kBlockShapes) {
    if (compiled(question.element, shape) && vectors <= int64_t{shape.max_threads} * shape.vectors) {
      const int64_t per_warp = int64_t{kWarpLanes} * shape.vectors;
      const int threads = static_cast<int>((vectors - 1) / per_warp + 1) * kWarpLanes;
      return {Strategy::block_row, threads, shape.vectors, 1, threads};
    }
  }
  return {Strategy::stream_row, kStreamThreads, kStreamVectors, 1, kStreamThreads};
}

constexpr const char* name(Strategy strategy) {
  return strategy == Strategy::warp_rows ? "warp_rows" : strategy == Strategy::block_row ? "block_row" : "stream_row";
}

inline std::string describe(const Plan& plan) {
  return std::string(name(plan.strategy)) + ": " + std::to_string(plan.lanes) + " lanes a row, " +
         std::to_string(plan.vectors) + " vectors a lane, " + std::to_string(plan.rows) + " rows in flight, " +
         std::to_string(plan.threads) + " threads";
}

// One compiled kernel.
struct Kernel {
  Direction direction;
  Element element;
  MaskKind mask;
  Strategy strategy;
  int lanes;    // template argument of warp_rows, 0 for the others
  int vectors;  // template argument
  int rows;     // template argument of warp_rows, 0 for the others

  // How the name of its symbol in a cubin begins (Itanium mangling of sms::cuda::<strategy>_<direction><...>).
  std::string symbol_prefix() const {
    const auto integer = [](int value) { return "Li" + std::to_string(value) + "E"; };
    const auto enumerator = [](const std::string& type, int value) {
      return "LNS_" + std::to_string(type.size()) + type + "E" + std::to_string(value) + "E";
    };
    const std::string function =
        std::string(name(strategy)) + (direction == Direction::forward ? "_forward" : "_backward");
    std::string arguments = enumerator("Element", static_cast<int>(element));
    if (direction == Direction::forward) arguments += enumerator("MaskKind", static_cast<int>(mask));
    if (strategy == Strategy::warp_rows) arguments += integer(lanes);
    if (strategy != Strategy::stream_row) arguments += integer(vectors);
    if (strategy == Strategy::warp_rows) arguments += integer(rows);
    return "_ZN3sms4cuda" + std::to_string(function.size()) + function + "I" + arguments + "EE";
  }
};

// Every kernel that choose() can lead to, on any architecture.
inline std::vector<Kernel> all_kernels() {
  std::vector<Kernel> kernels;
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    for (const Element element : {Element::float16, Element::bfloat16, Element::float32, Element::float64}) {
      for (const MaskKind mask : {MaskKind::none, MaskKind::boolean, MaskKind::same, MaskKind::float32}) {
        if (!compiled(direction, element, mask)) continue;
        for (const WarpShape& shape : kWarpShapes) {
          if (!compiled(element, shape)) continue;
          kernels.push_back({direction, element, mask, Strategy::warp_rows, shape.lanes, shape.vectors, shape.rows});
        }
        for (const BlockShape& shape : kBlockShapes) {
          if (!compiled(element, shape)) continue;
          kernels.push_back({direction, element, mask, Strategy::block_row, 0, shape.vectors, 0});
        }
        kernels.push_back({direction, element, mask, Strategy::stream_row, 0, kStreamVectors, 0});
      }
    }
  }
  return kernels;
}

}  // namespace sms::cuda
