#include "attention/attention.h"

namespace fd {
namespace {

constexpr float kHidden = -3.0e38f;  // score of a token that is not seen; finite, so that differences are not NaN

template <class T>
T* carve(char*& memory, size_t count) {
    T* p = reinterpret_cast<T*>(memory);
    memory += (count * sizeof(T) + kCacheLine - 1) / kCacheLine * kCacheLine;
    return p;
}

/// Blocks whose keys one product takes: two, where a product has room for the columns of both. A row's sums are added one
/// after the other, so a product of few rows needs many columns to keep the multipliers busy.
template <class E>
int blocks_of_scores(const KvLayout& layout) {
    return !layout.quantized && 2 * layout.block_k <= TileShape<E>::kVecs * kLanes ? 2 : 1;
}

}  // namespace

/// Rows [rows.begin, rows.end) of a tile go through blocks [begin, end) of one table.
template <class E>
struct Attention<E>::Pass {
    Range rows;
    const int32_t* table;
    int begin, end;
    int high;  // no row sees a position from here on
};

/// A part of a tile and a KV head: first what all queries share, then what each sees beyond.
template <class E>
struct Attention<E>::Unit {
    const TilePart* part;
    int head;
    std::vector<Pass> passes;
};

/// Fetches the blocks that a thread will visit, in order and a fixed distance ahead.
///
/// Blocks lie scattered, so the processor's own prefetching starts anew in each; and a core can wait for a few dozen
/// cache lines at a time only. So the lines are spread over all that is computed: every product, also those whose operands
/// are in the cache, fetches five eighths of what it reads, and each pass over a row of a chunk its part of the rest.
template <class E>
struct Attention<E>::Fetcher {
    std::vector<const char*> blocks;
    size_t block_bytes = 0;
    size_t lead = 0;  // blocks of a chunk
    size_t visited = 0, fetched = 0;  // blocks
    size_t offset = 0;                // bytes fetched of block `fetched`
    int lines_of_pass = 0;            // of each pass over a row; 0 for many rows, whose products suffice

    /// Say how many blocks and rows the next chunk has.
    void begin_chunk(int count, int rows) {
        lines_of_pass = count * int(block_bytes) / kCacheLine * 3 / (8 * kPasses * rows);
    }
    void fetch_in_pass() {
        const char* line;
        for (int lines = take(lines_of_pass, line); lines > 0; lines--, line += kCacheLine) prefetch(line);
    }
    template <class Call>
    void attach(Call& call, int vecs) {
        call.ahead_lines = 0;
        const int read = call.steps * vecs;  // a step reads a line of each vector
        const int lines = take(std::max(kLeastLines, read * 5 / 8), call.ahead);
        if (lines == 0) return;
        call.ahead_lines = ceil_div(lines, ceil_div(call.steps, Call::kAheadSteps));
        call.ahead_times = ceil_div(lines, call.ahead_lines);
    }
    void forget_visited() {
        blocks.erase(blocks.begin(), blocks.begin() + visited);
        fetched -= std::min(fetched, visited);
        visited = 0;
    }

   private:
    static constexpr int kLeastLines = 32;
    static constexpr int kPasses = 3;  // over a row of scores for its maximum and its weights, and over its sums
    static constexpr size_t kDistance = 192 << 10;  // bytes: a fraction of a second-level cache

    /// Return how many of the next `most` lines are to be fetched now, and where they begin.
    int take(int most, const char*& line) {
        if (fetched < visited + lead) {  // too late for the blocks before
            fetched = visited + lead;
            offset = 0;
        }
        if (fetched >= blocks.size() || (fetched - visited) * block_bytes > kDistance) return 0;
        line = blocks[fetched] + offset;
        const int left = ceil_div(int(block_bytes - offset), kCacheLine);  // what lies behind a block is not needed
        const int lines = left <= most + most / 4 ? left : most;
        offset += size_t(lines) * kCacheLine;
        if (offset >= block_bytes) {
            fetched++;
            offset = 0;
        }
        return lines;
    }
};

/// What a part of the context comes to for some rows. A row that has seen nothing has a sum of 0.
template <class E>
struct Attention<E>::Sums {
    float* total;  // [rows, d] values times weights, which are relative to max
    float* max;    // [rows] of the scores, base 2
    float* sum;    // [rows] of the weights
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
    float *key_scales, *value_scales;  // [columns] of a quantized chunk
    E* weights;        // [rows, columns]
    E* panel;          // keys or values of a quantized block that are multiplied as floats, or values of a latent one
    // Where they are multiplied as integers, instead of q and weights:
    SplitRow *split_q, *split_weights;   // [rows]
    int8_t *q_bytes, *weight_bytes;      // [rows, 2, half]
    size_t half;
    std::vector<const char*> blocks;  // of a chunk
    Sums chunk, own, whole;  // of one chunk, the chunks of its span so far, the spans before
    Sums span;               // `own` or, where a span is computed apart, the plan's
    float* before;           // [rows] factor of what came before what is merged
    float* now;              // [rows] factor of what is merged
    Unit unit, next;
    Fetcher fetcher;
    std::vector<char> memory;

    Scratch(const AttentionPlan& plan, const KvLayout& layout, int group) {
        const int rows = round_up(plan.tile_queries * group, kLanes) + TileShape<E>::kRowSlack + TileShape<E>::kRows;
        columns = plan.chunk_blocks * layout.block_k;
        q_stride = layout.d_k;
        d = layout.d_v;
        const size_t wide = (size_t(rows) * (columns + 3 * d + 8) + 2 * columns) * sizeof(float);
        half = std::max(columns, round_up(layout.d_k, kLanes));
        const size_t split = layout.integers ? size_t(rows) * 2 * (2 * half + sizeof(SplitRow)) : 0;
        const bool in_place = layout.integers || !(layout.quantized || layout.latent);
        const size_t panel_elements = in_place ? 0 : std::max(layout.key_elements(), layout.value_elements());
        const size_t narrow = (size_t(rows) * (columns + q_stride) + panel_elements) * sizeof(E);
        memory.resize(wide + narrow + split + 24 * kCacheLine);
        char* free = (char*)((size_t(memory.data()) + kCacheLine - 1) / kCacheLine * kCacheLine);
        q = carve<E>(free, rows * q_stride);
        scores = carve<float>(free, size_t(rows) * columns);
        weights = carve<E>(free, size_t(rows) * columns);
        panel = carve<E>(free, panel_elements);
        if (layout.integers) {
            split_q = carve<SplitRow>(free, rows);
            split_weights = carve<SplitRow>(free, rows);
            q_bytes = carve<int8_t>(free, rows * 2 * half);
            weight_bytes = carve<int8_t>(free, rows * 2 * half);
        }
        for (float** vector : {&key_scales, &value_scales}) *vector = carve<float>(free, columns);
        for (Sums* sums : {&chunk, &own, &whole})
            *sums = {carve<float>(free, size_t(rows) * d), carve<float>(free, rows), carve<float>(free, rows)};
        for (float** vector : {&before, &now}) *vector = carve<float>(free, rows);
        fetcher.block_bytes = layout.head_bytes();
        fetcher.lead = plan.chunk_blocks;
    }
};

template <class E>
void Attention<E>::run(const Context& context) {
    thread_local std::unique_ptr<Scratch> kept;
    thread_local int made_for[7];
    const KvLayout& layout = *layer_.layout;
    const int wanted[7] = {plan_->tile_queries * shape_.group(), plan_->chunk_blocks, layout.block_k, layout.d_k,
                           layout.d_v, layout.quantized, layout.latent};
    if (!kept || std::memcmp(made_for, wanted, sizeof wanted) != 0) {
        kept = std::make_unique<Scratch>(*plan_, layout, shape_.group());
        std::memcpy(made_for, wanted, sizeof wanted);
    }
    // Units are drawn one ahead, so that a thread knows what to fetch next.
    Scratch& s = *kept;
    s.fetcher.blocks.clear();
    s.fetcher.visited = s.fetcher.fetched = s.fetcher.offset = 0;
    const int units = int(plan_->parts.size()) * shape_.kv_heads;
    auto draw = [&](Unit& unit) {
        const int i = context.counter().fetch_add(1, std::memory_order_relaxed);
        if (i >= units) return false;
        plan_unit(context, plan_->parts[i / shape_.kv_heads], i % shape_.kv_heads, unit);
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
    if (plan_->split.empty()) return;
    context.wait_for_all();
    combine(context, s);
}

/// Merge the spans of this thread's share of the tiles whose spans were computed apart.
template <class E>
void Attention<E>::combine(const Context& context, Scratch& s) const {
    const Range mine = context.share(int(plan_->split.size()) * shape_.kv_heads);
    for (int i = mine.begin; i < mine.end; i++) {
        const QueryTile& tile = plan_->tiles[plan_->split[i / shape_.kv_heads]];
        const int head = i % shape_.kv_heads, rows = tile.count * shape_.group();
        std::fill_n(s.whole.sum, rows, 0.0f);
        for (int span = 0; span < tile.spans; span++) end_span(s, partial(tile, head, span), {0, rows});
        put_rows(context, tile, head, s.whole);
    }
}

template <class E>
void Attention<E>::plan_unit(const Context& context, const TilePart& part, int head, Unit& unit) const {
    const QueryTile& tile = plan_->tiles[part.tile];
    const Query* queries = &plan_->queries[tile.first];
    const int group = shape_.group(), block_size = layer_.layout->block_size;
    // What queries [first, end) see of the positions [from, to) that are in the part.
    auto add_pass = [&](int first, int end, int from, int to) {
        from = std::max(from, part.begin);
        to = std::min(to, part.end);
        if (from >= to) return;
        int low = to, high = 0;
        for (int i = first; i < end; i++) {
            low = std::min(low, queries[i].low(shape_.window, shape_.chunked));
            high = std::max(high, queries[i].high(shape_.window, shape_.chunked));
        }
        high = std::min(high, to);
        const int32_t* table = context.step.block_tables + size_t(queries[first].row) * context.step.max_blocks;
        const int begin = std::max(from, low) / block_size;
        unit.passes.push_back({{first * group, end * group}, table, begin, ceil_div(high, block_size), high});
    };
    unit.part = &part;
    unit.head = head;
    unit.passes.clear();
    add_pass(0, tile.count, 0, tile.shared);
    for (int i = 0; i < tile.count; i++)
        if (queries[i].end > tile.shared) add_pass(i, i + 1, tile.shared, queries[i].end);
}

template <class E>
void Attention<E>::run_unit(const Context& context, Scratch& s, const Unit& unit) const {
    const TilePart& part = *unit.part;
    const QueryTile& tile = plan_->tiles[part.tile];
    const int group = shape_.group(), d = shape_.d, rows = tile.count * group;
    s.queries = &plan_->queries[tile.first];
    const int span_tokens = plan_->span_blocks * layer_.layout->block_size;
    s.span = tile.spans == 0 ? s.own : partial(tile, unit.head, part.begin / span_tokens);
    for (int row = 0; row < rows; row++) {
        const E* q = context.row<E>(q_, s.queries[row / group].token) + (unit.head * group + row % group) * d;
        if (layer_.layout->integers) {
            float* x = s.scores;  // free until the first product
            for (int j = 0; j < round_up(d, kLanes); j++) x[j] = j < d ? to_float(q[j]) : 0.0f;
            s.split_q[row] = split_row(x, round_up(d, kLanes), s.half, s.q_bytes + row * 2 * s.half);
        } else {
            std::memcpy((void*)(s.q + row * s.q_stride), q, d * sizeof(E));
            std::memset((void*)(s.q + row * s.q_stride + d), 0, (s.q_stride - d) * sizeof(E));
        }
        std::memset(s.span.total + row * s.d, 0, s.d * sizeof(float));
        s.span.max[row] = kHidden;
        s.span.sum[row] = s.whole.sum[row] = 0;
    }
    for (const Pass& pass : unit.passes) run_pass(s, pass, unit);
    if (tile.spans > 0) return;
    if (part.end <= span_tokens) return put_rows(context, tile, unit.head, s.span);
    end_span(s, s.span, {0, rows});
    put_rows(context, tile, unit.head, s.whole);
}

/// Where a span of a tile is kept until its spans are combined.
template <class E>
typename Attention<E>::Sums Attention<E>::partial(const QueryTile& tile, int head, int span) const {
    const int rows = round_up(tile.count * shape_.group(), kLanes);
    float* kept = plan_->partials.data() + tile.partials + size_t(head * tile.spans + span) * rows * plan_->span_floats;
    return {kept + 2 * rows, kept, kept + rows};
}

/// Write the rows of a tile and a KV head: totals by sums.
template <class E>
void Attention<E>::put_rows(const Context& context, const QueryTile& tile, int head, const Sums& sums) const {
    const int group = shape_.group(), d = shape_.value();
    for (int row = 0; row < tile.count * group; row++) {
        const float* total = sums.total + row * layer_.layout->d_v;
        const int token = plan_->queries[tile.first + row / group].token;
        E* out = context.row<E>(out_, token) + (head * group + row % group) * d;
        float inverse = 1.0f / sums.sum[row];
        if (shape_.sinks) {  // here, where all keys of a row have been added up, once
            const float sink = shape_.sinks[head * group + row % group] * kLog2e, max = std::max(sums.max[row], sink);
            const float own = exp2_of(sums.max[row] - max);
            inverse = own / (sums.sum[row] * own + exp2_of(sink - max));
        }
        int j = 0;
        for (; j + kLanes <= d; j += kLanes) vstore(out + j, vload(total + j) * vset(inverse));
        for (; j < d; j++) put(out + j, total[j] * inverse);
    }
}

template <class E>
void Attention<E>::run_pass(Scratch& s, const Pass& pass, const Unit& unit) const {
    const KvLayout& layout = *layer_.layout;
    const int blocks = plan_->chunk_blocks, first = unit.part->begin / layout.block_size, head = unit.head;
    for (int begin = pass.begin; begin < pass.end;) {
        const int chunk_begin = begin / blocks * blocks;
        const int end = std::min(pass.end, chunk_begin + blocks);
        if (begin % plan_->span_blocks == 0 && begin > first) end_span(s, s.span, pass.rows);
        auto column = [&](int block) { return (block - begin) * layout.block_k; };
        const int together = blocks_of_scores<E>(layout);
        s.fetcher.begin_chunk(end - begin, pass.rows.end - pass.rows.begin);
        for (int b = begin; b < end; b += together) score(s, pass, head, b, std::min(together, end - b), column(b));
        softmax(s, pass, head, begin, end);
        weigh(s, pass, head, begin, end);
        merge(s, s.span, s.chunk, pass.rows);
        s.fetcher.visited += end - begin;
        begin = end;
    }
}

/// Tokens of a block up to the last one that some row sees, rounded up to what products and vectors read.
static int columns_of(const KvLayout& layout, int high, int block) {
    const int tokens = std::min(layout.block_size, high - block * layout.block_size);
    return std::min(layout.block_k, round_up(tokens, kLanes));
}

/// Elements of a quantized block's head in the program's type, those at first + r * stride + [0, count) for each of some
/// runs: the thread's panel has them at r * stride.
template <class E>
const E* Attention<E>::expanded(Scratch& s, int block, int head, size_t first, int runs, int count, size_t stride) const {
    const int8_t* from = reinterpret_cast<const int8_t*>(layer_.head(block, head)) + first;
    for (int r = 0; r < runs; r++, from += stride)
        for (int i = 0; i < count; i += kLanes) vstore(s.panel + r * stride + i, vload(from + i));
    return s.panel;
}

/// The keys of a quantized latent block: `runs` of kStep elements of its first columns.
template <class E>
const E* Attention<E>::latent_keys(Scratch& s, int block, int runs, int columns) const {
    const KvLayout& layout = *layer_.layout;
    const int8_t* stored = reinterpret_cast<const int8_t*>(layer_.head(block, 0));
    const float *ks = layer_.key_scales(block, 0), *vs = layer_.value_scales(block, 0);
    for (int r = 0; r < runs; r++) {
        const float* scales = r * layout.step < layout.key_part() ? ks : vs;
        const size_t at = size_t(r) * layout.block_k * layout.step;
        for (int i = 0; i < columns * layout.step; i++) put(s.panel + at + i, stored[at + i] * scales[i / layout.step]);
    }
    return s.panel;
}

/// The values of a latent block's first columns: the last elements of its keys, transposed.
template <class E>
const E* Attention<E>::latent_values(Scratch& s, int block, int columns) const {
    const KvLayout& layout = *layer_.layout;
    constexpr int S = Product<E>::kStep;
    const char* head = layer_.head(block, 0);
    const float* vs = layout.quantized ? layer_.value_scales(block, 0) : nullptr;
    const int first = layout.key_part(), count = layout.latent;
    auto transpose = [&](const auto* stored, auto&& value) {
        for (int offset = 0; offset < columns; offset += S) {
            E* to = s.panel + size_t(offset) * layout.d_v;
            const auto* from = stored + (size_t(first / S) * layout.block_k + offset) * S;
            for (int i = 0; i < count; i += S, from += size_t(layout.block_k) * S)
                for (int j = 0; j < S; j++)      // element of a run
                    for (int o = 0; o < S; o++)  // token
                        to[(i + j) * S + o] = value(from[o * S + j], offset + o);
            // Where a run ends beyond the values, its padding is 0.
            for (int i = round_up(count, S) * S; i < layout.d_v * S; i++) put(to + i, 0.0f);
        }
    };
    if (!layout.quantized)
        transpose(reinterpret_cast<const E*>(head), [](E x, int) { return x; });
    else
        transpose(reinterpret_cast<const int8_t*>(head), [&](int8_t x, int offset) {
            E y;
            put(&y, x * vs[offset]);
            return y;
        });
    return s.panel;
}

/// c (+)= a * b for some rows and all vectors of columns; `call` holds a and c of row 0, and the first vector of b.
template <class E>
void Attention<E>::multiply(Scratch& s, Range rows, int vecs, TileCall<E> call) const {
    using S = TileShape<E>;
    const TileCall<E> whole = call;
    const int count = rows.end - rows.begin, row_blocks = ceil_div(count, S::kRows);
    for (int v = 0; v < vecs; v += S::kVecs) {
        call.first = whole.first + size_t(v) * kLanes * Product<E>::kStep * sizeof(E);
        for (int i = 0; i < row_blocks; i++) {
            const Range r = row_block<E>(count, i, row_blocks);
            const size_t first = rows.begin + r.begin;
            call.a = whole.a + first * call.a_stride;
            call.c = whole.c + first * call.c_stride + v * kLanes;
            const int wide = std::min(S::kVecs, vecs - v);
            s.fetcher.attach(call, wide);
            tile<E>(r.end - r.begin, wide, call);
        }
    }
}

template <class E>
void Attention<E>::multiply(Scratch& s, Range rows, int vecs, SplitCall call) const {
    const SplitCall whole = call;
    const int count = rows.end - rows.begin, row_blocks = ceil_div(count, kSplitRows);
    for (int v = 0; v < vecs; v += kSplitVecs)
        for (int i = 0; i < row_blocks; i++) {
            const Range r = share(count, i, row_blocks);
            const size_t first = rows.begin + r.begin;
            call.a = whole.a + first * 2 * call.half;
            call.rows = whole.rows + first;
            call.first = whole.first + v * sizeof(I);
            call.c = whole.c + first * call.c_stride + v * kLanes;
            const int wide = std::min(kSplitVecs, vecs - v);
            s.fetcher.attach(call, wide);
            split_product(r.end - r.begin, wide, call);
        }
}

/// scores = q * keys for `count` blocks, which are those of `blocks_of_scores` or fewer.
template <class E>
void Attention<E>::score(Scratch& s, const Pass& pass, int head, int block, int count, int column) const {
    const KvLayout& layout = *layer_.layout;
    const int columns = (count - 1) * layout.block_k + columns_of(layout, pass.high, block + count - 1);
    if (layout.integers) {
        const char* stored = layer_.head(pass.table[block], head);
        const int steps = layout.d_k / kDotK;
        multiply(s, pass.rows, columns / kLanes,
                 SplitCall{s.q_bytes, s.half, s.split_q, &stored, 0, size_t(layout.block_k) * kDotK, 0, steps, steps,
                           s.scores + column, size_t(s.columns)});
        return;
    }
    TileCall<E> call{};
    call.a = s.q;
    call.a_stride = s.q_stride;
    call.b_step = size_t(layout.block_k) * Product<E>::kStep;
    call.steps = call.block_steps = layout.d_k / Product<E>::kStep;
    const char* keys[2] = {};
    if (!layout.quantized)
        for (int i = 0; i < count; i++) keys[i] = layer_.head(pass.table[block + i], head);
    else if (layout.latent)
        keys[0] = (const char*)latent_keys(s, pass.table[block], call.steps, columns);
    else
        keys[0] = (const char*)expanded(s, pass.table[block], head, 0, call.steps, columns * Product<E>::kStep, call.b_step);
    call.blocks = keys;
    call.apart = count > 1;
    call.c = s.scores + column;
    call.c_stride = s.columns;
    multiply(s, pass.rows, columns / kLanes, call);
}

/// The maximum of scaled scores, whose largest are known.
static float scaled_maximum(V largest, V factor) { return vmaximum(vmax(vset(kHidden), largest * factor)); }

/// The same as below for `rows` rows that see a whole chunk of an unquantized cache. All maxima come first, so that one row
/// does not wait for the maximum of another.
template <class E, class Fetcher>
[[gnu::flatten]] static void softmax_whole(const float* scores, E* weights, size_t columns, int rows, float factor,
                                           float* maxima, float* sums, Fetcher& fetcher) {
    constexpr int N = kChunkTokens / kLanes;
    const V by = vset(factor);
    for (int row = 0; row < rows; row++) {
        V largest = vset(kHidden);
        unroll<N>([&](int i) { largest = vmax(largest, vload(scores + row * columns + i * kLanes)); });
        maxima[row] = scaled_maximum(largest, by);
        fetcher.fetch_in_pass();
    }
    for (int row = 0; row < rows; row++) {
        const V less = vset(-maxima[row]);
        V sum = vset(0.0f);
        unroll<N>([&](int i) {
            const V v = vexp2(vfma(vload(scores + row * columns + i * kLanes), by, less));
            sum = sum + v;
            vstore_flushed(weights + row * columns + i * kLanes, v);
        });
        sums[row] = vsum(sum);
        fetcher.fetch_in_pass();
    }
}

/// Turn the chunk's scores into weights 2^(score - max), with their max and sum, for each row.
template <class E>
void Attention<E>::softmax(Scratch& s, const Pass& pass, int head, int first_block, int end_block) const {
    const KvLayout layout = *layer_.layout;
    const float factor = shape_.softcap ? shape_.scale : shape_.scale * kLog2e;
    const int blocks = end_block - first_block;
    float *const key_scales = s.key_scales, *const value_scales = s.value_scales;
    const float softcap = shape_.softcap;
    const bool scaled = layout.quantized && !layout.latent, plain = !scaled && !softcap && factor > 0;
    for (int b = 0; scaled && b < blocks; b++) {
        const int32_t block = pass.table[first_block + b];
        std::memcpy(key_scales + b * layout.block_k, layer_.key_scales(block, head), layout.block_k * sizeof(float));
        std::memcpy(value_scales + b * layout.block_k, layer_.value_scales(block, head), layout.block_k * sizeof(float));
    }
    // Blocks without padding are one span of columns.
    const int span = layout.block_k == layout.block_size ? blocks : 1;
    const int span_tokens = span * layout.block_size, columns = s.columns, group = shape_.group();
    const int chunk_begin = first_block * layout.block_size, chunk_end = chunk_begin + span_tokens;
    bool whole = plain && span == blocks && span_tokens == kChunkTokens;
    for (int i = pass.rows.begin / group; whole && i < ceil_div(pass.rows.end, group); i++)
        whole = s.queries[i].low(shape_.window, shape_.chunked) <= chunk_begin &&
                s.queries[i].high(shape_.window, shape_.chunked) >= chunk_end;
    if (whole) {
        const size_t first = pass.rows.begin;
        return softmax_whole(s.scores + first * columns, s.weights + first * columns, columns,
                             pass.rows.end - pass.rows.begin, factor, s.chunk.max + first, s.chunk.sum + first,
                             s.fetcher);
    }
    for (int row = pass.rows.begin; row < pass.rows.end; row++) {
        const Query& query = s.queries[row / group];
        const int low = query.low(shape_.window, shape_.chunked), high = query.high(shape_.window, shape_.chunked);
        float* const scores = s.scores + size_t(row) * columns;
        E* const weights = s.weights + size_t(row) * columns;
        // f(column, keep): `keep(x, other)` has other where a vector of columns has tokens that are not seen.
        auto each = [&](auto f) {
            int column = 0;
            for (int b = 0; b < blocks; b += span) {
                const int begin = (first_block + b) * layout.block_size, seen = std::min(high, begin + span_tokens) - begin;
                const int last = std::min(span * layout.block_k, round_up(std::min(span_tokens, pass.high - begin), kLanes));
                const int end = b + span < blocks ? span * layout.block_k : last, at = b * layout.block_k;
                auto some = [&](int from, int to) {
                    for (int i = from; i < to; i += kLanes)
                        f(at + i, [&](V x, float other) { return vkeep(x, low - begin - i, seen - i, vset(other)); });
                };
                const int all_from = std::min(end, round_up(std::max(0, low - begin), kLanes));
                const int all_to = std::max(all_from, std::min(end, seen / kLanes * kLanes));
                some(0, all_from);
                for (int i = all_from; i < all_to; i += kLanes) f(at + i, [](V x, float) { return x; });
                some(all_to, end);
                column = at + end;
            }
            return column;
        };
        V largest = vset(kHidden), sum = vset(0.0f);
        int end;
        s.fetcher.fetch_in_pass();
        if (plain) {
            each([&](int column, auto keep) { largest = vmax(largest, keep(vload(scores + column), kHidden)); });
            s.chunk.max[row] = scaled_maximum(largest, vset(factor));
            const V less = vset(-s.chunk.max[row]);
            end = each([&](int column, auto keep) {
                const V v = keep(vexp2(vfma(vload(scores + column), vset(factor), less)), 0.0f);
                sum = sum + v;
                vstore_flushed(weights + column, v);
            });
        } else {
            each([&](int column, auto keep) {
                V v = vload(scores + column) * vset(factor);
                if (scaled) v = v * vload(key_scales + column);
                if (softcap) v = softcapped(v, softcap) * vset(kLog2e);
                v = keep(v, kHidden);
                vstore(scores + column, v);
                largest = vmax(largest, v);
            });
            s.chunk.max[row] = vmaximum(largest);
            const V max = vset(s.chunk.max[row]);
            end = each([&](int column, auto keep) {
                V v = keep(vexp2(vload(scores + column) - max), 0.0f);
                sum = sum + v;
                if (scaled) v = v * vload(value_scales + column);
                layout.integers ? vstore(scores + column, v) : vstore_flushed(weights + column, v);
            });
        }
        s.chunk.sum[row] = vsum(sum);
        s.fetcher.fetch_in_pass();
        if (layout.integers)
            s.split_weights[row] = split_row(scores, end, s.half, s.weight_bytes + row * 2 * s.half);
        else
            for (int i = end; i < round_up(end, TileShape<E>::kAlign); i += kLanes) vstore(weights + i, vset(0.0f));
    }
}

/// sums = weights * values of the chunk's blocks: of many rows at once, unless the thread's panel holds their values.
template <class E>
void Attention<E>::weigh(Scratch& s, const Pass& pass, int head, int first_block, int end_block) const {
    const KvLayout& layout = *layer_.layout;
    const int last_columns = columns_of(layout, pass.high, end_block - 1), before = end_block - 1 - first_block;
    s.blocks.clear();
    for (int b = first_block; b < end_block; b++) s.blocks.push_back(layer_.head(pass.table[b], head));
    if (layout.integers) {
        const int steps = before * layout.block_v / kDotK + last_columns / kDotK;
        multiply(s, pass.rows, layout.d_v / kLanes,
                 SplitCall{s.weight_bytes, s.half, s.split_weights, s.blocks.data(), layout.key_elements(),
                           size_t(layout.d_v) * kDotK, layout.block_k, layout.block_v / kDotK, steps, s.chunk.total,
                           size_t(s.d)});
        return;
    }
    const int last_steps = round_up(last_columns, TileShape<E>::kAlign) / Product<E>::kStep;
    TileCall<E> call{};
    call.a = s.weights;
    call.a_stride = s.columns;
    call.b_step = size_t(layout.d_v) * Product<E>::kStep;
    call.block_steps = layout.block_k / Product<E>::kStep;
    call.c = s.chunk.total;
    call.c_stride = s.d;
    if (!layout.quantized && !layout.latent) {
        // Of few rows reading is the limit: a call fetches no more than one block, as much as it should read then.
        const bool many = pass.rows.end - pass.rows.begin > TileShape<E>::kRows;
        const int blocks = before + 1, together = many ? blocks : 2;
        call.first = layout.key_elements() * sizeof(E);
        for (int b = 0; b < blocks; b += together, call.a += together * layout.block_k, call.accumulate = true) {
            call.blocks = s.blocks.data() + b;
            call.steps = std::min(together, before - b) * call.block_steps + (b + together > before ? last_steps : 0);
            multiply(s, pass.rows, layout.d_v / kLanes, call);
        }
        return;
    }
    for (int b = first_block; b < end_block; b++, call.a += layout.block_k, call.accumulate = true) {
        call.steps = b + 1 < end_block ? call.block_steps : last_steps;
        const char* const values =
            (const char*)(layout.latent ? latent_values(s, pass.table[b], call.steps * Product<E>::kStep)
                                        : expanded(s, pass.table[b], head, layout.key_elements(), call.steps,
                                                   int(call.b_step), call.b_step));
        call.blocks = &values;
        multiply(s, pass.rows, layout.d_v / kLanes, call);
    }
}

/// Add `from` to `into`, which came before it, both rescaled to the larger maximum.
template <class E>
void Attention<E>::merge(Scratch& s, const Sums& into, const Sums& from, Range rows) const {
    for (int row = rows.begin; row < rows.end; row += kLanes) {
        const V max = vmax(vload(into.max + row), vload(from.max + row));
        vstore(s.before + row, vexp2(vload(into.max + row) - max));
        vstore(s.now + row, vexp2(vload(from.max + row) - max));
    }
    for (int row = rows.begin; row < rows.end; row++) {
        s.fetcher.fetch_in_pass();
        if (from.sum[row] == 0) continue;  // this row sees nothing of it
        float* total = into.total + size_t(row) * s.d;
        const float* more = from.total + size_t(row) * s.d;
        const V before = vset(s.before[row]), now = vset(s.now[row]);
        for (int j = 0; j < s.d; j += kLanes) vstore(total + j, vfma(vload(total + j), before, vload(more + j) * now));
        into.sum[row] = into.sum[row] * s.before[row] + from.sum[row] * s.now[row];
        into.max[row] = std::max(into.max[row], from.max[row]);
    }
}

/// Add a span to the whole of those before it, and begin another in its place.
template <class E>
void Attention<E>::end_span(Scratch& s, const Sums& span, Range rows) const {
    const Sums& whole = s.whole;
    for (int row = rows.begin; row < rows.end; row++) {
        if (whole.sum[row] != 0) continue;
        // Not merged with nothing: a row's first span keeps its bits.
        std::memcpy(whole.total + size_t(row) * s.d, span.total + size_t(row) * s.d, s.d * sizeof(float));
        whole.max[row] = span.max[row];
        whole.sum[row] = span.sum[row];
        span.sum[row] = 0;
    }
    merge(s, whole, span, rows);
    for (int row = rows.begin; row < rows.end; row++) {
        std::memset(span.total + size_t(row) * s.d, 0, s.d * sizeof(float));
        span.max[row] = kHidden;
        span.sum[row] = 0;
    }
}

template class Attention<float>;
template class Attention<bf16>;

}  // namespace fd
