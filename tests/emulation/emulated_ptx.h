// The functions of src/cuda/ptx.cuh on a host, as the PTX documentation describes their instructions.
#pragma once

#include "device.h"
#include "elements.h"

namespace sms::cuda {

inline void expect_boundary(const void* address, uintptr_t bytes = 16) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) emulation::fail("a vector at an address out of alignment");
}

inline void load_16(uint32_t (&word)[4], const char* address, bool) {
  expect_boundary(address);
  std::memcpy(word, address, 16);
}

inline void load_8(uint32_t& low, uint32_t& high, const char* address) {
  expect_boundary(address, 8);
  std::memcpy(&low, address, 4);
  std::memcpy(&high, address + 4, 4);
}

inline void store_16(char* address, const uint32_t (&word)[4]) {
  expect_boundary(address);
  std::memcpy(address, word, 16);
}

inline const char* one_address(const char* address) { return address; }

inline int one_number(int number) { return number; }

template <int kThreads>
void wait_for_half_of_block(bool is_first) {
  emulation::wait_for_threads(is_first ? 0 : 1, kThreads);
}

inline uint32_t any_word() { return 0xffffffffu; }

template <int kNumber>
void keep_apart() {}

template <uint32_t kBits>
float constant_of_branch() {
  return __uint_as_float(kBits);
}

inline void unpack_float16(uint32_t pair, float& low, float& high) {
  low = emulation::float16_value(static_cast<uint16_t>(pair));
  high = emulation::float16_value(static_cast<uint16_t>(pair >> 16));
}

inline uint32_t pack_float16(float low, float high) {
  return emulation::float16_bits(low) | uint32_t{emulation::float16_bits(high)} << 16;
}

template <uint32_t kBytes>
uint32_t spread_signs(uint32_t word) {
  uint32_t spread = 0;
  for (int n = 0; n < 4; ++n) {
    const uint32_t source = (kBytes >> (4 * n) & 0xf) - 8;
    if ((word >> (8 * source + 7) & 1) != 0) spread |= 0xffu << (8 * n);
  }
  return spread;
}

template <bool kBefore>
uint32_t halves_at(uint32_t first, uint32_t count) {
  return ((first < count) == kBefore ? 0xffffu : 0) | ((first + 1 < count) == kBefore ? 0xffff0000u : 0);
}

inline uint32_t nonzero_halves(uint32_t pair) {
  return ((pair & 0x7fffu) != 0 ? 0xffffu : 0) | ((pair & 0x7fff0000u) != 0 ? 0xffff0000u : 0);
}

inline char* launched_memory() { return emulation::launched_memory(); }

inline void copy_16(char* target, const char* source) {
  expect_boundary(target);
  expect_boundary(source);
  emulation::copy_later(target, source);
}

inline void wait_for_copies() { emulation::wait_for_copies(); }

inline void prefetch_to_l2(const char* address, uint32_t bytes) {
  expect_boundary(address);
  if (bytes % 16 != 0) emulation::fail("a prefetch of other than 16-byte pieces");
  for (uint32_t byte = 0; byte < bytes; ++byte) static_cast<void>(static_cast<const volatile char*>(address)[byte]);
}

inline uint32_t cluster_block() { return emulation::cluster_block(); }
inline uint32_t cluster_number() { return emulation::cluster_number(); }
inline uint32_t cluster_blocks() { return emulation::cluster_blocks(); }
inline void cluster_arrive_unordered() { emulation::arrive_at_cluster(); }
inline void cluster_wait() { emulation::wait_for_cluster(); }

struct ByteBarrier {
  uint64_t state;  // the bytes that are still to come

  void expect(uint32_t bytes) { state = bytes; }
  void wait() { emulation::wait_until_zero(state); }
};

template <typename Value>
void send_to_block(Value* target, ByteBarrier* barrier, uint32_t rank, const Value& value) {
  uint64_t& state = static_cast<ByteBarrier*>(emulation::in_block(barrier, rank))->state;
  if (state < sizeof value) emulation::fail("more bytes sent to a block than it expects");
  *static_cast<Value*>(emulation::in_block(target, rank)) = value;
  state -= sizeof value;
}

}  // namespace sms::cuda
