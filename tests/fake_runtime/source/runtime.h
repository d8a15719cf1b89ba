// A CUDA runtime in host memory, preloaded under torch's real front end: what its parts share.
//
// Device memory is host memory. Work is queued per stream and runs on the thread of whoever waits for it, as late and
// in as odd an order as events and streams allow (queues.cpp).
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace fake {

constexpr int kDevices = 2;
constexpr size_t kDeviceBytes = size_t(4) << 30;

// ---- one lock (lock.cpp) ----

// Held in every call. Whoever waits for it lets go of Python's lock first: work that another thread runs may need it.
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock &) = delete;
};

// Python's lock, with no collection of garbage meanwhile: what it frees would come back into this runtime.
class WithPython {
 public:
  WithPython();
  ~WithPython();
  bool there() const { return there_; }
  WithPython(const WithPython &) = delete;

 private:
  bool there_ = false;
  int state_ = 0, collected_ = 0;
};

// Whether this process was forked from one that uses the runtime: nothing works in it, as on a GPU.
bool is_forked();

// What a program did that no GPU permits, or that would be a race there. Tests ask for these at their end.
void report(const std::string &hazard);

// ---- devices (devices.cpp) ----

cudaError_t fail(cudaError_t error);  // remembers it for cudaGetLastError
int current_device();
int need_context(const char *call);  // of the current device
void use(int device);                // work or memory, which is what a context is for

// ---- memory (memory.cpp) ----

enum class Kind { kPageable, kPinned, kRegistered, kDevice };
struct Block {
  uintptr_t begin;
  size_t bytes;
  Kind kind;
  int device;
};
// The block that holds an address; of kind kPageable, and no bytes, where none does.
Block block_of(const void *address);
// Whether all bytes are in the block of the first: a copy from one registered block into the next is refused.
bool within_one_block(const void *address, size_t bytes);
void poison(void *address, size_t bytes);

// ---- queues (queues.cpp) ----

struct Stream;

// What a stream was given up to here.
struct Point {
  std::shared_ptr<Stream> stream;
  uint64_t ticket = 0;
  bool reached() const;
};

// What an event holds since it was last recorded.
struct Record {
  Point point;
  double milliseconds = 0;
  bool timed = false;
};

using Step = std::function<void()>;

struct Work {
  std::string name;
  std::vector<Step> steps;  // others' work may come between them
  std::vector<std::shared_ptr<Record>> after;
  std::vector<Point> after_points;
  std::shared_ptr<Record> records;
  std::shared_ptr<void> keeps;  // what the steps point at
  double milliseconds = 0.01;
  double stalls_until = 0;  // not before this time, unless the host waits for it
  // At work:
  size_t next = 0;
  double issued_at = 0;
};

struct Capture;

struct Stream : std::enable_shared_from_this<Stream> {
  Stream(int device, unsigned flags, int priority) : device(device), flags(flags), priority(priority) {}
  const int device;
  const unsigned flags;
  const int priority;
  uint64_t issued = 0, done = 0;
  std::deque<Work> queue;
  double weight = 1, clock = 0;
  std::shared_ptr<Capture> capture;
  bool waits_for_legacy() const { return !(flags & cudaStreamNonBlocking); }
};

std::shared_ptr<Stream> make_stream(int device, unsigned flags, int priority);
void destroy_stream(cudaStream_t handle);
// Null where there is no such stream. 0 and cudaStreamLegacy are the current device's default stream.
std::shared_ptr<Stream> stream_of(cudaStream_t handle);
std::shared_ptr<Stream> legacy_stream(int device);
std::vector<std::shared_ptr<Stream>> streams_of(int device);

// Queues work, or records it where the stream is captured.
cudaError_t push(const std::shared_ptr<Stream> &stream, Work work);
Point tail(const std::shared_ptr<Stream> &stream);
// Runs what it takes, and perhaps more. A wait of the host's.
void run_until(const Point &point);
void run_all(int device);
// A look of the host's that does not wait: something more may have run meanwhile.
void glance(const Point &point);
double now();               // milliseconds
uint64_t draw(uint64_t n);  // below n, from the seed

// Waits of the host's on this thread so far: calls that block until work has run.
void count_host_wait(const char *call);

// ---- events (streams.cpp) and graphs (graphs.cpp) ----

struct Node {
  Work work;
  std::set<size_t> after;
};

struct Capture {
  uint64_t id;
  cudaStreamCaptureMode mode;
  std::shared_ptr<Stream> origin;
  std::map<Stream *, std::set<size_t>> ends;  // by stream that takes part: nodes that its next one comes after
  std::vector<Node> nodes;
  bool invalid = false;
};

struct Event {
  int device;
  unsigned flags;
  std::shared_ptr<Record> last;
  std::shared_ptr<Capture> capture;  // recorded inside it
  std::set<size_t> captured;
};

// For calls that no capture permits, on this stream or (without one) on this thread. cudaSuccess where there is none.
cudaError_t refuse_in_capture(const std::shared_ptr<Stream> &stream, const char *call);
cudaError_t refuse_in_capture(const char *call);
cudaError_t refuse_beside_captures(const char *call);
void record_node(const std::shared_ptr<Stream> &stream, Work work);

}  // namespace fake
