#include "linear/packed.h"

#include <array>
#include <utility>

namespace fd {
namespace {

/// Scales or minima of the panel's vectors. A multiple of a unit is exact.
void load_scales(const Linear& w, const uint8_t* p, const uint8_t* units, V (&to)[kWeightVecs]) {
    for (int v = 0; v < kWeightVecs; v++) {
        const int at = v * kLanes;
        to[v] = w.scales == Scales::f32   ? vload((const float*)p + at)
                : w.scales == Scales::f16 ? vload_half((const uint16_t*)p + at)
                                          : vload_half((const uint16_t*)units + at) * vload((const int8_t*)p + at);
    }
}

template <int Bits, int R>
void tile_of(const Linear& w, const PackedCall& call) {
    constexpr int N = kWeightVecs, S = kDotSteps<Bits>, kTogether = 4;  // steps, between which memory is fetched ahead
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
    const uint8_t *b = reinterpret_cast<const uint8_t*>(call.panel), *units_at = b;
    auto element = [&](const char* p, int r) { return reinterpret_cast<const float*>(p + r * call.stride); };

    for (int k = 0; k < w.padded_k;) {
        if (const size_t before = units_before(w, k)) {
            units_at = b;
            b += before;
        }
        const uint8_t* group = b;
        b += (w.minima ? 2 : 1) * scales_bytes(w);
        for (int u = 0; u < units; u++) {
            LinearDot<Bits> dot[R][N];
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
                for (int s = 0; s < kTogether; s += S) {
#pragma GCC unroll 2
                    for (int part = 0; part < kDotParts<Bits>; part++, a += S * kDotK) {
                        typename LinearDot<Bits>::Weights columns[N][S];
                        load_columns<Bits>(b, s, part, columns);
#pragma GCC unroll 8
                        for (int r = 0; r < R; r++) {
                            I x[S];
#pragma GCC unroll 2
                            for (int j = 0; j < S; j++) x[j] = ibroadcast(a + r * call.stride + j * kDotK);
#pragma GCC unroll 2
                            for (int v = 0; v < N; v++)
                                if constexpr (S == 1)
                                    dot[r][v].add(columns[v][0], x[0]);
                                else
                                    dot[r][v].add(columns[v], x);
                        }
                    }
                }
                b += kTogether * kStepBytes<Bits>;
            }
            V factor[N];
            if (!whole) load_scales(w, group, units_at, factor);
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
                load_scales(w, group + scales_bytes(w), units_at + kUnitsBytes, factor);
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
    if (whole) load_scales(w, reinterpret_cast<const uint8_t*>(call.panel), nullptr, factor);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < N; v++) vstore(call.c + (r * N + v) * kLanes, y[r][v] * factor[v]);
}

#if defined(FD_AMX)

/// The same by tiles, of which R have 16 rows each: the integers of a unit are summed from nothing and stored, and what
/// `tile_of` does with them follows, in its order.
template <int Bits, int R>
void amx_tile_of(const Linear& w, int rows, const PackedCall& call) {
    constexpr int N = kWeightVecs, T = amx::kTile, kStep = N * kLanes * kDotK;
    static_assert(kLanes == T, "a tile is as wide as a vector");
    alignas(64) int32_t sums[R * T][N * kLanes];
    alignas(64) uint8_t unpacked[kActivationK / kDotK * kStep];
    const QuantizedRow at(w);
    const int unit = unit_of(w), units = w.group / unit;
    const bool whole = w.group == w.padded_k && !w.minima;
    for (int i = 0; i < rows * N; i++) vstore(call.c + i * kLanes, vset(0.0f));

    const char* ahead = call.ahead;
    const uint8_t *b = reinterpret_cast<const uint8_t*>(call.panel), *units_at = b;
    for (int k = 0, index = 0; k < w.padded_k;) {
        if (const size_t before = units_before(w, k)) {
            units_at = b;
            b += before;
        }
        V factor[N], minimum[N];
        load_scales(w, b, units_at, factor);
        if (w.minima) load_scales(w, b + scales_bytes(w), units_at + kUnitsBytes, minimum);
        b += (w.minima ? 2 : 1) * scales_bytes(w);
        for (int u = 0; u < units; u++, index++, k += unit) {
            for (int i = 0; i < call.ahead_lines * unit / 16; i++, ahead += kCacheLine) prefetch(ahead);
            const uint8_t* columns = b;
            if (Bits != 8) {
                for (int s = 0; s < unit / kDotK; s++) {
                    I nibbles[N];
                    load_nibbles<Bits>(b, s, nibbles);
                    std::memcpy(unpacked + s * kStep, nibbles, kStep);
                }
                columns = unpacked;
                asm volatile("" ::: "memory");  // a compiler does not know that loads of tiles read memory
            }
            b += unit / kDotK * kStepBytes<Bits>;
            const char* a = call.rows + k;
            amx::zero<0>();
            amx::zero<1>();
            amx::load<4>(a, call.stride);
            amx::load<6>(columns, kStep);
            amx::load<7>(columns + kStep / N, kStep);
            amx::multiply_add_bytes<0, 4, 6>();
            amx::multiply_add_bytes<1, 4, 7>();
            if constexpr (R > 1) {
                amx::zero<2>();
                amx::zero<3>();
                amx::load<5>(a + T * call.stride, call.stride);
                amx::multiply_add_bytes<2, 5, 6>();
                amx::multiply_add_bytes<3, 5, 7>();
                amx::store<2>(sums[T], sizeof sums[0]);
                amx::store<3>(sums[T] + kLanes, sizeof sums[0]);
            }
            amx::store<0>(sums[0], sizeof sums[0]);
            amx::store<1>(sums[0] + kLanes, sizeof sums[0]);
            for (int r = 0; r < rows; r++) {
                const char* row = call.rows + r * call.stride;
                const float scale = reinterpret_cast<const float*>(row + at.scale)[k / kActivationK];
                const I start = iset(reinterpret_cast<const int32_t*>(row + at.start)[index]);
                const V x = vset(scale), sum = vset(reinterpret_cast<const float*>(row + at.sum)[index]);
                for (int v = 0; v < N; v++) {
                    float* c = call.c + (r * N + v) * kLanes;
                    const V total = to_float(iadd(iload(sums[r] + v * kLanes), start));
                    V y = vfma(total, whole ? x : factor[v] * x, vload(c));
                    if (w.minima) y = vfma(minimum[v], sum, y);
                    vstore(c, y);
                }
            }
        }
    }
    if (!whole) return;
    V factor[N];
    load_scales(w, reinterpret_cast<const uint8_t*>(call.panel), nullptr, factor);
    for (int i = 0; i < rows * N; i++) vstore(call.c + i * kLanes, vload(call.c + i * kLanes) * factor[i % N]);
}

void amx_tile(const Linear& w, int rows, const PackedCall& call) {
    const bool two = rows > amx::kTile;
    if (w.fp4)
        two ? amx_tile_of<kFp4Bits, 2>(w, rows, call) : amx_tile_of<kFp4Bits, 1>(w, rows, call);
    else if (w.type == Type::u4)
        two ? amx_tile_of<4, 2>(w, rows, call) : amx_tile_of<4, 1>(w, rows, call);
    else if (w.type == Type::u6)
        two ? amx_tile_of<6, 2>(w, rows, call) : amx_tile_of<6, 1>(w, rows, call);
    else
        two ? amx_tile_of<8, 2>(w, rows, call) : amx_tile_of<8, 1>(w, rows, call);
}

#endif

template <int Bits, size_t... I>
void dispatch(std::index_sequence<I...>, const Linear& w, int rows, const PackedCall& call) {
    static constexpr std::array<void (*)(const Linear&, const PackedCall&), sizeof...(I)> table{tile_of<Bits, I + 1>...};
    table[rows - 1](w, call);
}

}  // namespace

void packed_tile(const Linear& w, int rows, const PackedCall& call) {
#if defined(FD_AMX)
    if (in_tiles(w, rows)) return amx_tile(w, rows, call);
#endif
    if (w.fp4)
        dispatch<kFp4Bits>(std::make_index_sequence<kDotRows<4>>{}, w, rows, call);
    else if (w.type == Type::u4)
        dispatch<4>(std::make_index_sequence<kDotRows<4>>{}, w, rows, call);
    else if (w.type == Type::u6)
        dispatch<6>(std::make_index_sequence<kDotRows<6>>{}, w, rows, call);
    else
        dispatch<8>(std::make_index_sequence<kDotRows<8>>{}, w, rows, call);
}

}  // namespace fd
