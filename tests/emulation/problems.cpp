// Random problems, computed by the kernels of src/cuda in emulation. Checked: results against the definition in
// float64; that a row's bits do not follow from where its operands lie; that nothing is read outside of operands or
// written outside of rows; which cells dropout keeps. All of a problem follows from its element and its number.
//
// problems ELEMENT FIRST COUNT and then the numbers of Bounds: problems FIRST, FIRST + 1, ... of an element.

#include <array>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/kernel_list.h"
#include "cuda/kernels.h"
#include "elements.h"
#include "memory.h"
#include "philox.h"

namespace sms::emulation {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int kDims = 3;  // batch, head, query

// The element's row of tests/tolerances.py.
struct Bounds {
  double forward;
  double relative;
  double forward_scores;
  double relative_scores;
  double backward;
  double backward_relative;
  double smallest;
};

class Random {
 public:
  Random(Element element, int64_t seed, int use)
      : engine_(static_cast<uint64_t>(seed) * 1000003 + static_cast<uint64_t>(element) * 101 +
                static_cast<uint64_t>(use)) {}

  uint64_t bits() { return engine_(); }
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
  double share() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  bool chance(double probability) { return share() < probability; }
  double normal(double spread) {
    return spread * std::sqrt(-2 * std::log(1 - share())) * std::cos(6.283185307179586 * share());
  }
  template <typename Value, size_t kCount>
  Value one_of(const Value (&values)[kCount]) {
    return values[between(0, kCount - 1)];
  }

 private:
  std::mt19937_64 engine_;
};

using Index = std::array<int64_t, kDims>;

struct Shape {
  Index size;
  int64_t columns;

  int64_t rows() const { return size[0] * size[1] * size[2]; }
  Index index(int64_t row) const { return {row / size[2] / size[1], row / size[2] % size[1], row % size[2]}; }
};

// Of an operand, a number for each cell; those of a dimension that it shares are the same.
struct Values {
  Index size;
  int64_t columns;
  std::vector<double> value;

  Values(const Shape& shape, const std::array<bool, kDims>& shared, bool column_shared)
      : size(shape.size), columns(column_shared ? 1 : shape.columns) {
    for (int d = 0; d < kDims; ++d) size[d] = shared[d] ? 1 : size[d];
    value.resize(size[0] * size[1] * size[2] * columns);
  }

  double& at(const Index& index, int64_t column) {
    int64_t row = 0;
    for (int d = 0; d < kDims; ++d) row = row * size[d] + (size[d] == 1 ? 0 : index[d]);
    return value[row * columns + (columns == 1 ? 0 : column)];
  }
};

// Of operands in memory: anywhere, or each row on vector boundaries with room to the next one.
enum class Where { anywhere, boundaries };

// In elements.
struct Layout {
  Index stride;
  int64_t column_stride;
  int64_t offset;  // from the front of the pages; -1: the last element ends where they do
};

constexpr std::array<bool, kDims> kNoneShared = {false, false, false};

Layout draw_layout(Random& random, const Shape& shape, Where where, const std::array<bool, kDims>& shared = kNoneShared,
                   int64_t column_stride = 1) {
  const bool anywhere = where == Where::anywhere;
  int64_t step = (shape.columns - 1) * std::abs(column_stride) + 1;
  if (anywhere) {
    step += random.chance(0.5) ? 0 : random.between(0, 19);
  } else {
    step = (step + cuda::kVectorBytes - 1) / cuda::kVectorBytes * cuda::kVectorBytes;
  }
  int order[kDims] = {2, 1, 0};  // innermost first
  if (anywhere && random.chance(0.3)) std::swap(order[random.between(0, 2)], order[random.between(0, 2)]);
  Layout layout{{}, column_stride, 0};
  for (const int d : order) {
    layout.stride[d] = shared[d] ? 0 : step;
    if (shared[d]) continue;
    step = step * shape.size[d] + (anywhere && random.chance(0.2) ? random.between(0, 9) : 0);
  }
  if (anywhere) layout.offset = random.chance(0.3) ? -1 : random.chance(0.3) ? 0 : random.between(0, 15);
  return layout;
}

// Of a number a row.
Layout row_by_row(const Shape& shape, const Layout& like) {
  return {{shape.size[1] * shape.size[2], shape.size[2], 1}, 0, like.offset < 0 ? -1 : 0};
}

class Operand {
 public:
  Operand(const Shape& shape, const Layout& layout, int bytes)
      : shape_(shape), layout_(layout), bytes_(bytes), last_((shape.columns - 1) * layout.column_stride) {
    if (layout.column_stride == 0) last_ = 0;
    int64_t high = std::max<int64_t>(last_, 0);
    for (int d = 0; d < kDims; ++d) high += (shape.size[d] - 1) * layout.stride[d];
    const int64_t low = std::min<int64_t>(last_, 0);
    const auto size = static_cast<size_t>((high - low + 1) * bytes);
    memory_ = layout.offset < 0
                  ? std::make_unique<Memory>(size, Memory::Place::back)
                  : std::make_unique<Memory>(size, Memory::Place::front, static_cast<size_t>(layout.offset * bytes));
    memory_->fill();
    base_ = memory_->data() - low * bytes;
  }

  char* base() const { return base_; }
  int64_t stride(int d) const { return layout_.stride[d]; }
  char* at(const Index& index, int64_t column) const {
    int64_t place = column * layout_.column_stride;
    for (int d = 0; d < kDims; ++d) place += index[d] * layout_.stride[d];
    return base_ + place * bytes_;
  }
  int64_t columns() const { return layout_.column_stride == 0 ? 1 : shape_.columns; }

  template <typename Write>
  void set(const Write& write) {
    for (int64_t row = 0; row < shape_.rows(); ++row) {
      const Index index = shape_.index(row);
      for (int64_t column = 0; column < columns(); ++column) write(at(index, column), index, column);
    }
  }
  void set(Element element, Values& values) {
    set([&](char* address, const Index& index, int64_t column) {
      write_element(element, address, values.at(index, column));
    });
  }
  void make_read_only() { memory_->make_read_only(); }

  // Whether every byte is as it was but for those of cells.
  bool untouched_elsewhere() const {
    std::map<int64_t, int64_t> rows;  // from the first byte of each to the byte after it
    for (int64_t row = 0; row < shape_.rows(); ++row) {
      const int64_t first = at(shape_.index(row), 0) - memory_->data();
      rows[first] = first + columns() * bytes_;
    }
    bool untouched = true;
    auto next = rows.begin();
    memory_->each([&](char byte, int64_t place) {
      while (next != rows.end() && place >= next->second) ++next;
      const bool of_row = next != rows.end() && place >= next->first;
      untouched = untouched && (of_row || byte == Memory::kUntouched);
    });
    return untouched;
  }

 private:
  Shape shape_;
  Layout layout_;
  int bytes_;
  int64_t last_;
  char* base_;
  std::unique_ptr<Memory> memory_;
};

// Numbers one after another, read only.
template <typename Number>
class Numbers {
 public:
  explicit Numbers(const std::vector<Number>& numbers)
      : memory_(numbers.size() * sizeof(Number), Memory::Place::back) {
    std::memcpy(memory_.data(), numbers.data(), numbers.size() * sizeof(Number));
    memory_.make_read_only();
  }
  const Number* data() const { return reinterpret_cast<const Number*>(memory_.data()); }

 private:
  Memory memory_;
};

// Whether a folded end (vectors.cuh) has an order of its own in the sum of a lane's terms: few problems tell.
bool orders_folded(const cuda::Plan& plan) { return (plan.vectors & (plan.vectors - 1)) != 0; }

// The columns of one element of a lane's vectors. Where a row's other terms are small, its sum is one of what a lane or two
// add up in that element: its bits tell in which order.
struct LaneColumns {
  int64_t from;
  int64_t step;

  LaneColumns(Random& random, const cuda::Plan& plan, int per_vector)
      : from(random.between(-per_vector, orders_folded(plan) ? -1 : per_vector - 1)),
        step(std::min(plan.lanes, cuda::kWarpLanes) * per_vector) {}

  bool has(int64_t column) const { return (column - from) % step == 0; }
};

// How often problems are to have such terms.
double chance_of_order(const cuda::Plan& plan) { return orders_folded(plan) ? 0.8 : 0.3; }

// What a problem wrote, as numbers: the same for every place of its operands.
using Results = std::vector<double>;

class Problem {
 public:
  Problem(Element element, int64_t seed, const Bounds& bounds)
      : element_(element), seed_(seed), bounds_(bounds), random_(element, seed, 0) {}

  void run();

  int64_t cells = 0;
  bool wrong = false;
  std::string kernel;

 private:
  void draw();
  void draw_dropout();
  // Of as many rows from `first_row` on: by philox.h on the host, which other tests hold to torch's generator.
  std::vector<uint8_t> kept_cells(int64_t first_row) const;
  void forward();
  void backward();
  void mask_gradient();
  void keep();

  bool excluded(const Index& index, int64_t column) const {
    const bool by_band = band_.active && (column < index[2] + band_.begin || column >= index[2] + band_.end);
    return by_band || (has_lengths_ && column >= lengths_[index[0]]);
  }
  double number() { return rounded(element_, random_.normal(3)); }
  int64_t number_of(const Index& index) const {
    return (index[0] * shape_.size[1] + index[1]) * shape_.size[2] + index[2];
  }
  bool kept(const Index& index, int64_t column) const {
    return !dropout_.active || kept_[number_of(index) * shape_.columns + column] != 0;
  }

  // What every kind of problem is given alike.
  template <typename Given>
  void give(Given& problem, const Operand& input, const Operand* second, const Operand* output);
  RowDim dim(int d, const Operand& input, const Operand* second, const Operand* output) const;

  // Runs compute(where, random) for operands anywhere and on boundaries, and compares.
  void try_places(const std::function<Results(Where, Random&)>& compute);

  // The row's own plan, and what of the kernel's name follows from it.
  cuda::Plan name_kernel(Direction direction, MaskKind mask) {
    const cuda::Question question{direction, shape_.columns, element_, mask, band_.active, device_.capability, dropout_.active};
    const cuda::Plan own = cuda::choose(question);
    const bool whole = shape_.columns % (cuda::kVectorBytes / element_bytes(element_)) == 0;
    cuda::Plan plan = cuda::launched(question, own, whole);
    if (direction == Direction::forward) {
      const cuda::Plan pairs = cuda::choose_pairs(question, own, true, shape_.rows(), band_, shape_.size[2] - 1);
      if (pairs.threads > 0) plan = pairs;
      if (pairs.threads > cuda::pair_threads(element_, mask, own.vectors, true)) {
        report("more threads than the kernel of a pair is compiled for");
      }
    }
    kernel += std::string(", ") + cuda::name(plan.strategy) + (plan.blocks > 1 ? " in clusters" : "");
    if (plan.blocks == cuda::kFiveBlocks) kernel += " of five blocks";
    if (plan.strategy == cuda::Strategy::block_row && plan.vectors == cuda::kOddBlockVectors) kernel += " of odd length";
    if (plan.strategy == cuda::Strategy::block_row && plan.threads > plan.lanes) kernel += " with two rows";
    return own;
  }

  void report(const std::string& what) {
    if (!wrong) std::printf("%s\n  %s\n", task.c_str(), what.c_str());
    wrong = true;
  }
  void expect_success(cudaError_t status) {
    if (status != cudaSuccess) report("the launch fails with " + std::to_string(status));
  }
  void expect_untouched(const Operand& operand, const char* name) {
    if (!operand.untouched_elsewhere()) report(std::string("written outside of the rows of ") + name);
  }
  void expect_near(double got, double want, double bound, const char* name, const Index& index, int64_t column) {
    ++cells;
    if (std::isnan(want) ? std::isnan(got) : std::abs(got - want) <= bound) return;
    char text[200];
    std::snprintf(text, sizeof text, "%s of batch %d, head %d, query %d, column %d is %.9g, expected %.9g within %.3g",
                  name, static_cast<int>(index[0]), static_cast<int>(index[1]), static_cast<int>(index[2]),
                  static_cast<int>(column), got, want, bound);
    report(text);
  }
  double statistic(const Operand& operand, int64_t row) const {
    const char* address = operand.at(shape_.index(row), 0);
    return read_element(element_ == Element::float64 ? Element::float64 : Element::float32, address);
  }

  Element element_;
  int64_t seed_;
  Bounds bounds_;
  Random random_;

  Shape shape_{};
  cuda::Device device_{};
  Band band_{};
  double scale_ = 1;
  bool has_lengths_ = false;
  bool lengths_64_ = false;
  std::vector<int64_t> lengths_;
  std::unique_ptr<Numbers<int64_t>> lengths_in_memory_64_;
  std::unique_ptr<Numbers<int32_t>> lengths_in_memory_32_;
  Dropout dropout_;
  std::unique_ptr<Numbers<int64_t>> random_state_;
  std::vector<uint8_t> kept_;
};

void Problem::draw() {
  const int per_vector = cuda::kVectorBytes / element_bytes(element_);
  // Causal rows of which a cluster of five blocks holds two, and a few that are longer (policy.h).
  const bool fills_five = element_ == Element::float32 && random_.chance(0.01);
  const bool is_long = fills_five || random_.chance(0.05);
  if (fills_five) {
    const int64_t length = cuda::kWarpLanes * 2 * cuda::kBlockVectors * per_vector;
    shape_.columns = random_.between(36, 66) * length - random_.between(0, length / per_vector - 1) * per_vector;
  } else if (is_long) {
    // Longer than a block's registers; a part of them not longer than its shared memory, and a few as a cluster holds.
    const int64_t most = random_.chance(0.2) ? 34000 : 12000;
    const int64_t vectors = random_.chance(0.5) ? random_.between(2000, 5000) : random_.between(500, most);
    shape_.columns = vectors * per_vector + random_.between(-per_vector, per_vector);
  } else if (random_.chance(0.65)) {
    // That kernels hold; 224 for two rows a block.
    const int vectors[] = {1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256, 512};
    const int64_t more = random_.chance(0.5) ? per_vector + 1 : 0;
    shape_.columns = random_.one_of(vectors) * per_vector;
    if (random_.chance(0.8)) shape_.columns += random_.between(-per_vector - 1, more);
  } else {
    shape_.columns = random_.between(1, 100 * per_vector);
  }
  shape_.columns = std::max<int64_t>(shape_.columns, 1);
  const int64_t rows = std::clamp<int64_t>(4000 / shape_.columns, 1, 300) + (is_long || random_.chance(0.5) ? 3 : 0);
  shape_.size[0] = random_.between(1, std::min<int64_t>(rows, 3));
  shape_.size[1] = random_.between(1, std::min<int64_t>(rows / shape_.size[0], 3));
  shape_.size[2] = random_.between(1, std::max<int64_t>(rows / shape_.size[0] / shape_.size[1], 1));
  if (random_.chance(0.5)) std::swap(shape_.size[random_.between(0, 2)], shape_.size[random_.between(0, 2)]);

  const int capabilities[] = {75, 80, 86, 90, 90, 120};
  const int l2_sizes[] = {0, 60 << 20};
  device_ = {fills_five ? 90 : random_.one_of(capabilities), random_.one_of(l2_sizes)};
  const int64_t queries = shape_.size[2];
  band_ = {fills_five || random_.chance(is_long ? 0.7 : 0.5), -queries, shape_.columns};
  if (band_.active) {
    if (random_.chance(0.5)) band_.begin = random_.between(-queries, shape_.columns);
    if (random_.chance(0.8)) band_.end = random_.between(-queries, shape_.columns);
    const int64_t lengths[] = {shape_.columns, cuda::segment_columns(shape_.columns, per_vector, cuda::kBlockVectors),
                               cuda::unfolded_columns(per_vector, cuda::kOddBlockVectors)};
    const int64_t length = random_.one_of(lengths);
    const int64_t query = random_.between(0, queries - 1);
    // As a slice of a square has it: rows that can be paired; some of them end with a warp's segment, or with the first
    // column behind it.
    if (fills_five || random_.chance(is_long ? 0.7 : 0.3)) {
      band_.end = (shape_.columns - queries) / 2 + random_.between(-1, 1);
      if (random_.chance(0.5)) {
        band_.begin = -queries;
        band_.end = shape_.columns / 2 / lengths[1] * lengths[1] + random_.between(0, 1) - query;
      }
    }
    // Rows that end with the first columns of a later batch of loads, of two vectors a lane or of four (vectors.cuh).
    int64_t batch = cuda::kWarpLanes * cuda::kBlockVectors * per_vector;
    while (batch >= shape_.columns) batch /= 2;
    if (shape_.columns <= 2 * batch && random_.chance(0.3)) {
      band_.begin = -queries;
      band_.end = batch + random_.between(1 - per_vector, 1) - query;
    }
    // Rows that begin among the last columns of a warp's segment, which may be folded (vectors.cuh).
    if (random_.chance(0.15)) {
      const int64_t segment_end = random_.between(1, std::max<int64_t>(shape_.columns / length, 1)) * length;
      band_.begin = segment_end - random_.between(0, per_vector) - query;
      band_.end = shape_.columns;
    }
  }
  const double scales[] = {1, 1, 0.125, 0.125, -0.7, 0};
  scale_ = random_.one_of(scales);
  has_lengths_ = random_.chance(0.3);
  lengths_64_ = random_.chance(0.5);
  lengths_.resize(shape_.size[0]);
  for (int64_t& length : lengths_) length = random_.between(-1, shape_.columns + 2);
  lengths_in_memory_64_ = std::make_unique<Numbers<int64_t>>(lengths_);
  lengths_in_memory_32_ = std::make_unique<Numbers<int32_t>>(std::vector<int32_t>(lengths_.begin(), lengths_.end()));
  last_thread_first = random_.chance(0.5);
  has_clusters = device_.capability >= 90;
  if (random_.chance(0.25)) draw_dropout();
}

void Problem::draw_dropout() {
  const double probabilities[] = {0.1, 0.5, 0.75};
  const double p = random_.one_of(probabilities);
  dropout_.active = true;
  dropout_.threshold = static_cast<uint32_t>(p * 0x1p32);
  dropout_.factor = dropout_factor(p);
  dropout_.first_row = random_.chance(0.5) ? 0 : random_.between(0, int64_t{1} << 33);
  const Draw draw{random_.bits(), random_.bits() >> 8 << 2};
  dropout_.random = {draw.seed, draw.offset, nullptr, nullptr};
  if (random_.chance(0.5)) {
    const int64_t step = random_.between(0, 100) * kFour;
    random_state_ = std::make_unique<Numbers<int64_t>>(std::vector<int64_t>{static_cast<int64_t>(draw.seed), step});
    dropout_.random = {0, draw.offset - static_cast<uint64_t>(step), random_state_->data(), random_state_->data() + 1};
  }
  kept_ = kept_cells(dropout_.first_row);
}

std::vector<uint8_t> Problem::kept_cells(int64_t first_row) const {
  const Draw draw = draw_of(dropout_.random);
  const int64_t fours = fours_of(shape_.columns);
  std::vector<uint8_t> kept;
  for (int64_t row = first_row; row < first_row + shape_.rows(); ++row) {
    for (int64_t column = 0; column < shape_.columns; column += kFour) {
      uint32_t word[kFour];
      random_four(word, draw, static_cast<uint64_t>(row * fours + column / kFour));
      for (int64_t i = 0; i < std::min<int64_t>(kFour, shape_.columns - column); ++i) {
        kept.push_back(word[i] >= dropout_.threshold ? 1 : 0);
      }
    }
  }
  return kept;
}

RowDim Problem::dim(int d, const Operand& input, const Operand* second, const Operand* output) const {
  RowDim dim{shape_.size[d], {}};
  dim.stride[kInput] = input.stride(d);
  dim.stride[kSecond] = second == nullptr ? 0 : second->stride(d);
  dim.stride[kOutput] = output == nullptr ? 0 : output->stride(d);
  dim.stride[kBatch] = d == 0 ? 1 : 0;
  dim.stride[kHead] = d == 1 ? 1 : 0;
  dim.stride[kQuery] = d == 2 ? 1 : 0;
  dim.stride[kStatistic] = d == 0 ? shape_.size[1] * shape_.size[2] : d == 1 ? shape_.size[2] : 1;
  return dim;
}

template <typename Given>
void Problem::give(Given& problem, const Operand& input, const Operand* second, const Operand* output) {
  problem.element = element_;
  problem.band = band_;
  problem.columns = shape_.columns;
  problem.key_lengths_64 = lengths_64_;
  if (has_lengths_) {
    problem.key_lengths = lengths_64_ ? static_cast<const void*>(lengths_in_memory_64_->data())
                                      : static_cast<const void*>(lengths_in_memory_32_->data());
  }
  problem.dropout = dropout_;
  problem.rows.dims = kDims;
  for (int d = 0; d < kDims; ++d) problem.rows.dim[d] = dim(d, input, second, output);
}

void Problem::try_places(const std::function<Results(Where, Random&)>& compute) {
  Results first;
  for (const Where where : {Where::anywhere, Where::boundaries}) {
    Random random(element_, seed_, where == Where::anywhere ? 1 : 2);
    const Results results = compute(where, random);
    if (where == Where::anywhere) {
      first = results;
      continue;
    }
    for (size_t i = 0; i < results.size(); ++i) {
      const bool nan = std::isnan(first[i]) && std::isnan(results[i]);
      if (!nan && std::memcmp(&first[i], &results[i], sizeof(double)) != 0) {
        char text[200];
        std::snprintf(text, sizeof text, "result %zu is %.9g, and %.9g where rows lie on boundaries", i, first[i],
                      results[i]);
        report(text);
        break;
      }
    }
  }
}

void Problem::forward() {
  const MaskKind kinds[] = {MaskKind::none, MaskKind::boolean, MaskKind::same, MaskKind::float32};
  MaskKind kind = random_.one_of(kinds);
  if (!cuda::compiled(Direction::forward, element_, kind)) kind = MaskKind::same;
  const cuda::Plan plan = name_kernel(Direction::forward, kind);
  const int bytes = element_bytes(element_);
  // Scores about where an exponent may no longer be one rounding of its own (segment.cuh), and far beyond. Those of 16 bits
  // are exact under a float mask too, as no bound allows for their rounding: the scale is a power of 2, and the mask adds 0.
  const bool is_far = random_.chance(0.1);
  const bool is_exact = is_far && bytes == 2 && cuda::has_addend(kind);
  const double far_scales[] = {0x1p22, is_exact ? -0x1p30 : -1e9};
  if (is_far) scale_ = random_.one_of(far_scales);
  const int mask_bytes = mask_element_bytes(kind, element_);
  const Element mask_element = kind == MaskKind::float32 ? Element::float32 : element_;
  std::array<bool, kDims> shared;
  for (bool& one : shared) one = random_.chance(0.4);
  const int64_t column_strides[] = {1, 1, 1, 1, 0, 2, -1};
  const int64_t mask_column_stride = random_.one_of(column_strides);
  const bool in_place = random_.chance(0.25);
  // The bits of 16-bit probabilities hardly tell, but the sink's is a float32.
  const bool tells_order = scale_ != 0 && random_.chance(chance_of_order(plan));
  const bool has_sink = random_.chance(tells_order && bytes == 2 ? 0.75 : 0.25);
  const bool sink_float32 = bytes == 2 && random_.chance(0.5);
  const bool before = dropout_.active && !in_place && random_.chance(0.5);

  Values mask(shape_, shared, mask_column_stride == 0);
  if (kind == MaskKind::boolean) {
    for (double& value : mask.value) value = random_.chance(0.3) ? 1 : 0;
  } else {
    for (double& value : mask.value) {
      value = random_.chance(0.15) ? -kInfinity : is_exact ? 0 : rounded(mask_element, random_.normal(2));
    }
  }
  const auto dead = [&](const Index& index, int64_t column) {
    return excluded(index, column) || (kind == MaskKind::boolean && mask.at(index, column) != 0);
  };
  // Excluded cells hold what would spoil their rows.
  const double spoilers[] = {std::nan(""), kInfinity, -kInfinity};
  const bool spoiled = random_.chance(0.3);
  Values x(shape_, kNoneShared, false);
  for (int64_t row = 0; row < shape_.rows(); ++row) {
    const Index index = shape_.index(row);
    for (int64_t column = 0; column < shape_.columns; ++column) {
      x.at(index, column) = spoiled && dead(index, column) ? random_.one_of(spoilers) : number();
    }
  }
  if (tells_order) {
    const LaneColumns large(random_, plan, cuda::kVectorBytes / bytes);
    for (size_t i = 0; i < x.value.size(); ++i) {
      const int64_t column = static_cast<int64_t>(i) % shape_.columns;
      if (!large.has(column)) x.value[i] = rounded(element_, x.value[i] - 15 / scale_);
    }
  }
  // A NaN row with segments that have nothing live takes both a long row and exclusions.
  const bool may_skip = plan.strategy != cuda::Strategy::warp_rows && (band_.active || has_lengths_);
  if (random_.chance(may_skip ? 0.4 : 0.1)) {
    x.value[random_.between(0, x.value.size() - 1)] = random_.one_of(spoilers);
  }
  const Element sink_element = sink_float32 ? Element::float32 : element_;
  std::vector<double> sink(shape_.size[1]);
  std::vector<char> sink_bytes(sink.size() * element_bytes(sink_element));
  for (size_t head = 0; head < sink.size(); ++head) {
    sink[head] = random_.chance(0.05) ? -kInfinity : rounded(sink_element, random_.normal(3));
    write_element(sink_element, &sink_bytes[head * element_bytes(sink_element)], sink[head]);
  }
  const Numbers<char> sink_in_memory(sink_bytes);

  ForwardProblem problem{};
  problem.mask_kind = kind;
  problem.scale = scale_;
  problem.mask_column_stride = mask_column_stride;
  problem.sink = has_sink ? sink_in_memory.data() : nullptr;
  problem.sink_float32 = sink_float32;

  try_places([&](Where where, Random& random) {
    const Layout x_layout = draw_layout(random, shape_, where);
    Layout y_layout = random.chance(0.6) ? x_layout : draw_layout(random, shape_, where);
    if (in_place) y_layout = x_layout;
    Layout mask_layout = draw_layout(random, shape_, where, shared, mask_column_stride);
    if (random.chance(0.4)) mask_layout.offset = x_layout.offset;
    Operand x_operand(shape_, x_layout, bytes);
    x_operand.set(element_, x);
    if (!in_place) x_operand.make_read_only();
    Operand y_operand(shape_, y_layout, bytes);
    Operand& y = in_place ? x_operand : y_operand;
    Operand mask_operand(shape_, mask_layout, mask_bytes);
    if (kind == MaskKind::boolean) {
      mask_operand.set([&](char* address, const Index& index, int64_t column) {
        *address = mask.at(index, column) != 0 ? 1 : 0;
      });
    } else if (kind != MaskKind::none) {
      mask_operand.set(mask_element, mask);
    }
    mask_operand.make_read_only();
    Operand before_operand(shape_, y_layout, bytes);
    Operand sink_probability(shape_, row_by_row(shape_, x_layout), statistic_bytes(element_));
    int64_t state[2] = {};

    give(problem, x_operand, kind == MaskKind::none ? nullptr : &mask_operand, &y);
    problem.x = x_operand.base();
    problem.y = y.base();
    problem.mask = kind == MaskKind::none ? nullptr : mask_operand.base();
    problem.sink_probability = has_sink ? sink_probability.base() : nullptr;
    problem.before_dropout = before ? before_operand.base() : nullptr;
    problem.random_state = before ? state : nullptr;
    if (where == Where::boundaries && random.chance(0.5)) {
      // A row's bits are the same whatever rows are there beside it.
      for (int64_t query = 0; query < shape_.size[2]; ++query) {
        ForwardProblem alone = problem;
        advance(alone, problem.rows.dim[2], query);
        alone.rows.dim[2].size = 1;
        expect_success(cuda::forward(alone, device_, nullptr));
      }
    } else {
      expect_success(cuda::forward(problem, device_, nullptr));
    }
    expect_untouched(y, "y");
    expect_untouched(before_operand, "y before dropout");
    expect_untouched(sink_probability, "the sink's probability");

    Results results;
    std::vector<double> score(shape_.columns);
    for (int64_t row = 0; row < shape_.rows(); ++row) {
      const Index index = shape_.index(row);
      const double row_sink = has_sink ? sink[index[1]] : -kInfinity;
      double maximum = row_sink;
      double size = std::isfinite(row_sink) ? std::abs(row_sink) : 0;
      bool nan = false;
      for (int64_t column = 0; column < shape_.columns; ++column) {
        double& one = score[column];
        one = -kInfinity;
        if (dead(index, column)) continue;
        one = x.at(index, column) * scale_;
        if (kind == MaskKind::same || kind == MaskKind::float32) one += mask.at(index, column);
        nan = nan || std::isnan(one) || one == kInfinity;
        maximum = std::max(maximum, one);
        if (std::isfinite(one)) size = std::max(size, std::abs(one));
      }
      // Packed scores are not rounded before the maximum is taken from them: only how far they are from it matters.
      if ((cuda::is_packed(element_, kind) || is_exact) && !has_sink) size = std::min(size, 128.0);
      double sum = 0;
      for (const double one : score) sum += maximum == -kInfinity ? 0 : std::exp(one - maximum);
      const double sink_share = maximum == -kInfinity ? 0 : std::exp(row_sink - maximum);
      const auto bound = [&](double want) {
        if (std::isnan(want)) return 0.0;
        return std::min((bounds_.relative + bounds_.relative_scores * size) * want + bounds_.smallest,
                        bounds_.forward + bounds_.forward_scores * size);
      };
      for (int64_t column = 0; column < shape_.columns; ++column) {
        double want = score[column] == -kInfinity ? 0 : std::exp(score[column] - maximum) / (sum + sink_share);
        if (nan) want = std::nan("");
        if (before) {
          results.push_back(read_element(element_, before_operand.at(index, column)));
          expect_near(results.back(), want, bound(want), "y before dropout", index, column);
        }
        double y_bound = bound(want);
        if (dropout_.active) {
          // It is rounded a second time.
          if (!nan) y_bound = dropout_.factor * (y_bound + bounds_.relative * want + bounds_.smallest);
          want = kept(index, column) ? want * dropout_.factor : 0;
        }
        results.push_back(read_element(element_, y.at(index, column)));
        expect_near(results.back(), want, y_bound, "y", index, column);
      }
      if (has_sink) {
        results.push_back(statistic(sink_probability, row));
        double want = sink_share == 0 ? 0 : sink_share / (sum + sink_share);
        if (nan) want = std::nan("");
        expect_near(results.back(), want, (1e-6 + bounds_.relative_scores * size) * want + bounds_.smallest,
                    "the sink's probability", index, 0);
      }
    }
    if (before) {
      const Draw draw = draw_of(dropout_.random);
      if (static_cast<uint64_t>(state[0]) != draw.seed || static_cast<uint64_t>(state[1]) != draw.offset) {
        report("seed and offset are not as drawn");
      }
    }
    return results;
  });
}

// Probabilities of a row in memory, zeros where cells are excluded; of some rows NaN.
Values draw_probabilities(Random& random, Element element, const Shape& shape,
                          const std::function<bool(const Index&, int64_t)>& excluded) {
  Values y(shape, kNoneShared, false);
  for (int64_t row = 0; row < shape.rows(); ++row) {
    const Index index = shape.index(row);
    const bool nan = random.chance(0.02);
    double sum = 0;
    for (int64_t column = 0; column < shape.columns; ++column) {
      double& one = y.at(index, column);
      one = excluded(index, column) || random.chance(0.1) ? 0 : std::exp(random.normal(3));
      sum += one;
    }
    for (int64_t column = 0; column < shape.columns; ++column) {
      double& one = y.at(index, column);
      if (one != 0) one = nan ? std::nan("") : rounded(element, one / sum);
    }
  }
  return y;
}

void Problem::backward() {
  const cuda::Plan plan = name_kernel(Direction::backward, MaskKind::none);
  const int bytes = element_bytes(element_);
  const auto outside = [&](const Index& index, int64_t column) { return excluded(index, column); };
  Values y = draw_probabilities(random_, element_, shape_, outside);
  std::array<bool, kDims> shared = kNoneShared;
  const bool expanded = random_.chance(0.2);
  if (expanded || random_.chance(0.1)) {
    for (bool& one : shared) one = random_.chance(0.5);
  }
  const bool every_dim = !shared[0] && !shared[1] && !shared[2];
  Values grad(shape_, shared, expanded);
  for (double& value : grad.value) value = rounded(element_, random_.normal(1));
  if (!expanded && random_.chance(chance_of_order(plan))) {
    const LaneColumns large(random_, plan, cuda::kVectorBytes / bytes);
    for (size_t i = 0; i < grad.value.size(); ++i) {
      if (!large.has(static_cast<int64_t>(i) % shape_.columns)) grad.value[i] = rounded(element_, 0x1p-12 * grad.value[i]);
    }
  }
  if (!expanded && every_dim && random_.chance(0.3)) {
    // Gradients of cells without weight are never looked at.
    for (size_t i = 0; i < grad.value.size(); ++i) {
      if (y.value[i] == 0) grad.value[i] = std::nan("");
    }
  }
  const bool has_dots = random_.chance(0.5);
  const bool has_dx = !has_dots || random_.chance(0.8);

  BackwardProblem problem{};
  problem.scale = scale_ * dropout_.factor;
  problem.grad_column_stride = expanded ? 0 : 1;
  try_places([&](Where where, Random& random) {
    const Layout y_layout = draw_layout(random, shape_, where);
    Layout grad_layout = draw_layout(random, shape_, where, shared, problem.grad_column_stride);
    if (random.chance(0.4)) grad_layout.offset = y_layout.offset;
    const Layout dx_layout = random.chance(0.6) ? y_layout : draw_layout(random, shape_, where);
    Operand y_operand(shape_, y_layout, bytes);
    y_operand.set(element_, y);
    y_operand.make_read_only();
    Operand grad_operand(shape_, grad_layout, bytes);
    grad_operand.set(element_, grad);
    grad_operand.make_read_only();
    const Operand dx(shape_, dx_layout, bytes);
    const Operand dots(shape_, row_by_row(shape_, y_layout), statistic_bytes(element_));

    give(problem, y_operand, &grad_operand, has_dx ? &dx : nullptr);
    problem.y = y_operand.base();
    problem.grad = grad_operand.base();
    problem.dx = has_dx ? dx.base() : nullptr;
    problem.dots = has_dots ? dots.base() : nullptr;
    expect_success(cuda::backward(problem, device_, nullptr));
    expect_untouched(dx, "dx");
    expect_untouched(dots, "the sums");

    Results results;
    for (int64_t row = 0; row < shape_.rows(); ++row) {
      const Index index = shape_.index(row);
      const auto gradient = [&](int64_t column) { return kept(index, column) ? grad.at(index, column) : 0; };
      double dot = 0;
      double largest = 0;
      for (int64_t column = 0; column < shape_.columns; ++column) {
        if (y.at(index, column) == 0) continue;
        dot += y.at(index, column) * gradient(column);
        largest = std::max(largest, std::abs(gradient(column)));
      }
      for (int64_t column = 0; column < shape_.columns && has_dx; ++column) {
        const double weight = y.at(index, column);
        const double want = weight == 0 ? 0 : problem.scale * weight * (gradient(column) - dot);
        const double bound = bounds_.backward * std::abs(problem.scale) * largest * weight +
                             bounds_.backward_relative * std::abs(want) +
                             (1 + std::abs(problem.scale)) * bounds_.smallest;
        results.push_back(read_element(element_, dx.at(index, column)));
        expect_near(results.back(), want, bound, "dx", index, column);
      }
      if (has_dots) {
        results.push_back(statistic(dots, row));
        expect_near(results.back(), dot, bounds_.backward * largest + bounds_.smallest, "the sum", index, 0);
      }
    }
    return results;
  });
}

void Problem::mask_gradient() {
  const int bytes = element_bytes(element_);
  const auto outside = [&](const Index& index, int64_t column) { return excluded(index, column); };
  Values y = draw_probabilities(random_, element_, shape_, outside);
  std::array<bool, kDims> shared;
  for (bool& one : shared) one = random_.chance(0.6);
  const bool expanded = random_.chance(0.2);
  Values grad(shape_, kNoneShared, expanded);
  for (double& value : grad.value) value = rounded(element_, random_.normal(1));
  const bool float32 = bytes == 2 && random_.chance(0.5);
  const Element gradient_element = float32 ? Element::float32 : element_;
  const Element dots_element = element_ == Element::float64 ? Element::float64 : Element::float32;
  Values dots(shape_, kNoneShared, true);
  std::vector<double> largest(shape_.rows());
  for (int64_t row = 0; row < shape_.rows(); ++row) {
    const Index index = shape_.index(row);
    double dot = 0;
    for (int64_t column = 0; column < shape_.columns; ++column) {
      if (!kept(index, column) || y.at(index, column) == 0) continue;
      dot += y.at(index, column) * grad.at(index, column);
      largest[row] = std::max(largest[row], std::abs(grad.at(index, column)));
    }
    dots.at(index, 0) = rounded(dots_element, dot);
  }
  // By cell of the gradient.
  Values want(shape_, shared, false);
  Values bound(shape_, shared, false);
  for (int64_t row = 0; row < shape_.rows(); ++row) {
    const Index index = shape_.index(row);
    for (int64_t column = 0; column < shape_.columns; ++column) {
      const double weight = dropout_.factor * y.at(index, column);
      if (weight == 0) continue;
      want.at(index, column) += weight * ((kept(index, column) ? grad.at(index, column) : 0) - dots.at(index, 0));
      bound.at(index, column) += bounds_.backward * weight * largest[row] + dropout_.factor * bounds_.smallest;
    }
  }

  MaskGradientProblem problem{};
  problem.grad_column_stride = expanded ? 0 : 1;
  problem.gradient_float32 = float32;
  try_places([&](Where where, Random& random) {
    const Layout y_layout = draw_layout(random, shape_, where);
    Layout grad_layout = draw_layout(random, shape_, where, kNoneShared, problem.grad_column_stride);
    if (random.chance(0.4)) grad_layout.offset = y_layout.offset;
    Operand y_operand(shape_, y_layout, bytes);
    y_operand.set(element_, y);
    y_operand.make_read_only();
    Operand grad_operand(shape_, grad_layout, bytes);
    grad_operand.set(element_, grad);
    grad_operand.make_read_only();
    Operand dots_operand(shape_, row_by_row(shape_, y_layout), element_bytes(dots_element));
    dots_operand.set(dots_element, dots);
    dots_operand.make_read_only();
    const Operand gradient(shape_, draw_layout(random, shape_, where, shared), element_bytes(gradient_element));

    give(problem, y_operand, &grad_operand, &gradient);
    problem.mask_dims = 0;
    int next = 0;
    for (const bool summed : {false, true}) {
      for (int d = 0; d < kDims; ++d) {
        if (shared[d] != summed) continue;
        problem.rows.dim[next++] = dim(d, y_operand, &grad_operand, &gradient);
        problem.mask_dims += summed ? 0 : 1;
      }
    }
    problem.y = y_operand.base();
    problem.grad = grad_operand.base();
    problem.dots = dots_operand.base();
    problem.gradient = gradient.base();
    if (!cuda::fits(problem)) report("does not fit");
    expect_success(cuda::mask_gradient(problem, nullptr));
    expect_untouched(gradient, "the mask's gradient");

    Results results;
    for (int64_t row = 0; row < shape_.rows(); ++row) {
      const Index index = shape_.index(row);
      for (int64_t column = 0; column < shape_.columns; ++column) {
        const double cell = want.at(index, column);
        results.push_back(read_element(gradient_element, gradient.at(index, column)));
        expect_near(results.back(), cell,
                    bound.at(index, column) + bounds_.backward_relative * std::abs(cell) + bounds_.smallest,
                    "the mask's gradient", index, column);
      }
    }
    return results;
  });
}

void Problem::keep() {
  if (!dropout_.active) draw_dropout();
  const std::vector<uint8_t> kept = kept_cells(0);
  Memory keep(static_cast<size_t>(shape_.rows() * shape_.columns), Memory::Place::back);
  expect_success(cuda::dropout_keep(dropout_, shape_.rows(), shape_.columns,
                                    reinterpret_cast<uint8_t*>(keep.data()), nullptr));
  for (int64_t row = 0; row < shape_.rows(); ++row) {
    for (int64_t column = 0; column < shape_.columns; ++column) {
      const int64_t cell = row * shape_.columns + column;
      expect_near(keep.data()[cell], kept[cell], 0, "what is kept", shape_.index(row), column);
    }
  }
}

void Problem::run() {
  draw();
  const double kind = random_.share();
  const bool is_forward = kind < 0.5;
  const bool is_backward = !is_forward && kind < 0.8;
  const bool is_mask_gradient = !is_forward && !is_backward && kind < 0.95;
  const char* names[] = {"float16", "bfloat16", "float32", "float64"};
  task = std::string("problem ") + std::to_string(seed_) + " of " + names[static_cast<int>(element_)] + ": ";
  kernel = is_forward ? "forward" : is_backward ? "backward" : is_mask_gradient ? "mask_gradient" : "keep";
  if (dropout_.active) kernel += " with dropout";
  task += kernel + ", " + std::to_string(shape_.size[0]) + " x " +
          std::to_string(shape_.size[1]) + " x " + std::to_string(shape_.size[2]) + " rows of " +
          std::to_string(shape_.columns) + " columns, compute capability " + std::to_string(device_.capability);
  if (is_forward) {
    forward();
  } else if (is_backward) {
    backward();
  } else if (is_mask_gradient) {
    mask_gradient();
  } else {
    keep();
  }
}

extern "C" void on_signal(int signal) {
  const bool of_memory = signal == SIGSEGV || signal == SIGBUS;
  fail(of_memory ? "memory that is no operand's, or that is read only"
                 : "an address out of alignment, a shift or an index out of range");
}

int run(int arguments, char** argument) {
  constexpr int kBounds = sizeof(Bounds) / sizeof(double);
  if (arguments != 4 + kBounds) {
    std::fprintf(stderr, "usage: %s ELEMENT FIRST COUNT and %d bounds\n", argument[0], kBounds);
    return 2;
  }
  for (const int signal : {SIGSEGV, SIGBUS, SIGILL, SIGTRAP}) std::signal(signal, on_signal);
  const auto element = static_cast<Element>(std::atoi(argument[1]));
  const int64_t first = std::atoll(argument[2]);
  const int64_t count = std::atoll(argument[3]);
  const auto bound = [&](int i) { return std::atof(argument[4 + i]); };
  const Bounds bounds{bound(0), bound(1), bound(2), bound(3), bound(4), bound(5), bound(6)};
  std::map<std::string, int> kernels;
  int64_t cells = 0;
  int wrong = 0;
  for (int64_t seed = first; seed < first + count && wrong < 10; ++seed) {
    Problem problem(element, seed, bounds);
    problem.run();
    ++kernels[problem.kernel];
    cells += problem.cells;
    wrong += problem.wrong ? 1 : 0;
  }
  for (const auto& [kernel, problems] : kernels) std::printf("%s: %d\n", kernel.c_str(), problems);
  std::printf("%" PRId64 " cells, %d wrong\n", cells, wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace sms::emulation

int main(int arguments, char** argument) { return sms::emulation::run(arguments, argument); }
