// The fused operations of a layer; see `fd_core.ops.contract.Ops` for what each computes.
#pragma once

#include "attention.h"

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

/// Norm of the wanted rows: `rows` of the step if given, else all. Part of other operations, with its own buffer.
template <class E>
struct NormRows {
    int in, out, width;
    NormWeights norm;
    void run(const Context& context, const int32_t* rows, int count) const;
};

/// out = x * w + bias.
template <class E>
struct LinearOperation : Operation {
    const Linear& w;
    int in, out;
    LinearOperation(const Linear& w, int in, int out) : w(w), in(in), out(out) {}
    const char* name() const override { return "linear"; }
    const Linear* weights() const override { return &w; }
    void run(const Context& context) override;
};

/// Norm, q/k/v projection, head norms, rope, KV write; queries go to `q`.
template <class E>
struct AttentionInputs : Operation {
    NormRows<E> norm;
    const Linear& w;
    AttentionShape shape;
    NormWeights q_norm, k_norm;
    RopeTables rope;
    KvLayer<E> layer;
    int qkv, q;  // buffers: float32 scratch, queries
    AttentionInputs(NormRows<E> norm, const Linear& w, AttentionShape shape, NormWeights q_norm, NormWeights k_norm,
                    RopeTables rope, KvLayer<E> layer, int qkv, int q)
        : norm(norm), w(w), shape(shape), q_norm(q_norm), k_norm(k_norm), rope(rope), layer(layer), qkv(qkv), q(q) {}
    const char* name() const override { return "attention_inputs"; }
    const Linear* weights() const override { return &w; }
    void run(const Context& context) override;
};

/// residual += norm(x * w + bias); `projected` is a float32 scratch buffer, used with a norm only.
template <class E>
struct ProjectResidual : Operation {
    const Linear& w;
    NormWeights post_norm;
    int in, projected, residual;
    ProjectResidual(const Linear& w, NormWeights post_norm, int in, int projected, int residual)
        : w(w), post_norm(post_norm), in(in), projected(projected), residual(residual) {}
    const char* name() const override { return "project_residual"; }
    const Linear* weights() const override { return &w; }
    void run(const Context& context) override;
};

/// out = activation(gate(norm(x))) * up(norm(x)); without a norm, x is taken as it is.
template <class E>
struct GatedLinear : Operation {
    NormRows<E> norm;
    const Linear& w;
    Activation activation;
    int out;
    GatedLinear(NormRows<E> norm, const Linear& w, Activation activation, int out)
        : norm(norm), w(w), activation(activation), out(out) {}
    const char* name() const override { return "mlp_inputs"; }
    const Linear* weights() const override { return &w; }
    void run(const Context& context) override;
};

/// Norm of the wanted rows and projection to the vocabulary.
template <class E>
struct Logits : Operation {
    NormRows<E> norm;
    const Linear& w;
    float softcap;
    int out;
    Logits(NormRows<E> norm, const Linear& w, float softcap, int out)
        : norm(norm), w(w), softcap(softcap), out(out) {}
    const char* name() const override { return "logits"; }
    const Linear* weights() const override { return &w; }
    void run(const Context& context) override;
};

/// Columns [vecs] of activation(gate) * up of a block of a gated product.
template <class E>
void store_gated(const Linear& w, Activation kind, int vec, int vecs, const float* c, E* out) {
    for (int v = 0; v < vecs; v += 2) {
        V gate = vload(c + v * kLanes), up = vload(c + (v + 1) * kLanes);
        if (w.bias) {
            gate = gate + vload(w.bias + (vec + v) * kLanes);
            up = up + vload(w.bias + (vec + v + 1) * kLanes);
        }
        vstore(out + (vec + v) / 2 * kLanes, activate(gate, kind) * up);
    }
}

inline V with_bias(const Linear& w, int vec, V x) { return w.bias ? x + vload(w.bias + vec * kLanes) : x; }

}  // namespace fd
