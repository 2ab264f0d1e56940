// Weights of a linear layer in the order that `tile` reads, and the product that runs over them.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "base/memory.h"
#include "base/threads.h"
#include "base/tile.h"

namespace fd {

enum class Type : int { f32 = 0, bf16 = 1, f16 = 2, u4 = 3, u8 = 4, u6 = 5 };
/// How scales and minima are stored: as they are, or as int8 multiples of float16 units that kUnitSpan values share.
enum class Scales : int { f32 = 0, f16 = 1, multiples = 2 };
constexpr int kUnitSpan = 256;

/// How weights of bf16 in 12 bits are to be read; see squeezed.h.
struct Squeezed {
    uint8_t upper[16];      // the table
    const int* starts;      // of each panel, and of one more: its first exception; null for weights that are stored whole
    const int* exceptions;  // their units in their panels
    const bf16* whole;      // [exceptions, kUnitValues]

    explicit operator bool() const { return starts != nullptr; }
};

/// [n, k] weights in panels of kVecs vectors of columns; a gated layer alternates vectors of gate and of up. Those of type
/// u4, u6 and u8 are packed as packed.h says.
struct Linear {
    int n;         // columns that the user sees: out, or the width of gate alone
    int k;         // as prepared
    int padded_k;  // k rounded up to what a tile reads, zero filled
    int vecs;      // vectors of columns stored
    bool gated;
    Type type;
    void* data;
    float* bias;  // [vecs * kLanes] in stored order, or null
    int group;    // of packed weights: values of a column that share a scale, a divisor of padded_k
    int offset;   // of packed weights: added to values, so that they have no sign
    bool minima;  // of packed weights
    Scales scales;  // of packed weights: of minima, too
    bool fp4;     // of type u4: values are codes of kFp4
    Squeezed squeezed;  // of type bf16

    bool packed() const { return type == Type::u4 || type == Type::u6 || type == Type::u8; }
};

/// Stored column of column `c` of part `part` (gate 0, up 1; always 0 where not gated).
inline int stored_column(const Linear& w, int part, int c) {
    if (!w.gated) return c;
    return (c / kLanes * 2 + part) * kLanes + c % kLanes;
}

/// Rows of block `i` of `blocks` that one tile computes. Whole tiles write rows beyond theirs, so they must come in
/// order and not overlap; others are cut evenly.
template <class E>
Range row_block(int rows, int i, int blocks) {
    constexpr int R = TileShape<E>::kRows;
    if (TileShape<E>::kRowSlack) return {i * R, std::min(rows, (i + 1) * R)};
    return share(rows, i, blocks);
}

/// Part of a product: rows from `row` times vectors of columns from `vec`; c has a row of `stride` floats for each.
struct Block {
    int row, rows, vec, vecs;
    float* c;
    int stride;
    float* at(int r, int v) const { return c + r * stride + v * kLanes; }
};

/// Memory that a thread reads when it is done with a product.
struct Following {
    const char* data;
    size_t bytes;
};

/// Cache lines fetched ahead for each k step: more would make the loads of the product itself wait.
constexpr int kMostAhead = 4;

template <class E>
struct Panel {
    const E* b;  // first vector asked for
    int vecs;    // vectors of the panel, which set the step along k
    int first;   // first vector of the panel
    size_t bytes;

    Panel(const Linear& w, int vec) {
        constexpr int N = TileShape<E>::kVecs;
        first = vec / N * N;
        vecs = std::min(N, w.vecs - first);
        bytes = size_t(vecs) * kLanes * w.padded_k * sizeof(E);
        b = static_cast<const E*>(w.data) + size_t(first) * kLanes * w.padded_k +
            size_t(vec - first) * kLanes * Product<E>::kStep;
    }
    size_t step() const { return size_t(vecs) * kLanes * Product<E>::kStep; }
};

/// Columns of a matmul for one thread, in vectors; a gate stays with its up.
inline Range column_share(const Linear& w, int thread, int threads) {
    const int unit = w.gated || w.packed() || w.squeezed ? 2 : 1;
    Range r = share(w.vecs / unit, thread, threads);
    return {r.begin * unit, r.end * unit};
}

/// Rows as they are multiplied, `stride` elements apart.
template <class E>
struct MultipliedRows {
    const Row<E>* data;
    size_t stride;
};

/// Those rows, in place or widened in this thread's memory.
template <class E>
MultipliedRows<E> multiplied(const E* x, size_t stride, int rows, int k) {
    if constexpr (std::is_same_v<E, Row<E>>) {
        return {x, stride};
    } else {
        thread_local std::vector<float> widened;
        const size_t width = round_up(k, kLanes);
        if (widened.size() < rows * width) widened.resize(rows * width);
        for (int r = 0; r < rows; r++)
            for (size_t i = 0; i < width; i += kLanes) vstore(widened.data() + r * width + i, vload(x + r * stride + i));
        return {widened.data(), width};
    }
}

/// y[rows, stored columns of vectors [vecs.begin, vecs.end)] = x * w, block by block; w is neither packed nor squeezed.
///
/// `epilogue(block)` takes each block when it is computed. Each panel is read once for a group of rows, and while it is
/// computed the next one is fetched: at a few rows the memory is the limit, at many the multipliers are. A panel of more than
/// kPartBytes is multiplied part by part, and a group's sums wait in between.
template <class E, class Epilogue>
void whole_matmul(const Linear& w, const E* x, size_t x_stride, int rows, Range vecs, Following after, Epilogue&& epilogue) {
    using A = Row<E>;
    using S = TileShape<A>;
    static_assert(S::kVecs == TileShape<E>::kVecs, "a panel is as wide as a tile");
    constexpr int kColumns = S::kVecs * kLanes, kStep = Product<E>::kStep;
    // The sums of one block or, between the parts of a panel, those of a group.
    constexpr size_t kRows = S::kRowSlack ? S::kRowSlack : S::kRows;
    constexpr size_t kGroupRows = S::kPartBytes ? S::kGroupBytes * kColumns / S::kPartBytes + 2 * kRows : kRows;
    alignas(64) float c[kGroupRows * kColumns];
    const int steps = w.padded_k / kStep;
    const int row_bytes = w.padded_k * int(sizeof(A));
    const int groups = int((size_t(rows) * row_bytes + S::kGroupBytes - 1) / S::kGroupBytes);

    for (int g = 0; g < groups; g++) {
        const Range group = share(rows, g, groups);
        const int blocks = ceil_div(group.end - group.begin, S::kRows);
        const auto a = multiplied(x + group.begin * x_stride, x_stride, group.end - group.begin, w.padded_k);
        for (int vec = vecs.begin; vec < vecs.end;) {
            const Panel<E> panel(w, vec);
            const int count = std::min(panel.first + panel.vecs, vecs.end) - vec;
            const int next = vec + count;
            const int parts = S::kPartBytes && blocks > 1 ? ceil_div(int(panel.bytes), S::kPartBytes) : 1;
            const int part_steps = round_up(ceil_div(steps, parts), std::max(1, S::kAlign / kStep));
            TileCall<E, A> call{};
            call.b_step = panel.step();
            call.a_stride = a.stride;
            call.c_stride = kColumns;
            call.a_passes = true;
            for (int step = 0; step < steps; step += part_steps) {
                const char* const b = reinterpret_cast<const char*>(panel.b + step * panel.step());
                call.blocks = &b;
                call.steps = call.block_steps = std::min(part_steps, steps - step);
                call.accumulate = step > 0;
                // What follows is the next part, the next panel, the first one again for the next rows, or another operation's.
                const bool last_part = step + call.steps == steps, last = last_part && next >= vecs.end;
                const Panel<E> another(w, !last_part ? vec : last ? vecs.begin : next);
                Following following{(const char*)(another.b + (last_part ? 0 : step + part_steps) * another.step()),
                                    another.bytes / parts};
                if (last && g + 1 == groups) following = after;
                const int times = ceil_div(call.steps, S::kAheadSteps), lines = int(following.bytes / kCacheLine);
                const char *ahead = following.data, *const ahead_end = ahead + following.bytes;
                const int most_ahead = rows < S::kAheadRows ? 0 : kMostAhead * S::kAheadSteps;
                const int ahead_lines = std::min(most_ahead, ceil_div(lines, times * blocks));
                for (int i = 0; i < blocks; i++) {
                    const Range r = row_block<A>(group.end - group.begin, i, blocks);
                    call.a = a.data + r.begin * a.stride + step * kStep;
                    call.c = parts > 1 ? c + r.begin * kColumns : c;
                    call.ahead = ahead;
                    call.ahead_lines = ahead < ahead_end ? ahead_lines : 0;
                    ahead += size_t(ahead_lines) * times * kCacheLine;
                    tile<E, A>(r.end - r.begin, count, call);
                    if (last_part) epilogue(Block{group.begin + r.begin, r.end - r.begin, vec, count, call.c, kColumns});
                }
            }
            vec = next;
        }
    }
}

}  // namespace fd
