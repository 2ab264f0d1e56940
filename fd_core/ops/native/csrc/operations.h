// The fused operations of a layer; see `fd_core.ops.contract.Ops` for what each computes.
#pragma once

#include "attention/attention.h"
#include "linear/packed.h"
#include "linear/squeezed.h"

namespace fd {

struct NormWeights {
    const float* weight;  // null for no norm
    float eps;
};

struct RopeTables {
    const float* cos;
    const float* sin;
};

/// Hand the values of a table's row to `take(i, value)`, as float32 of E: a column of a linear that is not gated.
template <class E, class Take>
void table_row(const Linear& table, int row, Take&& take) {
    auto rounded = [&](int i, float value) {
        E x;
        put(&x, value);
        take(i, to_float(x));
    };
    if (table.squeezed) {
        unsqueeze_column(table, row, take);
    } else if (!table.packed()) {
        constexpr int S = Product<E>::kStep;
        const Panel<E> panel(table, row / kLanes);
        const E* from = panel.b + row % kLanes * S;
        for (int i = 0; i < table.k; i++) take(i, to_float(from[i / S * panel.step() + i % S]));
    } else {
        unpack_column(table, row, rounded);
    }
}

/// out = table[token] * scale, less its mean if centred, into the float32 residual stream.
template <class E>
struct Embedding : Operation {
    const Linear& table;
    int out;
    float scale;
    bool centred;
    Embedding(const Linear& table, float scale, bool centred, int out)
        : table(table), out(out), scale(scale), centred(centred) {}
    const char* name() const override { return "embedding"; }
    void run(const Context& context) override;
};

/// out += table[position].
template <class E>
struct AddPositions : Operation {
    const Linear& table;
    int out;
    AddPositions(const Linear& table, int out) : table(table), out(out) {}
    const char* name() const override { return "positions"; }
    void run(const Context& context) override {
        const Range r = context.share(context.step.tokens);
        for (int t = r.begin; t < r.end; t++) {
            float* to = context.row<float>(out, t);
            table_row<E>(table, context.step.positions[t], [&](int i, float value) { to[i] += value; });
        }
    }
};

/// The rows that a product multiplies: those of `in` or their norm, rounded to E, or quantized where the weights are
/// packed. Part of the operations that multiply.
template <class E>
struct InputRows {
    const Linear& w;
    NormWeights norm;
    int in;       // a buffer of E or of float32; of the latter where there is a norm
    int scratch;  // for what is made of it, or -1 where it is used as it is
    const LoraTable* lora;  // what adapters add to the product, or null
    int adapted, shrunk;    // scratch of E: rows with adapters, adapter by adapter, and what `down` makes of each row

    /// One of them, as E.
    void load(const Context& context, int row, E* to) const;
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

/// out = the norm of the float32 rows of `in`: a layer norm where there is a bias.
struct StreamNorm : Operation {
    int in, out, width;
    NormWeights norm;
    const float* bias;
    StreamNorm(int in, int out, int width, NormWeights norm, const float* bias)
        : in(in), out(out), width(width), norm(norm), bias(bias) {}
    const char* name() const override { return "norm"; }
    void run(const Context& context) override {
        const Range r = context.share(context.step.tokens);
        for (int i = r.begin; i < r.end; i++) {
            const float* x = context.row<float>(in, i);
            float* y = context.row<float>(out, i);
            bias ? layer_norm(x, norm.weight, bias, width, norm.eps, y) : rms_norm(x, norm.weight, width, norm.eps, y);
        }
    }
};

/// out = an activation of each element of `in`.
template <class E>
struct Activate : Operation {
    int in, width, out;
    Activation kind;
    Activate(int in, Activation kind, int width, int out) : in(in), width(width), out(out), kind(kind) {}
    const char* name() const override { return "activate"; }
    void run(const Context& context) override {
        const Range r = context.share(context.step.tokens);
        for (int i = r.begin; i < r.end; i++) {
            const E* x = context.row<E>(in, i);
            E* y = context.row<E>(out, i);
            for (int j = 0; j < width; j += kLanes) vstore(y + j, activate(vload(x + j), kind));  // 0 stays padding
        }
    }
};

/// Rows of which each rank holds some columns. Each number is computed by one rank, as one rank alone computes it: the
/// number of ranks changes no bit.
struct RankColumns {
    Group* group = nullptr;      // null where one rank computes alone
    std::vector<int> starts{};  // the first column of each rank, then the width of a row

    explicit operator bool() const { return group != nullptr; }
    int begin() const { return group ? starts[group->rank] : 0; }
    int own() const { return starts[group->rank + 1] - begin(); }
    int width() const { return starts.back(); }
    /// Elements of a slot for each row, the same on all ranks.
    size_t stride() const {
        int most = 0;
        for (int r = 0; r < group->size; r++) most = std::max(most, starts[r + 1] - starts[r]);
        return round_up(most, kLanes);
    }
    /// Exchange the rows of a buffer of T that holds this rank's columns. Called by every thread when it has written;
    /// hands the columns of each rank of its share of rows to `take(row, first column, count, values)`.
    template <class T, class Take>
    void exchange(const Context& context, int rows, int part, Take&& take) const;
    /// The same into the rows of another buffer.
    template <class T>
    void gather(const Context& context, int rows, int part, int out) const {
        exchange<T>(context, rows, part, [&](int row, int first, int count, const T* values) {
            std::memcpy((void*)(context.row<T>(out, row) + first), values, count * sizeof(T));
        });
    }
};

template <class T, class Take>
void RankColumns::exchange(const Context& context, int rows, int part, Take&& take) const {
    context.wait_for_all();
    const Range mine = context.share(rows);
    const uint64_t number = group->next();
    const size_t stride = this->stride();
    auto slot = [&](int rank, int row) { return reinterpret_cast<T*>(group->slot(rank, number)) + row * stride; };
    // Products are copied to the slot: storing them into lines that another core has read is slower.
    for (int i = mine.begin; i < mine.end; i++)
        std::memcpy((void*)slot(group->rank, i), context.row<T>(part, i),
                    own() * sizeof(T));
    context.wait_for_all();
    if (context.thread == 0) group->meet(number, size_t(rows) * stride * sizeof(T));
    context.wait_for_all();
    if (group->failed()) return;
    for (int i = mine.begin; i < mine.end; i++)
        for (int r = 0; r < group->size; r++) take(i, starts[r], starts[r + 1] - starts[r], slot(r, i));
}

/// out = the rows of `in`, of which each rank holds some columns.
template <class E>
struct Gather : Operation {
    RankColumns columns;
    int in, out;
    Gather(RankColumns columns, int in, int out) : columns(std::move(columns)), in(in), out(out) {}
    const char* name() const override { return "gather"; }
    void run(const Context& context) override { columns.gather<E>(context, context.step.tokens, in, out); }
};

/// out = activation(x * w + bias).
template <class E>
struct LinearOperation : Operation {
    InputRows<E> input;
    Activation activation;
    int out;
    LinearOperation(InputRows<E> input, Activation activation, int out)
        : input(input), activation(activation), out(out) {}
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
    RopeTables rope, q_rope;
    KvLayer<E> layer;
    int qkv, q;  // buffers: float32 scratch, queries
    AttentionInputs(InputRows<E> input, AttentionShape shape, NormWeights q_norm, NormWeights k_norm, RopeTables rope,
                    RopeTables q_rope, KvLayer<E> layer, int qkv, int q)
        : input(input), shape(shape), q_norm(q_norm), k_norm(k_norm), rope(rope), q_rope(q_rope), layer(layer), qkv(qkv),
          q(q) {}
    const char* name() const override { return "attention_inputs"; }
    const Linear* weights() const override { return &input.w; }
    void run(const Context& context) override;
    int table() const override { return shape.table; }
};

/// The products of each head with a matrix of its own: out has `kept` elements of each head first, which follow those that
/// are multiplied. `rows` is scratch of E, where each head is padded as its matrix.
template <class E>
struct HeadProducts : Operation {
    std::vector<const Linear*> weights_of;
    int kept, in, rows, out;
    HeadProducts(std::vector<const Linear*> weights, int kept, int in, int rows, int out)
        : weights_of(std::move(weights)), kept(kept), in(in), rows(rows), out(out) {}
    const char* name() const override { return "heads"; }
    void run(const Context& context) override;
    static int padded(const Linear& w) { return round_up(w.padded_k, kLanes); }
};

/// Norm and rope of the columns of `in` from `first` on, a latent value and the rotated part of a key, which it writes; and
/// rope of the queries `q`.
template <class E>
struct WriteLatent : Operation {
    AttentionShape shape;
    NormWeights norm;
    RopeTables rope;
    KvLayer<E> layer;
    int in, first, q;
    WriteLatent(AttentionShape shape, NormWeights norm, RopeTables rope, KvLayer<E> layer, int in, int first, int q)
        : shape(shape), norm(norm), rope(rope), layer(layer), in(in), first(first), q(q) {}
    const char* name() const override { return "write_latent"; }
    void run(const Context& context) override;
    int table() const override { return shape.table; }
};

/// residual += norm(x * w + bias), of which each rank computes some columns. `part` and `projected` are float32 scratch
/// buffers: this rank's columns, if there are several, and whole rows, used with a norm.
template <class E>
struct ProjectResidual : Operation {
    InputRows<E> input;
    RankColumns columns;
    NormWeights post_norm;
    int part, projected, residual;
    ProjectResidual(InputRows<E> input, RankColumns columns, NormWeights post_norm, int part, int projected, int residual)
        : input(input), columns(std::move(columns)), post_norm(post_norm), part(part), projected(projected),
          residual(residual) {}
    const char* name() const override { return "project_residual"; }
    const Linear* weights() const override { return &input.w; }
    void run(const Context& context) override;
};

/// out = activation(gate(x)) * up(x).
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
        vstore(out + (block.vec + v) / 2 * kLanes, gated(gate, up, kind));
    }
}

/// The first panel that a thread of a team reads of w.
inline Following first_panel(const Linear* w, int thread, int threads) {
    if (w == nullptr) return {nullptr, 0};
    const Range vecs = column_share(*w, thread, threads);
    if (vecs.begin == vecs.end) return {nullptr, 0};
    if (w->packed()) return {packed_panel(*w, vecs.begin), packed_panel_bytes(*w)};
    if (w->squeezed) {
        const SqueezedPanel panel(*w, vecs.begin);
        return {reinterpret_cast<const char*>(panel.units), panel.bytes};
    }
    auto of = [&](const auto& panel) { return Following{(const char*)panel.b, panel.bytes}; };
    return w->type == Type::f32 ? of(Panel<float>(*w, vecs.begin)) : of(Panel<bf16>(*w, vecs.begin));
}

/// Rows of `x`, `stride` elements apart, times this thread's columns; quantized rows where w is packed. Of many rows a
/// thread may take all columns of some instead, which stay in its caches from one operation to the next.
template <class E, class Take>
void multiply_rows(const Context& context, const Linear& w, const void* x, size_t stride, int rows, Following after,
                   Take&& take) {
    const Range vecs = column_share(w, context.thread, context.team.size());
    if (!w.packed() && rows / context.team.size() >= TileShape<Row<E>>::kRowsApart) {
        const Range mine = context.share(rows);
        matmul<E>(w, static_cast<const E*>(x) + mine.begin * stride, stride, mine.end - mine.begin, {0, w.vecs}, after,
                  [&](Block block) {
                      block.row += mine.begin;
                      take(block);
                  });
    } else if (w.packed())
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
