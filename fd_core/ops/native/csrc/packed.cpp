#include "packed.h"

#include <array>
#include <utility>

namespace fd {
namespace {

/// Scales or minima of the panel's vectors.
void load_scales(const Linear& w, const uint8_t* p, V (&to)[kWeightVecs]) {
    for (int v = 0; v < kWeightVecs; v++)
        to[v] = w.half ? vload_half((const uint16_t*)p + v * kLanes) : vload((const float*)p + v * kLanes);
}

template <int Bits, int R>
void tile_of(const Linear& w, const PackedCall& call) {
    constexpr int N = kWeightVecs, kTogether = 4;  // steps, between which memory is fetched ahead
    const QuantizedRow at(w);
    const int unit = unit_of(w), units = w.group / unit, rounds = unit / (kDotK * kTogether);
    const bool whole = w.group == w.padded_k && !w.minima;  // one scale for a column: it can wait until the end
    V y[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < N; v++) y[r][v] = vset(0.0f);

    const char* ahead = call.ahead;
    const char* a = call.rows;
    const char* starts = call.rows + at.start;
    const char* scales = call.rows + at.scale;
    const char* sums = call.rows + at.sum;
    const uint8_t* b = reinterpret_cast<const uint8_t*>(call.panel);
    auto element = [&](const char* p, int r) { return reinterpret_cast<const float*>(p + r * call.stride); };

    for (int k = 0; k < w.padded_k;) {
        const uint8_t* group = b;
        b += (w.minima ? 2 : 1) * scales_bytes(w);
        for (int u = 0; u < units; u++) {
            Dot<Bits> dot[R][N];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                int start;
                std::memcpy(&start, starts + r * call.stride, 4);
#pragma GCC unroll 2
                for (int v = 0; v < N; v++) dot[r][v].begin(start);
            }
            for (int i = 0; i < rounds; i++) {
                for (int j = 0; j < call.ahead_lines; j++, ahead += kCacheLine) prefetch(ahead);
#pragma GCC unroll 4
                for (int s = 0; s < kTogether; s++, b += kStepBytes<Bits>, a += kDotK) {
                    typename Dot<Bits>::Weights columns[N];
                    load_columns<Bits>(b, columns);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        const I x = ibroadcast(a + r * call.stride);
#pragma GCC unroll 2
                        for (int v = 0; v < N; v++) dot[r][v].add(columns[v], x);
                    }
                }
            }
            V factor[N];
            if (!whole) load_scales(w, group, factor);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                int start;
                std::memcpy(&start, starts + r * call.stride, 4);
                const V x = vset(*element(scales, r));
#pragma GCC unroll 2
                for (int v = 0; v < N; v++)
                    y[r][v] = vfma(to_float(dot[r][v].total(start)), whole ? x : factor[v] * x, y[r][v]);
            }
            if (w.minima) {
                load_scales(w, group + scales_bytes(w), factor);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const V x = vset(*element(sums, r));
#pragma GCC unroll 2
                    for (int v = 0; v < N; v++) y[r][v] = vfma(factor[v], x, y[r][v]);
                }
            }
            k += unit;
            starts += sizeof(int32_t);
            sums += sizeof(float);
            if (k % kActivationK == 0) scales += sizeof(float);
        }
    }
    V factor[N] = {vset(1.0f), vset(1.0f)};
    if (whole) load_scales(w, reinterpret_cast<const uint8_t*>(call.panel), factor);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < N; v++) vstore(call.c + (r * N + v) * kLanes, y[r][v] * factor[v]);
}

template <int Bits, size_t... I>
void dispatch(std::index_sequence<I...>, const Linear& w, int rows, const PackedCall& call) {
    static constexpr std::array<void (*)(const Linear&, const PackedCall&), sizeof...(I)> table{tile_of<Bits, I + 1>...};
    table[rows - 1](w, call);
}

}  // namespace

int packed_tile_rows(const Linear& w) { return w.type == Type::u4 ? kDotRows<4> : kDotRows<8>; }

void packed_tile(const Linear& w, int rows, const PackedCall& call) {
    if (w.type == Type::u4)
        dispatch<4>(std::make_index_sequence<kDotRows<4>>{}, w, rows, call);
    else
        dispatch<8>(std::make_index_sequence<kDotRows<8>>{}, w, rows, call);
}

}  // namespace fd
