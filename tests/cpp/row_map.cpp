// Where rows lie by RowMap, in the pieces that it takes, against sums in 64 bits. Exits with 1 where they differ.
#include "cuda/row_map.h"

#include <array>
#include <cstdio>
#include <map>
#include <random>

#include "pieces.h"

namespace sms {
namespace {

using Offsets = std::array<int64_t, kOperands>;  // elements

struct Problem {
  Rows rows;
  Offsets origin{};
};

void advance(Problem& problem, const RowDim& dim, int64_t index) {
  for (int k = 0; k < kOperands; ++k) problem.origin[k] += index * dim.stride[k];
}

std::mt19937_64 generator(1);

int64_t between(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }
bool chance(double probability) { return std::bernoulli_distribution(probability)(generator); }

// Few rows far apart, many rows, shared rows, strides that have nothing in common, and negative ones.
Problem draw() {
  constexpr int64_t kReach = int64_t{1} << 38;
  Problem problem;
  problem.rows.dims = static_cast<int>(between(0, 6));
  const int64_t many = chance(0.3) && problem.rows.dims > 0 ? problem.rows.dims - 1 : -1;
  const int64_t unit = chance(0.5) ? between(1, 5000) : 1;
  const int64_t query = between(-1, problem.rows.dims - 1);
  int64_t rows = 1;
  for (int d = problem.rows.dims - 1; d >= 0; --d) {
    RowDim& dim = problem.rows.dim[d];
    dim.size = d == many ? between(1, int64_t{1} << between(1, 31)) : between(1, 5);
    const int64_t most = kReach / dim.size;
    for (int64_t& stride : dim.stride) {
      stride = chance(0.2)   ? 0
               : chance(0.2) ? between(1, most)
               : chance(0.1) ? -between(1, std::max<int64_t>(1, most / 64))
                             : between(1, std::clamp<int64_t>(most / unit, 1, 100000)) * unit;
    }
    dim.stride[kQuery] = d == query ? 1 : 0;
    dim.stride[kStatistic] = rows;
    rows *= dim.size;
  }
  return problem;
}

Offsets offsets_of(const Problem& problem, int64_t row) {
  Offsets offsets = problem.origin;
  for (int d = problem.rows.dims - 1; d >= 0; --d) {
    const RowDim& dim = problem.rows.dim[d];
    for (int k = 0; k < kOperands; ++k) offsets[k] += row % dim.size * dim.stride[k];
    row /= dim.size;
  }
  return offsets;
}

Offsets offsets_by_map(const Problem& piece, const cuda::RowMap& map, const cuda::RowPlace& place, uint32_t row) {
  Offsets offsets = piece.origin;
  offsets[kInput] += place.input / 2;
  offsets[kSecond] += place.second;
  offsets[kOutput] += place.output / 8;
  offsets[kQuery] += place.query;
  for (const Operand operand : {kBatch, kHead, kStatistic}) {
    offsets[operand] += map.offset(cuda::make_row_values<char>(piece.rows, nullptr, operand, 4), row) / 4;
  }
  return offsets;
}

bool holds(const Problem& problem) {
  const int64_t count = problem.rows.count();
  std::map<Offsets, int64_t> missing;
  if (count <= 5000) {
    for (int64_t row = 0; row < count; ++row) ++missing[offsets_of(problem, row)];
  }
  int64_t covered = 0;
  bool right = true;
  for_each_piece(problem, cuda::dim_to_split, [&](const Problem& piece) {
    const int rows_per_block = 1 << between(0, 6);
    const cuda::RowMap map = cuda::make_row_map(piece.rows, 2, 1, 8, rows_per_block);
    right = right && map.rows == piece.rows.count() && piece.rows.count() <= cuda::kMapRows;
    const auto check = [&](uint32_t row) {
      const Offsets expected = offsets_of(piece, row);
      right = right && offsets_by_map(piece, map, map.locate(row), row) == expected;
      if (map.aligned_blocks) {
        const uint32_t first = row - row % rows_per_block;
        right = right && offsets_by_map(piece, map, map.place(map.along(map.units(first), row - first)), row) == expected;
      }
      if (count <= 5000) --missing[expected];
    };
    if (count <= 5000) {
      for (uint32_t row = 0; row < map.rows; ++row) check(row);
    } else {
      for (int i = 0; i < 20; ++i) check(static_cast<uint32_t>(between(0, map.rows - 1)));
      check(map.rows - 1);
    }
    covered += map.rows;
  });
  for (const auto& [offsets, rows] : missing) right = right && rows == 0;
  return right && covered == count;
}

}  // namespace
}  // namespace sms

int main() {
  for (uint32_t divisor = 2; divisor < 1u << 31; divisor += 1 + divisor / 64) {
    for (const uint32_t n : {0u, divisor - 1, divisor, 2 * divisor - 1, 2 * divisor, divisor * ((1u << 30) / divisor) - 1,
                             (1u << 30) - 1}) {
      if (n >= 1u << 30 || sms::cuda::Divisor(divisor).quotient(n) == n / divisor) continue;
      std::printf("%u / %u\n", n, divisor);
      return 1;
    }
  }
  for (int i = 0; i < 5000; ++i) {
    const sms::Problem problem = sms::draw();
    if (sms::holds(problem)) continue;
    std::printf("problem %d:\n", i);
    for (int d = 0; d < problem.rows.dims; ++d) {
      std::printf("%lld:", static_cast<long long>(problem.rows.dim[d].size));
      for (const int64_t stride : problem.rows.dim[d].stride) std::printf(" %lld", static_cast<long long>(stride));
      std::printf("\n");
    }
    return 1;
  }
  return 0;
}
