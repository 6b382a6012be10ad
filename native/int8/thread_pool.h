// Threads of the integer engine's own, beside those of torch.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace socflower::int8 {

// Runs numbered tasks on a fixed set of threads. Without `cores`, the calling thread works too and
// num_threads - 1 threads are started; with `cores` (one per thread), num_threads threads are started, each
// pinned to its core, and the caller only waits: its own affinity, which later threads of torch would
// inherit, stays as it is. One run at a time; run() is not reentrant. Nothing is allocated after construction.
class ThreadPool {
 public:
  // Throws std::invalid_argument on num_threads < 1 or a list of another length, std::runtime_error when a
  // thread cannot be pinned.
  explicit ThreadPool(int num_threads, const std::vector<int>& cores = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return num_threads_; }

  // Calls task(index, thread) once for every index in [0, count), in any order; thread is in [0, size()).
  // Tasks must not throw.
  template <typename Task>
  void run(int count, Task&& task) {
    using Body = std::remove_reference_t<Task>;
    run_erased(count, [](void* body, int index, int thread) { (*static_cast<Body*>(body))(index, thread); },
               const_cast<void*>(static_cast<const void*>(&task)));
  }

 private:
  using Call = void (*)(void* body, int index, int thread);

  void run_erased(int count, Call call, void* body);
  void work(int thread);
  void drain(int thread);

  const int num_threads_;
  const bool caller_works_;
  std::vector<std::thread> threads_;

  std::mutex running_;  // one run at a time
  std::mutex mutex_;
  std::condition_variable start_, done_;
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<int> next_{0};
  std::atomic<int> busy_{0};
  std::atomic<bool> stop_{false};
  int count_ = 0;
  Call call_ = nullptr;
  void* body_ = nullptr;
};

// A maximum over tasks.
inline void raise_to(std::atomic<std::uint32_t>& largest, std::uint32_t value) {
  std::uint32_t seen = largest.load(std::memory_order_relaxed);
  while (value > seen && !largest.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace socflower::int8
