#include "recurrent.h"

namespace fd {

namespace {

constexpr int kJournal = 16;    // most tokens of a journal
constexpr int kChannels = 128;  // of a unit of work without heads
constexpr int kHeads = 4;       // most heads of values of a unit of work
constexpr int kBatch = 32;      // tokens whose inputs are convolved before their heads are computed
constexpr int kColumns = 2;    // vectors of columns at once
constexpr float kNormEps = 1e-6f;

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

/// One row's tokens for some channels, and with heads for one head of keys with heads of values that share it. What it
/// computes for a token depends on nothing but the token's inputs and the state before it, however tokens are divided
/// among steps.
template <class E>
struct Walk {
    struct Piece {
        int at, count;
    };
    const RecurrentShape& s;
    const StateBlocks& blocks;
    const Context& context;
    const int in, out;

    std::vector<Piece> pieces;  // channels; with heads those of a query, a key and values
    int part = 0, width = 0, stride = 0;
    int first = 0, heads = 0;                // heads of values of the unit
    bool owns_keys = true;                   // of several units with the same head of keys, one writes its channels
    const float* early = nullptr;            // channels of keys and queries, which such a unit may have overwritten
    int begin = 0, start = 0, consumed = 0;  // first row of `in` and position of the step's tokens; position of the state
    const int lanes;                         // floats of a row of a matrix
    std::vector<float> taps, bias, window, active, whole, replayed, scalars, y, raw;
    std::vector<float> matrices;  // [heads][vectors of a row][key_dim][kLanes], so that the lines of a vector have other sets

    Walk(const RecurrentShape& s, const StateBlocks& blocks, const Context& context, int in, int out)
        : s(s), blocks(blocks), context(context), in(in), out(out), lanes(round_up(s.value_dim, kLanes)) {}

    void select(int of) {
        part = of;
        if (s.value_heads) {
            const int key = of / splits(s), skipped = of % splits(s) * kHeads;
            owns_keys = skipped == 0, first = key * s.shared() + skipped, heads = std::min(kHeads, s.shared() - skipped);
            pieces = {{s.queries() + key * s.key_dim, s.key_dim},
                      {s.keys() + key * s.key_dim, s.key_dim},
                      {s.values() + first * s.value_dim, heads * s.value_dim}};
        } else {
            pieces = {{of * kChannels, std::min(kChannels, s.channels - of * kChannels)}};
        }
        width = 0;
        for (const Piece& p : pieces) width += p.count;
        stride = round_up(width, kLanes);
        taps.assign(size_t(s.taps) * stride, 0.0f);
        for (int t = 0; t < s.taps; t++) gather(s.conv + size_t(t) * s.channels, taps.data() + size_t(t) * stride);
        bias.assign(stride, 0.0f);
        if (s.bias) gather(s.bias, bias.data());
        window.resize(size_t(s.taps - 1 + kBatch) * stride);
        active.resize(size_t(kBatch) * stride);
        y.resize(size_t(kBatch) * std::max(1, heads) * lanes);
        scalars.resize(size_t(kBatch) * 2 * std::max(1, heads));
        raw.resize(width + 2 * heads);
    }
    /// Units of work of a head of keys.
    static int splits(const RecurrentShape& s) { return ceil_div(s.shared(), kHeads); }
    /// The place in `early` of channels of keys or queries of a block, or -1.
    static int early_at(const RecurrentShape& s, size_t at) {
        const bool token = at >= size_t(s.state());
        const size_t from = at - (token ? s.state() : 1), each = token ? s.journal() : s.channels;
        const int channel = int(from % each) - std::min(s.keys(), s.queries()), both = 2 * s.key_heads * s.key_dim;
        return channel < 0 || channel >= both ? -1 : int(from / each + (token ? s.taps - 1 : 0)) * both + channel;
    }
    void gather(const float* row, float* to) const {
        for (const Piece& p : pieces) {
            std::memcpy(to, row + p.at, p.count * sizeof(float));
            to += p.count;
        }
    }
    /// Copy between a row of channels of a block and `values`.
    template <class Copy>
    void each_piece(size_t first, float* values, Copy&& copy) const {
        for (const Piece& p : pieces) {
            copy(first + p.at, p.count, values);
            values += p.count;
        }
    }
    /// Copy a state, and the scalars of heads behind the channels of a journal's token.
    template <class Copy>
    void each_of_state(Copy&& copy) {
        for (int t = 0; t < s.taps - 1; t++)
            each_piece(1 + size_t(t) * s.channels, window.data() + size_t(t) * stride, copy);
    }
    size_t matrix_at(int h) const { return 1 + s.conv_state() + size_t(first + h) * s.key_dim * s.value_dim; }
    /// Copy a head's matrix from the order of the state to that of this, or back.
    void order(int h, bool back) {
        for (int r = 0; r < s.key_dim; r++)
            for (int v = 0; v < lanes; v += kLanes) {
                float *in_state = whole.data() + size_t(r) * s.value_dim + v, *here = matrix(h, v) + size_t(r) * kLanes;
                const float* from = back ? here : in_state;
                float* to = back ? in_state : here;
                const int held = s.value_dim - v;
                if (held >= kLanes)
                    vstore(to, vload(from));
                else
                    std::memcpy(to, from, held * sizeof(float));
            }
    }
    float* matrix(int h, int v) { return matrices.data() + (size_t(h) * lanes + v) * s.key_dim; }
    template <class Copy>
    void each_of_token(int index, float* values, Copy&& copy) const {
        const size_t at = s.state() + size_t(index) * s.journal();
        each_piece(at, values, copy);
        for (int i = 0; i < s.scalars(); i++)
            copy(at + s.channels + i * s.value_heads + first, heads, values + width + i * heads);
    }

    /// Begin with the state of a block, or with zeros; `position` is that of the state.
    void load(int block, int position, int first_token, int first_row) {
        consumed = position, start = first_token, begin = first_row;
        matrices.resize(size_t(heads) * s.key_dim * lanes);
        if (block < 0 || lanes > s.value_dim) std::fill(matrices.begin(), matrices.end(), 0.0f);
        if (block < 0) std::fill_n(window.begin(), size_t(s.taps - 1) * stride, 0.0f);
        whole.resize(size_t(s.key_dim) * s.value_dim);
        replayed.resize(size_t(start - consumed) * raw.size());
        if (block < 0) return;
        auto copy = [&](size_t at, size_t count, float* to) {
            const int place = early ? early_at(s, at) : -1;
            if (place < 0)
                blocks.read(block, at, count, to);
            else
                std::memcpy(to, early + place, count * sizeof(float));
        };
        each_of_state(copy);
        for (int h = 0; h < heads; h++) {
            blocks.read(block, matrix_at(h), whole.size(), whole.data());
            order(h, false);
        }
        for (int t = consumed; t < start; t++) each_of_token(t - consumed, replayed.data() + (t - consumed) * raw.size(), copy);
    }
    /// Write the state after `position` tokens and the journal of those from there to `upto`.
    void store(int block, int position, int upto) {
        auto copy = [&](size_t at, size_t count, const float* from) {
            if (owns_keys || early_at(s, at) < 0) blocks.write(block, at, count, from);
        };
        each_of_state(copy);
        for (int h = 0; h < heads; h++) {
            order(h, true);
            blocks.write(block, matrix_at(h), whole.size(), whole.data());
        }
        for (int t = position; t < upto; t++) {
            inputs(t, raw.data());
            each_of_token(t - position, raw.data(), copy);
        }
        if (part) return;
        float number;
        const int32_t count = position;
        std::memcpy(&number, &count, sizeof number);
        blocks.write(block, 0, 1, &number);
    }
    /// The inputs of the convolution of a token, and of its heads.
    void inputs(int t, float* to) const {
        if (t < start) {
            std::memcpy(to, replayed.data() + (t - consumed) * raw.size(), raw.size() * sizeof(float));
            return;
        }
        const float* x = context.row<float>(in, begin + t - start);
        gather(x + s.first_channel(), to);
        for (int i = 0; i < s.scalars(); i++)
            std::memcpy(to + width + i * heads, x + s.channels + s.outputs() + i * s.value_heads + first,
                        heads * sizeof(float));
        if (s.rule == Rule::gate) {
            const float* other = x + 2 * s.channels + pieces[0].at;
            for (int i = 0; i < width; i++) to[i] *= other[i];
        }
    }

    /// Consume the tokens from one position to another.
    void advance(int from, int to) {
        for (int t = from; t < to; t += kBatch) batch(t, std::min(kBatch, to - t));
    }
    void batch(int t, int count) {
        for (int i = 0; i < count; i++) {
            inputs(t + i, raw.data());
            std::memcpy(window.data() + size_t(s.taps - 1 + i) * stride, raw.data(), width * sizeof(float));
            for (int h = 0; h < heads; h++) {
                const int head = first + h, last = width + (s.scalars() - 1) * heads + h;
                float* scalar = scalars.data() + (size_t(i) * heads + h) * 2;
                const float time = std::clamp(softplus(raw[last] + s.time_bias[head]), s.least_time, s.most_time);
                scalar[0] = std::exp(-std::exp(s.decay[head]) * time);
                scalar[1] = s.rule == Rule::scan ? time : sigmoid(raw[width + h]);
            }
            float* x = active.data() + size_t(i) * stride;
            for (int c = 0; c < stride; c += kLanes) {
                V sum = vload(bias.data() + c);
                for (int tap = 0; tap < s.taps; tap++)
                    sum = vfma(vload(taps.data() + size_t(tap) * stride + c),
                               vload(window.data() + size_t(i + tap) * stride + c), sum);
                vstore(x + c, s.value_heads ? activate(sum, Activation::silu) : sum);
            }
            if (s.rule == Rule::delta) {
                unit(x, 1.0f / std::sqrt(float(s.key_dim)));
                unit(x + s.key_dim, 1.0f);
            }
        }
        for (int h = 0; h < heads; h++)
            for (int v = 0; v < lanes; v += kColumns * kLanes)
                v + kColumns * kLanes <= lanes ? columns<kColumns>(h, v, count) : columns<1>(h, v, count);
        std::memmove(window.data(), window.data() + size_t(count) * stride, size_t(s.taps - 1) * stride * sizeof(float));
        for (int i = 0; i < count; i++)
            if (t + i >= start) put_outputs(i, begin + t + i - start);
    }
    void unit(float* x, float scale) const {
        float sum = 0;
        for (int i = 0; i < s.key_dim; i++) sum += x[i] * x[i];
        scale /= std::sqrt(sum + kNormEps);
        for (int i = 0; i < s.key_dim; i++) x[i] *= scale;
    }
    /// N vectors of columns of a head's matrix, which stay in the nearest cache for all tokens; sums of several vectors
    /// at once hide the latency of additions.
    template <int N>
    void columns(int h, int v, int count) {
        float* matrix = this->matrix(h, v);
        const size_t next = size_t(s.key_dim) * kLanes;  // to the next vector of a row
        alignas(64) float value[N * kLanes] = {};
        const int held = std::min(N * kLanes, s.value_dim - v), last = s.key_dim / 4 * 4;
        for (int i = 0; i < count; i++) {
            const float *q = active.data() + size_t(i) * stride, *k = q + s.key_dim;
            const float* scalar = scalars.data() + (size_t(i) * heads + h) * 2;
            std::memcpy(value, k + s.key_dim + h * s.value_dim + v, held * sizeof(float));
            const V decay = vset(scalar[0]);
            V sums[N][4], change[N], result[N];
            auto each = [&](auto&& take) {  // in an order that does not depend on N
                for (auto& parts : sums)
                    for (V& sum : parts) sum = vset(0.0f);
                for (int r = 0; r < last; r += 4)
                    for (int j = 0; j < 4; j++)
                        for (int n = 0; n < N; n++) take(r + j, n, sums[n][j]);
                for (int r = last; r < s.key_dim; r++)
                    for (int n = 0; n < N; n++) take(r, n, sums[n][0]);
            };
            auto whole = [&](int n) { return (sums[n][0] + sums[n][1]) + (sums[n][2] + sums[n][3]); };
            for (int n = 0; n < N; n++) {
                change[n] = vload(value + n * kLanes);
                result[n] = s.skip ? vset(s.skip[first + h]) * change[n] : vset(0.0f);
            }
            if (s.rule == Rule::delta) {
                each([&](int r, int n, V& sum) {
                    sum = vfma(vset(k[r]), vload(matrix + n * next + size_t(r) * kLanes), sum);
                });
                for (int n = 0; n < N; n++) change[n] = change[n] - decay * whole(n);
            }
            for (V& each_change : change) each_change = vset(scalar[1]) * each_change;
            each([&](int r, int n, V& sum) {
                float* at = matrix + n * next + size_t(r) * kLanes;
                const V x = vfma(vset(k[r]), change[n], decay * vload(at));
                vstore(at, x);
                sum = vfma(vset(q[r]), x, sum);
            });
            for (int n = 0; n < N; n++)
                vstore(y.data() + (size_t(i) * heads + h) * lanes + v + n * kLanes, result[n] + whole(n));
        }
    }
    void put_outputs(int i, int row) {
        float* x = context.row<float>(in, row);
        E* to = context.row<E>(out, row);
        if (s.rule == Rule::gate) {
            const float *made = active.data() + size_t(i) * stride, *gate = x + s.first_gate() + pieces[0].at;
            for (int c = 0; c < width; c++) put(to + pieces[0].at + c, gate[c] * made[c]);
            return;
        }
        for (int h = 0; h < heads; h++) {
            float* made = y.data() + (size_t(i) * heads + h) * lanes;
            if (s.rule == Rule::delta) rms_norm(made, s.norm, s.value_dim, s.eps, made);
            const int at = (first + h) * s.value_dim;
            float* z = x + s.first_gate() + at;
            for (int c = 0; c < s.value_dim; c += kLanes) {
                vstore(made + c, vload(made + c) * activate(vload(z + c), Activation::silu));  // rows are padded
                if (s.rule == Rule::delta) convert(made + c, std::min(kLanes, s.value_dim - c), to + at + c);
            }
            if (s.rule == Rule::scan) std::memcpy(z, made, s.value_dim * sizeof(float));
        }
    }
    /// Mark the outputs of a row whose state is not there.
    void refuse(int from, int to) const {
        const int at = s.value_heads ? first * s.value_dim : pieces[0].at;
        const int count = s.value_heads ? heads * s.value_dim : width;
        for (int row = from; row < to; row++) {
            for (int c = 0; c < count; c++) put(context.row<E>(out, row) + at + c, NAN);
            if (s.rule == Rule::scan) std::fill_n(context.row<float>(in, row) + at, count, NAN);
        }
    }
};

}  // namespace

StateBlocks::StateBlocks(const KvLayout& l, int layer)
    : head_bytes_(l.head_bytes() * l.blocks), block_bytes_(l.head_bytes()), heads_(l.latent ? 1 : l.heads),
      data_(l.data + size_t(layer) * l.layer_bytes()) {
    auto add = [&](size_t at, size_t bytes) {
        if (!runs_.empty() && runs_.back().at + runs_.back().bytes == at)
            runs_.back().bytes += bytes;
        else
            runs_.push_back({at, bytes, bytes_});
        bytes_ += bytes;
    };
    const size_t unit = size_t(l.step) * l.item_bytes;  // remainders of units are not used
    for (int i = 0; i < l.d / l.step; i++) add(unit * i * l.block_k, unit * l.block_size);
    for (int i = 0; i < (l.latent ? 0 : l.block_size / l.step); i++)
        add(l.key_elements() * l.item_bytes + unit * i * l.d_v, unit * l.d);
    for (int i = 0; i < (l.quantized ? 2 : 0); i++)
        add(l.head_elements() * l.item_bytes + (i ? l.block_k : 0) * sizeof(float), l.block_size * sizeof(float));
    bytes_ -= bytes_ % sizeof(float);
}

template <class E>
Recur<E>::Recur(const RecurrentShape& shape, const KvLayout& layout, int layer, int in, int out)
    : shape(shape), blocks(layout, layer), block_size(layout.block_size), in(in), out(out) {
    check_at_most("elements of a recurrent state", shape.state(), int64_t(blocks.floats()));
    drafts = int(std::min<size_t>(kJournal, (blocks.floats() - shape.state()) / shape.journal()));
}

template <class E>
void Recur<E>::run(const Context& context) {
    const Step& step = context.step;
    std::vector<int> consumed(step.rows, -1);  // before any thread writes
    auto table = [&](int row) { return step.block_tables + size_t(row) * step.max_blocks; };
    auto start_of = [&](int row) { return step.context_len[row] - (step.query_start[row + 1] - step.query_start[row]); };
    for (int row = 0; row < step.rows; row++) {
        const int start = start_of(row);
        float number = 0;  // the bits of an integer
        if (start > 0) blocks.read(table(row)[(start - 1) / block_size], 0, 1, &number);
        int32_t count;
        std::memcpy(&count, &number, sizeof count);
        if (count <= start && start - count <= drafts) consumed[row] = count;
    }
    using Unit = Walk<E>;
    const int splits = shape.value_heads ? Unit::splits(shape) : 1, both = 2 * shape.key_heads * shape.key_dim;
    std::vector<std::vector<float>> early(step.rows);
    for (int row = 0; row < step.rows && splits > 1; row++) {
        const int start = start_of(row);
        if (start == 0 || consumed[row] < 0) continue;
        early[row].resize(size_t(shape.taps - 1 + start - consumed[row]) * both);
        for (size_t i = 0; i < early[row].size() / both; i++) {
            const int token = int(i) - (shape.taps - 1);
            const size_t at = token < 0 ? 1 + i * shape.channels : shape.state() + size_t(token) * shape.journal();
            const size_t channel = std::min(shape.keys(), shape.queries());
            blocks.read(table(row)[(start - 1) / block_size], at + channel, both, early[row].data() + i * both);
        }
    }
    context.wait_for_all();
    const int parts = shape.value_heads ? shape.key_heads * splits : ceil_div(shape.channels, kChannels);
    Unit walk(shape, blocks, context, in, out);
    for (int unit; (unit = context.counter().fetch_add(1)) < step.rows * parts;) {
        const int row = unit / parts, begin = step.query_start[row], end = step.query_start[row + 1];
        if (begin == end) continue;
        walk.select(unit % parts);
        if (consumed[row] < 0) {
            walk.refuse(begin, end);
            continue;
        }
        const int start = start_of(row), upto = step.context_len[row];
        walk.early = early[row].empty() ? nullptr : early[row].data();
        walk.load(start > 0 ? table(row)[(start - 1) / block_size] : -1, consumed[row], start, begin);
        // The first token is certain; those that may be drafts go to the journal.
        const int settled = std::max(start + 1, upto - drafts);
        int at = consumed[row];
        for (int next = round_up(start + 1, block_size); next < settled; next += block_size) {
            walk.advance(at, next);
            walk.store(table(row)[next / block_size - 1], at = next, next);
        }
        walk.advance(at, settled);
        for (int entry = (settled - 1) / block_size; entry <= (upto - 1) / block_size; entry++)
            walk.store(table(row)[entry], settled, upto);
        walk.advance(settled, upto);
    }
    if (shape.rule != Rule::scan) return;
    context.wait_for_all();
    const int width = shape.outputs() / shape.key_heads, begin = step.query_start[0];
    const Range mine = context.share(step.query_start[step.rows] - begin);
    for (int row = begin + mine.begin; row < begin + mine.end; row++)
        for (int group = 0; group < shape.key_heads; group++)
            rms_norm(context.row<float>(in, row) + group * width, shape.norm + group * width, width, shape.eps,
                     context.row<E>(out, row) + group * width);
}

template struct Recur<float>;
template struct Recur<bf16>;

}  // namespace fd
