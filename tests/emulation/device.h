// A device on the host, as far as the kernels need one. Each of its threads is a fiber, that runs until it has to wait
// for others. Fibers of one block share an operating system's thread, each block of a cluster has another: so
// `static thread_local` is what __shared__ says. One fiber runs at a time, in an order that is the same in every run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;

  dim3() = default;
  explicit dim3(unsigned blocks) : x(blocks) {}
};

namespace sms::emulation {

// What is under way, for the messages of fail().
extern std::string task;

// Ends the program: a kernel did what no device allows.
[[noreturn]] void fail(const std::string& what);

// Whether threads take their turns from the last to the first: what one reads before another wrote it shows in one of
// the two orders.
extern bool last_thread_first;

// Whether blocks can be launched in clusters.
extern bool has_clusters;

// Runs body() in every thread of a grid.
void launch(const dim3& grid, unsigned threads, size_t shared_bytes, unsigned cluster_blocks,
            const std::function<void()>& body);

inline constexpr unsigned kMostThreads = 1024;               // of a block
inline constexpr unsigned kBarriers = 16;                    // of a block
inline constexpr unsigned kMostBlocks = 8;                   // of a cluster
inline constexpr size_t kMostSharedBytes = size_t{227} << 10;  // of a block

// What follows is called in threads of a launch.

// Each lane of the warp gives a value and gets that of lane `source`.
uint64_t exchange(uint64_t value, int source);
bool any_of_warp(bool value);
void wait_for_warp();
void wait_for_block();
void wait_for_threads(unsigned barrier, unsigned threads);  // of the block, at one of its kBarriers

char* launched_memory();

// A copy into shared memory that has happened when this thread has waited for it, and no earlier.
void copy_later(char* target, const char* source);
void wait_for_copies();

uint32_t cluster_block();
uint32_t cluster_number();
uint32_t cluster_blocks();
void arrive_at_cluster();
void wait_for_cluster();

// Where `address`, in this block's shared memory, lies in that of block `rank`, which still runs.
void* in_block(void* address, uint32_t rank);
void wait_until_zero(const uint64_t& number);

}  // namespace sms::emulation
