// Memory between pages that nothing may touch.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>

namespace sms::emulation {

class Memory {
 public:
  enum class Place { front, back };  // of the pages: the byte before the first one faults, or the byte after the last

  static constexpr size_t kPage = size_t{64} << 10;  // the largest of any system
  static constexpr char kUntouched = 0x5a;

  // `before`: bytes between the pages' front and the first one; none at their back.
  Memory(size_t bytes, Place place, size_t before = 0)
      : pages_((bytes + before + kPage - 1) / kPage * kPage) {
    void* const mapped =
        mmap(nullptr, pages_ + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::runtime_error("no memory");
    front_ = static_cast<char*>(mapped) + kPage;
    data_ = place == Place::front ? front_ + before : front_ + pages_ - bytes;
    protect(PROT_READ | PROT_WRITE);
  }
  ~Memory() { munmap(front_ - kPage, pages_ + 2 * kPage); }
  Memory(const Memory&) = delete;

  char* data() const { return data_; }

  void fill() { std::memset(front_, kUntouched, pages_); }
  void make_read_only() { protect(PROT_READ); }

  // Calls visit(byte, its place relative to data()) for all there are, those before and after too.
  template <typename Visit>
  void each(const Visit& visit) const {
    for (const char* byte = front_; byte < front_ + pages_; ++byte) visit(*byte, byte - data_);
  }

 private:
  void protect(int access) {
    if (mprotect(front_, pages_, access) != 0) throw std::runtime_error("memory cannot be protected");
  }

  size_t pages_;
  char* front_;
  char* data_;
};

}  // namespace sms::emulation
