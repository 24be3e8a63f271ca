// Every kernel that is compiled, by policy.h, and plans in words. Apart from policy.h, which all kernels include: its
// headers take longer to read than policy.h.
#pragma once

#include <string>
#include <vector>

#include "policy.h"

namespace sms::cuda {

constexpr const char* name(Strategy strategy) {
  switch (strategy) {
    case Strategy::warp_rows: return "warp_rows";
    case Strategy::block_row: return "block_row";
    case Strategy::cluster_row: return "cluster_row";
    case Strategy::pair_rows: return "pair_rows";
    case Strategy::shared_row: return "shared_row";
    case Strategy::stream_row: return "stream_row";
    case Strategy::sum_rows: return "sum_rows";
    case Strategy::keep_rows: return "keep_rows";
  }
  return "";
}

inline std::string describe(const Plan& plan) {
  return std::string(name(plan.strategy)) + ": " + std::to_string(plan.lanes) + " lanes a row, " +
         std::to_string(plan.vectors) + " vectors a lane, " + std::to_string(plan.rows) + " rows in flight, " +
         std::to_string(plan.threads) + " threads, " + std::to_string(plan.blocks) +
         (plan.blocks == 1 ? " block a cluster" : " blocks a cluster");
}

// One compiled kernel.
struct Kernel {
  Direction direction;
  Element element;
  MaskKind mask;
  Strategy strategy;
  int lanes;    // template argument of warp_rows, 0 for the others
  int vectors;  // template argument of warp_rows, block_row, cluster_row and pair_rows; else 0
  int rows;     // template argument of warp_rows and block_row, 0 for the others
  bool whole;    // template argument
  bool dropout;  // template argument of all but cluster_row, pair_rows and shared_row

  // Of its largest block.
  int threads() const {
    switch (strategy) {
      case Strategy::warp_rows: return kWarpRowsThreads;
      case Strategy::block_row: return block_threads(vectors, rows, dropout);
      case Strategy::cluster_row: return kBlockThreads;
      case Strategy::pair_rows: return pair_threads(element, mask, vectors, whole);
      case Strategy::shared_row: return kSharedThreads;
      case Strategy::stream_row: return kStreamThreads;
      case Strategy::sum_rows: return kMaskGradientThreads;
      case Strategy::keep_rows: return kKeepThreads;
    }
    return 0;
  }

  // How the name of its symbol in a cubin begins (Itanium mangling of sms::cuda::<strategy>_<direction><...>); that of
  // keep_rows is no template.
  std::string symbol_prefix() const {
    if (strategy == Strategy::keep_rows) return "_ZN3sms4cuda9keep_rowsE";
    const auto integer = [](int value) { return "Li" + std::to_string(value) + "E"; };
    const auto enumerator = [](const std::string& type, int value) {
      return "LNS_" + std::to_string(type.size()) + type + "E" + std::to_string(value) + "E";
    };
    const std::string function = std::string(name(strategy)) + (strategy == Strategy::sum_rows ? "_mask_gradient"
                                                                : direction == Direction::forward ? "_forward"
                                                                                                  : "_backward");
    std::string arguments = enumerator("Element", static_cast<int>(element));
    if (direction == Direction::forward) arguments += enumerator("MaskKind", static_cast<int>(mask));
    if (strategy == Strategy::warp_rows) {
      arguments += integer(lanes) + integer(vectors) + integer(rows);
    } else if (vectors != 0) {
      arguments += integer(vectors);
      if (strategy == Strategy::block_row) arguments += integer(rows);
    }
    if (strategy != Strategy::sum_rows) arguments += whole ? "Lb1E" : "Lb0E";
    const bool may_drop = strategy != Strategy::cluster_row && strategy != Strategy::pair_rows &&
                          strategy != Strategy::shared_row;
    if (may_drop) arguments += dropout ? "Lb1E" : "Lb0E";
    return "_ZN3sms4cuda" + std::to_string(function.size()) + function + "I" + arguments + "EE";
  }
};

// Every kernel that choose(), choose_pairs() and launched() can lead to, on any architecture.
inline std::vector<Kernel> all_kernels() {
  std::vector<Kernel> kernels;
  const auto vectors_of = [](Strategy strategy) { return strategy == Strategy::block_row ? kBlockVectors : 0; };
  const auto rows_of = [](Strategy strategy) { return strategy == Strategy::block_row ? 1 : 0; };
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    for (const Element element : {Element::float16, Element::bfloat16, Element::float32, Element::float64}) {
      for (const MaskKind mask : {MaskKind::none, MaskKind::boolean, MaskKind::same, MaskKind::float32}) {
        if (!compiled(direction, element, mask)) continue;
        for (const bool whole : {false, true}) {
          if (whole && !has_whole_kernels(element)) continue;
          for (const WarpShape& shape : kWarpShapes) {
            if (!compiled(element, mask, shape)) continue;
            kernels.push_back({direction, element, mask, Strategy::warp_rows, shape.lanes, shape.vectors,
                               whole ? shape.rows : odd_rows(shape), whole, false});
          }
          for (const Strategy strategy : kLongStrategies) {
            if (!compiled(element, strategy, false) || strategy == Strategy::cluster_row) continue;  // the latter below
            kernels.push_back(
                {direction, element, mask, strategy, 0, vectors_of(strategy), rows_of(strategy), whole, false});
          }
          if (!whole && compiled_for_odd_blocks(element, mask)) {
            kernels.push_back({direction, element, mask, Strategy::block_row, 0, kOddBlockVectors, 1, whole, false});
          }
          if (whole && compiled_for_sharing(element, mask)) {
            kernels.push_back(
                {direction, element, mask, Strategy::block_row, 0, kBlockVectors, kSharingRows, whole, false});
          }
          for (const int vectors : {kBlockVectors, 2 * kBlockVectors}) {
            if (!in_clusters(direction, element, mask, vectors)) continue;
            if (compiled(element, Strategy::cluster_row, false)) {
              kernels.push_back({direction, element, mask, Strategy::cluster_row, 0, vectors, 0, whole, false});
            }
            if (direction == Direction::forward && compiled_for_pairs(element, mask, vectors, whole)) {
              kernels.push_back({direction, element, mask, Strategy::pair_rows, 0, vectors, 0, whole, false});
            }
          }
        }
        if (direction == Direction::forward && mask_for_dropout(mask) != mask) continue;
        for (const WarpShape& shape : kWarpShapes) {
          if (!compiled_for_dropout(element, shape)) continue;
          kernels.push_back({direction, element, mask, Strategy::warp_rows, shape.lanes, shape.vectors,
                             odd_rows(shape), false, true});
        }
        for (const Strategy strategy : kLongStrategies) {
          if (!compiled(element, strategy, true)) continue;
          kernels.push_back({direction, element, mask, strategy, 0, vectors_of(strategy), rows_of(strategy), false, true});
        }
      }
    }
  }
  for (const Element element : {Element::float16, Element::bfloat16, Element::float32, Element::float64}) {
    for (const bool dropout : {false, true}) {
      kernels.push_back({Direction::backward, element, MaskKind::none, Strategy::sum_rows, 0, 0, 0, false, dropout});
    }
  }
  kernels.push_back({Direction::backward, Element::float32, MaskKind::none, Strategy::keep_rows, 0, 0, 0, false, true});
  return kernels;
}

}  // namespace sms::cuda
