#include "warps.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#else
#define __sanitizer_start_switch_fiber(...) (void)0
#define __sanitizer_finish_switch_fiber(...) (void)0
// swapcontext asks the system for the mask of signals each time; a jump does not. AddressSanitizer knows only the first.
#define STATESTREAM_JUMPS
#endif

namespace emulation {
namespace {

constexpr unsigned kLanes = 32;
constexpr size_t kStackBytes = 256 * 1024;

// A stack with a page before it that nothing may touch.
class Stack {
 public:
  Stack() : guard_((size_t)sysconf(_SC_PAGESIZE)) {
    memory_ = mmap(nullptr, guard_ + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED || mprotect(memory_, guard_, PROT_NONE)) throw std::bad_alloc();
  }
  ~Stack() { munmap(memory_, guard_ + kStackBytes); }
  Stack(const Stack &) = delete;
  void *bottom() const { return (char *)memory_ + guard_; }

 private:
  void *memory_;
  size_t guard_;
};

enum class State { kReady, kWaits, kEnded };

struct Fiber {
  Stack stack;
  ucontext_t context;
  jmp_buf place_to_go_on;
  bool is_started = false;
  void *fake_stack = nullptr;  // AddressSanitizer's
  State state = State::kEnded;
  uint32_t mask, value;
  LaneValues seen;
  int place;
};

// Kept from block to block.
std::vector<std::unique_ptr<Fiber>> fibers;
const std::function<void(unsigned)> *work;
unsigned running;
ucontext_t scheduler;
#if defined(STATESTREAM_JUMPS)
jmp_buf scheduler_goes_on;
#endif
const void *scheduler_bottom;
size_t scheduler_bytes;

void leave(bool for_good) {
  Fiber &fiber = *fibers[running];
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.fake_stack, scheduler_bottom, scheduler_bytes);
#if defined(STATESTREAM_JUMPS)
  if (!_setjmp(fiber.place_to_go_on)) _longjmp(scheduler_goes_on, 1);
#else
  swapcontext(&fiber.context, &scheduler);
#endif
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_bottom, &scheduler_bytes);
}

void begin() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_bytes);
  do {
    (*work)(running);
    fibers[running]->state = State::kEnded;
    leave(!fibers[running]->is_started);
  } while (fibers[running]->is_started);
}

void resume(unsigned thread) {
  Fiber &fiber = *fibers[thread];
  running = thread;
  void *fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, fiber.stack.bottom(), kStackBytes);
#if defined(STATESTREAM_JUMPS)
  if (_setjmp(scheduler_goes_on)) return;
  if (fiber.is_started) _longjmp(fiber.place_to_go_on, 1);
  fiber.is_started = true;
#endif
  swapcontext(&scheduler, &fiber.context);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
  (void)fake_stack;
}

std::string lane_name(unsigned thread) {
  return "lane " + std::to_string(thread % kLanes) + " of warp " + std::to_string(thread / kLanes);
}

// Every lane that waits gets its result, or is told what it waits for in vain.
void meet(unsigned first, unsigned threads) {
  const unsigned end = std::min(first + kLanes, threads);
  for (unsigned thread = first; thread < end; ++thread) {
    Fiber &fiber = *fibers[thread];
    if (fiber.state != State::kWaits) continue;
    if (!(fiber.mask >> (thread - first) & 1)) throw std::logic_error(lane_name(thread) + " is not in its own mask");
    fiber.seen = {};
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      if (!(fiber.mask >> lane & 1)) continue;
      const unsigned other = first + lane;
      if (other >= end || fibers[other]->state == State::kEnded)
        throw std::logic_error(lane_name(thread) + " waits for " + lane_name(other) + ", which has ended");
      if (fibers[other]->mask != fiber.mask || fibers[other]->place != fiber.place)
        throw std::logic_error(lane_name(thread) + " and " + lane_name(other) + " wait at different places");
      fiber.seen[lane] = fibers[other]->value;
    }
  }
  for (unsigned thread = first; thread < end; ++thread)
    if (fibers[thread]->state == State::kWaits) fibers[thread]->state = State::kReady;
}

}  // namespace

void run_block(unsigned threads, const std::function<void(unsigned)> &body,
               const std::function<std::vector<unsigned>(uint64_t round)> &order) {
  work = &body;
  while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
  for (unsigned thread = 0; thread < threads; ++thread) {
    Fiber &fiber = *fibers[thread];
    if (!fiber.is_started) {
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.bottom();
      fiber.context.uc_stack.ss_size = kStackBytes;
      makecontext(&fiber.context, begin, 0);
    }
    fiber.state = State::kReady;
  }
  try {
    for (uint64_t round = 0;; ++round) {
      bool ran = false;
      for (unsigned thread : order(round)) {
        if (fibers[thread]->state != State::kReady) continue;
        resume(thread);
        ran = true;
      }
      if (!ran) return;
      for (unsigned first = 0; first < threads; first += kLanes) meet(first, threads);
    }
  } catch (...) {
    fibers.clear();  // some are in the middle of this block
    throw;
  }
}

LaneValues exchange(uint32_t mask, uint32_t value, int place) {
  Fiber &fiber = *fibers[running];
  fiber.mask = mask;
  fiber.value = value;
  fiber.place = place;
  fiber.state = State::kWaits;
  leave(false);
  return fiber.seen;
}

}  // namespace emulation
