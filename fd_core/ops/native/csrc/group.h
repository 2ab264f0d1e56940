// The exchanges between ranks of `fd_core.ops.parallel`, which says how their memory is laid out and why two slots do.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "base/threads.h"

namespace fd {

/// Exchanges the first bytes of slots between ranks that share no memory; returns what `Group::failed` does.
using Meet = int (*)(uint64_t number, size_t bytes);

/// One rank's end. Threads of a team write, one of them meets the other ranks, then all read.
class Group {
   public:
    Group(char* base, int rank, int size, size_t header, size_t slot, double patience, Meet meet)
        : rank(rank), size(size), slot_bytes(slot), base_(base), header_(header), patience_(patience), meet_(meet) {}

    const int rank, size;
    const size_t slot_bytes;

    /// The number of the exchange that begins, for every thread until one has met.
    uint64_t next() const { return word(1 + rank).load(std::memory_order_relaxed) + 1; }
    float* slot(int of, uint64_t number) const {
        return reinterpret_cast<float*>(base_ + header_ + (size_t(of) * 2 + number % 2) * slot_bytes);
    }
    /// Say that this rank has written so many bytes, and wait until all have. Called by one thread when all have written.
    void meet(uint64_t number, size_t bytes) {
        if (meet_) {
            if (!failed_) failed_ = meet_(number, bytes);
            return;
        }
        word(1 + rank).store(number, std::memory_order_release);
        for (int other = 0; other < size && !failed_; other++)
            if (!wait_for(other, number)) failed_ = 1 + other;
    }
    /// 0, or 1 and the rank that was not heard of; a group that failed once exchanges nothing any more.
    int failed() const { return failed_; }

   private:
    std::atomic<uint64_t>& word(int i) const { return *reinterpret_cast<std::atomic<uint64_t>*>(base_ + size_t(i) * 64); }
    bool wait_for(int other, uint64_t number) const {
        using Clock = std::chrono::steady_clock;
        Clock::time_point last;
        double waited = 0;
        for (int spins = 0; word(1 + other).load(std::memory_order_acquire) < number; spins++) {
            pause_core();
            if (spins < kSpins) continue;
            const Clock::time_point now = Clock::now();
            // If more passed, this process stood still itself, and perhaps the others with it.
            if (spins > kSpins) waited += std::min(std::chrono::duration<double>(now - last).count(), kOwnSeconds);
            last = now;
            if (word(0).load(std::memory_order_relaxed)) return false;
            if (waited > patience_) return false;
            // Long after the others are due, this core is better used by whoever holds them up.
            waited < kYieldSeconds ? sched_yield() : usleep(50);
        }
        return true;
    }

    static constexpr int kSpins = 4000;
    static constexpr double kYieldSeconds = 0.002;
    static constexpr double kOwnSeconds = 0.2;
    char* base_;
    size_t header_;
    double patience_;
    Meet meet_;  // null where all ranks map the memory
    std::atomic<int> failed_{0};
};

}  // namespace fd
