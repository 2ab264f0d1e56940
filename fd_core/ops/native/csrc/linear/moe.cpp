#include "linear/moe.h"

namespace fd {

constexpr float kExcluded = -3.0e38f;  // below every score

template <class E>
MoeResidual<E>::MoeResidual(Program& program, NormRows<E> norm, ExpertWeights experts, Activation activation,
                            ExpertColumns columns, int residual)
    : norm_(norm), experts_(std::move(experts)), activation_(activation), columns_(std::move(columns)), residual_(residual) {
    const int k = experts_.top_k;
    auto held = [](const std::vector<const Linear*>& weights) -> const Linear& {
        return **std::find_if(weights.begin(), weights.end(), [](const Linear* w) { return w != nullptr; });
    };
    width_ = columns_.out ? columns_.out.own() : held(experts_.down).n;
    gathered_ = program.add_buffer(norm.width, false, k);
    auto hidden_buffers = [&](const Linear& gate_up, const RankColumns& columns, int rows, int& whole, int& part) {
        whole = part = program.add_buffer(gate_up.n, false, rows);
        if (columns) whole = program.add_buffer(columns.width(), false, rows);
    };
    hidden_buffers(held(experts_.gate_up), columns_.hidden, k, hidden_, hidden_part_);
    result_ = program.add_buffer(held(experts_.down).n, true, k);
    if (experts_.shared_gate_up) {
        hidden_buffers(*experts_.shared_gate_up, columns_.shared_hidden, 1, shared_hidden_, shared_hidden_part_);
        shared_result_ = program.add_buffer(experts_.shared_down->n, true);
    }
    if (columns_.out) part_ = program.add_buffer(width_, true);
    if (!columns_.experts.empty()) program.exchanging(columns_.out.group, k * program.buffer(result_).stride, 0);
    auto quantized = [&](const std::vector<const Linear*>& weights, int rows) {
        int width = 0;
        for (const Linear* w : weights)
            if (w && w->packed()) width = std::max(width, QuantizedRow(*w).floats());
        return width ? program.add_buffer(width, true, rows) : -1;
    };
    quantized_ = quantized(experts_.gate_up, k);
    quantized_hidden_ = quantized(experts_.down, k);
    shared_quantized_ = quantized({experts_.shared_gate_up}, 1);
    shared_quantized_hidden_ = quantized({experts_.shared_down}, 1);
}

template <class E>
void MoeResidual<E>::run(const Context& context) {
    const int tokens = context.step.tokens;
    if (norm_.norm.weight) norm_.run(context, tokens);
    if (context.thread == 0) {
        chosen_.resize(size_t(tokens) * experts_.top_k);
        weights_.resize(chosen_.size());
        place_.resize(chosen_.size());
        shared_weights_.assign(tokens, 1.0f);
    }
    context.wait_for_all();

    const Range mine = context.share(tokens);
    std::vector<float> scores(2 * experts_.gate_up.size() + experts_.groups);
    for (int t = mine.begin; t < mine.end; t++) route(context, t, scores.data());
    context.wait_for_all();
    if (context.thread == 0) group_by_expert(tokens);
    context.wait_for_all();
    gather(context);
    context.wait_for_all();
    run_experts(context);
    context.wait_for_all();
    if (!columns_.experts.empty()) exchange_results(context);
    combine(context);
}

template <class E>
void MoeResidual<E>::route(const Context& context, int token, float* scores) {
    const int count = int(experts_.gate_up.size()), width = norm_.width, k = experts_.top_k;
    const E* x = context.row<E>(norm_.norm.weight ? norm_.out : norm_.in, token);
    auto product = [&](const float* w) {
        V parts = vset(0.0f);
        int i = 0;
        for (; i + kLanes <= width; i += kLanes) parts = vfma(vload(x + i), vload(w + i), parts);
        float sum = vsum(parts);
        for (; i < width; i++) sum += to_float(x[i]) * w[i];
        return sum;
    };
    auto sigmoid = [](float x) { return 1.0f / (1.0f + std::exp(-x)); };
    if (experts_.shared_gate) shared_weights_[token] = sigmoid(product(experts_.shared_gate));
    float largest = kExcluded;
    for (int e = 0; e < count; e++) {
        scores[e] = product(experts_.router + size_t(e) * width);
        if (experts_.router_bias) scores[e] += experts_.router_bias[e];
        largest = std::max(largest, scores[e]);
    }
    float* ranked = scores + count;
    std::copy_n(scores, count, ranked);  // scores of large products round to 1, but differ
    float sum = 0;
    for (int e = 0; e < count; e++)
        sum += scores[e] = experts_.sigmoid ? sigmoid(scores[e]) : std::exp(scores[e] - largest);
    for (int e = 0; e < count; e++) {
        if (!experts_.sigmoid) scores[e] /= sum;
        if (experts_.bias) ranked[e] = scores[e] + experts_.bias[e];
    }
    if (experts_.top_groups < experts_.groups) keep_best_groups(ranked, ranked + count);
    float chosen_sum = 0;
    for (int i = 0; i < k; i++) {
        const int best = int(std::max_element(ranked, ranked + count) - ranked);  // the lower index on a tie
        ranked[best] = kExcluded;
        chosen_[token * k + i] = best;
        weights_[token * k + i] = scores[best];
        chosen_sum += scores[best];
    }
    for (int i = 0; i < k; i++) {
        float& weight = weights_[token * k + i];
        if (experts_.normalize) weight /= std::max(chosen_sum, experts_.norm_floor);
        weight *= experts_.weight_scale;
    }
}

template <class E>
void MoeResidual<E>::keep_best_groups(float* ranked, float* totals) const {
    const int groups = experts_.groups, size = int(experts_.gate_up.size()) / groups;
    for (int g = 0; g < groups; g++) {
        float first = kExcluded, second = kExcluded;
        for (int e = g * size; e < (g + 1) * size; e++) {
            second = std::max(second, std::min(first, ranked[e]));
            first = std::max(first, ranked[e]);
        }
        totals[g] = experts_.bias ? first + second : first;
    }
    for (int n = experts_.top_groups; n < groups; n++) {
        int worst = 0;
        for (int g = 1; g < groups; g++)
            if (totals[g] <= totals[worst]) worst = g;  // the higher index on a tie
        totals[worst] = -kExcluded;
        std::fill_n(ranked + worst * size, size, kExcluded);
    }
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
void MoeResidual<E>::gather(const Context& context) const {
    const int in = norm_.norm.weight ? norm_.out : norm_.in;
    const Range mine = context.share(context.step.tokens);
    std::vector<E> weighed(experts_.weighs_inputs ? norm_.width : 0);
    for (int t = mine.begin; t < mine.end; t++) {
        for (int i = t * experts_.top_k; i < (t + 1) * experts_.top_k; i++) {
            const E* x = context.row<E>(in, t);
            if (!experts_.gate_up[chosen_[i]]) continue;
            if (experts_.weighs_inputs) {
                for (int j = 0; j < norm_.width; j++) put(&weighed[j], to_float(x[j]) * weights_[i]);
                x = weighed.data();
            }
            const Linear& w = *experts_.gate_up[chosen_[i]];
            if (w.packed())
                quantize_row(w, (char*)context.row<float>(quantized_, place_[i]), plain(x));
            else
                std::memcpy((void*)context.row<E>(gathered_, place_[i]), x, norm_.width * sizeof(E));
        }
        if (shared_quantized_ >= 0)
            quantize_row(*experts_.shared_gate_up, (char*)context.row<float>(shared_quantized_, t),
                         plain(context.row<E>(in, t)));
    }
}

template <class E>
void MoeResidual<E>::quantize_hidden(const Context& context) const {
    if (quantized_hidden_ >= 0)
        for (size_t e = 0; e < experts_.down.size(); e++) {
            const Linear* w = experts_.down[e];
            const Range mine = context.share(starts_[e + 1] - starts_[e]);
            for (int i = starts_[e] + mine.begin; w && w->packed() && i < starts_[e] + mine.end; i++)
                quantize_row(*w, (char*)context.row<float>(quantized_hidden_, i), plain(context.row<E>(hidden_, i)));
        }
    if (shared_quantized_hidden_ >= 0) {
        const Range mine = context.share(context.step.tokens);
        for (int t = mine.begin; t < mine.end; t++)
            quantize_row(*experts_.shared_down, (char*)context.row<float>(shared_quantized_hidden_, t),
                         plain(context.row<E>(shared_hidden_, t)));
    }
    if (quantized_hidden_ >= 0 || shared_quantized_hidden_ >= 0) context.wait_for_all();
}

template <class E>
void MoeResidual<E>::run_experts(const Context& context) const {
    auto multiply = [&](const Linear& w, int plain, int quantized, Range rows, auto&& take) {
        const int in = w.packed() ? quantized : plain;
        const void* x = w.packed() ? (const void*)context.row<float>(in, rows.begin) : context.row<E>(in, rows.begin);
        multiply_rows<E>(context, w, x, context.stride(in), rows.end - rows.begin, {nullptr, 0}, take);
    };
    auto gate_and_up = [&](const Linear& w, int plain, int quantized, int hidden, Range rows) {
        multiply(w, plain, quantized, rows, [&](const Block& block) {
            for (int r = 0; r < block.rows; r++) {
                E* to = context.row<E>(hidden, rows.begin + block.row + r);
                if (w.gated)
                    store_gated(w, activation_, block, r, to);
                else
                    for (int v = 0; v < block.vecs; v++)
                        vstore(to + (block.vec + v) * kLanes,
                               activate(with_bias(w, block.vec + v, vload(block.at(r, v))), activation_));
            }
        });
    };
    auto down = [&](const Linear& w, int plain, int quantized, int result, Range rows) {
        multiply(w, plain, quantized, rows, [&](const Block& block) {
            for (int r = 0; r < block.rows; r++)
                for (int v = 0; v < block.vecs; v++)
                    vstore(context.row<float>(result, rows.begin + block.row + r) + (block.vec + v) * kLanes,
                           with_bias(w, block.vec + v, vload(block.at(r, v))));
        });
    };
    auto rows_of = [&](size_t e) { return Range{starts_[e], starts_[e + 1]}; };
    const Range all = {0, context.step.tokens};
    for (size_t e = 0; e < experts_.gate_up.size(); e++)
        if (experts_.gate_up[e]) gate_and_up(*experts_.gate_up[e], gathered_, quantized_, hidden_part_, rows_of(e));
    if (experts_.shared_gate_up)
        gate_and_up(*experts_.shared_gate_up, norm_.norm.weight ? norm_.out : norm_.in, shared_quantized_,
                    shared_hidden_part_, all);
    if (columns_.hidden) columns_.hidden.gather<E>(context, all.end * experts_.top_k, hidden_part_, hidden_);
    if (columns_.shared_hidden) columns_.shared_hidden.gather<E>(context, all.end, shared_hidden_part_, shared_hidden_);
    context.wait_for_all();
    quantize_hidden(context);
    for (size_t e = 0; e < experts_.down.size(); e++)
        if (experts_.down[e]) down(*experts_.down[e], hidden_, quantized_hidden_, result_, rows_of(e));
    if (experts_.shared_down) down(*experts_.shared_down, shared_hidden_, shared_quantized_hidden_, shared_result_, all);
}

template <class E>
void MoeResidual<E>::exchange_results(const Context& context) {
    Group& group = *columns_.out.group;
    const size_t stride = context.stride(result_);
    const uint64_t number = group.next();
    auto rows_of = [&](int r) { return Range{starts_[columns_.experts[r]], starts_[columns_.experts[r + 1]]}; };
    const Range held = rows_of(group.rank), mine = context.share(held.end - held.begin);
    std::memcpy((void*)(group.slot(group.rank, number) + mine.begin * stride),
                context.row<float>(result_, held.begin + mine.begin), (mine.end - mine.begin) * stride * sizeof(float));
    context.wait_for_all();
    if (context.thread == 0) {
        int most = 0;
        results_.resize(experts_.down.size());
        for (int r = 0; r < group.size; r++) {
            const Range rows = rows_of(r);
            most = std::max(most, rows.end - rows.begin);
            for (int e = columns_.experts[r]; e < columns_.experts[r + 1]; e++)
                results_[e] = group.slot(r, number) + (starts_[e] - rows.begin) * stride + columns_.out.begin();
        }
        group.meet(number, most * stride * sizeof(float));
    }
    context.wait_for_all();
}

template <class E>
void MoeResidual<E>::combine(const Context& context) const {
    const Range mine = context.share(context.step.tokens);
    const int width = width_;
    auto result = [&](int pair) {
        const int e = chosen_[pair], place = place_[pair];
        return columns_.experts.empty() ? context.row<float>(result_, place)
                                        : results_[e] + (place - starts_[e]) * context.stride(result_);
    };
    for (int t = mine.begin; t < mine.end; t++) {
        float* to = context.row<float>(residual_, t);
        if (columns_.out) {
            const float* from = to + columns_.out.begin();
            to = context.row<float>(part_, t);
            std::copy(from, from + width, to);
        }
        for (int i = 0; i < experts_.top_k; i++) {
            const float* y = result(t * experts_.top_k + i);
            const float weight = experts_.weighs_inputs ? 1.0f : weights_[t * experts_.top_k + i];
            for (int j = 0; j < width; j++) to[j] += weight * y[j];
        }
        if (experts_.shared_down) {
            const float* y = context.row<float>(shared_result_, t);
            const float weight = shared_weights_[t];
            for (int j = 0; j < width; j++) to[j] += weight * y[j];
        }
    }
    if (columns_.out) columns_.out.gather<float>(context, context.step.tokens, part_, residual_);
}

template class MoeResidual<float>;
template class MoeResidual<bf16>;

}  // namespace fd
