// The fused operations of a layer; see `fd_core.ops.contract.Ops` for what each computes.
#pragma once

#include "attention.h"
#include "packed.h"

namespace fd {

struct NormWeights {
    const float* weight;  // null for no norm
    float eps;
};

struct RopeTables {
    const float* cos;
    const float* sin;
};

/// out = table[token] * scale, into the float32 residual stream.
template <class E>
struct Embedding : Operation {
    const E* table;
    int width, out;
    float scale;
    Embedding(const E* table, int width, float scale, int out) : table(table), width(width), out(out), scale(scale) {}
    const char* name() const override { return "embedding"; }
    void run(const Context& context) override;
};

/// The rows that a product multiplies: those of `in` or their norm, quantized where the weights are packed. Part of the
/// operations that multiply.
template <class E>
struct InputRows {
    const Linear& w;
    NormWeights norm;
    int in;       // a buffer of E, or of float32 where there is a norm
    int scratch;  // for what is made of it, or -1 where it is used as it is
    const LoraTable* lora;  // what adapters add to the product, or null
    int adapted, shrunk;    // scratch of E: rows with adapters, adapter by adapter, and what `down` makes of each row

    /// Make them of the wanted rows: `rows` of `in` if given, else all. All threads have met when it returns.
    void prepare(const Context& context, const int32_t* rows, int count) const;
    /// Whether a row of the step has an adapter; they are rows of `in` then.
    bool adapts(const Context& context) const { return lora != nullptr && !context.program.lora.order.empty(); }
    /// Multiply this thread's columns and hand each block of the result to `take(block)`.
    template <class Take>
    void multiply(const Context& context, int rows, Take&& take) const;
    /// The same with each vector of the result: `take(row, vec, value)`, bias added.
    template <class Take>
    void multiply_each(const Context& context, int rows, Take&& take) const;
};

/// Norm of all rows, by this thread's share of them.
template <class E>
struct NormRows {
    int in, out, width;
    NormWeights norm;
    void run(const Context& context, int count) const;
};

/// A sum over ranks of the rows of a float32 buffer. Products go to that buffer and are copied from there: storing them into
/// lines that another core has read is slower than a copy, which need not fetch a line that it replaces.
struct RankSum {
    Group* group;  // null where one rank computes alone
    int part;      // the buffer

    explicit operator bool() const { return group != nullptr; }
    /// Called by every thread when it has written; hands the sums of its share of rows to `take(row, column, sum)`, a
    /// vector at a time, in the order of ranks.
    template <class Take>
    void finish(const Context& context, int rows, int width, Take&& take) const;
};

template <class Take>
void RankSum::finish(const Context& context, int rows, int width, Take&& take) const {
    context.wait_for_all();
    const Range mine = context.share(rows);
    const uint64_t number = group->next();
    const size_t stride = context.stride(part);
    if (mine.begin < mine.end)
        std::memcpy(group->slot(group->rank, number) + mine.begin * stride, context.row<float>(part, mine.begin),
                    (mine.end - mine.begin) * stride * sizeof(float));
    context.wait_for_all();
    if (context.thread == 0) group->meet(number, size_t(rows) * stride * sizeof(float));
    context.wait_for_all();
    if (group->failed()) return;
    for (int i = mine.begin; i < mine.end; i++) {
        auto row = [&](int r) {
            return r == group->rank ? context.row<float>(part, i) : group->slot(r, number) + i * stride;
        };
        for (int j = 0; j < width; j += kLanes) {
            V sum = vload(row(0) + j);
            for (int r = 1; r < group->size; r++) sum = sum + vload(row(r) + j);
            take(i, j, sum);
        }
    }
}

/// out = x * w + bias.
template <class E>
struct LinearOperation : Operation {
    InputRows<E> input;
    int out;
    LinearOperation(InputRows<E> input, int out) : input(input), out(out) {}
    const char* name() const override { return "linear"; }
    const Linear* weights() const override { return &input.w; }
    void run(const Context& context) override;
};

/// Norm, q/k/v projection, head norms, rope, KV write; queries go to `q`.
template <class E>
struct AttentionInputs : Operation {
    InputRows<E> input;
    AttentionShape shape;
    NormWeights q_norm, k_norm;
    RopeTables rope;
    KvLayer<E> layer;
    int qkv, q;  // buffers: float32 scratch, queries
    AttentionInputs(InputRows<E> input, AttentionShape shape, NormWeights q_norm, NormWeights k_norm, RopeTables rope,
                    KvLayer<E> layer, int qkv, int q)
        : input(input), shape(shape), q_norm(q_norm), k_norm(k_norm), rope(rope), layer(layer), qkv(qkv), q(q) {}
    const char* name() const override { return "attention_inputs"; }
    const Linear* weights() const override { return &input.w; }
    void run(const Context& context) override;
};

/// residual += norm(x * w + bias, summed over ranks); `projected` is a float32 scratch buffer, used with a norm or a sum.
template <class E>
struct ProjectResidual : Operation {
    InputRows<E> input;
    RankSum sum;
    NormWeights post_norm;
    int projected, residual;
    ProjectResidual(InputRows<E> input, RankSum sum, NormWeights post_norm, int projected, int residual)
        : input(input), sum(sum), post_norm(post_norm), projected(projected), residual(residual) {}
    const char* name() const override { return "project_residual"; }
    const Linear* weights() const override { return &input.w; }
    void run(const Context& context) override;
};

/// out = activation(gate(norm(x))) * up(norm(x)); without a norm, x is taken as it is.
template <class E>
struct GatedLinear : Operation {
    InputRows<E> input;
    Activation activation;
    int out;
    GatedLinear(InputRows<E> input, Activation activation, int out) : input(input), activation(activation), out(out) {}
    const char* name() const override { return "mlp_inputs"; }
    const Linear* weights() const override { return &input.w; }
    void run(const Context& context) override;
};

/// Norm of the wanted rows and projection to the vocabulary. Of several ranks, each writes its columns into the slots of
/// all, and `out` is bound to this rank's.
template <class E>
struct Logits : Operation {
    InputRows<E> input;
    Group* group;
    float softcap;
    int out;
    Logits(InputRows<E> input, Group* group, float softcap, int out)
        : input(input), group(group), softcap(softcap), out(out) {}
    const char* name() const override { return "logits"; }
    const Linear* weights() const override { return &input.w; }
    void run(const Context& context) override;
};

inline V with_bias(const Linear& w, int vec, V x) { return w.bias ? x + vload(w.bias + vec * kLanes) : x; }

/// Row `r` of activation(gate) * up of a block of a gated product.
template <class E>
void store_gated(const Linear& w, Activation kind, const Block& block, int r, E* out) {
    for (int v = 0; v < block.vecs; v += 2) {
        const V gate = with_bias(w, block.vec + v, vload(block.at(r, v)));
        const V up = with_bias(w, block.vec + v + 1, vload(block.at(r, v + 1)));
        vstore(out + (block.vec + v) / 2 * kLanes, activate(gate, kind) * up);
    }
}

/// The first panel that a thread of a team reads of w.
inline Following first_panel(const Linear* w, int thread, int threads) {
    if (w == nullptr) return {nullptr, 0};
    const Range vecs = column_share(*w, thread, threads);
    if (vecs.begin == vecs.end) return {nullptr, 0};
    if (w->packed()) return {packed_panel(*w, vecs.begin), packed_panel_bytes(*w)};
    auto of = [&](const auto& panel) { return Following{(const char*)panel.b, panel.bytes}; };
    return w->type == Type::f32 ? of(Panel<float>(*w, vecs.begin)) : of(Panel<bf16>(*w, vecs.begin));
}

/// Rows of `x`, `stride` elements apart, times this thread's columns; quantized rows where w is packed.
template <class E, class Take>
void multiply_rows(const Context& context, const Linear& w, const void* x, size_t stride, int rows, Following after,
                   Take&& take) {
    const Range vecs = column_share(w, context.thread, context.team.size());
    if (w.packed())
        packed_matmul(w, static_cast<const char*>(x), stride * sizeof(float), rows, vecs, after, take);
    else
        matmul<E>(w, static_cast<const E*>(x), stride, rows, vecs, after, take);
}

template <class E>
template <class Take>
void InputRows<E>::multiply(const Context& context, int rows, Take&& take) const {
    const int from = scratch < 0 ? in : scratch;
    const void* x = w.packed() ? (const void*)context.row<float>(from, 0) : context.row<E>(from, 0);
    const Following after = first_panel(context.upcoming, context.thread, context.team.size());
    if (!adapts(context)) return multiply_rows<E>(context, w, x, context.stride(from), rows, after, take);
    const E* h = context.row<E>(shrunk, 0);
    multiply_rows<E>(context, w, x, context.stride(from), rows, after, [&](const Block& block) {
        add_up(*lora, context.program.lora, h, context.stride(shrunk), block);
        take(block);
    });
}

template <class E>
template <class Take>
void InputRows<E>::multiply_each(const Context& context, int rows, Take&& take) const {
    multiply(context, rows, [&](const Block& block) {
        for (int r = 0; r < block.rows; r++)
            for (int v = 0; v < block.vecs; v++)
                take(block.row + r, block.vec + v, with_bias(w, block.vec + v, vload(block.at(r, v))));
    });
}

}  // namespace fd
