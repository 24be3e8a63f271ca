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
// Of a row's last columns: masked vectors where there are such, else too long to be wanted in each kernel.
#if defined(__x86_64__) && SMS_VECTOR_BYTES == 64
#define SMS_TAIL SMS_INLINE
#else
#define SMS_TAIL __attribute__((noinline))
#endif

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
  using Number = int32_t;
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
  using Number = int64_t;
  typedef int64_t Index __attribute__((vector_size(kVectorBytes)));
  typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes / 8)));
  static constexpr double kInfinity = __builtin_inf();
  static constexpr double kNan = __builtin_nan("");
};

template <typename Compute>
using Vector = typename Simd<Compute>::Vector;
template <typename Compute>
using Bits = typename Simd<Compute>::Bits;
typedef uint64_t Bits128 __attribute__((vector_size(16)));
using Floats = Vector<float>;
using Doubles = Vector<double>;

template <typename Compute>
SMS_INLINE Vector<Compute> broadcast(Compute value) {
  return value - Vector<Compute>{};
}

template <typename Compute>
SMS_INLINE typename Simd<Compute>::Index lane_numbers() {
  typename Simd<Compute>::Index lane;
  for (int i = 0; i < Simd<Compute>::kLanes; ++i) lane[i] = i;
  return lane;
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
#if defined(__x86_64__)  // one instruction, which gives its second operand where either is NaN
#if SMS_VECTOR_BYTES == 64
  SMS_INLINE Floats operator()(Floats a, Floats b) const { return _mm512_maskz_max_ps(0xffff, b, a); }
  SMS_INLINE Doubles operator()(Doubles a, Doubles b) const { return _mm512_maskz_max_pd(0xff, b, a); }
#elif SMS_VECTOR_BYTES == 32
  SMS_INLINE Floats operator()(Floats a, Floats b) const { return _mm256_max_ps(b, a); }
  SMS_INLINE Doubles operator()(Doubles a, Doubles b) const { return _mm256_max_pd(b, a); }
#else
  SMS_INLINE Floats operator()(Floats a, Floats b) const { return _mm_max_ps(b, a); }
  SMS_INLINE Doubles operator()(Doubles a, Doubles b) const { return _mm_max_pd(b, a); }
#endif
#endif
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

// exp(d) = 2^(n + f) for d <= 0, n an integer and |f| <= 1/2: a polynomial for 2^f, n into the exponent. They are
// minimax for relative error with p(0) = 1 exactly: 1.9e-8 and 3.5e-17, below the rounding of the type.
template <typename Compute>
struct Exponential;

template <>
struct Exponential<float> {
  static constexpr float kBias = 127;
  static constexpr int kFraction = 23;  // bits
  static constexpr float kLeast = -0x1.601e68p+6f;  // -127 / log2(e)
  static constexpr float kPolynomial[] = {0x1.63941fe61ccb2p-13f, 0x1.603519f5708dep-10f, 0x1.3afc6d4eff1f7p-7f,
                                          0x1.c6ac367447829p-5f,  0x1.ebfc1d73f861fp-3f,  0x1.62e4340d1c0b6p-1f,
                                          1.0f};
};

template <>
struct Exponential<double> {
  static constexpr double kBias = 1023;
  static constexpr int kFraction = 52;
  static constexpr double kLeast = -0x1.628b76e3a7b61p+9;
  static constexpr double kPolynomial[] = {
      0x1.c08f918323219p-32, 0x1.e5fc666450e4dp-28, 0x1.b5406b96fdf5cp-24, 0x1.62bfd99f06163p-20,
      0x1.ffcbef3124659p-17, 0x1.43091307a8d4ap-13, 0x1.5d87fe7b6970dp-10, 0x1.3b2ab6fba2500p-7,
      0x1.c6b08d70491bbp-5,  0x1.ebfbdff82c596p-3,  0x1.62e42fefa39f2p-1,  1.0};
};

// exp(v - shift), in place, for v <= shift. Results below the least normal number are 0; -inf gives 0 and NaN gives
// NaN. `count` vectors step by step beside each other: one after the other, a processor looks ahead over few of them.
template <typename Compute, int count>
SMS_INLINE void exponentiate(Vector<Compute> (&v)[count], Vector<Compute> shift) {
  using Formula = Exponential<Compute>;
  // Adding 1.5 * 2^23 (2^52) rounds to an integer, left in the low bits of the sum: with the bias, the exponent field.
  constexpr Compute kMagic = static_cast<Compute>(int64_t{3} << (Formula::kFraction - 1)) + Formula::kBias;
  const Vector<Compute> magic = broadcast(kMagic);
  const Vector<Compute> log2e = broadcast(static_cast<Compute>(1.44269504088896340736));
  Vector<Compute> shifted[count], p[count];
#pragma GCC unroll 4
  for (int i = 0; i < count; ++i) {
    v[i] = Larger()(v[i] - shift, broadcast(Formula::kLeast));
    shifted[i] = fma(v[i], log2e, magic);
    v[i] = fma(v[i], log2e, magic - shifted[i]);
    p[i] = broadcast(Formula::kPolynomial[0]);
  }
#pragma GCC unroll 16
  for (size_t k = 1; k < sizeof Formula::kPolynomial / sizeof(Compute); ++k) {
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) p[i] = fma(p[i], v[i], broadcast(Formula::kPolynomial[k]));
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; ++i) v[i] = p[i] * (Vector<Compute>)((Bits<Compute>)shifted[i] << Formula::kFraction);
}

// Spelled out because GCC 12 converts half of a vector at a time.
SMS_INLINE Bits<float> widen_halves(Simd<float>::Halves v) {
#if defined(__x86_64__) && SMS_VECTOR_BYTES == 64
  return (Bits<float>)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)v);
#elif defined(__x86_64__) && SMS_VECTOR_BYTES == 32
  return (Bits<float>)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, Bits<float>);
#endif
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
  static SMS_INLINE Floats widen(Raw v) { return (Floats)(widen_halves(v) << 16); }
  // A NaN is the processor's own or was a bfloat16, with low bits of zero: rounding does not carry out of it.
  static SMS_INLINE Raw narrow(Floats v) {
    const Bits<float> bits = (Bits<float>)v;
    const Bits<float> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
#if defined(__x86_64__) && SMS_VECTOR_BYTES == 32  // GCC 12 packs in four instructions more
    const __m256i lanes = (__m256i)rounded;
    return (Raw)_mm_packus_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
#else
    return __builtin_convertvector(rounded, Raw);
#endif
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

// `count` bytes, fewer than 16, as the first of a vector's; others are zero, and their memory is not touched.
SMS_INLINE Bits128 load_bytes(const void* pointer, int64_t count) {
  const char* const bytes = static_cast<const char*>(pointer);
  // Two loads that may overlap, of the first and the last bytes.
  const auto ends = [&]<typename Word>(Word) __attribute__((always_inline)) {
    Word first, last;
    memcpy(&first, bytes, sizeof first);
    memcpy(&last, bytes + count - sizeof last, sizeof last);
    return Bits128{first, last};
  };
  if (count > 8) {
    const Bits128 words = ends(uint64_t{});
    return Bits128{words[0], words[1] >> (8 * (16 - count))};
  }
  if (count >= 4) {
    const Bits128 words = ends(uint32_t{});
    return Bits128{words[0] | words[1] << (8 * (count - 4)), 0};
  }
  if (count >= 2) {
    const Bits128 words = ends(uint16_t{});
    return Bits128{words[0] | words[1] << (8 * (count - 2)), 0};
  }
  return Bits128{count == 0 ? uint64_t{0} : static_cast<uint8_t>(*bytes), 0};
}

template <typename Raw>
SMS_INLINE Raw load(const void* pointer) {
  Raw raw;
  memcpy(&raw, pointer, sizeof raw);
  return raw;
}

// The first `count` elements, fewer than a vector's; others are zero, and their memory is not touched.
#if defined(__x86_64__) && SMS_VECTOR_BYTES == 32
template <typename Raw>
SMS_INLINE Raw load_first(const float* pointer, int64_t count) {
  return _mm256_maskload_ps(pointer, (__m256i)(lane_numbers<float>() < static_cast<int32_t>(count)));
}

template <typename Raw>
SMS_INLINE Raw load_first(const double* pointer, int64_t count) {
  return _mm256_maskload_pd(pointer, (__m256i)(lane_numbers<double>() < count));
}
#endif

template <typename Raw, typename Storage>
SMS_TAIL Raw load_first(const Storage* pointer, int64_t count) {
#if defined(__x86_64__) && SMS_VECTOR_BYTES == 64
  const uint32_t mask = (1u << count) - 1;
  if constexpr (sizeof(Storage) == 8) {
    return (Raw)_mm512_maskz_loadu_epi64(mask, pointer);
  } else if constexpr (sizeof(Storage) == 4) {
    return (Raw)_mm512_maskz_loadu_epi32(mask, pointer);
  } else if constexpr (sizeof(Storage) == 2) {
    return (Raw)_mm256_maskz_loadu_epi16(mask, pointer);
  } else {
    Raw raw;
    const __m128i bytes = _mm_maskz_loadu_epi8(mask, pointer);
    memcpy(&raw, &bytes, sizeof raw);
    return raw;
  }
#else
  static_assert(sizeof(Raw) <= 16);
  const Bits128 words = load_bytes(pointer, count * static_cast<int64_t>(sizeof(Storage)));
  Raw raw;
  memcpy(&raw, &words, sizeof raw);
  return raw;
#endif
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

// Writes the first `count` elements, fewer than a vector's.
template <typename Raw, typename Storage>
SMS_TAIL void store_first(Storage* pointer, int64_t count, Raw raw) {
#if defined(__x86_64__) && SMS_VECTOR_BYTES == 64
  const uint32_t mask = (1u << count) - 1;
  if constexpr (sizeof(Raw) == 64 && sizeof(Storage) == 4) _mm512_mask_storeu_epi32(pointer, mask, (__m512i)raw);
  if constexpr (sizeof(Raw) == 64 && sizeof(Storage) == 8) _mm512_mask_storeu_epi64(pointer, mask, (__m512i)raw);
  if constexpr (sizeof(Raw) == 32) _mm256_mask_storeu_epi16(pointer, mask, (__m256i)raw);
#else
  constexpr int64_t kLanes = sizeof(Raw) / sizeof(Storage);
  if constexpr (kLanes > 1) {
    typename VectorOf<Storage, kLanes / 2>::Type halves[2];
    memcpy(halves, &raw, sizeof raw);
    if (count >= kLanes / 2) {
      memcpy(pointer, &halves[0], sizeof halves[0]);
      store_first(pointer + kLanes / 2, count - kLanes / 2, halves[1]);
    } else {
      store_first(pointer, count, halves[0]);
    }
  }
#endif
}

// Writes the lanes of the vector at `column` that lie in a row of `columns`.
template <typename Raw, typename Storage>
SMS_INLINE void store(Storage* row, int64_t column, int64_t columns, Raw raw) {
  constexpr int64_t kLanes = sizeof(Raw) / sizeof(Storage);
  if (column + kLanes <= columns) {
    memcpy(row + column, &raw, sizeof raw);
  } else {
    store_first(row + column, columns - column, raw);
  }
}

template <typename Storage>
SMS_INLINE void zero(Storage* row, int64_t begin, int64_t end) {
  if (begin < end) memset(row + begin, 0, static_cast<size_t>(end - begin) * sizeof(Storage));
}

// ---- Walking a row ----

// Vectors of a block, which are computed beside each other. Terms are summed in blocks counted from column 0, so that
// what is added to what does not depend on where the live columns begin: a term of zeros changes no bit.
constexpr int kBlock = 4;

// Which lanes take part: all, or those of columns [begin, end) in a row of `columns`; 0, 0 where none do.
struct AllLanes {};
struct SomeLanes {
  int64_t begin;
  int64_t end;
  int64_t columns;
};

// A vector at `column` of a row. Lanes past the row's end are zero, and their memory is not touched.
template <typename Raw, typename Storage>
SMS_INLINE Raw load(const Storage* row, int64_t column, AllLanes) {
  return load<Raw>(row + column);
}

template <typename Raw, typename Storage>
SMS_INLINE Raw load(const Storage* row, int64_t column, SomeLanes lanes) {
  constexpr int64_t kLanes = sizeof(Raw) / sizeof(Storage);
  if (column + kLanes <= lanes.columns) return load<Raw>(row + column);
  return load_first<Raw>(row + column, lanes.columns - column);
}

template <typename Raw, typename Storage>
SMS_INLINE void store(Storage* row, int64_t column, AllLanes, Raw raw) {
  memcpy(row + column, &raw, sizeof raw);
}

template <typename Raw, typename Storage>
SMS_INLINE void store(Storage* row, int64_t column, SomeLanes lanes, Raw raw) {
  store(row, column, lanes.columns, raw);
}

SMS_INLINE SomeLanes live_lanes(const LiveColumns& live, int64_t columns, int64_t row) {
  const int64_t begin = live.begin + row * live.step;
  const int64_t end = live.end + row * live.step;
  const SomeLanes lanes = {begin > 0 ? begin : 0, end < live.limit ? end : live.limit, columns};
  return lanes.begin < lanes.end ? lanes : SomeLanes{0, 0, columns};
}

template <typename Compute>
SMS_INLINE Vector<Compute> select(int64_t, AllLanes, Vector<Compute> inside, Vector<Compute>) {
  return inside;
}

template <typename Compute>
SMS_INLINE Vector<Compute> select(int64_t column, SomeLanes lanes, Vector<Compute> inside, Vector<Compute> outside) {
  using Index = typename Simd<Compute>::Index;
  using Number = typename Simd<Compute>::Number;
  const Index lane = lane_numbers<Compute>();
  const Index begin = static_cast<Number>(lanes.begin - column) - Index{};
  const Index end = static_cast<Number>(lanes.end - column) - Index{};
  return ((lane >= begin) & (lane < end)) ? inside : outside;
}

// The columns of the blocks that hold a live column, as far as the row's last vector.
template <typename Compute>
struct Span {
  static constexpr int64_t kLanes = Simd<Compute>::kLanes;
  static constexpr int64_t kColumns = kBlock * kLanes;

  int64_t begin = 0;
  int64_t end = 0;

  SMS_INLINE explicit Span(SomeLanes live) {
    begin = live.begin & -kColumns;
    const int64_t blocks_end = (live.end + kColumns - 1) & -kColumns;
    const int64_t row_end = (live.columns + kLanes - 1) & -kLanes;
    end = blocks_end < row_end ? blocks_end : row_end;
  }
};

// Calls visit(column, lanes, place) for each vector of the span, and end() after each block. The place is the vector's
// in its block, or 0 where not all lanes take part.
template <typename Compute, typename Visit, typename End>
SMS_INLINE void visit_vectors(const Span<Compute>& span, SomeLanes live, const Visit& visit, const End& end) {
  constexpr int64_t kLanes = Simd<Compute>::kLanes;
  constexpr int64_t kColumns = Span<Compute>::kColumns;
  int64_t column = span.begin;
  // Of blocks that are wholly live, from here on; the first and the last one of the span may not be.
  int64_t whole = live.begin > column ? column : live.end & -kColumns;
  while (true) {
    for (; column < whole; column += kColumns) {
#pragma GCC unroll 4
      for (int place = 0; place < kBlock; ++place) visit(column + place * kLanes, AllLanes{}, place);
      end();
    }
    if (column >= span.end) return;
    const int64_t next = column + kColumns;
    const int64_t last = next < span.end ? next : span.end;
    for (; column < last; column += kLanes) visit(column, live, 0);
    end();
    column = next;
    whole = live.end & -kColumns;
  }
}

// Half of the lanes. Spelled out because GCC 12 converts two lanes at a time.
SMS_INLINE Doubles low_doubles(Floats v) {
#if defined(__x86_64__) && SMS_VECTOR_BYTES == 64
  return _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, v, 0));
#elif defined(__x86_64__) && SMS_VECTOR_BYTES == 32
  return _mm256_cvtps_pd(_mm256_castps256_ps128(v));
#else
  typename VectorOf<float, Simd<float>::kLanes / 2>::Type halves[2];
  memcpy(halves, &v, sizeof v);
  return __builtin_convertvector(halves[0], Doubles);
#endif
}

SMS_INLINE Doubles high_doubles(Floats v) {
#if defined(__x86_64__) && SMS_VECTOR_BYTES == 64
  return _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, v, 1));
#elif defined(__x86_64__) && SMS_VECTOR_BYTES == 32
  return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
#else
  typename VectorOf<float, Simd<float>::kLanes / 2>::Type halves[2];
  memcpy(halves, &v, sizeof v);
  return __builtin_convertvector(halves[1], Doubles);
#endif
}

// Adds to the first `count` of as many sums as lanes, or to all.
SMS_INLINE void add_to(double* sums, int64_t count, Doubles v) {
  constexpr int64_t kLanes = Simd<double>::kLanes;
  if (count >= kLanes) {
    v += load<Doubles>(sums);
    memcpy(sums, &v, sizeof v);
  } else {
    for (int64_t i = 0; i < count; ++i) sums[i] += v[i];
  }
}

SMS_INLINE void add_to(double* sums, int64_t count, Floats v) {
  add_to(sums, count, low_doubles(v));
  add_to(sums + Simd<double>::kLanes, count - Simd<double>::kLanes, high_doubles(v));
}

// Sums blocks of terms. Those of a block are added as they are, and blocks in double: among 65,536 terms a float sum
// would lose, each time, what lies below half a unit in its last place. Four lose at most 2.4e-7 of the sum.
template <typename Compute>
class Accumulator {
 public:
  SMS_INLINE void operator+=(Vector<Compute> term) { block_ += term; }

  SMS_INLINE void end_block() {
    if constexpr (sizeof(Compute) == 8) {
      low_ += block_;
    } else {
      low_ += low_doubles(block_);
      high_ += high_doubles(block_);
    }
    block_ = Vector<Compute>{};
  }

  SMS_INLINE double total() const { return fold_lanes<double, Simd<double>::kLanes>(low_ + high_, Plus()); }

 private:
  Vector<Compute> block_ = {};
  Doubles low_ = {};
  Doubles high_ = {};
};

// Rows up to this long are walked vector by vector, live or not: without branches that differ from row to row.
template <typename Compute>
constexpr int64_t kShortColumns = 2 * Span<Compute>::kColumns;

// The sum of term(column) over the vectors of a short row.
template <typename Compute, typename Term>
SMS_INLINE double sum_short(int64_t columns, const Term& term) {
  constexpr int64_t kLanes = Simd<Compute>::kLanes;
  constexpr int64_t kColumns = Span<Compute>::kColumns;
  Accumulator<Compute> sum;
  for (int64_t column = 0; column < columns; column += kLanes) {
    if (column == kColumns) sum.end_block();
    sum += term(column);
  }
  sum.end_block();
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

// ---- Fetching ahead ----

constexpr int64_t kLineBytes = 64;

// The lines of a row's columns from `column` on.
template <int64_t columns, int64_t bytes, bool to_write = false>
SMS_INLINE void fetch_columns(const char* row, int64_t column) {
#pragma GCC unroll 8
  for (int64_t at = 0; at < columns * bytes; at += kLineBytes) __builtin_prefetch(row + column * bytes + at, to_write);
}

// Among short rows that lie one after another: what is as long as one, some rows further. Masked loads and stores of
// AVX-512 do not make the processor fetch by itself: backward of 64 columns past the caches took 2.3 times as long.
template <bool to_write = false>
SMS_INLINE void fetch_short_row(const char* row, int64_t bytes) {
  constexpr int64_t kDistance = 1024;
  for (int64_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(row + kDistance + at, to_write);
}

// ---- Forward ----

// What is fetched while a row's exponentials are computed, which leaves memory idle: the row of y that is written after
// them, and what is read for the next row. Took rows of 2,048 float32 past the caches from 0.86 to 0.51 ns an element
// (0.70 with y alone, 0.76 with x alone; one thread of an EPYC).
struct Ahead {
  char* y;
  const char* x;
  const char* mask;
  int64_t mask_bytes;  // of a column; 0 without a mask
};

template <Element element>
void store_nans(void* y, int64_t columns) {
  using X = Format<element>;
  for (int64_t column = 0; column < columns; ++column) static_cast<typename X::Storage*>(y)[column] = X::kNan;
}

// Replaces the scores of a span by exp(score - shift), and sums them.
template <Element element>
double sum_exponentials(typename Format<element>::Compute* values, Span<typename Format<element>::Compute> span,
                        typename Format<element>::Compute shift, const Ahead& ahead) {
  using Compute = typename Format<element>::Compute;
  constexpr int64_t kLanes = Simd<Compute>::kLanes;
  const Vector<Compute> shift_vector = broadcast(shift);
  Accumulator<Compute> sum;
  const auto run = [&]<int count>(int64_t column, Vector<Compute>(&v)[count]) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) v[i] = load<Vector<Compute>>(values + column + i * kLanes);
    exponentiate<Compute>(v, shift_vector);
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) {
      memcpy(values + column + i * kLanes, &v[i], sizeof v[i]);
      sum += v[i];
    }
  };
  int64_t column = span.begin;
  for (; column + span.kColumns <= span.end; column += span.kColumns) {
    fetch_columns<span.kColumns, element_bytes(element)>(ahead.x, column);
    fetch_columns<span.kColumns, element_bytes(element), /*to_write=*/true>(ahead.y, column);
    for (int64_t at = 0; at < span.kColumns * ahead.mask_bytes; at += kLineBytes) {
      __builtin_prefetch(ahead.mask + column * ahead.mask_bytes + at);
    }
    Vector<Compute> block[kBlock];
    run(column, block);
    sum.end_block();
  }
  for (; column < span.end; column += kLanes) {
    Vector<Compute> one[1];
    run(column, one);
  }
  sum.end_block();
  return sum.total();
}

// exp(value) of `count` values and, beyond them, of what fills a block.
template <typename Compute>
void exponentiate_all(Compute* values, int64_t count) {
  constexpr int64_t kLanes = Simd<Compute>::kLanes;
  for (int64_t at = 0; at < count; at += kBlock * kLanes) {
    Vector<Compute> block[kBlock];
#pragma GCC unroll 4
    for (int i = 0; i < kBlock; ++i) block[i] = load<Vector<Compute>>(values + at + i * kLanes);
    exponentiate<Compute>(block, Vector<Compute>{});
#pragma GCC unroll 4
    for (int i = 0; i < kBlock; ++i) memcpy(values + at + i * kLanes, &block[i], sizeof block[i]);
  }
}

// From exponentials of short rows, each of which begins a vector.
template <Element element>
void store_short_rows(char* y, int64_t y_step, int64_t rows, int64_t columns,
                      const typename Format<element>::Compute* values) {
  using X = Format<element>;
  using Storage = typename X::Storage;
  using Compute = typename X::Compute;
  constexpr int64_t kLanes = Simd<Compute>::kLanes;
  const int64_t row_columns = (columns + kLanes - 1) & -kLanes;
  for (int64_t row = 0; row < rows; ++row, y += y_step, values += row_columns) {
    const double total = sum_short<Compute>(
        columns, [&](int64_t column) __attribute__((always_inline)) { return load<Vector<Compute>>(values + column); });
    const Vector<Compute> factor = broadcast(static_cast<Compute>(total == 0 ? 0 : 1 / total));
    for (int64_t column = 0; column < row_columns; column += kLanes) {
      const auto raw = X::narrow(load<Vector<Compute>>(values + column) * factor);
      store(reinterpret_cast<Storage*>(y), column, columns, raw);
    }
    if (total != total) store_nans<element>(y, columns);
  }
}

// Writes a row of y: a span of values times a factor, and zeros beside it. A factor of NaN makes all of them NaN.
template <Element element>
void store_probabilities(typename Format<element>::Storage* y, int64_t columns,
                         Span<typename Format<element>::Compute> span, const typename Format<element>::Compute* values,
                         double factor) {
  using X = Format<element>;
  using Compute = typename X::Compute;
  constexpr int64_t kLanes = Simd<Compute>::kLanes;
  if (factor != factor) {
    store_nans<element>(y, columns);
    return;
  }
  const Vector<Compute> factor_vector = broadcast(static_cast<Compute>(factor));
  zero(y, 0, span.begin);
  int64_t column = span.begin;
  const auto vector_at = [=](int64_t at) __attribute__((always_inline)) {
    return X::narrow(load<Vector<Compute>>(values + at) * factor_vector);
  };
  const int64_t whole = span.end <= columns ? span.end : span.end - kLanes;
  for (; column + span.kColumns <= whole; column += span.kColumns) {
#pragma GCC unroll 4
    for (int64_t at = column; at < column + span.kColumns; at += kLanes) store(y, at, AllLanes{}, vector_at(at));
  }
  for (; column < span.end; column += kLanes) store(y, column, columns, vector_at(column));
  zero(y, span.end, columns);
}

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
  static constexpr int64_t kMaskBytes = mask_kind == MaskKind::none ? 0 : sizeof(MaskStorage);
  static constexpr int kLanes = Lanes::kLanes;

  // Scores of one vector, -inf in lanes that are masked or not live.
  template <typename Which>
  static SMS_INLINE Vector<Compute> scores(const Storage* x, const MaskStorage* mask, Vector<Compute> scale,
                                           int64_t column, Which lanes) {
    const Vector<Compute> excluded = broadcast(-Lanes::kInfinity);
    Vector<Compute> s = X::widen(load<typename X::Raw>(x, column, lanes)) * scale;
    if constexpr (mask_kind == MaskKind::boolean) {
      const auto masked = load<typename Lanes::Bytes>(mask, column, lanes);
      s = widen_bytes<Compute>(masked) != 0 ? excluded : s;
    } else if constexpr (mask_kind != MaskKind::none) {
      s += Mask::widen(load<typename Mask::Raw>(mask, column, lanes));
    }
    return select<Compute>(column, lanes, s, excluded);
  }

  // Fills the span with scores, and finds the largest: -inf where all are -inf or NaN.
  static SMS_INLINE Compute largest_score(const Storage* x, const MaskStorage* mask, Compute scale,
                                          const Span<Compute>& span, SomeLanes live, Compute* values) {
    const Vector<Compute> scale_vector = broadcast(scale);
    const Larger larger;  // passes over NaN; the sum of exponentials does not
    Vector<Compute> largest[kBlock];
    for (auto& v : largest) v = broadcast(-Lanes::kInfinity);
    visit_vectors<Compute>(
        span, live,
        [&](int64_t column, auto lanes, int place) __attribute__((always_inline)) {
          const Vector<Compute> s = scores(x, mask, scale_vector, column, lanes);
          memcpy(values + column, &s, sizeof s);
          largest[place] = larger(largest[place], s);
        },
        []() __attribute__((always_inline)) {});
    return fold_lanes<Compute, kLanes>(larger(larger(largest[0], largest[1]), larger(largest[2], largest[3])), larger);
  }

  static ExpSum exponentials(const ForwardPiece& piece, double scale, void* scratch) {
    Compute* const values = static_cast<Compute*>(scratch);
    const SomeLanes live = {piece.begin, piece.end, piece.columns};
    const Span<Compute> span(live);
    const Storage* const x = static_cast<const Storage*>(piece.x);
    const Compute largest = largest_score(x, static_cast<const MaskStorage*>(piece.mask), static_cast<Compute>(scale),
                                          span, live, values);
    const Compute shift = finite_or_infinite(largest);
    const Ahead ahead = {static_cast<char*>(piece.y), reinterpret_cast<const char*>(x + piece.columns), nullptr, 0};
    return {shift, sum_exponentials<element>(values, span, shift, ahead)};
  }

  // Where all scores are -inf or NaN, their exponentials are to be 0 or NaN. One of +inf gives inf - inf = NaN.
  static SMS_INLINE Compute finite_or_infinite(Compute largest) { return largest == -Lanes::kInfinity ? 0 : largest; }

  // Many at a time, so that their exponentials are computed beside each other.
  static void short_rows(const ForwardRun& run, Compute* values) {
    const Larger larger;
    const Vector<Compute> scale = broadcast(static_cast<Compute>(run.scale));
    const int64_t row_columns = (run.columns + kLanes - 1) & -int64_t{kLanes};
    const char* x = static_cast<const char*>(run.x);
    const char* mask = static_cast<const char*>(run.mask);
    const int64_t most = kBatchScores / row_columns;
    for (int64_t first = 0, count; first < run.rows; first += count) {
      count = run.rows - first < most ? run.rows - first : most;
      Compute* at = values;
      for (int64_t row = first; row < first + count; ++row, x += run.x_step, mask += run.mask_step, at += row_columns) {
        const SomeLanes live = live_lanes(run.live, run.columns, row);
        Vector<Compute> largest = broadcast(-Lanes::kInfinity);
        for (int64_t column = 0; column < row_columns; column += kLanes) {
          const Vector<Compute> s = scores(reinterpret_cast<const Storage*>(x),
                                           reinterpret_cast<const MaskStorage*>(mask), scale, column, live);
          memcpy(at + column, &s, sizeof s);
          largest = larger(largest, s);
        }
        const Vector<Compute> shift = broadcast(finite_or_infinite(fold_lanes<Compute, kLanes>(largest, larger)));
        for (int64_t column = 0; column < row_columns; column += kLanes) {
          const Vector<Compute> shifted = load<Vector<Compute>>(at + column) - shift;
          memcpy(at + column, &shifted, sizeof shifted);
        }
      }
      exponentiate_all(values, count * row_columns);
      store_short_rows<element>(static_cast<char*>(run.y) + first * run.y_step, run.y_step, count, run.columns, values);
    }
  }

  static void rows(const ForwardRun& run, void* scratch) {
    Compute* const values = static_cast<Compute*>(scratch);
    if (run.columns <= kShortColumns<Compute>) {
      short_rows(run, values);
      return;
    }
    const char* x = static_cast<const char*>(run.x);
    const char* mask = static_cast<const char*>(run.mask);
    char* y = static_cast<char*>(run.y);
    for (int64_t row = 0; row < run.rows; ++row, x += run.x_step, mask += run.mask_step, y += run.y_step) {
      const SomeLanes live = live_lanes(run.live, run.columns, row);
      const Span<Compute> span(live);
      const Compute largest =
          largest_score(reinterpret_cast<const Storage*>(x), reinterpret_cast<const MaskStorage*>(mask),
                        static_cast<Compute>(run.scale), span, live, values);
      const Ahead ahead = {y, x + run.x_step, mask + run.mask_step, kMaskBytes};
      const double sum = sum_exponentials<element>(values, span, finite_or_infinite(largest), ahead);
      store_probabilities<element>(reinterpret_cast<Storage*>(y), run.columns, span, values, sum == 0 ? 0 : 1 / sum);
    }
  }

  static double number(const void* address, bool is_float32) {
    if (is_float32) return *static_cast<const float*>(address);
    return X::widen(load_first<typename X::Raw>(static_cast<const Storage*>(address), 1))[0];
  }

  static void store_row(const ForwardPiece& piece, const void* scratch, double factor) {
    const Span<Compute> span({piece.begin, piece.end, piece.columns});
    store_probabilities<element>(static_cast<Storage*>(piece.y), piece.columns, span,
                                 static_cast<const Compute*>(scratch), factor);
  }

  // A vector of y with dropout.
  static SMS_INLINE typename X::Raw dropped(typename X::Raw y, const uint8_t* kept, Vector<Compute> factor) {
    const auto bytes = load<typename Lanes::Bytes>(kept);
    return X::narrow(widen_bytes<Compute>(bytes) != 0 ? X::widen(y) * factor : Vector<Compute>{});
  }

  static void store_dropped(const ForwardPiece& piece, const void* scratch, double factor, const Kept& kept) {
    if (piece.before_dropout != nullptr) {
      ForwardPiece before = piece;
      before.y = piece.before_dropout;
      store_row(before, scratch, factor);
    }
    const Compute* const values = static_cast<const Compute*>(scratch);
    Storage* const y = static_cast<Storage*>(piece.y);
    if (factor != factor) {
      for (int64_t i = 0; i < piece.columns; ++i) y[i] = kept.bytes[i] != 0 ? X::kNan : Storage{};
      return;
    }
    const Span<Compute> span({piece.begin, piece.end, piece.columns});
    const Vector<Compute> normalizer = broadcast(static_cast<Compute>(factor));
    const Vector<Compute> kept_factor = broadcast(static_cast<Compute>(kept.factor));
    zero(y, 0, span.begin);
    for (int64_t column = span.begin; column < span.end; column += kLanes) {
      const Vector<Compute> v = load<Vector<Compute>>(values + column) * normalizer;
      store(y, column, piece.columns, dropped(X::narrow(v), kept.bytes + column, kept_factor));
    }
    zero(y, span.end, piece.columns);
  }
};

// ---- Backward ----

// Writes `columns` numbers, as floats or elements.
template <Element element>
void write_numbers(const double* numbers, int64_t columns, bool as_float32, void* target) {
  using Y = Format<element>;
  for (int64_t column = 0; column < columns; ++column) {
    const auto value = static_cast<typename Y::Compute>(numbers[column]);
    if (as_float32) {
      static_cast<float*>(target)[column] = static_cast<float>(value);
    } else {
      store(static_cast<typename Y::Storage*>(target), column, column + 1, Y::narrow(broadcast(value)));
    }
  }
}

template <Element element, int64_t grad_stride, bool dropout>
struct Backward {
  using Y = Format<element>;
  using Storage = typename Y::Storage;
  using Compute = typename Y::Compute;
  static constexpr int64_t kLanes = Simd<Compute>::kLanes;
  static constexpr int64_t kBlockColumns = Span<Compute>::kColumns;
  static constexpr int64_t kBytes = sizeof(Storage);

  // Of a row.
  const Storage* y;
  const Storage* grad;
  const uint8_t* kept;
  SomeLanes live;
  Span<Compute> span;

  SMS_INLINE Backward(const void* y_, const void* grad_, const uint8_t* kept_, SomeLanes live_)
      : y(static_cast<const Storage*>(y_)),
        grad(static_cast<const Storage*>(grad_)),
        kept(kept_),
        live(live_),
        span(live_) {}

  SMS_INLINE explicit Backward(const BackwardPiece& piece)
      : Backward(piece.y, piece.grad, piece.kept, {piece.begin, piece.end, piece.columns}) {}

  struct Operands {
    Vector<Compute> y;  // 0 in lanes that are not live
    Vector<Compute> grad;
  };

  template <typename Which>
  SMS_INLINE Operands operands(int64_t column, Which lanes) const {
    using Raw = typename Y::Raw;
    const Vector<Compute> none = {};
    Operands result = {select<Compute>(column, lanes, Y::widen(load<Raw>(y, column, lanes)), none),
                       Y::widen(grad_stride == 0 ? *grad - Raw{} : load<Raw>(grad, column, lanes))};
    if constexpr (dropout) {
      const auto bytes = load<typename Simd<Compute>::Bytes>(kept + column);
      result.grad = widen_bytes<Compute>(bytes) != 0 ? result.grad : none;
    }
    return result;
  }

  struct Factors {
    Vector<Compute> scale;
    Vector<Compute> dot;
    SMS_INLINE Factors(double scale_, double dot_)
        : scale(broadcast(static_cast<Compute>(scale_))), dot(broadcast(static_cast<Compute>(dot_))) {}
  };

  template <typename Which>
  SMS_INLINE Vector<Compute> product(int64_t column, Which lanes) const {
    const Operands v = operands(column, lanes);
    return v.y * (v.y == 0 ? Vector<Compute>{} : v.grad);
  }

  template <typename Which>
  SMS_INLINE typename Y::Raw gradient(int64_t column, Which lanes, const Factors& factors) const {
    const Operands v = operands(column, lanes);
    return Y::narrow(v.y == 0 ? Vector<Compute>{} : v.y * (v.grad - factors.dot) * factors.scale);
  }

  // Fetches the row of dx ahead, as store_row() does the next one of y and grad: 8 to 15% of the time of rows past the
  // caches.
  SMS_INLINE double dot(const void* dx) const {
    Accumulator<Compute> sum;
    visit_vectors<Compute>(
        span, live,
        [&](int64_t column, auto lanes, int place) __attribute__((always_inline)) {
          if (place == 0) fetch_columns<kBlockColumns, kBytes, /*to_write=*/true>(static_cast<const char*>(dx), column);
          sum += product(column, lanes);
        },
        [&]() __attribute__((always_inline)) { sum.end_block(); });
    return sum.total();
  }

  // The next row is so many bytes further.
  SMS_INLINE void store_row(void* target, double scale, double dot, int64_t y_step, int64_t grad_step) const {
    Storage* const dx = static_cast<Storage*>(target);
    const Factors factors(scale, dot);
    zero(dx, 0, span.begin);
    visit_vectors<Compute>(
        span, live,
        [&](int64_t column, auto lanes, int place) __attribute__((always_inline)) {
          if (place == 0) {
            fetch_columns<kBlockColumns, kBytes>(reinterpret_cast<const char*>(y) + y_step, column);
            if (grad_stride != 0) {
              fetch_columns<kBlockColumns, kBytes>(reinterpret_cast<const char*>(grad) + grad_step, column);
            }
          }
          store(dx, column, lanes, gradient(column, lanes, factors));
        },
        []() __attribute__((always_inline)) {});
    zero(dx, span.end, live.columns);
  }

  static double dot_of_piece(const BackwardPiece& piece) { return Backward(piece).dot(piece.dx); }

  static void store_piece(const BackwardPiece& piece, double scale, double dot) {
    Backward(piece).store_row(piece.dx, scale, dot, piece.columns * kBytes, piece.columns * kBytes);
  }

  static void short_rows(const BackwardRun& run) {
    const char* y = static_cast<const char*>(run.y);
    const char* grad = static_cast<const char*>(run.grad);
    char* dx = static_cast<char*>(run.dx);
    const int64_t columns = run.columns;
    for (int64_t row = 0; row < run.rows; ++row, y += run.y_step, grad += run.grad_step, dx += run.dx_step) {
      fetch_short_row(y, columns * kBytes);
      if (grad_stride != 0) fetch_short_row(grad, columns * kBytes);
      fetch_short_row</*to_write=*/true>(dx, columns * kBytes);
      const Backward backward(y, grad, nullptr, live_lanes(run.live, columns, row));
      const Factors factors(run.scale, sum_short<Compute>(columns, [&](int64_t column) __attribute__((always_inline)) {
        return backward.product(column, backward.live);
      }));
      for (int64_t column = 0; column < columns; column += kLanes) {
        const auto raw = backward.gradient(column, backward.live, factors);
        store(reinterpret_cast<Storage*>(dx), column, columns, raw);
      }
    }
  }

  static void rows(const BackwardRun& run) {
    // Two blocks of 64 columns take half as long again when they are walked so.
    if (run.columns <= (kVectorBytes == 64 ? kBlockColumns : kShortColumns<Compute>)) {
      short_rows(run);
      return;
    }
    const char* y = static_cast<const char*>(run.y);
    const char* grad = static_cast<const char*>(run.grad);
    char* dx = static_cast<char*>(run.dx);
    for (int64_t row = 0; row < run.rows; ++row, y += run.y_step, grad += run.grad_step, dx += run.dx_step) {
      const Backward backward(y, grad, nullptr, live_lanes(run.live, run.columns, row));
      backward.store_row(dx, run.scale, backward.dot(dx), run.y_step, run.grad_step);
    }
  }

  static void accumulate(const BackwardPiece& piece, double dot, double* sums) {
    const Backward row(piece);
    const Vector<Compute> dot_vector = broadcast(static_cast<Compute>(dot));
    visit_vectors<Compute>(
        row.span, row.live,
        [&](int64_t column, auto lanes, int) __attribute__((always_inline)) {
          const Operands v = row.operands(column, lanes);
          const Vector<Compute> gradient = v.y == 0 ? Vector<Compute>{} : v.y * (v.grad - dot_vector);
          add_to(sums + column, piece.columns - column, gradient);
        },
        []() __attribute__((always_inline)) {});
  }
};

// ---- The table ----

template <Element element, MaskKind mask_kind>
constexpr ForwardKernel forward_kernel() {
  using Row = Forward<element, mask_kind>;
  return {Row::rows, Row::exponentials, Row::store_row, Row::store_dropped, Row::number};
}

template <Element element, int64_t grad_stride, bool dropout>
constexpr BackwardKernel backward_kernel() {
  using Row = Backward<element, grad_stride, dropout>;
  return {dropout ? nullptr : Row::rows, Row::dot_of_piece, Row::store_piece, Row::accumulate, write_numbers<element>};
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
