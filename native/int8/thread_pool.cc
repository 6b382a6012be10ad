#include "thread_pool.h"

#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace socflower::int8 {
namespace {

// About 50 us on the machines at hand: the gap between two layers is shorter, a pause between steps is not.
constexpr int kSpins = 2000;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void pin(std::thread& thread, int core) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (core < 0 || core >= CPU_SETSIZE) throw std::runtime_error("there is no core " + std::to_string(core));
  CPU_SET(core, &set);
  if (pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set) != 0) {
    throw std::runtime_error("cannot pin a thread to core " + std::to_string(core) +
                             "; this process may not use it, or it does not exist");
  }
#else
  (void)thread, (void)core;
  throw std::runtime_error("threads can be pinned to cores on Linux only; leave `cores` out");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, const std::vector<int>& cores)
    : num_threads_(num_threads), caller_works_(cores.empty()) {
  if (num_threads < 1 || num_threads > 1024) {
    throw std::invalid_argument("num_threads must be 1 to 1024, got " + std::to_string(num_threads));
  }
  if (!cores.empty() && static_cast<int>(cores.size()) != num_threads) {
    throw std::invalid_argument("need one core per thread, got " + std::to_string(cores.size()) + " cores for " +
                                std::to_string(num_threads) + " threads");
  }
  try {
    for (int thread = caller_works_ ? 1 : 0; thread < num_threads; ++thread) {
      threads_.emplace_back([this, thread] { work(thread); });
      if (!cores.empty()) pin(threads_.back(), cores[thread]);
    }
  } catch (...) {
    stop_ = true;
    {
      std::lock_guard<std::mutex> lock(mutex_);
    }
    start_.notify_all();
    for (auto& started : threads_) started.join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  stop_ = true;
  {
    std::lock_guard<std::mutex> lock(mutex_);  // a thread between its check and its wait would miss the call
  }
  start_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::run_erased(int count, Call call, void* body) {
  std::lock_guard<std::mutex> one_at_a_time(running_);
  if (threads_.empty() || (count <= 1 && caller_works_)) {
    for (int index = 0; index < count; ++index) call(body, index, 0);
    return;
  }
  count_ = count, call_ = call, body_ = body;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    generation_.fetch_add(1, std::memory_order_release);
  }
  start_.notify_all();
  if (caller_works_) drain(0);
  for (int spin = 0; spin < kSpins && busy_.load(std::memory_order_acquire) > 0; ++spin) relax();
  if (busy_.load(std::memory_order_acquire) > 0) {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_.load(std::memory_order_acquire) == 0; });
  }
}

void ThreadPool::drain(int thread) {
  for (int index = next_.fetch_add(1, std::memory_order_relaxed); index < count_;
       index = next_.fetch_add(1, std::memory_order_relaxed)) {
    call_(body_, index, thread);
  }
}

void ThreadPool::work(int thread) {
  std::uint64_t seen = 0;
  for (;;) {
    for (int spin = 0; spin < kSpins && generation_.load(std::memory_order_acquire) == seen && !stop_; ++spin) {
      relax();
    }
    if (generation_.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      start_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen || stop_; });
    }
    if (stop_) return;
    seen = generation_.load(std::memory_order_acquire);
    drain(thread);
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      std::lock_guard<std::mutex> lock(mutex_);
      done_.notify_one();
    }
  }
}

}  // namespace socflower::int8
