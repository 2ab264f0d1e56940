// The one micro-kernel: C[rows, vecs * kLanes] (+)= A[rows, k] * B[k, vecs * kLanes].
//
// Linear layers, scores (queries times keys) and their sums (probabilities times values) all run through it, so weights
// and KV blocks are stored in the order that it reads: for each k step, the columns side by side, and inside a column
// kStep consecutive k. Each element of C is summed over k in order by one accumulator, whatever `rows` and `vecs` are:
// a row's result does not depend on which rows it is computed with.
#pragma once

#include <type_traits>

#include "base/amx.h"
#include "base/simd.h"

namespace fd {

/// Largest block that one call computes, how many k its operands are padded to, and what stays in a core's caches while a
/// product runs: rows of A in the second level, and part of a panel of B in the first (0: it is read from the second).
/// From kRowsApart rows a thread on, reading all weights costs less than rows that other threads have written. Memory is
/// fetched ahead from kAheadRows rows on, every kAheadSteps k steps: for fewer, the processor's own prefetching is faster.
template <class E>
struct TileShape;

struct VectorTiles {
    static constexpr int kRowSlack = 0, kPartBytes = 0, kGroupBytes = 384 << 10, kRowsApart = 1 << 20;
    static constexpr int kAheadRows = 1, kAheadSteps = 1;
};

#if defined(__AVX512F__)
// 6 x 4 accumulators leave room for 4 vectors of B and one of A in 32 registers.
template <>
struct TileShape<float> : VectorTiles {
    static constexpr int kRows = 6, kVecs = 4, kAlign = 1;
};
#elif defined(__AVX2__) && defined(__FMA__)
template <>
struct TileShape<float> : VectorTiles {
    static constexpr int kRows = 6, kVecs = 2, kAlign = 1;
};
#else
template <>
struct TileShape<float> : VectorTiles {
    static constexpr int kRows = 3, kVecs = 2, kAlign = 1;
};
#endif

#if defined(FD_AMX)
// Tiles are always whole: A must have kRowSlack readable rows after its last one.
template <>
struct TileShape<bf16> {
    static constexpr int kRows = 32, kVecs = 2, kAlign = 32, kRowSlack = 32, kPartBytes = 40 << 10, kGroupBytes = 1 << 20,
                         kRowsApart = 128, kAheadRows = 5, kAheadSteps = 16;
};
#elif defined(__AVX512BF16__)
template <>
struct TileShape<bf16> : VectorTiles {
    static constexpr int kRows = 6, kVecs = 4, kAlign = 2;
};
#elif defined(__AVX512F__)
// Both halves of the pairs are widened, so B takes twice the registers.
template <>
struct TileShape<bf16> : VectorTiles {
    static constexpr int kRows = 4, kVecs = 4, kAlign = 2;
};
#elif defined(__AVX2__) && defined(__FMA__)
template <>
struct TileShape<bf16> : VectorTiles {
    static constexpr int kRows = 4, kVecs = 2, kAlign = 2;
};
#else
template <>
struct TileShape<bf16> : VectorTiles {
    static constexpr int kRows = 2, kVecs = 2, kAlign = 2;
};
#endif

/// Type of the rows that linear layers multiply with weights of E: float where bf16 is widened to be multiplied, which is
/// done once for all columns then.
template <class E>
struct RowOf {
    using type = E;
};
#if (defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))) && !defined(__AVX512BF16__) && !defined(FD_AMX)
#define FD_WIDE_ROWS 1
template <>
struct RowOf<bf16> {
    using type = float;
};
#endif
template <class E>
using Row = typename RowOf<E>::type;

/// One k step of R rows times N vectors of columns: `columns(v)` is that of vector v.
template <class E, class A, int R, int N, class Columns>
inline void multiply_step(V (&acc)[R * N], const A* a, size_t a_stride, Columns&& columns) {
    using P = Product<E>;
    if constexpr (std::is_same_v<E, A>) {
        typename P::Operand kept[N];
        unroll<N>([&](int v) { kept[v] = pinned(columns(v)); });
        unroll<R>([&](int r) {
            const typename P::Operand x = P::broadcast(a + r * a_stride);
            unroll<N>([&](int v) { acc[r * N + v] = P::multiply_add(acc[r * N + v], x, kept[v]); });
        });
    } else {
        // One half of the pairs after the other: both take more registers than there are.
        auto multiply = [&](auto half, int i) {
            V kept[N];
            unroll<N>([&](int v) { kept[v] = pinned(half(columns(v))); });
            unroll<R>([&](int r) {
                const V x = vset(a[r * a_stride + i]);
                unroll<N>([&](int v) { acc[r * N + v] = pinned(vfma(x, kept[v], acc[r * N + v])); });
            });
        };
        multiply([](auto pairs) { return P::low(pairs); }, 0);
        multiply([](auto pairs) { return P::high(pairs); }, 1);
    }
}

template <class E, class A = E>
struct TileCall {
    static constexpr int kAheadSteps = TileShape<A>::kAheadSteps;
    const A* a;
    size_t a_stride;  // elements
    const char* const* blocks;  // of B, which goes on in the next one after `block_steps`
    size_t first;               // bytes from a block to its first vector
    size_t b_step;              // elements from one k step to the next
    int block_steps, steps;     // of each block, and of all, k / kStep: the last block may have fewer
    bool apart = false;         // the columns of B lie in two blocks: the first half, rounded up, and the others
    float* c;
    size_t c_stride;
    bool accumulate = false;
    const char* ahead = nullptr;  // memory that will be needed next, fetched while this is computed
    int ahead_lines = 0;          // cache lines of it at a time, every kAheadSteps k steps
    int ahead_times = 1 << 30;    // so often, from the first step on
    bool a_passes = false;        // A is read once and should leave B in the first-level cache
};

/// Compute one block; 1 <= rows <= kRows of A, 1 <= vecs <= kVecs. C has kRows rows where the shape has row slack.
template <class E, class A = E>
void tile(int rows, int vecs, const TileCall<E, A>& call);

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }
constexpr size_t kCacheLine = 64;

}  // namespace fd
