#include "device.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <semaphore>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_runtime_api.h"
#include "memory.h"

namespace sms::emulation {

std::string task;
bool last_thread_first = false;
bool has_clusters = true;

namespace {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = size_t{128} << 10;
constexpr uint64_t kUnset = ~uint64_t{0};

// Complete when everyone who is expected has arrived; then it begins anew.
struct Barrier {
  unsigned expected = 0;
  unsigned arrived = 0;
  uint64_t completed = 0;

  void arrive() {
    if (++arrived < expected) return;
    arrived = 0;
    ++completed;
  }
};

struct Warp {
  Barrier barrier;
  const char* operation = nullptr;  // that its lanes have come to
  uint64_t value[2][kLanes];        // of the operation before and of this one
};

struct Block;

// A thread of a block, and where it goes on.
struct Fiber {
  Block* block;
  unsigned thread;
  char* stack;
  bool begun = false;
  bool done = true;
  jmp_buf place;
  // It waits for this number, at `waits_at`, to be another than the one that it has seen.
  const uint64_t* number = nullptr;
  uint64_t seen = 0;
  const char* waits_at = "";
  uint64_t cluster_barrier = kUnset;  // how often that of the cluster was complete when it arrived there
  std::vector<std::pair<char*, const char*>> copies;
};

Fiber* current = nullptr;

// The launch under way.
const std::function<void()>* kernel = nullptr;
uint32_t number_of_cluster = 0;
uint32_t blocks_of_cluster = 1;
Barrier cluster_barrier;

// Lies in the memory of an operating system's thread at the same distance from each variable of it in all of them.
thread_local char anchor;

void go_home();

// Where a fiber's stack begins. It stays there: a launch later it goes on with another kernel.
void enter() {
  while (true) {
    (*kernel)();
    if (!current->copies.empty()) fail("a thread ends before its copies");
    current->done = true;
    go_home();
  }
}

struct Block {
  uint32_t rank;
  char* base;  // of its shared memory: `anchor` of its thread
  Memory launched{kMostSharedBytes, Memory::Place::back};
  char* memory = nullptr;  // of the launch
  unsigned threads = 0;
  unsigned left = 0;  // that are not done
  Barrier barrier;
  Barrier part_barrier[kBarriers];  // of some of the threads
  std::vector<Warp> warps;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::unique_ptr<Memory> stacks[kMostThreads];
  jmp_buf home;

  explicit Block(uint32_t block_rank) : rank(block_rank), base(&anchor) {}

  void begin(unsigned block_threads, size_t shared_bytes) {
    threads = left = block_threads;
    barrier = {threads, 0, 0};
    for (Barrier& part : part_barrier) part = {};
    warps.assign(threads / kLanes, {});
    for (Warp& warp : warps) warp.barrier.expected = kLanes;
    // Ends where no access is allowed. What is not written there is NaN.
    memory = launched.data() + kMostSharedBytes - (shared_bytes + 15) / 16 * 16;
    std::memset(memory, 0xff, shared_bytes);
    while (fibers.size() < threads) {
      auto fiber = std::make_unique<Fiber>();
      fiber->block = this;
      fiber->thread = static_cast<unsigned>(fibers.size());
      stacks[fiber->thread] = std::make_unique<Memory>(kStackBytes, Memory::Place::front);
      fiber->stack = stacks[fiber->thread]->data();
      fibers.push_back(std::move(fiber));
    }
    for (unsigned thread = 0; thread < threads; ++thread) {
      fibers[thread]->done = false;
      fibers[thread]->number = nullptr;
      fibers[thread]->cluster_barrier = kUnset;
    }
  }

  // Takes every thread as far as it comes without other blocks. Whether any came further. Each warp goes on until it
  // has to wait for another, so that they are as far apart as they can be.
  bool advance() {
    bool advanced = false;
    bool again = true;
    while (again) {
      again = false;
      for (unsigned turn = 0; turn < threads / kLanes; ++turn) {
        const unsigned warp = last_thread_first ? threads / kLanes - 1 - turn : turn;
        while (advance_warp(warp)) again = advanced = true;
      }
    }
    return advanced;
  }

  bool advance_warp(unsigned warp) {
    bool advanced = false;
    for (unsigned turn = 0; turn < kLanes; ++turn) {
      const unsigned lane = last_thread_first ? kLanes - 1 - turn : turn;
      Fiber& fiber = *fibers[warp * kLanes + lane];
      if (fiber.done || (fiber.number != nullptr && *fiber.number == fiber.seen)) continue;
      fiber.number = nullptr;
      run(fiber);
      if (fiber.done) --left;
      advanced = true;
    }
    return advanced;
  }

  void run(Fiber& fiber) {
    current = &fiber;
    threadIdx = dim3(fiber.thread);
    threadIdx.y = threadIdx.z = 0;
    blockIdx = dim3(number_of_cluster * blocks_of_cluster + rank);
    blockIdx.y = blockIdx.z = 0;
    // A jump costs a fourteenth of swapcontext(), which asks the system for the mask of signals each time.
    if (_setjmp(home) != 0) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
    setcontext(&context);
  }
};

// Lets the other threads run.
void go_home() {
  if (_setjmp(current->place) == 0) _longjmp(current->block->home, 1);
}

void wait_for_another(const uint64_t& number, const char* where) {
  current->number = &number;
  current->seen = number;
  current->waits_at = where;
  go_home();
}

void meet(Barrier& barrier, const char* where) {
  const uint64_t completed = barrier.completed;
  barrier.arrive();
  if (barrier.completed == completed) wait_for_another(barrier.completed, where);
}

// Gives this lane's value to an operation of the warp; the values of all lanes.
const uint64_t (&tell_warp(uint64_t value, const char* operation))[kLanes] {
  Warp& warp = current->block->warps[threadIdx.x / kLanes];
  // Lanes are at most one operation apart, so two places are enough.
  const uint64_t place = warp.barrier.completed % 2;
  if (warp.barrier.arrived == 0) warp.operation = operation;
  if (warp.operation != operation) {
    fail(std::string("lanes of a warp have come to ") + warp.operation + " and to " + operation);
  }
  warp.value[place][threadIdx.x % kLanes] = value;
  meet(warp.barrier, operation);
  return warp.value[place];
}

// A thread of the operating system that does what it is told while the one that tells it waits.
class Worker {
 public:
  Worker() : thread_([this] { work(); }) {}
  ~Worker() {
    job_ = nullptr;
    told_.release();
    thread_.join();
  }
  Worker(const Worker&) = delete;

  void run(const std::function<void()>& job) {
    job_ = &job;
    told_.release();
    done_.acquire();
  }

 private:
  void work() {
    while (true) {
      told_.acquire();
      if (job_ == nullptr) return;
      (*job_)();
      done_.release();
    }
  }

  const std::function<void()>* job_ = nullptr;
  std::binary_semaphore told_{0};
  std::binary_semaphore done_{0};
  std::thread thread_;
};

// Blocks by their rank in a cluster; the first is this thread's.
std::unique_ptr<Block> block[kMostBlocks];
std::unique_ptr<Worker> worker[kMostBlocks];

void in_thread_of(uint32_t rank, const std::function<void()>& job) {
  if (rank == 0) return job();
  if (worker[rank] == nullptr) worker[rank] = std::make_unique<Worker>();
  worker[rank]->run(job);
}

[[noreturn]] void fail_all_wait() {
  std::string what = "threads wait for others that never come:";
  for (uint32_t rank = 0; rank < blocks_of_cluster; ++rank) {
    for (unsigned thread = 0; thread < block[rank]->threads; ++thread) {
      const Fiber& fiber = *block[rank]->fibers[thread];
      if (fiber.done) continue;
      what += "\n  thread " + std::to_string(thread) + " of block " + std::to_string(rank) + " at " + fiber.waits_at;
      thread |= kLanes - 1;  // one of a warp is enough
    }
  }
  current = nullptr;
  fail(what);
}

}  // namespace

void fail(const std::string& what) {
  std::printf("%s\n  %s\n", task.c_str(), what.c_str());
  if (current != nullptr) {
    std::printf("  in thread %u of block %u\n", current->thread, blockIdx.x);
  }
  std::fflush(stdout);
  std::_Exit(1);
}

void launch(const dim3& grid, unsigned threads, size_t shared_bytes, unsigned cluster_blocks,
            const std::function<void()>& body) {
  if (cluster_blocks > 1 && !has_clusters) fail("a cluster on a device that has none");
  kernel = &body;
  gridDim = grid;
  blockDim = dim3(threads);
  blocks_of_cluster = cluster_blocks;
  for (number_of_cluster = 0; number_of_cluster < grid.x / cluster_blocks; ++number_of_cluster) {
    cluster_barrier = {cluster_blocks * threads, 0, 0};
    for (uint32_t rank = 0; rank < cluster_blocks; ++rank) {
      in_thread_of(rank, [&] {
        if (block[rank] == nullptr) block[rank] = std::make_unique<Block>(rank);
        block[rank]->begin(threads, shared_bytes);
      });
    }
    unsigned left = cluster_blocks * threads;
    while (left > 0) {
      bool advanced = false;
      left = 0;
      for (uint32_t turn = 0; turn < cluster_blocks; ++turn) {
        const uint32_t rank = last_thread_first ? cluster_blocks - 1 - turn : turn;
        in_thread_of(rank, [&] { advanced = block[rank]->advance() || advanced; });
        left += block[rank]->left;
      }
      if (!advanced) fail_all_wait();
    }
  }
  current = nullptr;
}

uint64_t exchange(uint64_t value, int source) { return tell_warp(value, "a shuffle")[source]; }

bool any_of_warp(bool value) {
  const auto& values = tell_warp(value ? 1 : 0, "a vote");
  return std::any_of(values, values + kLanes, [](uint64_t one) { return one != 0; });
}

void wait_for_warp() { tell_warp(0, "a barrier of the warp"); }

void wait_for_block() { meet(current->block->barrier, "a barrier of the block"); }

void wait_for_threads(unsigned barrier, unsigned threads) {
  Barrier& part = current->block->part_barrier[barrier];
  if (part.arrived == 0) part.expected = threads;
  if (part.expected != threads) fail("threads that expect other numbers of them at a barrier");
  meet(part, "a barrier of a part of the block");
}

char* launched_memory() { return current->block->memory; }

void copy_later(char* target, const char* source) { current->copies.emplace_back(target, source); }

void wait_for_copies() {
  for (const auto& [target, source] : current->copies) std::memcpy(target, source, 16);
  current->copies.clear();
}

uint32_t cluster_block() { return current->block->rank; }
uint32_t cluster_number() { return number_of_cluster; }
uint32_t cluster_blocks() { return blocks_of_cluster; }

void arrive_at_cluster() {
  if (current->cluster_barrier != kUnset) fail("a thread arrives twice at the barrier of its cluster");
  current->cluster_barrier = cluster_barrier.completed;
  cluster_barrier.arrive();
}

void wait_for_cluster() {
  if (current->cluster_barrier == kUnset) fail("a thread waits at the barrier of its cluster where it has not arrived");
  if (cluster_barrier.completed == current->cluster_barrier) {
    wait_for_another(cluster_barrier.completed, "the barrier of the cluster");
  }
  current->cluster_barrier = kUnset;
}

void* in_block(void* address, uint32_t rank) {
  if (rank >= blocks_of_cluster) fail("a block of the cluster that does not exist");
  if (block[rank]->left == 0) fail("a number sent to a block that has ended");
  return static_cast<char*>(address) - current->block->base + block[rank]->base;
}

void wait_until_zero(const uint64_t& number) {
  while (number != 0) wait_for_another(number, "bytes from blocks of the cluster");
}

}  // namespace sms::emulation
