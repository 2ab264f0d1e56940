// The functions that Python calls through ctypes. Handles are opaque pointers. Nothing is thrown: where memory runs out, a
// function returns null or 0; where an index or a size is out of bounds, kRefused, and `fd_refusal` has the text.

#include "attention/kv_copy.h"
#include "linear/moe.h"
#include "linear/squeezed.h"
#include "recurrent.h"
#include "sampling.h"

namespace fd {
namespace {

float element(const void* source, Type type, size_t i) {
    switch (type) {
        case Type::f32:
            return static_cast<const float*>(source)[i];
        case Type::bf16:
            return to_float(static_cast<const bf16*>(source)[i]);
        default:
            return half_to_float(static_cast<const uint16_t*>(source)[i]);
    }
}

/// Elements [first, first + n) of an array of `type` as the program's.
template <class E>
void read_elements(const void* source, Type type, size_t first, int n, E* to) {
    auto read = [&](const auto* from, auto&& load) {
        from += first;
        int i = 0;
        for (; i + kLanes <= n; i += kLanes) vstore(to + i, load(from + i));
        for (; i < n; i++) put(to + i, element(source, type, first + i));
    };
    if (type == Type::f16) return read(static_cast<const uint16_t*>(source), vload_half);
    if (type == Type::f32) return read(static_cast<const float*>(source), [](const float* p) { return vload(p); });
    const bf16* from = static_cast<const bf16*>(source);
    if constexpr (std::is_same_v<E, bf16>)
        std::copy_n(from + first, n, to);
    else
        read(from, [](const bf16* p) { return vload(p); });
}

template <class E>
void pack_rows(Linear& w, int part, int first_column, const void* source, Type type, Range rows) {
    constexpr int S = Product<E>::kStep, kTogether = kCacheLine / sizeof(E);
    E read[kLanes][kTogether];
    for (int r = rows.begin, count; r < rows.end; r += count) {
        const int column = stored_column(w, part, first_column + r), lane = column % kLanes;
        count = std::min(kLanes - lane, rows.end - r);  // rows that are columns of one vector
        const Panel<E> panel(w, column / kLanes);
        for (int k = 0; k < w.k; k += kTogether) {
            const int n = std::min(kTogether, w.k - k);
            for (int c = 0; c < count; c++) {
                if (n % S) put(&read[c][n], 0.0f);  // S is 1 or 2
                read_elements(source, type, size_t(r + c) * w.k + k, n, read[c]);
            }
            E* to = const_cast<E*>(panel.b) + k / S * panel.step() + lane * S;
            for (int i = 0; i < n; i += S, to += panel.step())
                for (int c = 0; c < count; c++) std::memcpy((void*)(to + c * S), &read[c][i], S * sizeof(E));
        }
    }
}

/// `values` int8 [rows, k], `scales` and `minima` [rows, k / group] of the type that w stores, where `group` may be a
/// multiple of w.group; `units` float16 [rows, k / kUnitSpan, 1], or 2 with minima, if these are multiples.
void pack_values(const Linear& w, int part, int first_column, const int8_t* values, const char* scales,
                 const char* minima, const uint16_t* units, int group, Range rows) {
    const int groups = w.k / group, parts = dot_parts(w);
    const size_t item = scale_bytes(w);
    std::vector<uint8_t> codes(w.group + kDotK);
    for (int r = rows.begin, count; r < rows.end; r += count) {
        const int column = stored_column(w, part, first_column + r);
        count = std::min(kLanes - column % kLanes, rows.end - r);  // rows that are columns of one vector
        char* panel = packed_panel(w, column / kLanes);
        for (int k = 0; k < w.k; k += w.group, panel += group_bytes(w)) {
            const size_t before = units_before(w, k);
            const int size = std::min(w.group, w.k - k);
            char* const at = panel + before;
            uint8_t* const bytes = reinterpret_cast<uint8_t*>(at + (w.minima ? 2 : 1) * scales_bytes(w));
            for (int row = r, c = column % (kWeightVecs * kLanes); row < r + count; row++, c++) {
                if (before) {
                    const uint16_t* unit = units + (size_t(row) * (w.k / kUnitSpan) + k / kUnitSpan) * (minima ? 2 : 1);
                    std::memcpy(panel + c * sizeof *unit, unit, sizeof *unit);
                    if (minima) std::memcpy(panel + kUnitsBytes + c * sizeof *unit, unit + 1, sizeof *unit);
                }
                const size_t from = (size_t(row) * groups + k / group) * item;
                std::memcpy(at + c * item, scales + from, item);
                if (minima) std::memcpy(at + scales_bytes(w) + c * item, minima + from, item);
                const int8_t* const value = values + size_t(row) * w.k + k;
                for (int i = 0; i < size; i++) codes[i] = uint8_t(value[i] + w.offset);
                for (int i = 0; w.fp4 && i < size; i++) codes[i] = uint8_t(std::find(kFp4, kFp4 + 15, codes[i]) - kFp4);
                std::fill_n(&codes[size], kDotK, 0);
                for (int i = 0; i < size; i += kDotK)
                    each_part_of(w, bytes, c, i, [&](uint8_t* vector, int to, int bits, int of) {
                        for (int j = 0; j < kDotK; j++) {
                            const int code = codes[i + j] >> of & ((1 << bits) - 1);
                            vector[byte_of(parts, c % kLanes, j)] |= uint8_t(code << to);
                        }
                    });
            }
            panel = at;
        }
    }
}

constexpr int kRefused = -3;
thread_local std::string refusal;

template <class F>
auto guarded(F&& body) -> decltype(body()) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return {};
    }
}

/// The same for what computes: 1, or what `body` returns, or kRefused.
template <class F>
int computed(F&& body) {
    const DefaultFloats floats;
    try {
        if constexpr (std::is_void_v<decltype(body())>)
            return body(), 1;
        else
            return body();
    } catch (const OutOfBounds& error) {
        refusal = error.what();
        return kRefused;
    } catch (const std::bad_alloc&) {
        return 0;
    }
}

}  // namespace
}  // namespace fd

using namespace fd;

// Nothing else is visible outside the library.
#pragma GCC visibility push(default)
extern "C" {

// What was built ------------------------------------------------------------------------------------------------------

const char* fd_instruction_set() {
#if defined(FD_AMX_EMULATED)
    return "amx_emulated";
#elif defined(FD_AMX)
    return "amx_bf16";
#elif defined(__AVX512BF16__)
    return "avx512_bf16";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "avx2";
#else
    return "generic";
#endif
}

/// The instructions that multiply packed weights.
const char* fd_packed_products() { return dot_name(); }

/// 1 if the process may use what was built; 0 where the kernel refuses the tile state.
int fd_usable() {
#if defined(FD_AMX)
    return amx::request();
#else
    return 1;
#endif
}

/// Rows that must be readable after the last row of a matrix.
int fd_row_slack() { return TileShape<bf16>::kRowSlack; }
int fd_lanes() { return kLanes; }
/// What was out of bounds in the last call of this thread that was refused.
const char* fd_refusal() { return refusal.c_str(); }

// Teams, arenas -------------------------------------------------------------------------------------------------------

void* fd_team_new(int threads) {
    try {
        return new Team(threads);
    } catch (const std::exception&) {  // the system refused a thread, or memory
        return nullptr;
    }
}
void fd_team_free(void* team) { delete static_cast<Team*>(team); }
/// `base` is memory that all ranks map, unless `meet` exchanges it: a header, then slots; see group.h.
void* fd_group_new(void* base, int rank, int size, size_t header, size_t slot, double patience, Meet meet) {
    return guarded(
        [&]() -> void* { return new Group(static_cast<char*>(base), rank, size, header, slot, patience, meet); });
}
void fd_group_free(void* group) { delete static_cast<Group*>(group); }
/// 0, or 1 and the rank that this one waited for in vain.
int fd_group_failed(void* group) { return static_cast<Group*>(group)->failed(); }
/// Keep what this thread wrote and read before apart from what it writes and reads next.
void fd_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
void* fd_arena_new() {
    return guarded([]() -> void* { return new Arena; });
}
void fd_arena_free(void* arena) { delete static_cast<Arena*>(arena); }

// Weights -------------------------------------------------------------------------------------------------------------

void* fd_linear_new(void* arena, int n, int k, int gated, int type, int has_bias) {
    return guarded([&]() -> void* {
        auto* w = new (static_cast<Arena*>(arena)->allocate(sizeof(Linear))) Linear{};
        const bool wide = Type(type) == Type::f32;
        w->n = n;
        w->k = k;
        w->gated = gated;
        w->type = Type(type);
        w->padded_k = round_up(k, wide ? TileShape<float>::kAlign : TileShape<bf16>::kAlign);
        w->vecs = round_up(n, kLanes) / kLanes * (gated ? 2 : 1);
        const size_t elements = size_t(w->vecs) * kLanes * w->padded_k;
        w->bias = has_bias ? (float*)static_cast<Arena*>(arena)->allocate(size_t(w->vecs) * kLanes * 4) : nullptr;
        w->data = static_cast<Arena*>(arena)->allocate(elements * (wide ? 4 : 2));  // the latest, which may shrink
        return w;
    });
}

/// Pack `rows` rows of [rows, k] into columns from `first_column` of part `part`.
void fd_linear_pack(void* linear, int part, int first_column, const void* source, int type, int rows, void* team) {
    Linear& w = *static_cast<Linear*>(linear);
    Team& t = *static_cast<Team*>(team);
    t.run([&](int thread) {
        const Range mine = share(rows, thread, t.size());
        if (w.type == Type::f32)
            pack_rows<float>(w, part, first_column, source, Type(type), mine);
        else
            pack_rows<bf16>(w, part, first_column, source, Type(type), mine);
    });
}

/// Store the arena's latest linear, of which all rows are packed, in fewer bytes if its values allow; 1 if they did.
int fd_linear_squeeze(void* arena, void* linear, void* team) {
    return guarded([&] {
        Linear& w = *static_cast<Linear*>(linear);
        const size_t bytes = squeeze(w, *static_cast<Team*>(team));
        if (bytes) static_cast<Arena*>(arena)->shrink(w.data, bytes);
        return int(bytes > 0);
    });
}

/// What the values of a packed linear are: for each `group` consecutive k (16, a multiple of 32, or k) there is a scale, and
/// a minimum if there are minima, both stored as `scales`; values are from -offset to 2^bits - 1 - offset, or those of FP4.
struct PackedForm {
    int bits, group, offset, minima;
    Scales scales;
    int fp4;
};

void* fd_packed_new(void* arena, int n, int k, int gated, const PackedForm* form, int has_bias) {
    return guarded([&]() -> void* {
        auto* w = new (static_cast<Arena*>(arena)->allocate(sizeof(Linear))) Linear{};
        w->n = n;
        w->k = k;
        w->gated = gated;
        w->type = form->bits == 4 ? Type::u4 : form->bits == 6 ? Type::u6 : Type::u8;
        w->padded_k = round_up(k, kActivationK);
        w->group = form->group == k ? w->padded_k : form->group;
        w->offset = form->offset;
        w->minima = form->minima;
        w->scales = form->scales;
        w->fp4 = form->fp4;
        w->vecs = round_up(round_up(n, kLanes) / kLanes * (gated ? 2 : 1), kWeightVecs);
        w->data = static_cast<Arena*>(arena)->allocate(w->vecs / kWeightVecs * packed_panel_bytes(*w));
        w->bias = has_bias ? (float*)static_cast<Arena*>(arena)->allocate(size_t(w->vecs) * kLanes * 4) : nullptr;
        return w;
    });
}

/// Pack rows as `fd_linear_pack` does; `group` is that of the arrays, of which each group of the linear is a part.
void fd_packed_pack(void* linear, int part, int first_column, const int8_t* values, const char* scales,
                    const char* minima, const uint16_t* units, int group, int rows, void* team) {
    Linear& w = *static_cast<Linear*>(linear);
    Team& t = *static_cast<Team*>(team);
    // Columns share bytes of nibbles, so a panel is one thread's.
    t.run([&](int thread) {
        const int columns = kLanes * (w.gated ? 1 : kWeightVecs), first = first_column / columns;
        const Range panels = share((first_column + rows + columns - 1) / columns - first, thread, t.size());
        const Range mine = {std::max(0, (first + panels.begin) * columns - first_column),
                            std::min(rows, (first + panels.end) * columns - first_column)};
        pack_values(w, part, first_column, values, scales, minima, units, group, mine);
    });
}

/// A linear with the same values and a bias of zeros.
void* fd_linear_biased(void* arena, const void* linear) {
    return guarded([&]() -> void* {
        auto* w = new (static_cast<Arena*>(arena)->allocate(sizeof(Linear))) Linear(*static_cast<const Linear*>(linear));
        w->bias = (float*)static_cast<Arena*>(arena)->allocate(size_t(w->vecs) * kLanes * 4);
        return w;
    });
}

void fd_linear_bias(void* linear, int part, int first_column, const void* source, int type, int count) {
    Linear& w = *static_cast<Linear*>(linear);
    for (int i = 0; i < count; i++) w.bias[stored_column(w, part, first_column + i)] = element(source, Type(type), i);
}

// KV cache ------------------------------------------------------------------------------------------------------------

struct Cache {
    KvLayout layout;
    int type;
    std::unique_ptr<Mapping> memory;
};

void* fd_kv_new(int layers, int blocks, int block_size, int heads, int d, int latent, int type, int quantized) {
    return guarded([&]() -> void* {
        auto cache = std::make_unique<Cache>();
        KvLayout& l = cache->layout;
        l.layers = layers;
        l.blocks = blocks;
        l.block_size = block_size;
        l.heads = heads;
        l.d = d;
        l.latent = latent;
        l.quantized = quantized;
        cache->type = type;
        Type(type) == Type::f32 ? l.pad<float>() : l.pad<bf16>();
        cache->memory = std::make_unique<Mapping>(l.total_bytes());
        l.data = cache->memory->data();
        return cache.release();
    });
}
void fd_kv_free(void* cache) { delete static_cast<Cache*>(cache); }
void fd_kv_transfer(void* cache, const int32_t* blocks, int count, void* canonical, int to_cache) {
    const Cache& c = *static_cast<Cache*>(cache);
    if (Type(c.type) == Type::f32)
        copy_blocks<float>(c.layout, blocks, count, static_cast<char*>(canonical), to_cache);
    else
        copy_blocks<bf16>(c.layout, blocks, count, static_cast<char*>(canonical), to_cache);
}

/// k, v: float32 [tokens, heads, d]; latent: [tokens, d - latent] and [tokens, latent].
int fd_kv_write(void* cache, int layer, const float* k, const float* v, const int32_t* slots, int tokens) {
    const Cache& c = *static_cast<Cache*>(cache);
    const KvLayout& l = c.layout;
    auto write = [&](auto kv) {
        for (int t = 0; t < tokens; t++)
            if (slots[t] % l.block_size == 0) kv.clear_block(slots[t] / l.block_size);
        for (int t = 0; t < tokens; t++)
            for (int h = 0; h < l.heads; h++)
                kv.write(slots[t], h, k + (size_t(t) * l.heads + h) * l.key_part(),
                         v + (size_t(t) * l.heads + h) * (l.latent ? l.latent : l.d));
    };
    return computed([&] {
        check_indices("KV slot", slots, tokens, l.slots());
        Type(c.type) == Type::f32 ? write(KvLayer<float>(l, layer)) : write(KvLayer<bf16>(l, layer));
    });
}

}  // extern "C"

// Programs ------------------------------------------------------------------------------------------------------------

namespace {

void lower(int& limit, int64_t to) { limit = int(std::min<int64_t>(limit, to)); }

struct GeometryPlan {
    int group, kv_heads, block_size, table;
    AttentionPlan plan;
};

/// A program of one element type, with what its operations share.
struct Recording {
    Program program;
    int type;
    std::vector<std::unique_ptr<GeometryPlan>> plans;
    // Scratch buffers, as wide as their widest user.
    int normed = -1, quantized = -1, qkv = -1, part = -1, projected = -1, adapted = -1, shrunk = -1;

    int scratch(int& index, int width, bool wide) {
        if (index < 0) index = program.add_buffer(width, wide);
        Buffer& b = program.buffer(index);
        b.width = std::max(b.width, width);
        b.stride = std::max(b.stride, size_t(round_up(width, 64)));
        return index;
    }
    /// The rows of `in` for a product with w, normed if there is a norm, and what the adapters of `lora` add to it.
    template <class E>
    InputRows<E> rows(const Linear& w, int in, const float* norm = nullptr, float eps = 0,
                      const void* lora_table = nullptr) {
        int made = -1;
        if (w.packed())
            made = scratch(quantized, QuantizedRow(w).floats(), true);
        else if (norm || (program.buffer(in).wide && sizeof(E) < sizeof(float)))
            made = scratch(normed, w.k, false);
        auto* lora = static_cast<const LoraTable*>(lora_table);
        if (lora == nullptr) return {w, {norm, eps}, in, made, nullptr, -1, -1};
        lower(program.limits.adapters, lora->places + 1);
        int rank = 0;
        for (int i = 0; i < lora->places; i++)
            if (const LoraDelta* delta = lora->of(i + 1)) rank = std::max(rank, delta->down->n);
        return {w, {norm, eps}, in, made, lora, scratch(adapted, w.k, false), scratch(shrunk, rank, false)};
    }
    template <class E>
    NormRows<E> norm(int in, int width, const float* weight, float eps) {
        return {in, scratch(normed, width, false), width, {weight, eps}};
    }
    /// What an operation exchanges, `rows` rows for each token; `starts` is of RankColumns, null for nothing.
    RankColumns columns(void* group, const int* starts, int rows = 1) {
        if (!group || !starts) return {};
        auto* with = static_cast<Group*>(group);
        RankColumns columns{with, {starts, starts + with->size + 1}};
        program.exchanging(with, rows * columns.stride(), 0);
        return columns;
    }
    AttentionPlan* plan(const AttentionShape& shape, int block_size) {
        const int group = shape.group(), kv_heads = shape.kv_heads, table = shape.table;
        for (auto& p : plans)
            if (p->group == group && p->kv_heads == kv_heads && p->block_size == block_size && p->table == table &&
                p->plan.causal == bool(shape.causal))
                return &p->plan;
        plans.push_back(std::make_unique<GeometryPlan>(GeometryPlan{group, kv_heads, block_size, table, {}}));
        plans.back()->plan.causal = shape.causal;
        return &plans.back()->plan;
    }
};

Recording& recording(void* program) { return *static_cast<Recording*>(program); }

/// Add the operation that make(E()) returns, E being the program's element type.
template <class F>
int add(void* program, F&& make) {
    return computed([&] {
        Recording& r = recording(program);
        r.program.add(Type(r.type) == Type::f32 ? make(float()) : make(bf16()));
    });
}

/// Note that an operation reads by the block tables of a group of layers.
void reads(void* program, const KvLayout& layout, int table) {
    Limits& limits = recording(program).program.limits;
    lower(limits.blocks, layout.blocks);
    limits.block_size = layout.block_size;
    limits.tables = std::max(limits.tables, table + 1);
}

/// The layout of a cache, which must be of an operation's heads.
const KvLayout& layout_of(const void* cache, int layer, const AttentionShape& shape) {
    const KvLayout& l = static_cast<const Cache*>(cache)->layout;
    check_indices("layer", &layer, 1, l.layers);
    if (shape.kv_heads != l.heads || shape.d != l.d || shape.latent != l.latent) throw OutOfBounds("the KV cache has heads of another model");
    return l;
}

}  // namespace

extern "C" {

void* fd_program_new(int type) {
    return guarded([&]() -> void* {
        auto* r = new Recording;
        r->type = type;
        return r;
    });
}
void fd_program_free(void* program) { delete static_cast<Recording*>(program); }

/// A buffer with a row for each token of a step, or for each row of its logits.
int fd_program_buffer(void* program, int width, int wide, int of_logits) {
    return recording(program).program.add_buffer(width, wide, 1, of_logits);
}
int fd_program_bind(void* program, int buffer, void* data, int rows, size_t stride) {
    return computed([&] { recording(program).program.bind(buffer, data, rows, stride); });
}

/// Run a step; -1 if the ranks came apart, -2 if they cannot exchange so many rows.
int fd_program_run(void* program, const Step* step, void* team) {
    return computed([&]() -> int {
        Recording& r = recording(program);
        Team& t = *static_cast<Team*>(team);
        r.program.check(*step);
        if (r.program.too_large(*step)) return -2;
        for (auto& p : r.plans) p->plan.build(step->of_table(p->table), p->block_size, p->group, p->kv_heads, t.size());
        r.program.run(*step, t, Type(r.type) == Type::f32 ? 4 : 2);
        return r.program.group && r.program.group->failed() ? -1 : 1;
    });
}

/// Switch timing of operations on or off, and forget what was measured.
void fd_program_time(void* program, int timed) {
    recording(program).program.timed = timed;
    for (auto& operation : recording(program).program.operations()) operation->seconds = 0;
}
int fd_program_length(void* program) { return int(recording(program).program.operations().size()); }
const char* fd_program_name(void* program, int i) { return recording(program).program.operations()[i]->name(); }
double fd_program_seconds(void* program, int i) { return recording(program).program.operations()[i]->seconds; }

/// The rows of the table are the columns of a linear.
int fd_add_embedding(void* program, const void* linear, float scale, int centred, int out) {
    const Linear& table = *static_cast<const Linear*>(linear);
    return add(program, [&](auto e) -> Operation* {
        lower(recording(program).program.limits.token_ids, table.n);
        return new Embedding<decltype(e)>(table, scale, centred, out);
    });
}

/// Likewise for positions.
int fd_add_positions(void* program, const void* linear, int out) {
    const Linear& table = *static_cast<const Linear*>(linear);
    return add(program, [&](auto e) -> Operation* {
        lower(recording(program).program.limits.positions, table.n);
        return new AddPositions<decltype(e)>(table, out);
    });
}

int fd_add_norm(void* program, int in, const float* norm, float eps, const float* bias, int width, int out) {
    return add(program, [&](auto) -> Operation* { return new StreamNorm(in, out, width, {norm, eps}, bias); });
}

int fd_add_activate(void* program, int in, int activation, int width, int out) {
    return add(program, [&](auto e) -> Operation* {
        return new Activate<decltype(e)>(in, Activation(activation), width, out);
    });
}

/// `activation` is one of Activation, which multiplies up in a gated linear; without one, those are two columns.
int fd_add_linear(void* program, int in, const float* norm, float eps, const void* linear, int activation,
                  const void* lora, int out) {
    return add(program, [&](auto e) -> Operation* {
        using E = decltype(e);
        const Linear& w = *static_cast<const Linear*>(linear);
        const InputRows<E> rows = recording(program).rows<E>(w, in, norm, eps, lora);
        if (w.gated && Activation(activation) != Activation::none)
            return new GatedLinear<E>(rows, Activation(activation), out);
        return new LinearOperation<E>(rows, Activation(activation), out);
    });
}

/// `cos` and `sin` have a row for each of `positions` positions.
int fd_add_attention_inputs(void* program, int in, const float* norm, float eps, const void* linear,
                            const AttentionShape* shape, const float* q_norm, float q_eps, const float* k_norm, float k_eps,
                            const float* cos, const float* sin, const float* q_cos, const float* q_sin, int positions,
                            const void* cache, int layer, const void* lora, int q) {
    return add(program, [&](auto e) -> Operation* {
        using E = decltype(e);
        const Linear& w = *static_cast<const Linear*>(linear);
        Recording& r = recording(program);
        const KvLayout& layout = layout_of(cache, layer, *shape);
        lower(r.program.limits.positions, positions);
        lower(r.program.limits.kv_slots, layout.slots());
        r.program.limits.tables = std::max(r.program.limits.tables, shape->table + 1);
        return new AttentionInputs<E>(r.rows<E>(w, in, norm, eps, lora), *shape, {q_norm, q_eps}, {k_norm, k_eps}, {cos, sin},
                                      {q_cos, q_sin}, KvLayer<E>(layout, layer), r.scratch(r.qkv, w.n, true), q);
    });
}

int fd_add_attention(void* program, const AttentionShape* shape, const void* cache, int layer, int q, int out) {
    return add(program, [&](auto e) -> Operation* {
        const KvLayout& layout = layout_of(cache, layer, *shape);
        reads(program, layout, shape->table);
        AttentionShape of = *shape;
        // Heads that share latent vectors are divided among units, as those of several KV heads are.
        while (of.latent && (of.heads % of.kv_heads || of.group() > kTileRows)) of.kv_heads++;
        AttentionPlan* plan = recording(program).plan(of, layout.block_size);
        return new Attention<decltype(e)>(of, layout, layer, q, out, plan);
    });
}

/// `weights` are the matrices of `heads` heads.
int fd_add_heads(void* program, int in, const void* const* weights, int heads, int kept, int out) {
    return add(program, [&](auto e) -> Operation* {
        using E = decltype(e);
        Recording& r = recording(program);
        std::vector<const Linear*> of;
        for (int h = 0; h < heads; h++) of.push_back(static_cast<const Linear*>(weights[h]));
        const int rows = r.scratch(r.normed, heads * HeadProducts<E>::padded(*of[0]), false);
        return new HeadProducts<E>(std::move(of), kept, in, rows, out);
    });
}

int fd_add_write_latent(void* program, int in, int first, const float* norm, float eps, const AttentionShape* shape,
                        const float* cos, const float* sin, int positions, const void* cache, int layer, int q) {
    return add(program, [&](auto e) -> Operation* {
        using E = decltype(e);
        Limits& limits = recording(program).program.limits;
        const KvLayout& layout = layout_of(cache, layer, *shape);
        lower(limits.positions, positions);
        lower(limits.kv_slots, layout.slots());
        limits.tables = std::max(limits.tables, shape->table + 1);
        return new WriteLatent<E>(*shape, {norm, eps}, {cos, sin}, KvLayer<E>(layout, layer), in, first, q);
    });
}

int fd_add_recur(void* program, const RecurrentShape* shape, const void* cache, int layer, int in, int out) {
    return add(program, [&](auto e) -> Operation* {
        const KvLayout& layout = static_cast<const Cache*>(cache)->layout;
        check_indices("layer", &layer, 1, layout.layers);
        reads(program, layout, shape->table);
        return new Recur<decltype(e)>(*shape, layout, layer, in, out);
    });
}

int fd_add_gate_heads(void* program, int in, int gate, int width, int out) {
    return add(program, [&](auto e) -> Operation* { return new GateHeads<decltype(e)>(in, gate, width, out); });
}

/// How many operations of a program exchange rows with other ranks.
int fd_program_exchanges(void* program) { return recording(program).program.exchanges; }

/// Of several ranks, `starts` are the first columns of the rows that each holds, and the width of all; here and below.
int fd_add_gather(void* program, void* group, const int* starts, int in, int out) {
    return add(program, [&](auto e) -> Operation* {
        return new Gather<decltype(e)>(recording(program).columns(group, starts), in, out);
    });
}

int fd_add_project_residual(void* program, const void* linear, const float* post_norm, float eps, void* group,
                            const int* starts, int in, const void* lora, int residual) {
    return add(program, [&](auto e) -> Operation* {
        using E = decltype(e);
        const Linear& w = *static_cast<const Linear*>(linear);
        Recording& r = recording(program);
        RankColumns columns = r.columns(group, starts);
        const int part = columns ? r.scratch(r.part, w.n, true) : -1;
        const int projected = post_norm ? r.scratch(r.projected, columns ? columns.width() : w.n, true) : -1;
        return new ProjectResidual<E>(r.rows<E>(w, in, nullptr, 0, lora), std::move(columns), {post_norm, eps}, part,
                                      projected, residual);
    });
}

/// With a group, the linear is this rank's share, and `out` has to be bound to this rank's slot of the last exchange.
int fd_add_logits(void* program, int in, const float* norm, float eps, const void* linear, float softcap, void* group,
                  int out) {
    return add(program, [&](auto e) -> Operation* {
        using E = decltype(e);
        const Linear& w = *static_cast<const Linear*>(linear);
        Recording& r = recording(program);
        r.program.limits.logits = true;
        Group* with = r.program.exchanging(static_cast<Group*>(group), 0, r.program.buffer(out).stride);
        return new Logits<E>(r.rows<E>(w, in, norm, eps), with, softcap, out);
    });
}

struct MoeGeometry {
    int experts, top_k, normalize, sigmoid, weighs_inputs, groups, top_groups;
    float norm_floor, weight_scale;
};

int fd_add_moe_residual(void* program, int in, const float* norm, float eps, int width, const MoeGeometry* g,
                        const float* router, const float* router_bias, const float* bias, const float* shared_gate, const void* const* gate_up,
                        const void* const* down,
                        const void* shared_gate_up, const void* shared_down, int activation, void* group,
                        const int* hidden_starts, const int* shared_starts, const int* starts,
                        const int* expert_starts, int residual) {
    return add(program, [&](auto e) -> Operation* {
        using E = decltype(e);
        Recording& r = recording(program);
        ExpertWeights w{};
        w.router = router;
        w.router_bias = router_bias;
        w.bias = bias;
        w.shared_gate = shared_gate;
        for (int i = 0; i < g->experts; i++) {
            w.gate_up.push_back(static_cast<const Linear*>(gate_up[i]));
            w.down.push_back(static_cast<const Linear*>(down[i]));
        }
        w.shared_gate_up = static_cast<const Linear*>(shared_gate_up);
        w.shared_down = static_cast<const Linear*>(shared_down);
        w.top_k = g->top_k;
        w.normalize = g->normalize;
        w.sigmoid = g->sigmoid;
        w.weighs_inputs = g->weighs_inputs;
        w.groups = g->groups;
        w.top_groups = g->top_groups;
        w.norm_floor = g->norm_floor;
        w.weight_scale = g->weight_scale;
        ExpertColumns columns{r.columns(group, hidden_starts, g->top_k), r.columns(group, shared_starts),
                              r.columns(group, starts), {}};
        if (expert_starts) columns.experts.assign(expert_starts, expert_starts + columns.out.group->size + 1);
        return new MoeResidual<E>(r.program, r.norm<E>(in, width, norm, eps), std::move(w), Activation(activation),
                                  std::move(columns), residual);
    });
}

// Sampling ------------------------------------------------------------------------------------------------------------

int fd_sample(const SampleRows* rows, void* team) {
    return computed([&] { sample(*rows, *static_cast<Team*>(team)); });
}
int fd_penalize(const PenaltyRows* rows, void* team) {
    return computed([&] { penalize(*rows, *static_cast<Team*>(team)); });
}
int fd_mask_logits(const MaskRows* rows, void* team) {
    return computed([&] { mask_logits(*rows, *static_cast<Team*>(team)); });
}

}  // extern "C"
#pragma GCC visibility pop
