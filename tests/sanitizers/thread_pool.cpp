// Three callers give the CPU module's threads work from nothing to a fraction of a millisecond, so that
// threads wake when it is done, or nearly.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cpu/threads.h"

namespace {

long wrong_tasks(unsigned seed, int rounds) {
  long wrong = 0;
  for (int round = 0; round < rounds; ++round) {
    seed = seed * 1664525 + 1013904223;
    const int tasks = (seed >> 10) % 9, threads = 1 + (seed >> 20) % 5, length = (seed >> 5) % 100000;
    std::vector<int> taken(tasks);
    statestream::parallel_for(tasks, threads, [&](int64_t i) {
      ++taken[i];
      for (volatile int turn = 0; turn < length; turn = turn + 1) {
      }
    });
    for (const int times : taken) wrong += times != 1;
  }
  return wrong;
}

}  // namespace

int main(int, char **arguments) {
  const int rounds = std::atoi(arguments[1]);
  long wrong[3];
  std::thread first([&] { wrong[0] = wrong_tasks(1, rounds); });
  std::thread second([&] { wrong[1] = wrong_tasks(2, rounds); });
  wrong[2] = wrong_tasks(3, rounds);
  first.join();
  second.join();
  std::printf("%ld\n", wrong[0] + wrong[1] + wrong[2]);
}
