// A program: the fused operations of a model's forward, recorded once and run by one call for each step.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "attention/attention_plan.h"
#include "base/bounds.h"
#include "group.h"
#include "attention/kv.h"
#include "linear/linear.h"
#include "linear/lora.h"
#include "base/memory.h"
#include "base/rows.h"
#include "base/threads.h"

namespace fd {

/// The flattened batch of one step, as in `fd_core.ops.contract.StepInput`.
struct Step {
    int tokens, rows, logits, max_blocks;
    int tables;  // groups of layers: `kv_slots` and `block_tables` have the places of each, one after the other
    const int32_t* token_ids;
    const int32_t* positions;
    const int32_t* kv_slots;
    const int32_t* query_start;
    const int32_t* context_len;
    const int32_t* block_tables;
    const int32_t* logits_rows;
    const int32_t* lora_places;  // null where no token has an adapter
    const int32_t* ends;  // of the positions that each token sees where it sees no later ones; null: up to its own

    /// The same step with the places of one group of layers.
    Step of_table(int table) const {
        Step step = *this;
        step.tables = 1;
        step.kv_slots += size_t(table) * tokens;
        step.block_tables += size_t(table) * rows * max_blocks;
        return step;
    }
};

/// An activation matrix: one row for each token of the step, rows padded so that vectors may run over their ends.
/// Padding columns of a matrix that feeds a product hold zeros.
struct Buffer {
    int width;       // columns
    size_t stride;   // elements from row to row
    bool wide;       // float32 whatever the program's type
    int per_token;   // rows for each token of the step
    bool of_logits;  // rows for each row of logits instead
    int bound;       // rows of the caller's memory that it is, or -1 where it is the program's own
    char* data;
    std::unique_ptr<Mapping> own;
};

/// What a step's indices must stay below, by what the operations of a program read.
struct Limits {
    static constexpr int kNone = 0x7fffffff;  // no operation reads by it
    int token_ids = kNone, positions = kNone, kv_slots = kNone, blocks = kNone, block_size = 0, adapters = kNone;
    int tables = 1;  // at most as many as the step has
    bool logits = false;
};

class Program;

/// What one thread sees of a running step.
struct Context {
    const Step& step;
    Program& program;
    Team& team;
    int thread;
    size_t operation;         // index of the one that runs
    const Linear* upcoming;  // weights that the operations after it read first, or null

    void wait_for_all() const { team.wait_for_all(); }
    Range share(int total) const { return fd::share(total, thread, team.size()); }
    /// A counter of work units that the threads draw from; starts at 0 for each operation of each step.
    std::atomic<int>& counter() const;
    template <class E>
    E* row(int buffer, int row) const;
    size_t stride(int buffer) const;
};

struct Operation {
    virtual ~Operation() = default;
    virtual const char* name() const = 0;
    /// Called by every thread; all threads meet after it.
    virtual void run(const Context& context) = 0;
    /// The weights that it reads first, if any: fetched while the operation before it ends.
    virtual const Linear* weights() const { return nullptr; }
    /// The group of layers whose places it reads.
    virtual int table() const { return 0; }
    double seconds = 0;
};

class Program {
   public:
    int add_buffer(int width, bool wide, int per_token = 1, bool of_logits = false) {
        const size_t stride = round_up(width, kRowAlign);
        buffers_.push_back({width, stride, wide, per_token, of_logits, -1, nullptr, nullptr});
        return int(buffers_.size()) - 1;
    }
    /// Let `rows` rows of the caller's be a buffer; steps with more are refused.
    void bind(int buffer, void* data, int rows, size_t stride) {
        Buffer& b = buffers_[buffer];
        check_at_most("columns of a buffer", round_up(b.width, kRowAlign), stride);
        b.bound = rows;
        b.data = static_cast<char*>(data);
        b.stride = stride;
    }
    void add(Operation* operation) { operations_.emplace_back(operation); }
    /// Note that an operation exchanges rows with other ranks: so many floats for each token, and for each row of logits.
    Group* exchanging(Group* with, size_t per_token, size_t per_logits) {
        if (!with) return with;
        group = with, exchanges++;
        per_token_ = std::max(per_token_, per_token), per_logits_ = std::max(per_logits_, per_logits);
        return with;
    }
    /// Whether the rows of a step are more than ranks exchange at a time.
    bool too_large(const Step& step) const {
        const size_t most = std::max(step.tokens * per_token_, step.logits * per_logits_);
        return group && most * sizeof(float) > group->slot_bytes;
    }

    /// Throw if an operation would read or write beyond what there is.
    void check(const Step& step) const {
        const Limits& most = limits;
        auto check = [](const char* what, const int32_t* indices, int count, int limit) {
            if (limit != Limits::kNone) check_indices(what, indices, count, limit);
        };
        for (const Buffer& b : buffers_)
            if (b.bound >= 0) check_at_most("rows of a step", b.of_logits ? step.logits : step.tokens, b.bound);
        check("token id", step.token_ids, step.tokens, most.token_ids);
        check("position", step.positions, step.tokens, most.positions);
        check_at_most("tables of the model", most.tables, step.tables);
        check("KV slot", step.kv_slots, step.tables * step.tokens, most.kv_slots);
        if (step.lora_places) check("adapter", step.lora_places, step.tokens, most.adapters);
        if (most.logits) check_indices("row of logits", step.logits_rows, step.logits, step.tokens);
        if (most.blocks == Limits::kNone) return;
        for (int row = 0; row < step.rows; row++) {
            const int begin = step.query_start[row], end = step.query_start[row + 1];
            if (begin == end) continue;  // nothing asks
            check_indices("start of a row", &begin, 1, int64_t(end) + 1);
            check_at_most("end of a row", end, step.tokens);
            check_at_most("tokens of a row", int64_t(end) - begin, step.context_len[row]);
            check_at_most("context of a row", step.context_len[row], int64_t(step.max_blocks) * most.block_size);
            for (int table = 0; table < step.tables; table++)
                check_indices("KV block", step.of_table(table).block_tables + size_t(row) * step.max_blocks,
                              ceil_div(step.context_len[row], most.block_size), most.blocks);
        }
    }

    void run(const Step& step, Team& team, size_t element_size) {
        lora.build(step.lora_places, step.tokens);
        reserve(step.tokens > step.logits ? step.tokens : step.logits, element_size);
        if (counters_.size() != operations_.size()) counters_ = std::vector<Counter>(operations_.size());
        upcoming_.resize(operations_.size());
        for (size_t i = operations_.size(), next = i; i-- > 0; next = i) {
            const bool last = next == operations_.size();
            const Linear* w = last ? nullptr : operations_[next]->weights();
            upcoming_[i] = w || last ? w : upcoming_[next];
        }
        for (auto& counter : counters_) counter.value.store(0, std::memory_order_relaxed);
        team.run([&](int thread) { run_thread({step, *this, team, thread, 0, nullptr}); });
    }

    Buffer& buffer(int index) { return buffers_[index]; }
    std::atomic<int>& counter(size_t operation) { return counters_[operation].value; }
    const std::vector<std::unique_ptr<Operation>>& operations() const { return operations_; }
    bool timed = false;
    Limits limits;
    LoraPlan lora;
    Group* group = nullptr;  // of the operations that exchange rows with other ranks, or null
    int exchanges = 0;       // in one run

   private:
    struct Counter {
        alignas(64) std::atomic<int> value{0};
        Counter() = default;
        Counter(Counter&&) {}
    };

    void run_thread(const Context& context) {
#if defined(FD_AMX)
        amx::configure();
#endif
        auto start = std::chrono::steady_clock::now();
        for (size_t i = 0; i < operations_.size(); i++) {
            const Step own = context.step.of_table(operations_[i]->table());
            operations_[i]->run({own, *this, context.team, context.thread, i, upcoming_[i]});
            context.wait_for_all();
            if (timed && context.thread == 0) {
                auto end = std::chrono::steady_clock::now();
                operations_[i]->seconds += std::chrono::duration<double>(end - start).count();
                start = end;
            }
        }
#if defined(FD_AMX)
        amx::release();
#endif
    }

    void reserve(int rows, size_t element_size) {
        if (rows <= rows_) return;
        rows_ = round_up(rows, 64);
        for (auto& b : buffers_) {
            if (b.bound >= 0) continue;
            const size_t all = size_t(rows_) * b.per_token + TileShape<bf16>::kRowSlack;
            const size_t bytes = all * b.stride * (b.wide ? sizeof(float) : element_size);
            b.own = std::make_unique<Mapping>(bytes);
            b.data = b.own->data();
        }
    }

    static constexpr int kRowAlign = 64;
    std::vector<Buffer> buffers_;
    std::vector<std::unique_ptr<Operation>> operations_;
    std::vector<Counter> counters_;
    std::vector<const Linear*> upcoming_;
    int rows_ = 0;
    size_t per_token_ = 0, per_logits_ = 0;  // floats exchanged
};

template <class E>
E* Context::row(int buffer, int row) const {
    Buffer& b = program.buffer(buffer);
    return reinterpret_cast<E*>(b.data) + size_t(row) * b.stride;
}
inline std::atomic<int>& Context::counter() const { return program.counter(operation); }
inline size_t Context::stride(int buffer) const { return program.buffer(buffer).stride; }

}  // namespace fd
