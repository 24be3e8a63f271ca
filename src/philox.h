// Which cells dropout keeps, shared by host and device. Free of torch.
//
// The columns of a row come in fours, the first of which begins at column 0. Each four has a number: those of the rows
// before it first, then those before it in its row. Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers:
// as easy as 1, 2, 3; SC 2011) makes its four random numbers of 32 bits, with the counter that torch's generator would
// give to a thread of that number: so a cell's number depends on seed, offset, row and column alone.
#pragma once

#include "problem.h"

namespace sms {

inline constexpr int kFour = 4;

SMS_HOST_DEVICE int64_t fours_of(int64_t columns) { return (columns + kFour - 1) / kFour; }

struct Draw {
  uint64_t seed;
  uint64_t offset;
};

SMS_HOST_DEVICE Draw draw_of(const RandomState& state) {
  return {state.seed_pointer == nullptr ? state.seed : static_cast<uint64_t>(*state.seed_pointer),
          state.offset + (state.offset_pointer == nullptr ? 0 : static_cast<uint64_t>(*state.offset_pointer))};
}

template <typename Word>
struct Product {
  Word high;
  Word low;
};

struct MultiplyWords {
  SMS_HOST_DEVICE Product<uint32_t> operator()(uint32_t a, uint32_t b) const {
#if defined(__CUDA_ARCH__)
    uint64_t product;  // of one instruction; the compiler would add zeros to the upper half
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
#else
    const uint64_t product = uint64_t{a} * b;
#endif
    return {static_cast<uint32_t>(product >> 32), static_cast<uint32_t>(product)};
  }
};

// Turns a counter into random numbers. A word may be a vector of words; multiply(word, constant) is their product.
template <typename Word, typename Multiply>
SMS_HOST_DEVICE void philox(Word (&word)[4], uint64_t seed, const Multiply& multiply) {
  uint32_t low = static_cast<uint32_t>(seed);
  uint32_t high = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const Product<Word> first = multiply(word[0], 0xd2511f53u);
    const Product<Word> second = multiply(word[2], 0xcd9e8d57u);
    word[0] = second.high ^ word[1] ^ low;
    word[1] = second.low;
    word[2] = first.high ^ word[3] ^ high;
    word[3] = first.low;
    low += 0x9e3779b9u;
    high += 0xbb67ae85u;
  }
}

// The random numbers of the four with this number.
SMS_HOST_DEVICE void random_four(uint32_t (&word)[4], const Draw& draw, uint64_t number) {
  const uint64_t offset = draw.offset / kFour;
  word[0] = static_cast<uint32_t>(offset);
  word[1] = static_cast<uint32_t>(offset >> 32);
  word[2] = static_cast<uint32_t>(number);
  word[3] = static_cast<uint32_t>(number >> 32);
  philox(word, draw.seed, MultiplyWords());
}

}  // namespace sms
