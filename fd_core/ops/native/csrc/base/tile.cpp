#include "base/tile.h"

#include <algorithm>
#include <array>

namespace fd {
namespace {

/// f(first element of B that is read, first step, steps) for each block.
template <class E, class A, class F>
[[gnu::always_inline]] inline void each_block(const TileCall<E, A>& call, F&& f) {
    for (int first = 0, block = 0; first < call.steps; first += call.block_steps, block++)
        f((const E*)(call.blocks[block] + call.first), first, std::min(call.block_steps, call.steps - first));
}

template <class E, class A, int R, int N, bool Apart>
[[gnu::flatten]] void vector_tile(const TileCall<E, A>& call) {
    using P = Product<E>;
    V acc[R * N];
    auto place = [c = call.c, stride = call.c_stride](int i) { return c + i / N * stride + i % N * kLanes; };
    if (call.accumulate)
        unroll<R * N>([&](int i) { acc[i] = vload(place(i)); });
    else
        unroll<R * N>([&](int i) { acc[i] = vset(0.0f); });

    const A* a = call.a;
    const char* ahead = call.ahead;
    const size_t a_stride = call.a_stride, b_step = call.b_step;
    const int ahead_lines = call.ahead_lines;
    int ahead_times = call.ahead_times;
    each_block(call, [&](const E* b, int, int steps) {
        constexpr int kFirst = (N + 1) / 2, kVector = kLanes * P::kStep;
        const E* second = Apart ? (const E*)(call.blocks[1] + call.first) - kFirst * kVector : b;
        for (int k = 0; k < steps; k++, a += P::kStep, b += b_step, second += b_step) {
            if (ahead_times-- > 0)
                for (int i = 0; i < ahead_lines; i++, ahead += kCacheLine) prefetch(ahead);
            multiply_step<E, A, R, N>(acc, a, a_stride,
                                      [&](int v) { return P::load((Apart && v >= kFirst ? second : b) + v * kVector); });
        }
    });
    unroll<R * N>([&](int i) { vstore(place(i), acc[i]); });
}

template <class E, class A, bool Apart, size_t... I>
constexpr auto kernel_table(std::index_sequence<I...>) {
    constexpr int N = TileShape<E>::kVecs;
    return std::array<void (*)(const TileCall<E, A>&), sizeof...(I)>{vector_tile<E, A, I / N + 1, I % N + 1, Apart>...};
}

template <class E, class A>
void dispatch(int rows, int vecs, const TileCall<E, A>& call) {
    constexpr int N = TileShape<E>::kVecs;
    using Kernels = std::make_index_sequence<TileShape<A>::kRows * N>;
    const int kernel = (rows - 1) * N + vecs - 1;
    if constexpr (std::is_same_v<E, A>) {
        static constexpr auto apart = kernel_table<E, A, true>(Kernels{});
        if (call.apart) return apart[kernel](call);
    }
    static constexpr auto table = kernel_table<E, A, false>(Kernels{});
    table[kernel](call);
}

#if defined(FD_AMX)

// R and N count 16-row and 16-column tiles: a block of up to 2 x 2 accumulators.
template <int R, int N, bool Passes>
void amx_tile(const TileCall<bf16>& call) {
    constexpr int kTile = amx::kTile, kTileK = 2 * amx::kDepth;
    const size_t c_bytes = call.c_stride * sizeof(float), a_bytes = call.a_stride * sizeof(bf16);
    const size_t b_bytes = call.b_step * sizeof(bf16);
    float* lower = call.c + kTile * call.c_stride;
    if (call.accumulate) {
        amx::load<0>(call.c, c_bytes);
        if constexpr (N > 1) amx::load<1>(call.c + kTile, c_bytes);
        if constexpr (R > 1) amx::load<2>(lower, c_bytes);
        if constexpr (R > 1 && N > 1) amx::load<3>(lower + kTile, c_bytes);
    } else {
        amx::zero<0>();
        amx::zero<1>();
        amx::zero<2>();
        amx::zero<3>();
    }
    const char* ahead = call.ahead;
    int ahead_times = call.ahead_times;
    each_block(call, [&](const bf16* b, int first, int steps) {
        for (int k = first; k < first + steps; k += kTileK / 2, b += kTileK / 2 * call.b_step) {
            const bf16* a = call.a + k * 2;
            if (ahead_times-- > 0)
                for (int i = 0; i < call.ahead_lines; i++, ahead += kCacheLine) prefetch(ahead);
            amx::load<4, Passes>(a, a_bytes);
            amx::load<6>(b, b_bytes);
            amx::multiply_add<0, 4, 6>();
            if constexpr (N > 1) {
                amx::load<7>(b + 2 * kTile, b_bytes);
                amx::multiply_add<1, 4, 7>();
            }
            if constexpr (R > 1) {
                amx::load<5, Passes>(a + kTile * call.a_stride, a_bytes);
                amx::multiply_add<2, 5, 6>();
                if constexpr (N > 1) amx::multiply_add<3, 5, 7>();
            }
        }
    });
    amx::store<0>(call.c, c_bytes);
    if constexpr (N > 1) amx::store<1>(call.c + kTile, c_bytes);
    if constexpr (R > 1) amx::store<2>(lower, c_bytes);
    if constexpr (R > 1 && N > 1) amx::store<3>(lower + kTile, c_bytes);
}

#endif

}  // namespace

template <>
void tile<float>(int rows, int vecs, const TileCall<float>& call) {
    dispatch(rows, vecs, call);
}

#if defined(FD_AMX)
template <>
void tile<bf16>(int rows, int vecs, const TileCall<bf16>& call) {
    static constexpr void (*table[2][2][2])(const TileCall<bf16>&) = {
        {{amx_tile<1, 1, false>, amx_tile<1, 2, false>}, {amx_tile<2, 1, false>, amx_tile<2, 2, false>}},
        {{amx_tile<1, 1, true>, amx_tile<1, 2, true>}, {amx_tile<2, 1, true>, amx_tile<2, 2, true>}}};
    table[call.a_passes][rows > 16][vecs - 1](call);
}
#else
template <>
void tile<bf16>(int rows, int vecs, const TileCall<bf16>& call) {
    dispatch(rows, vecs, call);
}
#if defined(FD_WIDE_ROWS)
template <>
void tile<bf16, float>(int rows, int vecs, const TileCall<bf16, float>& call) {
    dispatch(rows, vecs, call);
}
#endif
#endif

}  // namespace fd
