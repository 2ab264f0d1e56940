// Products of attention over an int8 cache: whole numbers, exact and the same on every instruction set.
//
// Queries, and the weights of a chunk, are rounded to kLevels steps of their row's largest magnitude, which is finer than
// bf16, and kept as two bytes: 128 * high + low. The cache's bytes are the operand without a sign, 128 too large, which the
// start of each sum makes good.
#pragma once

#include "base/dot.h"
#include "attention/kv.h"

namespace fd {

constexpr float kLevels = 127 * 128;

/// A row of two bytes for each element: `bytes` are the high ones and, `half` bytes behind, the low ones.
struct SplitRow {
    float scale;
    float start;  // of a sum over its elements; not finite if the row is not
};

/// Round a row; its elements from `count`, a multiple of kLanes, to `half` stay as they are.
inline SplitRow split_row(const float* x, int count, size_t half, int8_t* bytes) {
    V largest = vset(0.0f), sum = largest;
    for (int i = 0; i < count; i += kLanes) {
        const V v = vload(x + i);
        largest = vmax(largest, vmax(v, vset(0.0f) - v));
    }
    const float most = vmaximum(largest);
    const V inverse = vset(most > 1e-30f ? kLevels / most : 0.0f);  // finite
    for (int i = 0; i < count; i += kLanes) {
        const V whole = vround(vload(x + i) * inverse), high = vround(whole * vset(1.0f / 128));
        sum = sum + whole;
        store_rounded(bytes + i, high);
        store_rounded(bytes + half + i, vfma(high, vset(-128.0f), whole));
    }
    return {most / kLevels, -128 * vsum(sum)};
}

/// c = a * b, where b goes on over several blocks of keys or values of one head.
struct SplitCall {
    const int8_t* a;  // the first row's bytes
    size_t half;      // bytes from high to low, and from low to the next row
    const SplitRow* rows;
    const char* const* blocks;
    size_t first;   // bytes from a block to its first vector
    size_t b_step;  // bytes from one step of kDotK elements to the next
    int a_block;    // bytes of a row for each block
    int block_steps, steps;  // of each block, and of all: the last block may have fewer
    float* c;
    size_t c_stride;
    static constexpr int kAheadSteps = 1;
    const char* ahead = nullptr;  // as in TileCall
    int ahead_lines = 0, ahead_times = 0;
};

// Sums of 32 bits run through; others have to be taken out before they saturate.
constexpr bool kSumsLast = sizeof(Dot<8>) == sizeof(I);
constexpr int kSplitVecs = kWeightVecs, kSplitRows = kSumsLast && kLanes == 16 ? 6 : 1;

template <int R, int N>
[[gnu::flatten]] void split_tile(const SplitCall& call) {
    constexpr int kHalves = 2 * R, kMost = kActivationK / kDotK;
    Dot<8> sum[kHalves * N];
    V total[kHalves * N];
    unroll<kHalves * N>([&](int i) {
        sum[i].begin(0);
        total[i] = vset(0.0f);
    });
    auto take = [&] {
        unroll<kHalves * N>([&](int i) {
            total[i] = total[i] + to_float(sum[i].total(0));
            sum[i].begin(0);
        });
    };
    const size_t half = call.half, b_step = call.b_step;
    const char* ahead = call.ahead;
    const int ahead_lines = call.ahead_lines;
    int ahead_times = call.ahead_times;
    for (int first = 0, block = 0; first < call.steps; first += call.block_steps, block++) {
        const char* b = call.blocks[block] + call.first;
        const int8_t* a = call.a + block * call.a_block;
        const int steps = call.steps - first < call.block_steps ? call.steps - first : call.block_steps;
        for (int k = 0; k < steps; k++, a += kDotK, b += b_step) {
            if (ahead_times-- > 0)
                for (int i = 0; i < ahead_lines; i++, ahead += kCacheLine) prefetch(ahead);
            if (!kSumsLast && k % kMost == 0) take();
            typename Dot<8>::Weights columns[N];
            unroll<N>([&](int v) { columns[v] = Dot<8>::prepare(pinned(iflip(iload(b + v * sizeof(I))))); });
            unroll<kHalves>([&](int r) {
                const I x = ibroadcast(a + r * half);
                unroll<N>([&](int v) { sum[r * N + v].add(columns[v], x); });
            });
        }
    }
    take();
    unroll<R * N>([&](int i) {
        const int r = i / N, v = i % N;
        const SplitRow& row = call.rows[r];
        const V low = total[(2 * r + 1) * N + v] + vset(row.start);
        vstore(call.c + r * call.c_stride + v * kLanes, vfma(total[2 * r * N + v], vset(128.0f), low) * vset(row.scale));
    });
}

/// Compute one block of c; 1 <= rows <= kSplitRows, 1 <= vecs <= kSplitVecs.
template <int... I>
void split_product(int rows, int vecs, const SplitCall& call, std::integer_sequence<int, I...>) {
    static constexpr void (*table[])(const SplitCall&) = {split_tile<I / kSplitVecs + 1, I % kSplitVecs + 1>...};
    table[(rows - 1) * kSplitVecs + vecs - 1](call);
}
inline void split_product(int rows, int vecs, const SplitCall& call) {
    split_product(rows, vecs, call, std::make_integer_sequence<int, kSplitRows * kSplitVecs>{});
}

}  // namespace fd
