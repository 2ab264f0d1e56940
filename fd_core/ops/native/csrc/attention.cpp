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
    int high;  // no row sees a position from here on
};

/// A tile and a KV head: first what all queries share, then what each sees beyond.
template <class E>
struct Attention<E>::Unit {
    const QueryTile* tile;
    int head;
    std::vector<Pass> passes;
};

/// Fetches the blocks that a thread will visit, in order and a fixed distance ahead.
///
/// Blocks lie scattered, so the processor's own prefetching starts anew in each; and a core can wait for a few dozen
/// cache lines at a time only. So every product, also those whose operands are in the cache, fetches a few lines.
template <class E>
struct Attention<E>::Fetcher {
    std::vector<const char*> blocks;
    size_t block_bytes = 0;
    size_t lead = 0;  // blocks of a chunk
    size_t visited = 0, fetched = 0;  // blocks
    size_t offset = 0;                // bytes fetched of block `fetched`

    void attach(TileCall<E>& call) {
        if (fetched < visited + lead) {  // too late for the blocks before
            fetched = visited + lead;
            offset = 0;
        }
        call.ahead_lines = 0;
        if (fetched >= blocks.size() || (fetched - visited) * block_bytes > kDistance) return;
        call.ahead = blocks[fetched] + offset;
        call.ahead_lines = ceil_div(kLinesPerCall, call.steps);
        offset += size_t(call.ahead_lines) * call.steps * kCacheLine;
        if (offset >= block_bytes) {
            fetched++;
            offset = 0;
        }
    }
    void forget_visited() {
        blocks.erase(blocks.begin(), blocks.begin() + visited);
        fetched -= std::min(fetched, visited);
        visited = 0;
    }

   private:
    static constexpr int kLinesPerCall = 64;
    static constexpr size_t kDistance = 192 << 10;  // bytes: a fraction of a second-level cache
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
    E* panel;          // keys or values of a quantized block
    float* sums;       // [rows, d] of one chunk
    float* chunk_max;  // [rows] of one chunk, base 2
    float* chunk_sum;
    float* total;  // [rows, d] of all chunks so far, relative to max
    float* max;
    float* sum;
    float* before;  // [rows] factor of what came before the chunk
    float* now;     // [rows] factor of the chunk
    Unit unit, next;
    Fetcher fetcher;
    std::vector<char> memory;

    Scratch(const AttentionPlan& plan, const KvLayout& layout, int group) {
        const int rows = round_up(plan.tile_queries * group, kLanes) + TileShape<E>::kRowSlack + TileShape<E>::kRows;
        columns = plan.chunk_blocks * layout.block_k;
        q_stride = layout.d_k;
        d = layout.d_v;
        const size_t wide = size_t(rows) * (columns + 2 * d + 6) * sizeof(float);
        const size_t panel_elements = layout.quantized ? std::max(layout.key_elements(), size_t(layout.block_v) * d) : 0;
        const size_t narrow = (size_t(rows) * (columns + q_stride) + panel_elements) * sizeof(E);
        memory.resize(wide + narrow + 16 * kCacheLine);
        char* free = (char*)((size_t(memory.data()) + kCacheLine - 1) / kCacheLine * kCacheLine);
        q = carve<E>(free, rows * q_stride);
        scores = carve<float>(free, size_t(rows) * columns);
        weights = carve<E>(free, size_t(rows) * columns);
        panel = carve<E>(free, panel_elements);
        sums = carve<float>(free, size_t(rows) * d);
        total = carve<float>(free, size_t(rows) * d);
        for (float** vector : {&chunk_max, &chunk_sum, &max, &sum, &before, &now}) *vector = carve<float>(free, rows);
        fetcher.block_bytes = layout.head_bytes();
        fetcher.lead = plan.chunk_blocks;
    }
};

template <class E>
void Attention<E>::run(const Context& context) {
    thread_local std::unique_ptr<Scratch> kept;
    thread_local int made_for[6];
    const KvLayout& layout = *layer_.layout;
    const int wanted[6] = {plan_->tile_queries * shape_.group(), plan_->chunk_blocks, layout.block_k, layout.d_k,
                           layout.d_v, layout.quantized};
    if (!kept || std::memcmp(made_for, wanted, sizeof wanted) != 0) {
        kept = std::make_unique<Scratch>(*plan_, layout, shape_.group());
        std::memcpy(made_for, wanted, sizeof wanted);
    }
    // Units are drawn one ahead, so that a thread knows what to fetch next.
    Scratch& s = *kept;
    s.fetcher.blocks.clear();
    s.fetcher.visited = s.fetcher.fetched = s.fetcher.offset = 0;
    const int units = int(plan_->tiles.size()) * shape_.kv_heads;
    auto draw = [&](Unit& unit) {
        const int i = context.counter().fetch_add(1, std::memory_order_relaxed);
        if (i >= units) return false;
        plan_unit(context, plan_->tiles[i / shape_.kv_heads], i % shape_.kv_heads, unit);
        for (const Pass& pass : unit.passes)
            for (int b = pass.begin; b < pass.end; b++)
                s.fetcher.blocks.push_back(layer_.head(pass.table[b], unit.head));
        return true;
    };
    for (bool more = draw(s.unit); more; std::swap(s.unit, s.next)) {
        more = draw(s.next);
        run_unit(context, s, s.unit);
        s.fetcher.forget_visited();
    }
}

template <class E>
void Attention<E>::plan_unit(const Context& context, const QueryTile& tile, int head, Unit& unit) const {
    const Query* queries = &plan_->queries[tile.first];
    const int group = shape_.group(), block_size = layer_.layout->block_size;
    // What queries [first, end) see of the positions [from, to).
    auto add_pass = [&](int first, int end, int from, int to) {
        int low = to, high = 0;
        for (int i = first; i < end; i++) {
            low = std::min(low, shape_.window ? std::max(0, queries[i].position + 1 - shape_.window) : 0);
            high = std::max(high, queries[i].position + 1);
        }
        high = std::min(high, to);
        const int32_t* table = context.step.block_tables + size_t(queries[first].row) * context.step.max_blocks;
        const int begin = std::max(from, low) / block_size;
        unit.passes.push_back({{first * group, end * group}, table, begin, ceil_div(high, block_size), high});
    };
    unit.tile = &tile;
    unit.head = head;
    unit.passes.clear();
    add_pass(0, tile.count, 0, tile.shared);
    for (int i = 0; i < tile.count; i++)
        if (queries[i].position >= tile.shared) add_pass(i, i + 1, tile.shared, queries[i].position + 1);
}

template <class E>
void Attention<E>::run_unit(const Context& context, Scratch& s, const Unit& unit) const {
    const QueryTile& tile = *unit.tile;
    const int group = shape_.group(), d = shape_.d, rows = tile.count * group;
    s.queries = &plan_->queries[tile.first];
    for (int row = 0; row < rows; row++) {
        const E* q = context.row<E>(q_, s.queries[row / group].token) + (unit.head * group + row % group) * d;
        std::memcpy((void*)(s.q + row * s.q_stride), q, d * sizeof(E));
        std::memset((void*)(s.q + row * s.q_stride + d), 0, (s.q_stride - d) * sizeof(E));
        std::memset(s.total + row * s.d, 0, s.d * sizeof(float));
        s.max[row] = kHidden;
        s.sum[row] = 0;
    }
    for (const Pass& pass : unit.passes) run_pass(s, pass, unit.head);
    for (int row = 0; row < rows; row++) {
        const float* total = s.total + row * s.d;
        E* out = context.row<E>(out_, s.queries[row / group].token) + (unit.head * group + row % group) * d;
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
        softmax(s, pass, head, begin, end);
        for (int b = begin; b < end; b++) weigh(s, pass, head, b, column(b), b == begin);
        merge(s, pass);
        s.fetcher.visited += end - begin;
        begin = end;
    }
}

/// Tokens of a block up to the last one that some row sees, rounded up to what products and vectors read.
static int columns_of(const KvLayout& layout, int high, int block) {
    const int tokens = std::min(layout.block_size, high - block * layout.block_size);
    return std::min(layout.block_k, round_up(tokens, kLanes));
}

/// Elements of a block's head in the program's type, those at first + r * stride + [0, count) for each of some runs:
/// in place, or of a quantized cache where the thread's panel has them at r * stride.
template <class E>
const E* Attention<E>::expanded(Scratch& s, int block, int head, size_t first, int runs, int count, size_t stride) const {
    const char* stored = layer_.head(block, head);
    if (!layer_.layout->quantized) return reinterpret_cast<const E*>(stored) + first;
    const int8_t* from = reinterpret_cast<const int8_t*>(stored) + first;
    expand(from, runs, count, stride, s.panel);
    return s.panel;
}

/// c (+)= a * b for some rows and all vectors of columns; `call` holds a and c of row 0, and b of the first vector.
template <class E>
void Attention<E>::multiply(Scratch& s, Range rows, int vecs, TileCall<E> call) const {
    using S = TileShape<E>;
    const E *a = call.a, *b = call.b;
    float* c = call.c;
    const int count = rows.end - rows.begin, row_blocks = ceil_div(count, S::kRows);
    for (int v = 0; v < vecs; v += S::kVecs) {
        call.b = b + size_t(v) * kLanes * Product<E>::kStep;
        for (int i = 0; i < row_blocks; i++) {
            const Range r = row_block<E>(count, i, row_blocks);
            const size_t first = rows.begin + r.begin;
            call.a = a + first * call.a_stride;
            call.c = c + first * call.c_stride + v * kLanes;
            s.fetcher.attach(call);
            tile<E>(r.end - r.begin, std::min(S::kVecs, vecs - v), call);
        }
    }
}

/// scores = q * keys for one block.
template <class E>
void Attention<E>::score(Scratch& s, const Pass& pass, int head, int block, int column) const {
    const KvLayout& layout = *layer_.layout;
    const int columns = columns_of(layout, pass.high, block);
    TileCall<E> call{};
    call.a = s.q;
    call.a_stride = s.q_stride;
    call.b_step = size_t(layout.block_k) * Product<E>::kStep;
    call.steps = layout.d_k / Product<E>::kStep;
    call.b = expanded(s, pass.table[block], head, 0, call.steps, columns * Product<E>::kStep, call.b_step);
    call.c = s.scores + column;
    call.c_stride = s.columns;
    multiply(s, pass.rows, columns / kLanes, call);
}

/// Turn the chunk's scores into weights 2^(score - max), with their max and sum, for each row.
template <class E>
void Attention<E>::softmax(Scratch& s, const Pass& pass, int head, int first_block, int end_block) const {
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
            const float* scales = layout.quantized ? layer_.key_scales(pass.table[b], head) : nullptr;
            for (int i = 0; i < columns; i += kLanes) {
                V v = vload(x + i) * vset(factor);
                if (scales) v = v * vload(scales + i);
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
            const float* scales = layout.quantized ? layer_.value_scales(pass.table[b], head) : nullptr;
            int i = 0;
            for (; i < columns; i += kLanes) {
                V v = vexp2(vload(scores + column + i) - vset(max));
                const int from = low - begin - i, to = std::min(high, end) - begin - i;
                if (from > 0 || to < kLanes) v = vkeep(v, from, to, vset(0.0f));
                sum = sum + v;
                vstore(weights + column + i, scales ? v * vload(scales + i) : v);
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
    const KvLayout& layout = *layer_.layout;
    TileCall<E> call{};
    call.a = s.weights + column;
    call.a_stride = s.columns;
    call.b_step = size_t(layout.d_v) * Product<E>::kStep;
    call.steps = round_up(columns_of(layout, pass.high, block), TileShape<E>::kAlign) / Product<E>::kStep;
    call.b = expanded(s, pass.table[block], head, layout.key_elements(), call.steps, int(call.b_step), call.b_step);
    call.c = s.sums;
    call.c_stride = s.d;
    call.accumulate = !first;
    multiply(s, pass.rows, layout.d_v / kLanes, call);
}

/// Add the chunk to what came before it, both rescaled to the larger maximum.
template <class E>
void Attention<E>::merge(Scratch& s, const Pass& pass) const {
    for (int row = pass.rows.begin; row < pass.rows.end; row += kLanes) {
        const V max = vmax(vload(s.max + row), vload(s.chunk_max + row));
        vstore(s.before + row, vexp2(vload(s.max + row) - max));
        vstore(s.now + row, vexp2(vload(s.chunk_max + row) - max));
    }
    for (int row = pass.rows.begin; row < pass.rows.end; row++) {
        if (s.chunk_max[row] == kHidden) continue;  // this row sees nothing of the chunk
        float* total = s.total + size_t(row) * s.d;
        const float* sums = s.sums + size_t(row) * s.d;
        const V before = vset(s.before[row]), now = vset(s.now[row]);
        for (int j = 0; j < s.d; j += kLanes) vstore(total + j, vfma(vload(total + j), before, vload(sums + j) * now));
        s.sum[row] = s.sum[row] * s.before[row] + s.chunk_sum[row] * s.now[row];
        s.max[row] = std::max(s.max[row], s.chunk_max[row]);
    }
}

template class Attention<float>;
template class Attention<bf16>;

}  // namespace fd
