// Recurrent layers: their states lie in the blocks of the KV cache, see `fd_core.ops.contract.Recurrent`.
#pragma once

#include "operations.h"

namespace fd {

enum class Rule : int { gate, delta, scan };

struct RecurrentShape {
    Rule rule;
    int taps, channels, key_heads, value_heads, key_dim, value_dim, table;
    float eps, least_time, most_time;
    const float *conv, *bias, *decay, *time_bias, *norm, *skip;

    int outputs() const { return value_heads ? value_heads * value_dim : channels; }
    int scalars() const { return value_heads ? (rule == Rule::delta ? 2 : 1) : 0; }  // of each head, in the inputs
    int first_channel() const { return rule == Rule::scan ? outputs() : 0; }         // in the inputs
    int first_gate() const { return rule == Rule::scan ? 0 : channels; }
    int queries() const { return rule == Rule::scan ? outputs() + key_heads * key_dim : 0; }  // in the channels
    int keys() const { return rule == Rule::scan ? outputs() : key_heads * key_dim; }
    int values() const { return rule == Rule::scan ? 0 : 2 * key_heads * key_dim; }
    int conv_state() const { return (taps - 1) * channels; }
    int state() const { return 1 + conv_state() + value_heads * key_dim * value_dim; }
    int journal() const { return channels + scalars() * value_heads; }
    int shared() const { return value_heads / key_heads; }
};

/// The memory of a block in one layer as a row of floats: the bytes of the elements that `fd_kv_transfer` copies.
class StateBlocks {
   public:
    StateBlocks(const KvLayout& layout, int layer);
    size_t floats() const { return bytes_ * heads_ / sizeof(float); }
    void read(int block, size_t first, size_t count, float* to) const {
        copy(block, first, count, [&](char* at, size_t done, size_t n) { std::memcpy((char*)to + done, at, n); });
    }
    void write(int block, size_t first, size_t count, const float* from) const {
        copy(block, first, count, [&](char* at, size_t done, size_t n) { std::memcpy(at, (const char*)from + done, n); });
    }

   private:
    struct Run {
        size_t at, bytes, before;  // in a head's memory; `before` of the runs before it
    };
    template <class Take>
    void copy(int block, size_t first, size_t count, Take&& take) const;

    std::vector<Run> runs_;
    size_t bytes_ = 0, head_bytes_, block_bytes_;  // of a head: that are used, to the next head, and to the next block
    int heads_;
    char* data_;
};

template <class Take>
void StateBlocks::copy(int block, size_t first, size_t count, Take&& take) const {
    size_t at = first * sizeof(float), left = count * sizeof(float), done = 0;
    while (left > 0) {
        const size_t head = at / bytes_, place = at % bytes_;
        auto after = std::upper_bound(runs_.begin(), runs_.end(), place, [](size_t p, const Run& r) { return p < r.before; });
        const Run& run = *(after - 1);
        const size_t within = place - run.before, n = std::min({left, run.bytes - within, bytes_ - place});
        take(data_ + head * head_bytes_ + block * block_bytes_ + run.at + within, done, n);
        at += n, done += n, left -= n;
    }
}

/// out = the outputs of a recurrence for the float32 inputs `in`, whose states it reads and writes; `scan` also writes
/// outputs before their norm into the gates of `in`.
template <class E>
struct Recur : Operation {
    RecurrentShape shape;
    StateBlocks blocks;
    int block_size, in, out;
    int drafts;  // tokens of the journal
    Recur(const RecurrentShape& shape, const KvLayout& layout, int layer, int in, int out);
    const char* name() const override { return "recur"; }
    void run(const Context& context) override;
    int table() const override { return shape.table; }
};

/// out = in * sigmoid(gate), of float32 gates.
template <class E>
struct GateHeads : Operation {
    int in, gate, width, out;
    GateHeads(int in, int gate, int width, int out) : in(in), gate(gate), width(width), out(out) {}
    const char* name() const override { return "gate_heads"; }
    void run(const Context& context) override {
        const Range mine = context.share(context.step.tokens);
        for (int t = mine.begin; t < mine.end; t++) {
            const float* g = context.row<float>(gate, t);
            const E* x = context.row<E>(in, t);
            E* y = context.row<E>(out, t);
            int i = 0;
            for (; i + kLanes <= width; i += kLanes)
                vstore(y + i, vload(x + i) / (vset(1.0f) + vexp(vset(0.0f) - vload(g + i))));
            for (; i < width; i++) put(y + i, to_float(x[i]) / (1.0f + std::exp(-g[i])));
        }
    }
};

}  // namespace fd
