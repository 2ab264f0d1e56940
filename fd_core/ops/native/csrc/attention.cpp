#include "attention.h"

namespace fd {
namespace {

constexpr float kHidden = -3.0e38f;  // score of a token that is not seen; finite, so that differences are not NaN

template <class T>
T* carve(char*& memory, size_t count) {
    T* p = reinterpret_cast<T*>(memory);
    memory += (count * sizeof(T) + kCacheLine - 1) / kCacheLine * kCacheLine;
    return p;
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

/// Rows [rows.begin, rows.end) of a tile go through blocks [begin, end) of one table.
template <class E>
struct Attention<E>::Pass {
    Range rows;
    const int32_t* table;
    int begin, end;
    int low, high;  // positions that some row sees
    // The pass after this one, whose first blocks are fetched while the last of this one are computed.
    const int32_t* next_table = nullptr;
    int next_begin = 0, next_end = 0, next_head = 0;

    void then(const Pass& following, int of_head) {
        next_table = following.table;
        next_begin = following.begin;
        next_end = following.end;
        next_head = of_head;
    }
    /// Block that is needed `distance` blocks after `block`, and the KV head for which.
    bool ahead(int block, int distance, int head, int* which, int* of_head) const {
        if (block + distance < end) {
            *which = table[block + distance];
            *of_head = head;
            return true;
        }
        const int i = next_begin + block + distance - end;
        if (next_table == nullptr || i >= next_end) return false;
        *which = next_table[i];
        *of_head = next_head;
        return true;
    }
};

/// Memory of one thread: `rows` are (query, head of the KV head's group) pairs, queries outermost.
template <class E>
struct Attention<E>::Scratch {
    const Query* queries;
    int columns;       // of scores: tokens of a chunk as stored
    size_t q_stride;   // elements, padded as the keys' rows
    int d;             // columns of sums
    E* q;              // [rows, q_stride]
    float* scores;     // [rows, columns]
    E* weights;        // [rows, columns]
    float* sums;       // [rows, d] of one chunk
    float* chunk_max;  // [rows] of one chunk, base 2
    float* chunk_sum;
    float* total;  // [rows, d] of all chunks so far, relative to max
    float* max;
    float* sum;
    std::vector<Pass> passes;
    std::vector<char> memory;

    Scratch(const AttentionPlan& plan, const KvLayout& layout, int group) {
        const int rows = plan.tile_queries * group + TileShape<E>::kRowSlack + TileShape<E>::kRows;
        columns = plan.chunk_blocks * layout.block_k;
        q_stride = layout.d_k;
        d = layout.d_v;
        const size_t wide = size_t(rows) * (columns + 2 * d + 4) * sizeof(float);
        const size_t narrow = size_t(rows) * (columns + q_stride) * sizeof(E);
        memory.resize(wide + narrow + 16 * kCacheLine);
        char* next = (char*)((size_t(memory.data()) + kCacheLine - 1) / kCacheLine * kCacheLine);
        q = carve<E>(next, rows * q_stride);
        scores = carve<float>(next, size_t(rows) * columns);
        weights = carve<E>(next, size_t(rows) * columns);
        sums = carve<float>(next, size_t(rows) * d);
        total = carve<float>(next, size_t(rows) * d);
        chunk_max = carve<float>(next, rows);
        chunk_sum = carve<float>(next, rows);
        max = carve<float>(next, rows);
        sum = carve<float>(next, rows);
    }
};

template <class E>
void Attention<E>::run(const Context& context) {
    thread_local std::unique_ptr<Scratch> scratch;
    thread_local int made_for[4];
    const KvLayout& layout = *layer_.layout;
    const int wanted[4] = {plan_->tile_queries * shape_.group(), plan_->chunk_blocks, layout.block_k, layout.d_v};
    if (!scratch || std::memcmp(made_for, wanted, sizeof wanted) != 0) {
        scratch = std::make_unique<Scratch>(*plan_, layout, shape_.group());
        std::memcpy(made_for, wanted, sizeof wanted);
    }
    // Units are drawn one ahead, so that a thread knows what to fetch next.
    const int units = int(plan_->tiles.size()) * shape_.kv_heads;
    auto draw = [&] { return context.counter().fetch_add(1, std::memory_order_relaxed); };
    for (int unit = draw(), next; unit < units; unit = next) {
        next = draw();
        const QueryTile* following = next < units ? &plan_->tiles[next / shape_.kv_heads] : nullptr;
        run_tile(context, *scratch, plan_->tiles[unit / shape_.kv_heads], unit % shape_.kv_heads, following,
                 next % shape_.kv_heads);
    }
}

template <class E>
void Attention<E>::run_tile(const Context& context, Scratch& s, const QueryTile& tile, int head, const QueryTile* next,
                            int next_head) const {
    const Step& step = context.step;
    const KvLayout& layout = *layer_.layout;
    const int group = shape_.group(), d = shape_.d, block_size = layout.block_size;
    s.queries = &plan_->queries[tile.first];
    for (int i = 0; i < tile.count; i++)
        for (int g = 0; g < group; g++) {
            const int row = i * group + g;
            const E* q = context.row<E>(q_, s.queries[i].token) + (head * group + g) * d;
            std::memcpy((void*)(s.q + row * s.q_stride), q, d * sizeof(E));
            std::memset((void*)(s.q + row * s.q_stride + d), 0, (s.q_stride - d) * sizeof(E));
            std::memset(s.total + row * s.d, 0, s.d * sizeof(float));
            s.max[row] = kHidden;
            s.sum[row] = 0;
        }

    auto table = [&](int row) { return step.block_tables + size_t(row) * step.max_blocks; };
    auto first_seen = [&](int position) { return shape_.window ? std::max(0, position + 1 - shape_.window) : 0; };
    // The lowest and highest positions that queries [a, b) see, as a range of blocks after `from` tokens.
    auto pass_of = [&](const Query* queries, int a, int b, int from, int to) {
        Pass pass{};
        pass.rows = {a * group, b * group};
        pass.table = table(queries[a].row);
        pass.low = first_seen(queries[a].position);
        pass.high = 0;
        for (int i = a; i < b; i++) {
            pass.low = std::min(pass.low, first_seen(queries[i].position));
            pass.high = std::max(pass.high, queries[i].position + 1);
        }
        pass.high = std::min(pass.high, to);
        pass.begin = std::max(from, pass.low) / block_size;
        pass.end = ceil_div(pass.high, block_size);
        return pass;
    };
    // First what all queries share, then what each sees beyond.
    auto shared_pass = [&](const QueryTile& t) { return pass_of(&plan_->queries[t.first], 0, t.count, 0, t.shared); };
    std::vector<Pass>& passes = s.passes;
    passes.assign(1, shared_pass(tile));
    for (int i = 0; i < tile.count; i++)
        if (s.queries[i].position >= tile.shared)
            passes.push_back(pass_of(s.queries, i, i + 1, tile.shared, s.queries[i].position + 1));
    const size_t last = passes.size() - 1;
    if (next) passes.push_back(shared_pass(*next));
    for (size_t i = 0; i <= last; i++) {
        if (i + 1 < passes.size()) passes[i].then(passes[i + 1], i < last ? head : next_head);
        run_pass(s, passes[i], head);
    }

    for (int row = 0; row < tile.count * group; row++) {
        const float* total = s.total + row * s.d;
        E* out = context.row<E>(out_, s.queries[row / group].token) + (head * group + row % group) * d;
        const float inverse = 1.0f / s.sum[row];
        int j = 0;
        for (; j + kLanes <= d; j += kLanes) vstore(out + j, vload(total + j) * vset(inverse));
        for (; j < d; j++) put(out + j, total[j] * inverse);
    }
}

template <class E>
void Attention<E>::run_pass(Scratch& s, const Pass& pass, int head) const {
    const KvLayout& layout = *layer_.layout;
    const int blocks = plan_->chunk_blocks;
    for (int begin = pass.begin; begin < pass.end;) {
        const int chunk_begin = begin / blocks * blocks;
        const int end = std::min(pass.end, chunk_begin + blocks);
        auto column = [&](int block) { return (block - begin) * layout.block_k; };
        for (int b = begin; b < end; b++) score(s, pass, head, b, column(b));
        softmax(s, pass, begin, end);
        for (int b = begin; b < end; b++) weigh(s, pass, head, b, column(b), b == begin);
        merge(s, pass);
        begin = end;
    }
}

/// Tokens of a block up to the last one that some row sees, rounded up to what products and vectors read.
static int columns_of(const KvLayout& layout, int high, int block) {
    const int tokens = std::min(layout.block_size, high - block * layout.block_size);
    return std::min(layout.block_k, round_up(tokens, kLanes));
}

/// scores = q * keys for one block.
template <class E>
void Attention<E>::score(Scratch& s, const Pass& pass, int head, int block, int column) const {
    using S = TileShape<E>;
    const KvLayout& layout = *layer_.layout;
    const int vecs = columns_of(layout, pass.high, block) / kLanes;
    TileCall<E> call{};
    call.b_step = size_t(layout.block_k) * Product<E>::kStep;
    call.steps = layout.d_k / Product<E>::kStep;
    call.a_stride = s.q_stride;
    call.c_stride = s.columns;
    int later, of_head;
    if (pass.ahead(block, plan_->chunk_blocks, head, &later, &of_head)) {
        call.ahead = (const char*)layer_.keys(later, of_head);
        call.ahead_lines = int(call.b_step * sizeof(E) / kCacheLine);
    }
    for (int v = 0; v < vecs; v += S::kVecs) {
        const int count = std::min(S::kVecs, vecs - v);
        call.b = layer_.keys(pass.table[block], head) + size_t(v) * kLanes * Product<E>::kStep;
        const int row_blocks = ceil_div(pass.rows.end - pass.rows.begin, S::kRows);
        for (int i = 0; i < row_blocks; i++) {
            const Range r = share(pass.rows.end - pass.rows.begin, i, row_blocks);
            const int first = pass.rows.begin + r.begin;
            call.a = s.q + first * s.q_stride;
            call.c = s.scores + size_t(first) * s.columns + column + v * kLanes;
            tile<E>(r.end - r.begin, count, call);
            call.ahead_lines = 0;  // once is enough
        }
    }
}

/// Turn the chunk's scores into weights 2^(score - max), with their max and sum, for each row.
template <class E>
void Attention<E>::softmax(Scratch& s, const Pass& pass, int first_block, int end_block) const {
    const KvLayout& layout = *layer_.layout;
    const int block_size = layout.block_size;
    const float factor = shape_.softcap ? shape_.scale : shape_.scale * kLog2e;
    for (int row = pass.rows.begin; row < pass.rows.end; row++) {
        const int high = s.queries[row / shape_.group()].position + 1;
        const int low = shape_.window ? std::max(0, high - shape_.window) : 0;
        float* scores = s.scores + size_t(row) * s.columns;
        E* weights = s.weights + size_t(row) * s.columns;

        V largest = vset(kHidden);
        for (int b = first_block; b < end_block; b++) {
            float* x = scores + (b - first_block) * layout.block_k;
            const int begin = b * block_size, end = begin + block_size, columns = columns_of(layout, pass.high, b);
            for (int i = 0; i < columns; i += kLanes) {
                V v = vload(x + i) * vset(factor);
                if (shape_.softcap) v = softcapped(v, shape_.softcap) * vset(kLog2e);
                const int from = low - begin - i, to = std::min(high, end) - begin - i;
                if (from > 0 || to < kLanes) v = vkeep(v, from, to, vset(kHidden));
                vstore(x + i, v);
                largest = vmax(largest, v);
            }
        }
        const float max = vmaximum(largest);
        V sum = vset(0.0f);
        for (int b = first_block; b < end_block; b++) {
            const int column = (b - first_block) * layout.block_k;
            const int begin = b * block_size, end = begin + block_size, columns = columns_of(layout, pass.high, b);
            int i = 0;
            for (; i < columns; i += kLanes) {
                V v = vexp2(vload(scores + column + i) - vset(max));
                const int from = low - begin - i, to = std::min(high, end) - begin - i;
                if (from > 0 || to < kLanes) v = vkeep(v, from, to, vset(0.0f));
                sum = sum + v;
                vstore(weights + column + i, v);
            }
            for (; i < layout.block_v && i < round_up(columns, TileShape<E>::kAlign); i += kLanes)
                vstore(weights + column + i, vset(0.0f));
        }
        s.chunk_max[row] = max;
        s.chunk_sum[row] = vsum(sum);
    }
}

/// sums (+)= weights * values for one block.
template <class E>
void Attention<E>::weigh(Scratch& s, const Pass& pass, int head, int block, int column, bool first) const {
    using S = TileShape<E>;
    const KvLayout& layout = *layer_.layout;
    const int vecs = layout.d_v / kLanes;
    const E* values = layer_.values(pass.table[block], head);
    TileCall<E> call{};
    call.b_step = size_t(layout.d_v) * Product<E>::kStep;
    call.steps = round_up(columns_of(layout, pass.high, block), S::kAlign) / Product<E>::kStep;
    call.a_stride = s.columns;
    call.c_stride = s.d;
    call.accumulate = !first;
    int later, of_head;
    if (pass.ahead(block, plan_->chunk_blocks, head, &later, &of_head)) {
        call.ahead = (const char*)layer_.values(later, of_head);
        call.ahead_lines = int(call.b_step * sizeof(E) / kCacheLine);
    }
    for (int v = 0; v < vecs; v += S::kVecs) {
        const int count = std::min(S::kVecs, vecs - v);
        call.b = values + size_t(v) * kLanes * Product<E>::kStep;
        const int row_blocks = ceil_div(pass.rows.end - pass.rows.begin, S::kRows);
        for (int i = 0; i < row_blocks; i++) {
            const Range r = share(pass.rows.end - pass.rows.begin, i, row_blocks);
            const int row = pass.rows.begin + r.begin;
            call.a = s.weights + size_t(row) * s.columns + column;
            call.c = s.sums + size_t(row) * s.d + v * kLanes;
            tile<E>(r.end - r.begin, count, call);
            call.ahead_lines = 0;
        }
    }
}

/// Add the chunk to what came before it, both rescaled to the larger maximum.
template <class E>
void Attention<E>::merge(Scratch& s, const Pass& pass) const {
    for (int row = pass.rows.begin; row < pass.rows.end; row++) {
        if (s.chunk_max[row] == kHidden) continue;  // this row sees nothing of the chunk
        const float max = std::max(s.max[row], s.chunk_max[row]);
        const float before = exp2_of(s.max[row] - max), now = exp2_of(s.chunk_max[row] - max);
        float* total = s.total + size_t(row) * s.d;
        const float* sums = s.sums + size_t(row) * s.d;
        for (int j = 0; j < s.d; j += kLanes)
            vstore(total + j, vfma(vload(total + j), vset(before), vload(sums + j) * vset(now)));
        s.sum[row] = s.sum[row] * before + s.chunk_sum[row] * now;
        s.max[row] = max;
    }
}

template class Attention<float>;
template class Attention<bf16>;

}  // namespace fd
