// The memory streams of an optimizer step with trivial arithmetic: what the memory itself allows.
// Built by cpu_step.py; reads every stream, writes those that a step writes.
#include <cstdint>
#include <thread>
#include <vector>

// read: streams that are only read; written: streams that are read and written. Sizes in bytes.
extern "C" void touch(const uint64_t *read, int reads, const int64_t *read_bytes, const uint64_t *written, int writes,
                      const int64_t *written_bytes, int64_t pieces, int threads) {
  auto work = [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece) {
      uint64_t sum = 0;
      for (int k = 0; k < reads; ++k) {
        const int64_t n = read_bytes[k] / pieces / 8;
        const uint64_t *a = (const uint64_t *)read[k] + piece * n;
        for (int64_t i = 0; i < n; ++i) sum += a[i];
      }
      for (int k = 0; k < writes; ++k) {
        const int64_t n = written_bytes[k] / pieces / 8;
        uint64_t *a = (uint64_t *)written[k] + piece * n;
        for (int64_t i = 0; i < n; ++i) a[i] = a[i] ^ (sum & 1);
      }
    }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t)
    others.emplace_back(work, pieces * t / threads, pieces * (t + 1) / threads);
  work(0, pieces / threads);
  for (auto &other : others) other.join();
}
