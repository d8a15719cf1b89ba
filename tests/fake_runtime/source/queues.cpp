// Streams as queues, and the schedule: which of the work that may run does.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <random>

#include "runtime.h"

namespace fake {
namespace {

// kLate runs nothing before it must, and then only what must; kEager all that may at once; the others some, favouring
// streams by weights.
enum class Style { kEager, kLate, kRandom, kBursts };

std::mt19937_64 random_bits(1);
Style style = Style::kEager;
std::map<cudaStream_t, std::shared_ptr<Stream>> streams;
std::shared_ptr<Stream> legacy[kDevices];
std::set<std::shared_ptr<Stream>> busy;
int running = 0;  // work that runs may not be run again from inside itself
thread_local uint64_t host_waits = 0;
std::string last_host_wait;

bool one_in(uint64_t n) { return draw(n) == 0; }

double new_weight() {
  static const double weights[] = {0.02, 0.2, 1, 1, 5};
  return weights[draw(5)];
}

bool may_run(const Work &work) {
  for (const auto &record : work.after)
    if (!record->point.reached()) return false;
  for (const Point &point : work.after_points)
    if (!point.reached()) return false;
  return true;
}

void run_step(const Work &work, const Step &step) {
  ++running;
  try {
    step();
  } catch (const std::exception &error) {
    report(work.name + ": " + error.what());
  }
  --running;
}

// The next step of the work at the stream's head, which may run.
void run_head(const std::shared_ptr<Stream> &stream) {
  Work &work = stream->queue.front();
  if (work.next == 0) {
    double begin = std::max(stream->clock, work.issued_at);
    for (const auto &record : work.after) begin = std::max(begin, record->milliseconds);
    for (const Point &point : work.after_points) begin = std::max(begin, point.stream->clock);
    stream->clock = begin + work.milliseconds;
  }
  if (work.next < work.steps.size()) run_step(work, work.steps[work.next++]);
  if (work.next < work.steps.size()) return;
  if (work.records) work.records->milliseconds = stream->clock;
  ++stream->done;
  stream->queue.pop_front();
  if (stream->queue.empty()) busy.erase(stream);
}

bool run_something() {
  if (running) return false;
  std::vector<std::shared_ptr<Stream>> ready;
  double all = 0;
  for (const auto &stream : busy) {
    const Work &work = stream->queue.front();
    if (work.stalls_until <= now() && may_run(work)) {
      ready.push_back(stream);
      all += stream->weight;
    }
  }
  if (ready.empty()) return false;
  double left = all * (double)draw(1 << 20) / (1 << 20);
  for (const auto &stream : ready) {
    left -= stream->weight;
    if (left < 0 || stream == ready.back()) {
      run_head(stream);
      return true;
    }
  }
  return true;
}

void after_a_call() {
  switch (style) {
    case Style::kLate: return;
    case Style::kEager:
      while (run_something()) continue;
      return;
    case Style::kRandom:
      for (uint64_t k = draw(3); k > 0; --k) run_something();
      return;
    case Style::kBursts:
      if (one_in(10))
        for (uint64_t k = draw(40); k > 0; --k) run_something();
  }
}

// A step of what the point truly depends on. False where it can never be reached.
bool run_toward(const Point &point) {
  std::shared_ptr<Stream> stream = point.stream;
  for (std::set<Stream *> seen; seen.insert(stream.get()).second && !stream->queue.empty();) {
    const Work &work = stream->queue.front();
    const Point *blocked_by = nullptr;
    for (const auto &record : work.after)
      if (!record->point.reached()) blocked_by = &record->point;
    for (const Point &other : work.after_points)
      if (!other.reached()) blocked_by = &other;
    if (!blocked_by) {
      run_head(stream);
      return true;
    }
    stream = blocked_by->stream;
  }
  return false;
}

}  // namespace

uint64_t draw(uint64_t n) { return random_bits() % n; }

double now() {
  static const auto begin = std::chrono::steady_clock::now();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

bool Point::reached() const { return !stream || stream->done >= ticket; }

Point tail(const std::shared_ptr<Stream> &stream) { return {stream, stream->issued}; }

std::shared_ptr<Stream> make_stream(int device, unsigned flags, int priority) {
  auto stream = std::make_shared<Stream>(device, flags, priority);
  stream->weight = new_weight();
  streams[(cudaStream_t)stream.get()] = stream;
  return stream;
}

void destroy_stream(cudaStream_t handle) { streams.erase(handle); }

std::shared_ptr<Stream> legacy_stream(int device) {
  if (!legacy[device]) legacy[device] = std::make_shared<Stream>(device, cudaStreamDefault, 0);
  return legacy[device];
}

std::shared_ptr<Stream> stream_of(cudaStream_t handle) {
  if (!handle || handle == cudaStreamLegacy) return legacy_stream(current_device());
  const auto found = streams.find(handle);
  return found == streams.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Stream>> streams_of(int device) {
  std::vector<std::shared_ptr<Stream>> found;
  for (const auto &[handle, stream] : streams)
    if (stream->device == device) found.push_back(stream);
  return found;
}

cudaError_t push(const std::shared_ptr<Stream> &stream, Work work) {
  if (stream->capture) {
    record_node(stream, std::move(work));
    return cudaSuccess;
  }
  // The default stream waits for all streams that were not made cudaStreamNonBlocking, and they for it.
  const auto legacy = legacy_stream(stream->device);
  if (stream == legacy) {
    for (const auto &other : streams_of(stream->device))
      if (other->waits_for_legacy() && !tail(other).reached()) work.after_points.push_back(tail(other));
  } else if (stream->waits_for_legacy() && !tail(legacy).reached()) {
    work.after_points.push_back(tail(legacy));
  }
  work.issued_at = now();
  if (work.records) work.records->point = {stream, stream->issued + 1};
  ++stream->issued;
  stream->queue.push_back(std::move(work));
  busy.insert(stream);
  after_a_call();
  return cudaSuccess;
}

void run_until(const Point &point) {
  while (!point.reached()) {
    if (running) {
      report("work that runs waits for other work");
      return;
    }
    if (style != Style::kLate && one_in(2) && run_something()) continue;
    if (!run_toward(point)) {
      report("a wait that never ends: the streams wait for each other");
      std::abort();
    }
  }
}

void run_all(int device) {
  auto all = streams_of(device);
  all.push_back(legacy_stream(device));
  std::shuffle(all.begin(), all.end(), random_bits);
  for (const auto &stream : all) run_until(tail(stream));
}

void glance(const Point &point) {
  // Time passes: whoever asks again and again must see it end.
  if (running || point.reached() || !one_in(style == Style::kLate ? 8 : 2)) return;
  const Work *head = point.stream->queue.empty() ? nullptr : &point.stream->queue.front();
  if (head && head->stalls_until > now()) return;
  if (style == Style::kLate)
    run_toward(point);
  else
    run_something();
}

void count_host_wait(const char *call) {
  ++host_waits;
  last_host_wait = call;
}

}  // namespace fake

using namespace fake;

// style: 0 eager, 1 late, 2 random, 3 bursts.
API void fake_seed(uint64_t seed, int new_style) {
  const Lock lock;
  random_bits.seed(seed);
  style = (Style)new_style;
  for (const auto &[handle, stream] : streams) stream->weight = new_weight();
}

// How often this thread has waited for a device, and for what last.
API uint64_t fake_host_waits() { return host_waits; }
API const char *fake_last_host_wait() { return last_host_wait.c_str(); }

// Runs everything that is queued, not counted as a wait of the host's.
API void fake_settle() {
  const Lock lock;
  for (int device = 0; device < kDevices; ++device) run_all(device);
}
