#include "moe.h"

namespace fd {

template <class E>
MoeResidual<E>::MoeResidual(Program& program, NormRows<E> norm, ExpertWeights experts, Activation activation,
                            int residual)
    : norm_(norm), experts_(std::move(experts)), activation_(activation), residual_(residual) {
    const int k = experts_.top_k;
    gathered_ = program.add_buffer(norm.width, false, k);
    hidden_ = program.add_buffer(experts_.gate_up[0]->n, false, k);
    result_ = program.add_buffer(norm.width, true, k);
    if (experts_.shared_gate_up) {
        shared_hidden_ = program.add_buffer(experts_.shared_gate_up->n, false);
        shared_result_ = program.add_buffer(norm.width, true);
    }
}

template <class E>
void MoeResidual<E>::run(const Context& context) {
    const int tokens = context.step.tokens;
    if (norm_.norm.weight) norm_.run(context, nullptr, tokens);
    if (context.thread == 0) {
        chosen_.resize(size_t(tokens) * experts_.top_k);
        weights_.resize(chosen_.size());
        place_.resize(chosen_.size());
    }
    context.wait_for_all();

    const Range mine = context.share(tokens);
    std::vector<float> scores(2 * experts_.gate_up.size());
    for (int t = mine.begin; t < mine.end; t++) route(context, t, scores.data());
    context.wait_for_all();
    if (context.thread == 0) group_by_expert(tokens);
    context.wait_for_all();
    const int in = norm_.norm.weight ? norm_.out : norm_.in;
    for (int t = mine.begin; t < mine.end; t++)
        for (int i = 0; i < experts_.top_k; i++)
            std::memcpy((void*)context.row<E>(gathered_, place_[t * experts_.top_k + i]), context.row<E>(in, t),
                        norm_.width * sizeof(E));
    context.wait_for_all();
    run_experts(context);
    context.wait_for_all();
    combine(context);
}

template <class E>
void MoeResidual<E>::route(const Context& context, int token, float* scores) {
    const int count = int(experts_.gate_up.size()), width = norm_.width, k = experts_.top_k;
    const E* x = context.row<E>(norm_.norm.weight ? norm_.out : norm_.in, token);
    float largest = -3.0e38f;
    for (int e = 0; e < count; e++) {
        const float* w = experts_.router + size_t(e) * width;
        V parts = vset(0.0f);
        int i = 0;
        for (; i + kLanes <= width; i += kLanes) parts = vfma(vload(x + i), vload(w + i), parts);
        float score = vsum(parts);
        for (; i < width; i++) score += to_float(x[i]) * w[i];
        scores[e] = score;
        largest = std::max(largest, score);
    }
    float sum = 0;
    for (int e = 0; e < count; e++) sum += scores[e] = std::exp(scores[e] - largest);
    float* ranked = scores + count;
    for (int e = 0; e < count; e++) {
        scores[e] /= sum;
        ranked[e] = scores[e] + (experts_.bias ? experts_.bias[e] : 0.0f);
    }
    float chosen_sum = 0;
    for (int i = 0; i < k; i++) {
        const int best = int(std::max_element(ranked, ranked + count) - ranked);  // the lower index on a tie
        ranked[best] = -3.0e38f;
        chosen_[token * k + i] = best;
        weights_[token * k + i] = scores[best];
        chosen_sum += scores[best];
    }
    if (experts_.normalize)
        for (int i = 0; i < k; i++) weights_[token * k + i] /= std::max(chosen_sum, experts_.norm_floor);
}

template <class E>
void MoeResidual<E>::group_by_expert(int tokens) {
    starts_.assign(experts_.gate_up.size() + 1, 0);
    for (int e : chosen_) starts_[e + 1]++;
    for (size_t e = 1; e < starts_.size(); e++) starts_[e] += starts_[e - 1];
    std::vector<int> next(starts_.begin(), starts_.end() - 1);
    for (int i = 0; i < tokens * experts_.top_k; i++) place_[i] = next[chosen_[i]]++;
}

template <class E>
void MoeResidual<E>::run_experts(const Context& context) const {
    constexpr int kColumns = TileShape<E>::kVecs * kLanes;
    auto gate_and_up = [&](const Linear& w, int in, int hidden, Range rows) {
        matmul<E>(w, context.row<E>(in, rows.begin), context.stride(in), rows.end - rows.begin,
                  column_share(w, context.thread, context.team.size()), nullptr,
                  [&](int first, int count, int vec, int vecs, const float* c) {
                      for (int i = 0; i < count; i++)
                          store_gated(w, activation_, vec, vecs, c + i * kColumns,
                                      context.row<E>(hidden, rows.begin + first + i));
                  });
    };
    auto down = [&](const Linear& w, int hidden, int result, Range rows) {
        matmul<E>(w, context.row<E>(hidden, rows.begin), context.stride(hidden), rows.end - rows.begin,
                  column_share(w, context.thread, context.team.size()), nullptr,
                  [&](int first, int count, int vec, int vecs, const float* c) {
                      for (int i = 0; i < count; i++)
                          for (int v = 0; v < vecs; v++)
                              vstore(context.row<float>(result, rows.begin + first + i) + (vec + v) * kLanes,
                                     with_bias(w, vec + v, vload(c + i * kColumns + v * kLanes)));
                  });
    };
    auto rows_of = [&](size_t e) { return Range{starts_[e], starts_[e + 1]}; };
    const Range all = {0, context.step.tokens};
    for (size_t e = 0; e < experts_.gate_up.size(); e++) gate_and_up(*experts_.gate_up[e], gathered_, hidden_, rows_of(e));
    if (experts_.shared_gate_up)
        gate_and_up(*experts_.shared_gate_up, norm_.norm.weight ? norm_.out : norm_.in, shared_hidden_, all);
    context.wait_for_all();
    for (size_t e = 0; e < experts_.down.size(); e++) down(*experts_.down[e], hidden_, result_, rows_of(e));
    if (experts_.shared_down) down(*experts_.shared_down, shared_hidden_, shared_result_, all);
}

template <class E>
void MoeResidual<E>::combine(const Context& context) const {
    const Range mine = context.share(context.step.tokens);
    for (int t = mine.begin; t < mine.end; t++) {
        float* to = context.row<float>(residual_, t);
        for (int i = 0; i < experts_.top_k; i++) {
            const float* y = context.row<float>(result_, place_[t * experts_.top_k + i]);
            const float weight = weights_[t * experts_.top_k + i];
            for (int j = 0; j < norm_.width; j++) to[j] += weight * y[j];
        }
        if (experts_.shared_down) {
            const float* y = context.row<float>(shared_result_, t);
            for (int j = 0; j < norm_.width; j++) to[j] += y[j];
        }
    }
}

template class MoeResidual<float>;
template class MoeResidual<bf16>;

}  // namespace fd
