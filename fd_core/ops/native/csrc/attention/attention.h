// Paged attention with an online softmax: one kernel for decode, prefill and shared prefixes.
#pragma once

#include "attention/attention_int8.h"
#include "program.h"

namespace fd {

struct AttentionShape {
    int heads, kv_heads, d;
    int window;       // 0 sees all
    int chunked;      // whether it is the size of chunks
    int half;         // of the elements of a head that rope turns
    int interleaved;  // whether rope turns neighbours, not element i with i + half
    int causal;       // whether a token sees no later one
    int norms_rotated;  // whether the norms of heads follow rope
    int joint_norms;    // whether all heads of q, and all of k, have one norm
    int table;          // group of layers whose KV places it uses
    int latent;         // as in KvLayout
    float scale;
    float softcap;  // 0 for none
    const float* sinks;  // [heads], scores of one more key with the value 0; or null
    int group() const { return heads / kv_heads; }
    int value() const { return latent ? latent : d; }  // elements of a head's output
    int key_part() const { return d - latent; }
};

template <class E>
class Attention : public Operation {
   public:
    Attention(AttentionShape shape, const KvLayout& layout, int layer, int q, int out, AttentionPlan* plan)
        : shape_(shape), layer_(layout, layer), q_(q), out_(out), plan_(plan) {
        plan->span_floats = std::max(plan->span_floats, layout.d_v + 2);
    }
    const char* name() const override { return "attention"; }
    void run(const Context& context) override;
    int table() const override { return shape_.table; }

   private:
    struct Pass;
    struct Unit;
    struct Fetcher;
    struct Scratch;
    struct Sums;
    void plan_unit(const Context&, const TilePart&, int head, Unit&) const;
    void run_unit(const Context&, Scratch&, const Unit&) const;
    void run_pass(Scratch&, const Pass&, const Unit&) const;
    const E* expanded(Scratch&, int block, int head, size_t first, int runs, int count, size_t stride) const;
    const E* latent_keys(Scratch&, int block, int runs, int columns) const;
    const E* latent_values(Scratch&, int block, int columns) const;
    void multiply(Scratch&, Range rows, int vecs, TileCall<E> call) const;
    void multiply(Scratch&, Range rows, int vecs, SplitCall call) const;
    void score(Scratch&, const Pass&, int head, int block, int count, int column) const;
    void weigh(Scratch&, const Pass&, int head, int first_block, int end_block) const;
    void softmax(Scratch&, const Pass&, int head, int first_block, int end_block) const;
    void merge(Scratch&, const Sums& into, const Sums& from, Range rows) const;
    void end_span(Scratch&, const Sums& span, Range rows) const;
    void put_rows(const Context&, const QueryTile&, int head, const Sums&) const;
    void combine(const Context&, Scratch&) const;
    Sums partial(const QueryTile&, int head, int span) const;

    AttentionShape shape_;
    KvLayer<E> layer_;
    int q_, out_;
    AttentionPlan* plan_;  // shared by the layers of one geometry
};

}  // namespace fd
