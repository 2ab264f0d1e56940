// Vectors of float32 and the one multiply-add that every product is built from.
//
// The rest of the sources is written over this file: `V` holds kLanes floats, `Product<E>` multiplies vectors of
// elements of type E (float or bf16) into a `V`. One of three instruction sets is chosen by the compiler's flags.
//
// Numbers that are not finite or below 2^-126 mean the same on each of them, in a vector and in its scalar tail:
// - vmax and vmin return the second operand where one is NaN; `vmaximum` of a vector with a NaN is any of its lanes.
// - vexp2, vexp and vtanh of NaN are NaN. vexp2 underflows gradually to 0 and overflows to infinity.
// - Rounding is to nearest, ties to even. float32 keeps denormals; DefaultFloats of threads.h sets the processor so.
// - bf16 keeps denormals, and of a NaN the sign and the upper bits. The bf16 product instructions of AVX-512 and AMX
//   read denormals as 0, which no setting changes: a difference below 2^-126 times a weight.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if (defined(__AMX_BF16__) && defined(__AMX_INT8__)) || defined(FD_AMX_EMULATED)
#define FD_AMX 1  // here and not in amx.h, so that no file can choose other code for not including that one
#endif
#if defined(FD_AMX_EMULATED) && !defined(__AVX512F__)
#undef __AVX2__  // tiles are as wide as vectors of 16 lanes: without AVX-512, those of plain C++
#endif
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace fd {

struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t u = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

/// Round to nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {uint16_t((u >> 16) | 0x40)};
    return {uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16)};
}
inline void put(float* p, float f) { *p = f; }
inline void put(bf16* p, float f) { *p = to_bf16(f); }

/// float16, exactly.
inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(fraction) * 0x1p-24f;
    const uint32_t quiet = exponent == 31 && fraction ? 0x400000u : 0;  // as the instruction converts a NaN
    uint32_t u = sign | (exponent == 31 ? 0x7f800000u | quiet : (exponent + 112) << 23) | fraction << 13;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

// V: kLanes float32 --------------------------------------------------------------------------------------------------
// GCC and Clang give these vector types + - * / of their own.

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using V = __m512;
inline V vset(float x) { return _mm512_set1_ps(x); }
inline V vload(const float* p) { return _mm512_loadu_ps(p); }
inline V vload(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline V vload(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline V vload_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void vstore(float* p, V x) { _mm512_storeu_ps(p, x); }
inline V vfma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V vmax(V a, V b) { return _mm512_max_ps(a, b); }
inline V vmin(V a, V b) { return _mm512_min_ps(a, b); }
inline V vround(V x) { return _mm512_roundscale_ps(x, 0); }
/// x * 2^n, rounded once. Others multiply by two factors, since 2^n itself may be beyond the range of float32: the first
/// product is exact.
inline V vscale2(V x, V n) { return _mm512_scalef_ps(x, n); }
inline float vsum(V x) { return _mm512_reduce_add_ps(x); }
inline float vmaximum(V x) { return _mm512_reduce_max_ps(x); }
/// Lanes [low, high) of x, `other` elsewhere.
inline V vkeep(V x, int low, int high, V other) {
    __mmask16 below_high = high >= kLanes ? 0xffff : (1u << (high < 0 ? 0 : high)) - 1;
    __mmask16 below_low = low >= kLanes ? 0xffff : (1u << (low < 0 ? 0 : low)) - 1;
    return _mm512_mask_blend_ps(below_high & ~below_low, other, x);
}
inline __m256i round_to_bf16(V x) {
    __m512i u = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
inline void vstore(bf16* p, V x) {
#if defined(__AVX512BF16__)
    constexpr int kDenormal = 0x20;  // which the instruction would round to 0
    if (__builtin_expect(_mm512_fpclass_ps_mask(x, kDenormal) == 0, 1)) {
        _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
        return;
    }
#endif
    _mm256_storeu_si256((__m256i*)p, round_to_bf16(x));
}

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int kLanes = 8;
using V = __m256;
inline V vset(float x) { return _mm256_set1_ps(x); }
inline V vload(const float* p) { return _mm256_loadu_ps(p); }
inline V vload(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline V vload(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
inline V vload_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void vstore(float* p, V x) { _mm256_storeu_ps(p, x); }
inline V vfma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V vmax(V a, V b) { return _mm256_max_ps(a, b); }
inline V vmin(V a, V b) { return _mm256_min_ps(a, b); }
inline V vround(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V vscale2(V x, V n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), one = _mm256_set1_epi32(127);
    const __m256i rest = _mm256_sub_epi32(whole, half);
    auto power = [&](__m256i e) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, one), 23)); };
    return x * power(half) * power(rest);
}
inline V vkeep(V x, int low, int high, V other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), lane),
                                         _mm256_cmpgt_epi32(_mm256_set1_epi32(high), lane));
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(inside));
}
inline void vstore(bf16* p, V x) {
    __m256i u = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}

#else

#if defined(FD_AMX_EMULATED)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float V __attribute__((vector_size(4 * kLanes)));
inline V vset(float x) { return x - V{}; }
inline V vload(const float* p) {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline V vload(const bf16* p) {
    V x;
    for (int i = 0; i < kLanes; i++) x[i] = to_float(p[i]);
    return x;
}
inline V vload(const int8_t* p) {
    V x;
    for (int i = 0; i < kLanes; i++) x[i] = float(p[i]);
    return x;
}
inline V vload_half(const uint16_t* p) {
    V x;
    for (int i = 0; i < kLanes; i++) x[i] = half_to_float(p[i]);
    return x;
}
inline void vstore(float* p, V x) { std::memcpy(p, &x, sizeof x); }
inline void vstore(bf16* p, V x) {
    for (int i = 0; i < kLanes; i++) p[i] = to_bf16(x[i]);
}
inline V vfma(V a, V b, V c) { return a * b + c; }
inline V vmax(V a, V b) { return a > b ? a : b; }
inline V vmin(V a, V b) { return a < b ? a : b; }
inline V vround(V x) {
    for (int i = 0; i < kLanes; i++) x[i] = std::nearbyint(x[i]);
    return x;
}
inline V vscale2(V x, V n) {
    typedef int32_t Whole __attribute__((vector_size(4 * kLanes)));
    const Whole whole = __builtin_convertvector(n, Whole), half = whole >> 1;
    auto power = [](Whole e) { return (V)((e + 127) << 23); };
    return x * power(half) * power(whole - half);
}
inline V vkeep(V x, int low, int high, V other) {
    for (int i = 0; i < kLanes; i++)
        if (i < low || i >= high) x[i] = other[i];
    return x;
}

#endif

/// Store numbers that are multiplied next: of those below 2^-126 the instructions read 0 in any case.
inline void vstore_flushed(float* p, V x) { vstore(p, x); }
inline void vstore_flushed(bf16* p, V x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
    vstore(p, x);
#endif
}

#if !defined(__AVX512F__)
inline float vsum(V x) {
    float lane[kLanes], sum = 0;
    vstore(lane, x);
    for (float v : lane) sum += v;
    return sum;
}
inline float vmaximum(V x) {
    float lane[kLanes];
    vstore(lane, x);
    float best = lane[0];
    for (float v : lane) best = v > best ? v : best;
    return best;
}
#endif

/// 2^x within 3e-7 of its value, or of the least denormal; NaN of NaN.
inline V vexp2(V x) {
#if !defined(__AVX512F__)  // which scales by any power of two in one instruction
    x = vmin(vset(129.0f), vmax(vset(-151.0f), x));  // in this order, which keeps NaN
#endif
    V n = vround(x), f = x - n;
    // Interpolation of 2^f at Chebyshev's points of [-1/2, 1/2].
    V p = vset(1.339086336e-3f);
    p = vfma(p, f, vset(9.676031918e-3f));
    p = vfma(p, f, vset(5.550357114e-2f));
    p = vfma(p, f, vset(2.402210749e-1f));
    p = vfma(p, f, vset(6.93147188e-1f));
    p = vfma(p, f, vset(1.000000075f));
    return vscale2(p, n);
}

constexpr float kLog2e = 1.4426950408889634f;
inline V vexp(V x) { return vexp2(x * vset(kLog2e)); }
inline V vtanh(V x) { return vset(1.0f) - vset(2.0f) / (vset(1.0f) + vexp2(x * vset(2 * kLog2e))); }

/// 2^x for one number, by the same arithmetic as the vectors so that a result never depends on where it was computed.
inline float exp2_of(float x) {
    float lane[kLanes];
    vstore(lane, vexp2(vset(x)));
    return lane[0];
}

/// Fetch a line into the second-level cache: a core can wait for twice as many lines on their way there as to the first. On
/// Zen 5, which alone has both of these instructions, the first level is the better one.
inline void prefetch(const void* p) {
#if defined(__AVX512VP2INTERSECT__) && defined(__AVX512BF16__)
    __builtin_prefetch(p, 0, 3);
#else
    __builtin_prefetch(p, 0, 2);
#endif
}

/// f(0) to f(N - 1), unrolled before the rest is optimized, so that arrays which f indexes become registers. The function
/// that calls it has to be [[gnu::flatten]].
template <class F, int... I>
inline void unroll(std::integer_sequence<int, I...>, F&& f) {
    (f(I), ...);
}
template <int N, class F>
inline void unroll(F&& f) {
    unroll(std::make_integer_sequence<int, N>{}, f);
}

/// Keep in a register what was loaded; gcc 12 would load it again for each use.
template <class T>
inline T pinned(T x) {
#if defined(__AVX2__) || defined(__AVX512F__)
    asm("" : "+v"(x));
#endif
    return x;
}

// Product<E>: acc += a * b over kLanes columns and kStep consecutive k ------------------------------------------------
// Operands hold, for each lane, kStep consecutive elements along k: one float, or a pair of bf16 in one 32-bit word.

template <class E>
struct Product;

template <>
struct Product<float> {
    static constexpr int kStep = 1;
    using Operand = V;
    static Operand load(const float* p) { return vload(p); }
    static Operand broadcast(const float* p) { return vset(*p); }
    static V multiply_add(V acc, Operand a, Operand b) { return vfma(a, b, acc); }
};

template <>
struct Product<bf16> {
    static constexpr int kStep = 2;
#if defined(__AVX512F__)
    using Operand = __m512i;
    static Operand load(const bf16* p) { return _mm512_loadu_si512(p); }
    static Operand broadcast(const bf16* p) {
        int pair;
        std::memcpy(&pair, p, 4);
        return _mm512_set1_epi32(pair);
    }
#if defined(__AVX512BF16__)
    static V multiply_add(V acc, Operand a, Operand b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
#else
    static V low(Operand x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
    static V high(Operand x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(0xffff0000))); }
    static V multiply_add(V acc, Operand a, Operand b) { return vfma(high(a), high(b), vfma(low(a), low(b), acc)); }
#endif
#elif defined(__AVX2__) && defined(__FMA__)
    using Operand = __m256i;
    static Operand load(const bf16* p) { return _mm256_loadu_si256((const __m256i*)p); }
    static Operand broadcast(const bf16* p) {
        int pair;
        std::memcpy(&pair, p, 4);
        return _mm256_set1_epi32(pair);
    }
    static V low(Operand x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
    static V high(Operand x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff0000))); }
    static V multiply_add(V acc, Operand a, Operand b) { return vfma(high(a), high(b), vfma(low(a), low(b), acc)); }
#else
    typedef uint32_t Operand __attribute__((vector_size(4 * kLanes)));
    static Operand load(const bf16* p) {
        Operand x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    static Operand broadcast(const bf16* p) {
        uint32_t u;
        std::memcpy(&u, p, 4);
        return Operand{} + u;
    }
    static V low(Operand x) { return (V)(x << 16); }
    static V high(Operand x) { return (V)(x & 0xffff0000u); }
    static V multiply_add(V acc, Operand a, Operand b) { return vfma(high(a), high(b), vfma(low(a), low(b), acc)); }
#endif
};

}  // namespace fd
