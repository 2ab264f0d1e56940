#include "operations.h"

namespace fd {

template <class E>
void Embedding<E>::run(const Context& context) {
    const Range r = context.share(context.step.tokens);
    for (int t = r.begin; t < r.end; t++) {
        float* to = context.row<float>(out, t);
        // Scaled values are rounded to the model's type, as models that have a scale do.
        double sum = 0;
        table_row<E>(table, context.step.token_ids[t], [&](int i, float value) {
            E rounded;
            put(&rounded, value * scale);
            sum += to[i] = to_float(rounded);
        });
        const float mean = centred ? float(sum / table.k) : 0.0f;
        for (int i = 0; i < table.k && centred; i++) to[i] -= mean;
    }
}

template <class E>
void NormRows<E>::run(const Context& context, int count) const {
    const Range r = context.share(count);
    for (int i = r.begin; i < r.end; i++)
        rms_norm(context.row<float>(in, i), norm.weight, width, norm.eps, context.row<E>(out, i));
    context.wait_for_all();
}

template <class E>
void InputRows<E>::load(const Context& context, int row, E* to) const {
    if (norm.weight)
        rms_norm(context.row<float>(in, row), norm.weight, w.k, norm.eps, to);
    else if (context.program.buffer(in).wide)
        convert(context.row<float>(in, row), w.k, to);
    else
        std::memcpy((void*)to, context.row<E>(in, row), w.k * sizeof(E));
}

template <class E>
void InputRows<E>::prepare(const Context& context, const int32_t* rows, int count) const {
    const bool adapting = adapts(context);
    if (scratch < 0 && !adapting) return;
    const Range mine = context.share(scratch < 0 ? 0 : count);
    for (int i = mine.begin; i < mine.end; i++) {
        const int from = rows ? rows[i] : i;
        auto quantize = [&](auto values) { quantize_row(w, (char*)context.row<float>(scratch, i), values); };
        if (!w.packed())
            load(context, from, context.row<E>(scratch, i));
        else if (norm.weight)
            quantize(normed(context.row<float>(in, from), norm.weight, w.k, norm.eps));
        else if (context.program.buffer(in).wide)
            quantize(plain(context.row<float>(in, from)));
        else
            quantize(plain(context.row<E>(in, from)));
    }
    const LoraPlan& plan = context.program.lora;
    if (adapting) {
        const Range gathered = context.share(int(plan.order.size()));
        for (int i = gathered.begin; i < gathered.end; i++) {
            E* to = context.row<E>(adapted, i);
            load(context, plan.order[i], to);
            std::memset(to + w.k, 0, (context.stride(adapted) - w.k) * sizeof(E));  // a wider linear may have used it
        }
    }
    context.wait_for_all();
    if (!adapting) return;
    multiply_down<E>(*lora, plan, context.row<E>(adapted, 0), context.stride(adapted), context.thread,
                     context.team.size(), [&](int row, int vec, V x) {
                         vstore(context.row<E>(shrunk, row) + vec * kLanes, x);
                     });
    context.wait_for_all();
}

template <class E>
void LinearOperation<E>::run(const Context& context) {
    const bool wide = context.program.buffer(out).wide;
    input.prepare(context, nullptr, context.step.tokens);
    input.multiply_each(context, context.step.tokens, [&](int row, int vec, V x) {
        x = activate(x, activation);
        if (wide)
            vstore(context.row<float>(out, row) + vec * kLanes, x);
        else
            vstore(context.row<E>(out, row) + vec * kLanes, x);
    });
}

template <class E>
void AttentionInputs<E>::run(const Context& context) {
    const Step& step = context.step;
    const int block_size = layer.layout->block_size;
    const Range mine = context.share(step.tokens);
    for (int t = mine.begin; t < mine.end; t++)
        if (step.kv_slots[t] % block_size == 0) layer.clear_block(step.kv_slots[t] / block_size);
    input.prepare(context, nullptr, step.tokens);
    input.multiply_each(context, step.tokens, [&](int row, int vec, V x) {
        vstore(context.row<float>(qkv, row) + vec * kLanes, x);
    });
    context.wait_for_all();

    // A unit is one KV head of one token with the query heads that share it, or all of a token that have one norm.
    const int group = shape.group(), d = shape.d, heads = shape.joint_norms ? shape.kv_heads : 1;
    const Range units = context.share(step.tokens * (shape.kv_heads / heads));
    for (int i = units.begin * heads; i < units.end * heads; i++) {
        const int t = i / shape.kv_heads, head = i % shape.kv_heads;
        float* values = context.row<float>(qkv, t);
        if (shape.joint_norms && head == 0) {
            const int width = shape.heads * d;
            rms_norm(values, q_norm.weight, width, q_norm.eps, values);
            rms_norm(values + width, k_norm.weight, shape.kv_heads * d, k_norm.eps, values + width);
        }
        const size_t at = size_t(step.positions[t]) * shape.half;
        auto prepare = [&](float* x, const NormWeights& n, const RopeTables& tables) {
            const bool each = n.weight && !shape.joint_norms;
            if (each && !shape.norms_rotated) rms_norm(x, n.weight, d, n.eps, x);
            rotate(x, tables.cos + at, tables.sin + at, shape.half, shape.interleaved);
            if (each && shape.norms_rotated) rms_norm(x, n.weight, d, n.eps, x);
        };
        for (int h = head * group; h < (head + 1) * group; h++) {
            prepare(values + h * d, q_norm, q_rope);
            convert(values + h * d, d, context.row<E>(q, t) + h * d);
        }
        float* k = values + (shape.heads + head) * d;
        const float* v = values + (shape.heads + shape.kv_heads + head) * d;
        prepare(k, k_norm, rope);
        layer.write(step.kv_slots[t], head, k, v);
    }
}

template <class E>
void HeadProducts<E>::run(const Context& context) {
    const Linear& like = *weights_of[0];
    const int tokens = context.step.tokens, heads = int(weights_of.size());
    const int k = like.k, n = like.n, width = padded(like);
    const Range mine = context.share(tokens);
    for (int t = mine.begin; t < mine.end; t++) {
        auto spread = [&](const auto* x) {
            E* to = context.row<E>(rows, t);
            for (int h = 0; h < heads; h++, x += k + kept) {
                E* kept_to = context.row<E>(out, t) + h * (kept + n);
                for (int i = 0; i < width; i++) put(to + h * width + i, i < k ? to_float(x[i]) : 0.0f);
                for (int i = 0; i < kept; i++) put(kept_to + i, to_float(x[k + i]));
            }
        };
        context.program.buffer(in).wide ? spread(context.row<float>(in, t)) : spread(context.row<E>(in, t));
    }
    context.wait_for_all();
    const Range of = context.share(heads);
    for (int h = of.begin; h < of.end; h++) {
        const Linear& w = *weights_of[h];
        matmul<E>(w, context.row<E>(rows, 0) + h * width, context.stride(rows), tokens, {0, w.vecs}, {nullptr, 0},
                  [&](const Block& block) {
                      for (int r = 0; r < block.rows; r++)
                          for (int v = 0; v < block.vecs; v++) {
                              const int column = (block.vec + v) * kLanes, count = std::min(kLanes, n - column);
                              E* to = context.row<E>(out, block.row + r) + h * (kept + n) + kept + column;
                              convert(block.at(r, v), std::max(0, count), to);
                          }
                  });
    }
}

template <class E>
void WriteLatent<E>::run(const Context& context) {
    const Step& step = context.step;
    const int block_size = layer.layout->block_size, rotated = shape.key_part();
    const Range mine = context.share(step.tokens);
    for (int t = mine.begin; t < mine.end; t++)
        if (step.kv_slots[t] % block_size == 0) layer.clear_block(step.kv_slots[t] / block_size);
    context.wait_for_all();
    std::vector<float> turned(rotated);
    for (int t = mine.begin; t < mine.end; t++) {
        const size_t at = size_t(step.positions[t]) * shape.half;
        auto turn = [&](float* x) { rotate(x, rope.cos + at, rope.sin + at, shape.half, shape.interleaved); };
        float* value = context.row<float>(in, t) + first;
        rms_norm(value, norm.weight, shape.latent, norm.eps, value);
        turn(value + shape.latent);
        layer.write(step.kv_slots[t], 0, value + shape.latent, value);
        for (int h = 0; h < shape.heads; h++) {
            E* x = context.row<E>(q, t) + h * shape.d;
            for (int i = 0; i < rotated; i++) turned[i] = to_float(x[i]);
            turn(turned.data());
            convert(turned.data(), rotated, x);
        }
    }
}

template <class E>
void ProjectResidual<E>::run(const Context& context) {
    const int rows = context.step.tokens, width = columns ? columns.width() : input.w.n;
    input.prepare(context, nullptr, rows);
    const int whole = post_norm.weight ? projected : residual;
    const bool apart = columns || post_norm.weight;
    input.multiply_each(context, rows, [&](int row, int vec, V x) {
        float* to = context.row<float>(columns ? part : whole, row) + vec * kLanes;
        vstore(to, apart ? x : vload(to) + x);
    });
    if (columns && post_norm.weight) columns.gather<float>(context, rows, part, projected);
    if (columns && !post_norm.weight)
        columns.exchange<float>(context, rows, part, [&](int row, int first, int count, const float* x) {
            float* to = context.row<float>(residual, row) + first;
            for (int j = 0; j < count; j++) to[j] += x[j];
        });
    if (!post_norm.weight) return;
    context.wait_for_all();
    const Range r = context.share(rows);
    for (int i = r.begin; i < r.end; i++) {
        float* y = context.row<float>(projected, i);
        float* to = context.row<float>(residual, i);
        rms_norm(y, post_norm.weight, width, post_norm.eps, y);
        for (int j = 0; j < width; j++) to[j] += y[j];
    }
}

template <class E>
void GatedLinear<E>::run(const Context& context) {
    const int rows = context.step.tokens;
    input.prepare(context, nullptr, rows);
    input.multiply(context, rows, [&](const Block& block) {
        for (int r = 0; r < block.rows; r++)
            store_gated(input.w, activation, block, r, context.row<E>(out, block.row + r));
    });
}

template <class E>
void Logits<E>::run(const Context& context) {
    const int rows = context.step.logits;
    input.prepare(context, context.step.logits_rows, rows);
    if (!group) {
        input.multiply_each(context, rows, [&](int row, int vec, V x) {
            vstore(context.row<float>(out, row) + vec * kLanes, softcap ? softcapped(x, softcap) : x);
        });
        return;
    }
    const uint64_t number = group->next();
    const size_t stride = context.stride(out), first = size_t(group->rank) * input.w.n;
    input.multiply_each(context, rows, [&](int row, int vec, V x) {
        alignas(64) float values[kLanes];
        vstore(values, softcap ? softcapped(x, softcap) : x);
        const int column = vec * kLanes, count = std::min(kLanes, input.w.n - column);
        for (int r = 0; r < group->size && count > 0; r++)
            std::memcpy(group->slot(r, number) + row * stride + first + column, values, count * sizeof(float));
    });
    context.wait_for_all();
    if (context.thread == 0) group->meet(number, size_t(rows) * stride * sizeof(float));
}

#define FD_INSTANTIATE(E)               \
    template struct Embedding<E>;       \
    template struct NormRows<E>;        \
    template struct InputRows<E>;       \
    template struct LinearOperation<E>; \
    template struct AttentionInputs<E>; \
    template struct HeadProducts<E>;    \
    template struct WriteLatent<E>;     \
    template struct ProjectResidual<E>; \
    template struct GatedLinear<E>;     \
    template struct Logits<E>;
FD_INSTANTIATE(float)
FD_INSTANTIATE(bf16)

}  // namespace fd
