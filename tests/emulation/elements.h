// Elements in memory and their values, apart from how kernels convert them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "problem.h"

namespace sms::emulation {

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float16_value(uint16_t bits) {
  // The same fraction under an exponent that is 112 too small, subnormals included.
  const float size = (bits & 0x7c00) == 0x7c00 ? ((bits & 0x3ff) == 0 ? INFINITY : NAN)
                                               : float_of(uint32_t{bits & 0x7fffu} << 13) * 0x1p112f;
  return (bits & 0x8000) != 0 ? -size : size;
}

// To nearest, ties to even.
inline uint16_t float16_bits(float value) {
  const float size = std::fabs(value);
  const uint32_t bits = bits_of(size);
  uint32_t result;
  if (std::isnan(value)) {
    result = 0x7fff;
  } else if (size >= 65520.0f) {
    result = 0x7c00;
  } else if (size < 0x1p-14f) {
    result = bits_of(size + 0.5f) - bits_of(0.5f);  // whose last place is float16's smallest number
  } else {
    result = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
  }
  return static_cast<uint16_t>(result | (std::signbit(value) ? 0x8000 : 0));
}

inline float bfloat16_value(uint16_t bits) { return float_of(uint32_t{bits} << 16); }

inline uint16_t bfloat16_bits(float value) {
  if (std::isnan(value)) return 0x7fff;
  const uint32_t bits = bits_of(value);
  const uint32_t rest = bits & 0xffff;
  const uint32_t kept = bits >> 16;
  return static_cast<uint16_t>(kept + (rest > 0x8000 || (rest == 0x8000 && kept % 2 == 1) ? 1 : 0));
}

inline double read_element(Element element, const void* address) {
  uint16_t bits;
  float single;
  double value;
  switch (element) {
    case Element::float16:
    case Element::bfloat16:
      std::memcpy(&bits, address, sizeof bits);
      return element == Element::float16 ? float16_value(bits) : bfloat16_value(bits);
    case Element::float32: std::memcpy(&single, address, sizeof single); return single;
    case Element::float64: break;
  }
  std::memcpy(&value, address, sizeof value);
  return value;
}

inline void write_element(Element element, void* address, double value) {
  const auto single = static_cast<float>(value);
  switch (element) {
    case Element::float16:
    case Element::bfloat16: {
      const uint16_t bits = element == Element::float16 ? float16_bits(single) : bfloat16_bits(single);
      std::memcpy(address, &bits, sizeof bits);
      return;
    }
    case Element::float32: std::memcpy(address, &single, sizeof single); return;
    case Element::float64: std::memcpy(address, &value, sizeof value); return;
  }
}

// The nearest value that the element can have.
inline double rounded(Element element, double value) {
  char memory[8];
  write_element(element, memory, value);
  return read_element(element, memory);
}

}  // namespace sms::emulation
