// One team of threads that runs a step: workers spin briefly between and inside steps, then yield or sleep.
//
// Barriers of general runtimes stall for milliseconds when the system takes a core away from a spinning thread; here a
// waiting thread gives its core back after a few microseconds, so a team on busy cores slows down but never stalls.
#pragma once

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

namespace fd {

inline void pause_core() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

/// Rounding to nearest and denormals kept, as long as it lives, whatever the program that loaded the library has set:
/// else thread 0, which is the caller's, would compute otherwise than the workers.
class DefaultFloats {
   public:
    DefaultFloats() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloats() { std::fesetenv(&before_); }
    DefaultFloats(const DefaultFloats&) = delete;
    DefaultFloats& operator=(const DefaultFloats&) = delete;

   private:
    std::fenv_t before_;
};

class Barrier {
   public:
    explicit Barrier(int count) : count_(count) {}

    void wait() {
        if (count_ == 1) return;
        unsigned round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
            pause_core();
            if (spins >= kSpins) sched_yield();
        }
    }

   private:
    static constexpr int kSpins = 2000;
    const int count_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> round_{0};
};

class Team {
   public:
    explicit Team(int size) : size_(size), barrier_(size) {
        for (int i = 1; i < size; i++) workers_.emplace_back([this, i] { work(i); });
    }

    ~Team() {
        {
            std::lock_guard<std::mutex> guard(sleep_);
            stop_ = true;
            job_number_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    int size() const { return size_; }
    void wait_for_all() { barrier_.wait(); }

    /// Run job(thread) on every thread of the team, the caller being thread 0; returns when all have ended.
    void run(const std::function<void(int)>& job) {
        std::lock_guard<std::mutex> one_at_a_time(running_);
        job_ = &job;
        {
            // Under the mutex, so that a worker that is about to sleep sees the number before or is woken after.
            std::lock_guard<std::mutex> guard(sleep_);
            job_number_.fetch_add(1, std::memory_order_release);
        }
        if (sleeping_.load(std::memory_order_acquire) > 0) wake_.notify_all();
        job(0);
        barrier_.wait();
    }

   private:
    void work(int thread) {
        const DefaultFloats floats;  // not those of the thread that made the team
        for (unsigned done = 0;;) {
            unsigned number = await_job(done);
            if (stop_) return;
            (*job_)(thread);
            done = number;
            barrier_.wait();
        }
    }

    unsigned await_job(unsigned done) {
        unsigned number;
        for (int spins = 0; spins < kIdleSpins; spins++) {
            if ((number = job_number_.load(std::memory_order_acquire)) != done) return number;
            pause_core();
        }
        std::unique_lock<std::mutex> lock(sleep_);
        sleeping_.fetch_add(1, std::memory_order_release);
        wake_.wait(lock, [&] { return (number = job_number_.load(std::memory_order_acquire)) != done; });
        sleeping_.fetch_sub(1, std::memory_order_release);
        return number;
    }

    // About 50 microseconds: longer than the gap between two calls of one step, far shorter than an idle server's.
    static constexpr int kIdleSpins = 5000;
    const int size_;
    Barrier barrier_;
    std::mutex running_, sleep_;
    std::condition_variable wake_;
    const std::function<void(int)>* job_ = nullptr;
    alignas(64) std::atomic<unsigned> job_number_{0};
    std::atomic<int> sleeping_{0};
    bool stop_ = false;
    std::vector<std::thread> workers_;
};

/// [begin, end) of `total` units for one of `threads` threads.
struct Range {
    int begin, end;
};
inline Range share(int total, int thread, int threads) {
    return {int(int64_t(total) * thread / threads), int(int64_t(total) * (thread + 1) / threads)};
}

}  // namespace fd
