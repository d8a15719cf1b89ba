// A block whose threads take turns, so that the lanes of a warp can meet: each thread is a fiber.
#pragma once
#include <stdint.h>

#include <array>
#include <functional>
#include <vector>

namespace emulation {

// Runs `body(thread)` for each of `threads` threads. A round runs every thread, in the order that
// `order(round)` gives, until it waits or ends; then the lanes of each warp that wait go on together.
// Throws std::logic_error where hardware would hang or give anything: a lane that its mask names has ended, or
// waits elsewhere.
void run_block(unsigned threads, const std::function<void(unsigned)> &body,
               const std::function<std::vector<unsigned>(uint64_t round)> &order);

// Within run_block: by lane, the values of those that the mask names, once all of them are here, and zeros
// for the others. `place` tells one call in the source from another.
using LaneValues = std::array<uint32_t, 32>;
LaneValues exchange(uint32_t mask, uint32_t value, int place);

}  // namespace emulation
