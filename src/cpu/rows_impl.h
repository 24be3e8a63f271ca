// The row kernels, written with the compiler's vector types. Included once per instruction set, by rows_*.cpp alone.
//
// Everything here has internal linkage, and nothing is used that would emit a weak symbol (no <algorithm>, no
// <limits>), so an instruction set cannot leak into code shared with others. Built with -ffp-contract=off: a
// multiplication and an addition are fused only where fma() says so, in full and partial vectors alike.
//
// A row's columns are dealt to vector lanes from the piece's first column on, whatever its address, and cells outside
// the live interval count as masked ones: a causal row has the bits of the same row under a boolean mask.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "rows.h"

#define SMS_INLINE inline __attribute__((always_inline))

namespace sms::cpu {
namespace {

constexpr int kVectorBytes = SMS_VECTOR_BYTES;

// ---- Vectors of the two compute types ----

template <typename Compute>
struct Simd;

template <>
struct Simd<float> {
  static constexpr int kLanes = kVectorBytes / 4;
  typedef float Vector __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Index __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
  typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes / 4)));
  static constexpr float kInfinity = __builtin_inff();
  static constexpr float kNan = __builtin_nanf("");
};

template <>
struct Simd<double> {
  static constexpr int kLanes = kVectorBytes / 8;
  typedef double Vector __attribute__((vector_size(kVectorBytes)));
  typedef uint64_t Bits __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Index __attribute__((vector_size(kVectorBytes)));
  typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes / 8)));
  static constexpr double kInfinity = __builtin_inf();
  static constexpr double kNan = __builtin_nan("");
};

template <typename Compute>
using Vector = typename Simd<Compute>::Vector;
template <typename Compute>
using Bits = typename Simd<Compute>::Bits;
using Floats = Vector<float>;
using Doubles = Vector<double>;

template <typename Compute>
SMS_INLINE Vector<Compute> broadcast(Compute value) {
  return value - Vector<Compute>{};
}

SMS_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__x86_64__) && SMS_VECTOR_BYTES == 64
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__x86_64__) && SMS_VECTOR_BYTES == 32
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

SMS_INLINE Doubles fma(Doubles a, Doubles b, Doubles c) {
#if defined(__x86_64__) && SMS_VECTOR_BYTES == 64
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__x86_64__) && SMS_VECTOR_BYTES == 32
  return _mm256_fmadd_pd(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f64(c, a, b);
#else
  return a * b + c;
#endif
}

// The larger of both; `a` where either is NaN. For vectors and scalars.
struct Larger {
  template <typename T>
  SMS_INLINE T operator()(T a, T b) const {
    return b > a ? b : a;
  }
};

struct Plus {
  template <typename T>
  SMS_INLINE T operator()(T a, T b) const {
    return a + b;
  }
};

template <typename Compute, int lanes>
struct VectorOf {
  typedef Compute Type __attribute__((vector_size(lanes * sizeof(Compute))));
};

// Folds the lanes of a vector in halves; op takes two vectors or two scalars.
template <typename Compute, int lanes, typename Op>
SMS_INLINE Compute fold_lanes(typename VectorOf<Compute, lanes>::Type v, const Op& op) {
  if constexpr (lanes == 2) {
    return op(v[0], v[1]);
  } else {
    typename VectorOf<Compute, lanes / 2>::Type halves[2];
    memcpy(halves, &v, sizeof v);
    return fold_lanes<Compute, lanes / 2>(op(halves[0], halves[1]), op);
  }
}

// 2^t for t <= 0: t = n + f with |f| <= 1/2, a polynomial for 2^f, n into the exponent. The polynomials are minimax for
// relative error with p(0) = 1 exactly: 1.9e-8 and 3.5e-17, below the rounding of the type. Results below the least
// normal number are 0; -inf gives 0 and NaN gives NaN.
SMS_INLINE Floats exp2_nonpositive(Floats t) {
  constexpr float kExponentBias = 127.0f;
  // Adding 1.5 * 2^23 rounds to an integer, left in the low bits of the sum: with the bias, the exponent field.
  const Floats magic = broadcast(12582912.0f + kExponentBias);
  const Floats least = broadcast(-kExponentBias);
  t = t < least ? least : t;
  const Floats shifted = t + magic;
  const Floats f = t - (shifted - magic);
  Floats p = broadcast(0x1.63941fe61ccb2p-13f);
  p = fma(p, f, broadcast(0x1.603519f5708dep-10f));
  p = fma(p, f, broadcast(0x1.3afc6d4eff1f7p-7f));
  p = fma(p, f, broadcast(0x1.c6ac367447829p-5f));
  p = fma(p, f, broadcast(0x1.ebfc1d73f861fp-3f));
  p = fma(p, f, broadcast(0x1.62e4340d1c0b6p-1f));
  p = fma(p, f, broadcast(1.0f));
  return p * (Floats)((Bits<float>)shifted << 23);
}

SMS_INLINE Doubles exp2_nonpositive(Doubles t) {
  constexpr double kExponentBias = 1023.0;
  const Doubles magic = broadcast(6755399441055744.0 + kExponentBias);  // 1.5 * 2^52
  const Doubles least = broadcast(-kExponentBias);
  t = t < least ? least : t;
  const Doubles shifted = t + magic;
  const Doubles f = t - (shifted - magic);
  Doubles p = broadcast(0x1.c08f918323219p-32);
  p = fma(p, f, broadcast(0x1.e5fc666450e4dp-28));
  p = fma(p, f, broadcast(0x1.b5406b96fdf5cp-24));
  p = fma(p, f, broadcast(0x1.62bfd99f06163p-20));
  p = fma(p, f, broadcast(0x1.ffcbef3124659p-17));
  p = fma(p, f, broadcast(0x1.43091307a8d4ap-13));
  p = fma(p, f, broadcast(0x1.5d87fe7b6970dp-10));
  p = fma(p, f, broadcast(0x1.3b2ab6fba2500p-7));
  p = fma(p, f, broadcast(0x1.c6b08d70491bbp-5));
  p = fma(p, f, broadcast(0x1.ebfbdff82c596p-3));
  p = fma(p, f, broadcast(0x1.62e42fefa39f2p-1));
  p = fma(p, f, broadcast(1.0));
  return p * (Doubles)((Bits<double>)shifted << 52);
}

// ---- Element formats: how they lie in memory, and to and from the compute type ----

template <Element element>
struct Format;

template <>
struct Format<Element::float32> {
  using Storage = float;
  using Compute = float;
  using Raw = Floats;
  static SMS_INLINE Floats widen(Raw v) { return v; }
  static SMS_INLINE Raw narrow(Floats v) { return v; }
  static constexpr Storage kNan = Simd<float>::kNan;
};

template <>
struct Format<Element::float64> {
  using Storage = double;
  using Compute = double;
  using Raw = Doubles;
  static SMS_INLINE Doubles widen(Raw v) { return v; }
  static SMS_INLINE Raw narrow(Doubles v) { return v; }
  static constexpr Storage kNan = Simd<double>::kNan;
};

template <>
struct Format<Element::bfloat16> {
  using Storage = uint16_t;
  using Compute = float;
  using Raw = Simd<float>::Halves;
  static SMS_INLINE Floats widen(Raw v) { return (Floats)(__builtin_convertvector(v, Bits<float>) << 16); }
  static SMS_INLINE Raw narrow(Floats v) {
    const Bits<float> bits = (Bits<float>)v;
    const Bits<float> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Bits<float> quiet_nan = (bits >> 16) | 0x40u;
    return __builtin_convertvector(v == v ? rounded : quiet_nan, Raw);
  }
  static constexpr Storage kNan = 0x7fc0;
};

template <>
struct Format<Element::float16> {
  using Storage = uint16_t;
  using Compute = float;
  using Raw = Simd<float>::Halves;
  static SMS_INLINE Floats widen(Raw v) {
#if defined(__x86_64__) && SMS_VECTOR_BYTES == 64
    return _mm512_maskz_cvtph_ps(0xffff, (__m256i)v);  // maskz: GCC 12 warns of the plain form's undefined operand
#elif defined(__x86_64__) && SMS_VECTOR_BYTES == 32
    return _mm256_cvtph_ps((__m128i)v);
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16((float16x4_t)v);
#else
    const Bits<float> bits = __builtin_convertvector(v, Bits<float>);
    const Bits<float> magnitude = (bits & 0x7fffu) << 13;
    const Bits<float> scaled = (Bits<float>)((Floats)magnitude * 0x1p112f);  // exact, subnormal numbers too
    return (Floats)(((bits & 0x8000u) << 16) | (magnitude >= 0x7c00u << 13 ? scaled | 0x7f800000u : scaled));
#endif
  }
  static SMS_INLINE Raw narrow(Floats v) {
#if defined(__x86_64__) && SMS_VECTOR_BYTES == 64
    return (Raw)_mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__x86_64__) && SMS_VECTOR_BYTES == 32
    return (Raw)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
    return (Raw)vcvt_f16_f32((float32x4_t)v);
#else
    const Bits<float> sign = ((Bits<float>)v >> 16) & 0x8000u;
    const Bits<float> bits = (Bits<float>)v & 0x7fffffffu;
    // Rebias the exponent (112 less) and round to even at bit 13; a carry may run into infinity.
    const Bits<float> normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    // Below 2^-14: adding 0.5, whose unit in the last place is 2^-24, rounds to half's subnormal grid.
    const Bits<float> subnormal = (Bits<float>)((Floats)bits + 0.5f) - (Bits<float>)broadcast(0.5f);
    Bits<float> half = bits < (113u << 23) ? subnormal : normal;
    half = bits >= (143u << 23) ? broadcast_bits(0x7c00u) : half;     // 65,536 and beyond
    half = bits > (255u << 23) ? broadcast_bits(0x7e00u) : half;      // NaN
    return __builtin_convertvector(half | sign, Raw);
#endif
  }
  static SMS_INLINE Bits<float> broadcast_bits(uint32_t value) { return value - Bits<float>{}; }
  static constexpr Storage kNan = 0x7e00;
};

// ---- Loads and stores ----

// Which lanes of a vector take part: all, or [first, last).
struct AllLanes {};
struct SomeLanes {
  int first;
  int last;
};

template <typename Raw, typename Storage>
SMS_INLINE Raw load(const Storage* pointer, AllLanes) {
  Raw raw;
  memcpy(&raw, pointer, sizeof raw);
  return raw;
}

// Other lanes are zero, and their memory is not touched.
template <typename Raw, typename Storage>
SMS_INLINE Raw load(const Storage* pointer, SomeLanes lanes) {
#if defined(__x86_64__) && SMS_VECTOR_BYTES == 64
  const uint32_t mask = (1u << lanes.last) - (1u << lanes.first);  // at most 16 lanes
  if constexpr (sizeof(Raw) == 64 && sizeof(Storage) == 4) return (Raw)_mm512_maskz_loadu_epi32(mask, pointer);
  if constexpr (sizeof(Raw) == 64 && sizeof(Storage) == 8) return (Raw)_mm512_maskz_loadu_epi64(mask, pointer);
  if constexpr (sizeof(Raw) == 32) return (Raw)_mm256_maskz_loadu_epi16(mask, pointer);
  if constexpr (sizeof(Raw) == 16) return (Raw)_mm_maskz_loadu_epi8(mask, pointer);
#endif
  Storage values[sizeof(Raw) / sizeof(Storage)] = {};
  memcpy(values + lanes.first, pointer + lanes.first, static_cast<size_t>(lanes.last - lanes.first) * sizeof(Storage));
  Raw raw;
  memcpy(&raw, values, sizeof raw);
  return raw;
}

// Widens bytes to lanes. Spelled out because GCC 12 takes __builtin_convertvector apart, lane by lane.
template <typename Compute>
SMS_INLINE Bits<Compute> widen_bytes(typename Simd<Compute>::Bytes bytes) {
#if defined(__x86_64__)
  constexpr bool kFloat = sizeof(Compute) == 4;
  __m128i v = {};
  memcpy(&v, &bytes, sizeof bytes);
#if SMS_VECTOR_BYTES == 64
  if constexpr (kFloat) return (Bits<Compute>)_mm512_maskz_cvtepu8_epi32(0xffff, v);
  if constexpr (!kFloat) return (Bits<Compute>)_mm512_maskz_cvtepu8_epi64(0xff, v);
#elif SMS_VECTOR_BYTES == 32
  if constexpr (kFloat) return (Bits<Compute>)_mm256_cvtepu8_epi32(v);
  if constexpr (!kFloat) return (Bits<Compute>)_mm256_cvtepu8_epi64(v);
#else
  v = _mm_unpacklo_epi16(_mm_unpacklo_epi8(v, __m128i{}), __m128i{});
  return (Bits<Compute>)(kFloat ? v : _mm_unpacklo_epi32(v, __m128i{}));
#endif
#else
  return __builtin_convertvector(bytes, Bits<Compute>);
#endif
}

template <typename Compute>
SMS_INLINE Vector<Compute> select(AllLanes, Vector<Compute> inside, Vector<Compute>) {
  return inside;
}

template <typename Compute>
SMS_INLINE Vector<Compute> select(SomeLanes lanes, Vector<Compute> inside, Vector<Compute> outside) {
  typename Simd<Compute>::Index lane;
  for (int i = 0; i < Simd<Compute>::kLanes; ++i) lane[i] = i;
  return ((lane >= lanes.first) & (lane < lanes.last)) ? inside : outside;
}

// Writes the lanes of the vector at `column` that lie in a row of `columns`.
template <typename Raw, typename Storage>
SMS_INLINE void store(Storage* row, int64_t column, int64_t columns, Raw raw) {
  constexpr int64_t kLanes = sizeof(Raw) / sizeof(Storage);
  if (column + kLanes <= columns) {
    memcpy(row + column, &raw, sizeof raw);
    return;
  }
  const int64_t last = columns - column;
#if defined(__x86_64__) && SMS_VECTOR_BYTES == 64
  const uint32_t mask = (1u << last) - 1;
  if constexpr (sizeof(Raw) == 64 && sizeof(Storage) == 4) _mm512_mask_storeu_epi32(row + column, mask, (__m512i)raw);
  if constexpr (sizeof(Raw) == 64 && sizeof(Storage) == 8) _mm512_mask_storeu_epi64(row + column, mask, (__m512i)raw);
  if constexpr (sizeof(Raw) == 32) _mm256_mask_storeu_epi16(row + column, mask, (__m256i)raw);
#else
  memcpy(row + column, &raw, static_cast<size_t>(last) * sizeof(Storage));
#endif
}

template <typename Storage>
SMS_INLINE void zero(Storage* row, int64_t begin, int64_t end) {
  if (begin < end) memset(row + begin, 0, static_cast<size_t>(end - begin) * sizeof(Storage));
}

// ---- Walking a row ----

// The columns of the vectors that hold a live column.
template <int kLanes>
struct Span {
  int64_t begin;
  int64_t end;
  SMS_INLINE Span(int64_t live_begin, int64_t live_end)
      : begin(live_begin / kLanes * kLanes), end((live_end + kLanes - 1) / kLanes * kLanes) {}
};

// Calls visit(column, lanes) for a vector of which columns of [begin, end) are live, if any are.
template <int kLanes, typename Visit>
SMS_INLINE void visit_vector(int64_t begin, int64_t end, int64_t column, const Visit& visit) {
  const int64_t first = begin > column ? begin - column : 0;
  const int64_t last = end < column + kLanes ? end - column : kLanes;
  if (first == 0 && last == kLanes) {
    visit(column, AllLanes{});
  } else if (first < last) {
    visit(column, SomeLanes{static_cast<int>(first), static_cast<int>(last)});
  }
}

// Sums vectors of terms. Float terms are added eight at a time and their sums in double: among 65,536 terms a float sum
// would lose, each time, what lies below half a unit in its last place. Eight lose at most 4.8e-7 of the sum.
template <typename Compute>
class Accumulator {
 public:
  static constexpr int kGroup = 8;

  SMS_INLINE void add(Vector<Compute> group) {
    if constexpr (sizeof(Compute) == 8) {
      low_ += group;
    } else {
      typename VectorOf<Compute, Simd<Compute>::kLanes / 2>::Type halves[2];
      memcpy(halves, &group, sizeof group);
      low_ += __builtin_convertvector(halves[0], Doubles);
      high_ += __builtin_convertvector(halves[1], Doubles);
    }
  }

  SMS_INLINE double total() const { return fold_lanes<double, Simd<double>::kLanes>(low_ + high_, Plus()); }

 private:
  Doubles low_ = {};
  Doubles high_ = {};
};

// The sum of term(column, lanes) over the vectors that hold a column of [begin, end). Groups are counted from column 0,
// so that what is added to what does not depend on where the interval begins: a term of zeros changes no bit.
template <typename Compute, typename Term>
SMS_INLINE double sum_of(int64_t begin, int64_t end, const Term& term) {
  constexpr int kLanes = Simd<Compute>::kLanes;
  constexpr int64_t kColumns = Accumulator<Compute>::kGroup * kLanes;
  Accumulator<Compute> sum;
  for (int64_t start = begin / kColumns * kColumns; start < end; start += kColumns) {
    Vector<Compute> group = {};
    if (start >= begin && start + kColumns <= end) {
#pragma GCC unroll 8
      for (int64_t column = start; column < start + kColumns; column += kLanes) group += term(column, AllLanes{});
    } else {
      const int64_t last = end < start + kColumns ? end : start + kColumns;
      for (int64_t column = begin > start ? begin / kLanes * kLanes : start; column < last; column += kLanes) {
        visit_vector<kLanes>(begin, end, column, [&](int64_t at, auto lanes)
                             __attribute__((always_inline)) { group += term(at, lanes); });
      }
    }
    sum.add(group);
  }
  return sum.total();
}

// ---- Dropout ----

// Products of 32-bit words, lane by lane: those of even and of odd lanes apart.
struct MultiplyLanes {
  using Words = Bits<float>;
  typedef uint64_t Wide __attribute__((vector_size(kVectorBytes)));

  SMS_INLINE Product<Words> operator()(Words a, uint32_t b) const {
    const Wide even = multiply_low((Wide)a, b);
    const Wide odd = multiply_low((Wide)a >> 32, b);
    constexpr uint64_t kHigh = 0xffffffff00000000u;
    return {(Words)((even >> 32) | (odd & kHigh)), (Words)((even & ~kHigh) | (odd << 32))};
  }

 private:
  // Of the lower half of each lane.
  static SMS_INLINE Wide multiply_low(Wide a, uint64_t b) {
    const Wide factor = b - Wide{};
#if defined(__x86_64__) && SMS_VECTOR_BYTES == 64
    return (Wide)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)factor);
#elif defined(__x86_64__) && SMS_VECTOR_BYTES == 32
    return (Wide)_mm256_mul_epu32((__m256i)a, (__m256i)factor);
#elif defined(__x86_64__)
    return (Wide)_mm_mul_epu32((__m128i)a, (__m128i)factor);
#else
    return (a & 0xffffffffu) * factor;
#endif
  }
};

void keep_columns(const Draw& draw, uint64_t four, uint32_t threshold, int64_t first, int64_t last, uint8_t* bytes) {
  using Words = Bits<float>;
  constexpr int kLanes = Simd<float>::kLanes;
  const auto spread = [](uint32_t value) __attribute__((always_inline)) { return value - Words{}; };
  Words lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const uint64_t offset = draw.offset / kFour;
  for (int64_t column = first / kFour * kFour; column < last; column += kLanes * kFour) {
    const uint64_t number = four + static_cast<uint64_t>(column / kFour);
    const Words low = spread(static_cast<uint32_t>(number)) + lane;
    const Words carry = (Words)(low < lane);  // all bits: minus one
    Words word[kFour] = {spread(static_cast<uint32_t>(offset)), spread(static_cast<uint32_t>(offset >> 32)), low,
                         spread(static_cast<uint32_t>(number >> 32)) - carry};
    philox(word, draw.seed, MultiplyLanes());
    Words kept = {};  // a lane has the bytes of a four
    for (int i = 0; i < kFour; ++i) kept |= (Words)(word[i] >= threshold) & (0xffu << (8 * i));
    memcpy(bytes + column, &kept, sizeof kept);
  }
}

// ---- Forward ----

template <bool condition, typename Yes, typename No>
struct Choose {
  using Type = Yes;
};
template <typename Yes, typename No>
struct Choose<false, Yes, No> {
  using Type = No;
};

template <Element element, MaskKind mask_kind>
struct Forward {
  using X = Format<element>;
  using Storage = typename X::Storage;
  using Compute = typename X::Compute;
  using Lanes = Simd<Compute>;
  using Mask = Format<mask_kind == MaskKind::float32 ? Element::float32 : element>;
  using MaskStorage = typename Choose<mask_kind == MaskKind::boolean, uint8_t, typename Mask::Storage>::Type;
  static constexpr int kLanes = Lanes::kLanes;

  // Scores of one vector, -inf in lanes that are masked or not live.
  template <typename Which>
  static SMS_INLINE Vector<Compute> scores(const Storage* x, const MaskStorage* mask, Vector<Compute> scale,
                                           int64_t column, Which lanes) {
    const Vector<Compute> excluded = broadcast(-Lanes::kInfinity);
    Vector<Compute> s = X::widen(load<typename X::Raw>(x + column, lanes)) * scale;
    if constexpr (mask_kind == MaskKind::boolean) {
      const auto masked = load<typename Lanes::Bytes>(mask + column, lanes);
      s = widen_bytes<Compute>(masked) != 0 ? excluded : s;
    } else if constexpr (mask_kind != MaskKind::none) {
      s += Mask::widen(load<typename Mask::Raw>(mask + column, lanes));
    }
    return select<Compute>(lanes, s, excluded);
  }

  static ExpSum exponentials(const ForwardPiece& piece, double scale, const double* maximum, void* scratch) {
    const Storage* const x = static_cast<const Storage*>(piece.x);
    const MaskStorage* const mask = static_cast<const MaskStorage*>(piece.mask);
    Compute* const values = static_cast<Compute*>(scratch);
    const Vector<Compute> scale_vector = broadcast(static_cast<Compute>(scale));
    const Span<kLanes> span(piece.begin, piece.end);
    // The maximum passes over NaN; the sum below does not.
    const Larger larger;
    Vector<Compute> largest[4];
    for (auto& v : largest) v = broadcast(-Lanes::kInfinity);
    const auto score = [=, &largest](int64_t column, auto lanes, int place) __attribute__((always_inline)) {
      const Vector<Compute> s = scores(x, mask, scale_vector, column, lanes);
      memcpy(values + column, &s, sizeof s);
      largest[place] = larger(largest[place], s);
    };
    const auto score_one = [&](int64_t column, auto lanes) __attribute__((always_inline)) { score(column, lanes, 0); };
    int64_t column = span.begin;
    if (column < piece.begin) {
      visit_vector<kLanes>(piece.begin, piece.end, column, score_one);
      column += kLanes;
    }
    for (; column + 4 * kLanes <= piece.end; column += 4 * kLanes) {
#pragma GCC unroll 4
      for (int place = 0; place < 4; ++place) score(column + place * kLanes, AllLanes{}, place);
    }
    for (; column < piece.end; column += kLanes) visit_vector<kLanes>(0, piece.end, column, score_one);

    Compute shift;
    if (maximum != nullptr) {
      shift = static_cast<Compute>(*maximum);
    } else {
      const Vector<Compute> both[2] = {larger(largest[0], largest[1]), larger(largest[2], largest[3])};
      shift = fold_lanes<Compute, kLanes>(larger(both[0], both[1]), larger);
      if (shift == -Lanes::kInfinity) shift = 0;  // all scores are -inf or NaN: their exponentials are 0 or NaN
    }
    // A maximum of +inf gives inf - inf = NaN.
    const Vector<Compute> shift_vector = broadcast(shift);
    const Vector<Compute> log2e = broadcast(static_cast<Compute>(1.44269504088896340736));
    // Whole vectors of scratch, hence one kind of lanes.
    const double sum = sum_of<Compute>(span.begin, span.end, [=](int64_t at, auto) __attribute__((always_inline)) {
      Vector<Compute> v;
      memcpy(&v, values + at, sizeof v);
      v = exp2_nonpositive((v - shift_vector) * log2e);
      memcpy(values + at, &v, sizeof v);
      return v;
    });
    return {shift, sum};
  }

  static double number(const void* address, bool is_float32) {
    if (is_float32) return *static_cast<const float*>(address);
    const auto raw = load<typename X::Raw>(static_cast<const Storage*>(address), SomeLanes{0, 1});
    return X::widen(raw)[0];
  }

  // A vector of y with dropout.
  static SMS_INLINE typename X::Raw dropped(typename X::Raw y, const uint8_t* kept, Vector<Compute> factor) {
    typename Lanes::Bytes bytes;
    memcpy(&bytes, kept, sizeof bytes);
    return X::narrow(widen_bytes<Compute>(bytes) != 0 ? X::widen(y) * factor : Vector<Compute>{});
  }

  static void store_dropped(const ForwardPiece& piece, const void* scratch, double sum, const Kept& kept) {
    if (piece.before_dropout != nullptr) {
      ForwardPiece before = piece;
      before.y = piece.before_dropout;
      store_row(before, scratch, sum);
    }
    const Compute* const values = static_cast<const Compute*>(scratch);
    Storage* const y = static_cast<Storage*>(piece.y);
    if (sum != sum) {
      for (int64_t column = 0; column < piece.columns; ++column) y[column] = kept.bytes[column] != 0 ? X::kNan : Storage{};
      return;
    }
    const Span<kLanes> span = sum == 0 ? Span<kLanes>(0, 0) : Span<kLanes>(piece.begin, piece.end);
    const Vector<Compute> normalizer = broadcast(static_cast<Compute>(1 / sum));
    const Vector<Compute> factor = broadcast(static_cast<Compute>(kept.factor));
    zero(y, 0, span.begin);
    for (int64_t column = span.begin; column < span.end; column += kLanes) {
      Vector<Compute> v;
      memcpy(&v, values + column, sizeof v);
      store(y, column, piece.columns, dropped(X::narrow(v * normalizer), kept.bytes + column, factor));
    }
    zero(y, span.end, piece.columns);
  }

  static void store_row(const ForwardPiece& piece, const void* scratch, double sum) {
    const Compute* const values = static_cast<const Compute*>(scratch);
    Storage* const y = static_cast<Storage*>(piece.y);
    if (sum != sum) {
      for (int64_t column = 0; column < piece.columns; ++column) y[column] = X::kNan;
      return;
    }
    if (sum == 0) {
      zero(y, 0, piece.columns);
      return;
    }
    const Span<kLanes> span(piece.begin, piece.end);
    const Vector<Compute> factor = broadcast(static_cast<Compute>(1 / sum));
    zero(y, 0, span.begin);
    for (int64_t column = span.begin; column < span.end; column += kLanes) {
      Vector<Compute> v;
      memcpy(&v, values + column, sizeof v);
      store(y, column, piece.columns, X::narrow(v * factor));
    }
    zero(y, span.end, piece.columns);
  }
};

// ---- Backward ----

template <Element element, int64_t grad_stride, bool dropout>
struct Backward {
  using Y = Format<element>;
  using Storage = typename Y::Storage;
  using Compute = typename Y::Compute;
  static constexpr int kLanes = Simd<Compute>::kLanes;

  struct Operands {
    Vector<Compute> y;
    Vector<Compute> grad;
  };

  template <typename Which>
  static SMS_INLINE Operands operands(const Storage* y, const Storage* grad, const uint8_t* kept, int64_t column,
                                      Which lanes) {
    using Raw = typename Y::Raw;
    Operands result = {Y::widen(load<Raw>(y + column, lanes)),
                       Y::widen(grad_stride == 0 ? *grad - Raw{} : load<Raw>(grad + grad_stride * column, lanes))};
    if constexpr (dropout) {
      typename Simd<Compute>::Bytes bytes;
      memcpy(&bytes, kept + column, sizeof bytes);
      result.grad = widen_bytes<Compute>(bytes) != 0 ? result.grad : Vector<Compute>{};
    }
    return result;
  }

  static double dot(const BackwardPiece& piece) {
    const Storage* const y = static_cast<const Storage*>(piece.y);
    const Storage* const grad = static_cast<const Storage*>(piece.grad);
    const uint8_t* const kept = piece.kept;
    return sum_of<Compute>(piece.begin, piece.end, [=](int64_t column, auto lanes) __attribute__((always_inline)) {
      const Operands v = operands(y, grad, kept, column, lanes);
      return v.y * (v.y == 0 ? Vector<Compute>{} : v.grad);
    });
  }

  static void store_row(const BackwardPiece& piece, double scale, double dot) {
    const Storage* const y = static_cast<const Storage*>(piece.y);
    const Storage* const grad = static_cast<const Storage*>(piece.grad);
    Storage* const dx = static_cast<Storage*>(piece.dx);
    const Vector<Compute> scale_vector = broadcast(static_cast<Compute>(scale));
    const Vector<Compute> dot_vector = broadcast(static_cast<Compute>(dot));
    const Span<kLanes> span(piece.begin, piece.end);
    zero(dx, 0, span.begin);
    const auto store_vector = [&](int64_t column, auto lanes) __attribute__((always_inline)) {
      const Operands v = operands(y, grad, piece.kept, column, lanes);  // y is 0 in lanes that are not live
      const Vector<Compute> gradient = v.y * (v.grad - dot_vector) * scale_vector;
      store(dx, column, piece.columns, Y::narrow(v.y == 0 ? Vector<Compute>{} : gradient));
    };
    for (int64_t column = span.begin; column < span.end; column += kLanes) {
      visit_vector<kLanes>(piece.begin, piece.end, column, store_vector);
    }
    zero(dx, span.end, piece.columns);
  }

  static void accumulate(const BackwardPiece& piece, double dot, double* sums) {
    const Storage* const y = static_cast<const Storage*>(piece.y);
    const Storage* const grad = static_cast<const Storage*>(piece.grad);
    const Vector<Compute> dot_vector = broadcast(static_cast<Compute>(dot));
    const Span<kLanes> span(piece.begin, piece.end);
    for (int64_t column = span.begin; column < span.end; column += kLanes) {
      visit_vector<kLanes>(piece.begin, piece.end, column, [&](int64_t at, auto lanes) __attribute__((always_inline)) {
        const Operands v = operands(y, grad, piece.kept, at, lanes);  // y is 0 in lanes that are not live
        const Vector<Compute> gradient = v.y == 0 ? Vector<Compute>{} : v.y * (v.grad - dot_vector);
        const int64_t count = at + kLanes < piece.columns ? kLanes : piece.columns - at;
        for (int64_t i = 0; i < count; ++i) sums[at + i] += gradient[i];
      });
    }
  }

  static void write(const double* sums, int64_t columns, bool as_float32, void* target) {
    for (int64_t column = 0; column < columns; ++column) {
      const Compute value = static_cast<Compute>(sums[column]);
      if (as_float32) {
        static_cast<float*>(target)[column] = static_cast<float>(value);
      } else {
        store(static_cast<Storage*>(target), column, column + 1, Y::narrow(broadcast(value)));
      }
    }
  }
};

// ---- The table ----

template <Element element, MaskKind mask_kind>
constexpr ForwardKernel forward_kernel() {
  using Row = Forward<element, mask_kind>;
  return {Row::exponentials, Row::store_row, Row::store_dropped, Row::number};
}

template <Element element, int64_t grad_stride, bool dropout>
constexpr BackwardKernel backward_kernel() {
  using Row = Backward<element, grad_stride, dropout>;
  return {Row::dot, Row::store_row, Row::accumulate, Row::write};
}

constexpr RowKernels make_row_kernels(const char* instruction_set) {
  RowKernels kernels = {};
  kernels.instruction_set = instruction_set;
  kernels.keep = keep_columns;
  const auto fill = [&]<Element element>() {
    const int e = static_cast<int>(element);
    ForwardKernel* const forward = kernels.forward[e];
    forward[static_cast<int>(MaskKind::none)] = forward_kernel<element, MaskKind::none>();
    forward[static_cast<int>(MaskKind::boolean)] = forward_kernel<element, MaskKind::boolean>();
    forward[static_cast<int>(MaskKind::same)] = forward_kernel<element, MaskKind::same>();
    if constexpr (element_bytes(element) == 2) {
      forward[static_cast<int>(MaskKind::float32)] = forward_kernel<element, MaskKind::float32>();
    }
    kernels.backward[e][0][0] = backward_kernel<element, 0, false>();
    kernels.backward[e][0][1] = backward_kernel<element, 0, true>();
    kernels.backward[e][1][0] = backward_kernel<element, 1, false>();
    kernels.backward[e][1][1] = backward_kernel<element, 1, true>();
  };
  fill.template operator()<Element::float16>();
  fill.template operator()<Element::bfloat16>();
  fill.template operator()<Element::float32>();
  fill.template operator()<Element::float64>();
  return kernels;
}

}  // namespace
}  // namespace sms::cpu
