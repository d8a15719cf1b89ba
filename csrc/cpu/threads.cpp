#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "floating_point.h"

namespace statestream {
namespace {

// To wake a sleeping thread takes about as long as it takes to update a hundred thousand elements, and the next call is
// often at once. Then it is found awake: for so long threads look out for it, and callers for the last of their
// threads.
constexpr std::chrono::microseconds kLookout{200};

template <class Condition>
void look_out_for(const Condition &condition) {
  const auto end = std::chrono::steady_clock::now() + kLookout;
  while (!condition() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

class Pool {
 public:
  void run(int64_t tasks, int threads, const std::function<void(int64_t)> &work) {
    std::lock_guard<std::mutex> one_caller(callers_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      threads = 1 + start_workers(threads - 1);
      work_ = &work;
      tasks_ = tasks;
      next_.store(0, std::memory_order_relaxed);
      wanted_ = threads - 1;
      ++round_;
    }
    wake_.notify_all();
    take_tasks(work, tasks);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = nullptr;  // a worker that wakes only now finds nothing to do, and is not waited for
    }
    look_out_for([&] { return running_ == 0; });
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return running_ == 0; });
  }

 private:
  // How many of the wanted workers there are: fewer where the system refuses another thread.
  int start_workers(int wanted) {
    try {
      for (; started_ < wanted; ++started_) std::thread(&Pool::serve, this, started_).detach();
    } catch (const std::system_error &) {
    }
    return started_ < wanted ? started_ : wanted;
  }

  void take_tasks(const std::function<void(int64_t)> &work, int64_t tasks) {
    DefaultFloatingPoint environment;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks;) work(i);
  }

  void serve(int index) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
    for (;;) {
      look_out_for([&] { return round_ != seen; });
      lock.lock();
      wake_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      const bool joins = work_ && index < wanted_;
      if (!joins) {
        lock.unlock();
        continue;
      }
      ++running_;
      const std::function<void(int64_t)> &work = *work_;
      const int64_t tasks = tasks_;
      lock.unlock();
      take_tasks(work, tasks);
      lock.lock();
      if (--running_ == 0) finished_.notify_one();
      lock.unlock();
    }
  }

  std::mutex callers_, mutex_;
  std::condition_variable wake_, finished_;
  std::atomic<int64_t> next_{0};
  const std::function<void(int64_t)> *work_ = nullptr;
  int64_t tasks_ = 0;
  int started_ = 0, wanted_ = 0;
  std::atomic<int> running_{0};
  std::atomic<uint64_t> round_{0};  // written under the mutex
};

// Never destroyed: detached threads wait on it until the process ends.
Pool *pool = nullptr;
std::mutex pool_mutex;

Pool &shared_pool() {
  std::lock_guard<std::mutex> lock(pool_mutex);
  if (!pool) {
    static std::once_flag registered;
    // A forked child has none of the threads and perhaps a held lock: it begins anew.
    std::call_once(registered, [] {
      pthread_atfork([] { pool_mutex.lock(); }, [] { pool_mutex.unlock(); },
                     [] {
                       pool = nullptr;
                       pool_mutex.unlock();
                     });
    });
    pool = new Pool;
  }
  return *pool;
}

}  // namespace

void parallel_for(int64_t tasks, int threads, const std::function<void(int64_t)> &work) {
  if (tasks < threads) threads = (int)tasks;
  if (threads > 1) {
    shared_pool().run(tasks, threads, work);
    return;
  }
  DefaultFloatingPoint environment;
  for (int64_t i = 0; i < tasks; ++i) work(i);
}

}  // namespace statestream
