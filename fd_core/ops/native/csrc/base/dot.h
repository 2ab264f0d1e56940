// Exact integer products of packed weights (bytes without a sign) and quantized activations (bytes with one).
//
// A vector of weights holds kLanes columns of 4 consecutive k each. `Dot` sums them over a group of at most 32 k, in the
// best way that the instruction set has; every way gives the same integers.
#pragma once

#include <type_traits>

#include "base/simd.h"

namespace fd {

constexpr int kDotK = 4;          // consecutive k in the 32 bits of a lane
constexpr int kActivationK = 32;  // consecutive k of a row of activations that share a scale
constexpr int kWeightVecs = 2;    // vectors of columns in a panel of packed weights

// I: kLanes int32, or four times as many bytes --------------------------------------------------------------------------

#if defined(__AVX512F__)

using I = __m512i;
inline I iload(const void* p) { return _mm512_loadu_si512(p); }
inline I iset(int x) { return _mm512_set1_epi32(x); }
inline I iand(I a, I b) { return _mm512_and_si512(a, b); }
inline I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
inline V to_float(I x) { return _mm512_cvtepi32_ps(x); }
inline I high_nibbles(I x) { return iand(_mm512_srli_epi16(x, 4), iset(0x0f0f0f0f)); }
template <int Left>
inline I ishift(I x) { return Left > 0 ? _mm512_slli_epi32(x, Left) : _mm512_srli_epi32(x, -Left); }
inline I lookup(__m128i table, I places) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), places); }

#elif defined(__AVX2__) && defined(__FMA__)

using I = __m256i;
inline I iload(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline I iset(int x) { return _mm256_set1_epi32(x); }
inline I iand(I a, I b) { return _mm256_and_si256(a, b); }
inline I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
inline V to_float(I x) { return _mm256_cvtepi32_ps(x); }
inline I high_nibbles(I x) { return iand(_mm256_srli_epi16(x, 4), iset(0x0f0f0f0f)); }
template <int Left>
inline I ishift(I x) { return Left > 0 ? _mm256_slli_epi32(x, Left) : _mm256_srli_epi32(x, -Left); }
inline I lookup(__m128i table, I places) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), places); }

#else

typedef int32_t I __attribute__((vector_size(4 * kLanes)));
inline I iload(const void* p) {
    I x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline I iset(int x) { return I{} + x; }
inline I iand(I a, I b) { return a & b; }
inline I iadd(I a, I b) { return a + b; }
inline V to_float(I x) { return __builtin_convertvector(x, V); }
inline I high_nibbles(I x) { return (x >> 4) & iset(0x0f0f0f0f); }
template <int Left>
inline I ishift(I x) { return Left > 0 ? x << (Left > 0 ? Left : 0) : x >> (Left > 0 ? 0 : -Left); }

#endif

/// Values of FP4 (e2m1) in halves, plus kFp4Offset, in order; a code is a place. The last is none.
constexpr int kFp4Offset = 12;
alignas(16) constexpr uint8_t kFp4[16] = {0, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 24, 24};
inline I fp4_values(I codes) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
    return lookup(_mm_load_si128((const __m128i*)kFp4), codes);
#else
    uint8_t bytes[sizeof(I)];
    std::memcpy(bytes, &codes, sizeof bytes);
    for (uint8_t& each : bytes) each = kFp4[each];
    return iload(bytes);
#endif
}

/// Bytes with a sign to bytes without one, 128 larger.
inline I iflip(I x) { return x ^ iset(int(0x80808080)); }
inline I low_nibbles(I x) { return iand(x, iset(0x0f0f0f0f)); }
/// 4 consecutive activations in every lane.
inline I ibroadcast(const void* p) {
    int x;
    std::memcpy(&x, p, 4);
    return iset(x);
}

// Quantizing activations: kActivationK values at a time -----------------------------------------------------------------

/// The largest magnitude, found by bits so that a NaN is the largest.
inline float largest_magnitude(const float* x) {
    int32_t most = 0;
#if defined(__AVX512F__)
    const I low = iand(iload(x), iset(0x7fffffff)), high = iand(iload(x + kLanes), iset(0x7fffffff));
    most = _mm512_reduce_max_epi32(_mm512_max_epi32(low, high));
#elif defined(__AVX2__) && defined(__FMA__)
    I m = iand(iload(x), iset(0x7fffffff));
    for (int i = kLanes; i < kActivationK; i += kLanes) m = _mm256_max_epi32(m, iand(iload(x + i), iset(0x7fffffff)));
    __m128i h = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    h = _mm_max_epi32(h, _mm_shuffle_epi32(h, 0x4e));
    most = _mm_cvtsi128_si32(_mm_max_epi32(h, _mm_shuffle_epi32(h, 0xb1)));
#else
    for (int i = 0; i < kActivationK; i++) {
        int32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
#endif
    float largest;
    std::memcpy(&largest, &most, 4);
    return largest;
}

/// Round kLanes numbers from -127 to 127, ties to even; a NaN becomes -128.
inline void store_rounded(int8_t* q, V x) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)q, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
#elif defined(__AVX2__) && defined(__FMA__)
    const __m256i i = _mm256_cvtps_epi32(x);
    const __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    _mm_storel_epi64((__m128i*)q, _mm_packs_epi16(h, h));
#else
    x = vround(x);
    for (int i = 0; i < kLanes; i++) q[i] = x[i] == x[i] ? int8_t(x[i]) : int8_t(-128);
#endif
}

/// Sums of 2 x 16 quantized values.
inline void sum_halves(const int8_t* q, int32_t (&half)[2]) {
#if defined(__AVX2__)
    // Sums of 8 bytes without a sign, each byte 128 too large. Loads are as wide as the stores before, so that they need
    // not wait for the cache.
    half[0] = half[1] = 0;
    for (int i = 0; i < kActivationK; i += kLanes) {
        const __m128i* p = (const __m128i*)(q + i);
        const __m128i bytes = kLanes == 16 ? _mm_loadu_si128(p) : _mm_loadl_epi64(p);
        const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
        half[i / 16] += _mm_cvtsi128_si32(sums) - 8 * 128;
        if (kLanes == 16) half[i / 16] += _mm_extract_epi16(sums, 4) - 8 * 128;
    }
#else
    half[0] = half[1] = 0;
    for (int i = 0; i < kActivationK; i++) half[i / 16] += q[i];
#endif
}

// Dot<Bits>: sums of products for kLanes columns ------------------------------------------------------------------------
// `begin(start)` and `total(start)` take the same number, which is part of the sum. Bits are 4, 6, 8 or those of kFp4Bits.

constexpr int kFp4Bits = 5;  // what the largest value of kFp4 has; its codes have 4

#if (defined(__AVX512F__) && defined(__AVX512VNNI__)) || (!defined(__AVX512F__) && defined(__AVXVNNI__))

template <int Bits>
struct Dot {
    using Weights = I;
    static Weights prepare(I bytes) { return bytes; }
    I sum;
    void begin(int start) { sum = iset(start); }
    void add(Weights w, I x) {
#if defined(__AVX512F__)
        // Not the intrinsic, around which gcc 12 copies and spills the sums.
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
#else
        sum = _mm256_dpbusd_avx_epi32(sum, w, x);
#endif
    }
    I total(int) const { return sum; }
};
/// Rows that a tile computes at once.
template <int Bits>
constexpr int kDotRows = kLanes == 16 ? 6 : 3;
template <int Bits>
using LinearDot = Dot<Bits>;
template <int Bits>
constexpr int kDotSteps = 1;
/// Parts of a step that are multiplied one after the other, each with activations of so many bytes.
template <int Bits>
constexpr int kDotParts = 1;

#elif defined(__AVX2__) && defined(__FMA__)

// Pairs of products are added in 16 bits, which saturates beyond 32767: 8 steps of nibbles stay below. A byte is two
// nibbles.
#if defined(__AVX512F__)
inline I multiply_pairs(I w, I x) { return _mm512_maddubs_epi16(w, x); }
inline I add_pairs(I a, I b) { return _mm512_add_epi16(a, b); }
inline I widen_pairs(I x) { return _mm512_madd_epi16(x, _mm512_set1_epi16(1)); }
inline I times16(I x) { return _mm512_slli_epi32(x, 4); }
inline I load_words(const uint8_t* p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline I multiply_words(I w, I x) { return _mm512_madd_epi16(w, x); }
#else
inline I multiply_pairs(I w, I x) { return _mm256_maddubs_epi16(w, x); }
inline I add_pairs(I a, I b) { return _mm256_add_epi16(a, b); }
inline I widen_pairs(I x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }
inline I times16(I x) { return _mm256_slli_epi32(x, 4); }
inline I load_words(const uint8_t* p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline I multiply_words(I w, I x) { return _mm256_madd_epi16(w, x); }
#endif

template <int Bits>
struct Dot {
    struct Weights {
        I low, high;  // high of bytes only
    };
    static Weights prepare(I bytes) {
        if constexpr (Bits == 4) return {bytes, bytes};
        return {low_nibbles(bytes), high_nibbles(bytes)};
    }
    I low, high;
    void begin(int) { low = high = iset(0); }
    void add(const Weights& w, I x) {
        // One after the other: gcc 12 adds the products of several steps first, and spills them.
        low = add_pairs(low, multiply_pairs(w.low, x));
        asm("" : "+v"(low));
        if constexpr (Bits == 8) {
            high = add_pairs(high, multiply_pairs(w.high, x));
            asm("" : "+v"(high));
        }
    }
    I total(int start) const {
        const I sum = iadd(iset(start), widen_pairs(low));
        if constexpr (Bits == 4) return sum;
        return iadd(sum, times16(widen_pairs(high)));
    }
};
template <int Bits>
constexpr int kDotRows = Bits == 8 || (Bits == 6 && kLanes == 16) ? 6 : 4;

/// Bytes multiplied as words: as many instructions as nibbles take, but half the sums, and nothing to take out of them.
struct WordDot {
    using Weights = I;
    static Weights load(const uint8_t* b) { return load_words(b); }
    I sum;
    void begin(int start) { sum = iset(start); }
    void add(Weights w, I x) {
        sum = iadd(sum, multiply_words(w, x));
        asm("" : "+v"(sum));
    }
    I total(int) const { return sum; }
};
/// Pairs of products of larger values than nibbles, of at most 6 bits: those of two steps are added in 16 bits.
struct PairDot {
    using Weights = I;
    static Weights prepare(I bytes) { return bytes; }
    I sum;
    void begin(int start) { sum = iset(start); }
    void add(const Weights (&w)[2], const I (&x)[2]) {
        sum = iadd(sum, widen_pairs(add_pairs(multiply_pairs(w[0], x[0]), multiply_pairs(w[1], x[1]))));
        asm("" : "+v"(sum));
    }
    I total(int) const { return sum; }
};
template <int Bits>
using LinearDot = std::conditional_t<Bits == 8, WordDot, std::conditional_t<Bits == 4, Dot<4>, PairDot>>;
/// Steps that are added at once.
template <int Bits>
constexpr int kDotSteps = Bits == 4 || Bits == 8 ? 1 : 2;
template <int Bits>
constexpr int kDotParts = Bits == 8 ? 2 : 1;

#else

template <int Bits>
struct Dot {
    using Weights = I;
    static Weights prepare(I bytes) { return bytes; }
    I sum;
    void begin(int start) { sum = iset(start); }
    void add(Weights w, I x) {
        // Byte j of every lane: the weights' without a sign, the activations' with one.
        sum += (w & 0xff) * (x << 24 >> 24);
        sum += (w >> 8 & 0xff) * (x << 16 >> 24);
        sum += (w >> 16 & 0xff) * (x << 8 >> 24);
        sum += (w >> 24 & 0xff) * (x >> 24);
    }
    I total(int) const { return sum; }
};
template <int Bits>
constexpr int kDotRows = 2;
template <int Bits>
using LinearDot = Dot<Bits>;
template <int Bits>
constexpr int kDotSteps = 1;
template <int Bits>
constexpr int kDotParts = 1;

#endif

/// Name of the instructions that products of packed weights use.
inline const char* dot_name() {
#if defined(FD_AMX_EMULATED)
    return "amx_int8_emulated";
#elif defined(FD_AMX)
    return "amx_int8";
#elif defined(__AVX512F__) && defined(__AVX512VNNI__)
    return "avx512_vnni";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__) && defined(__FMA__) && defined(__AVXVNNI__)
    return "avx_vnni";
#elif defined(__AVX2__) && defined(__FMA__)
    return "avx2";
#else
    return "generic";
#endif
}

/// Bytes of one step (kDotK consecutive k) of a panel; of 6 bits, half of two steps.
template <int Bits>
constexpr int kStepBytes = kWeightVecs * int(sizeof(I)) * (Bits == kFp4Bits ? 4 : Bits) / 8;

/// Byte of element k of a column in a vector of a step: each part has its elements of all columns side by side.
constexpr int byte_of(int parts, int column, int k) {
    const int width = kDotK / parts;
    return k / width * width * kLanes + column * width + k % width;
}

/// The columns of a step of a panel of less than 8 bits. Of a byte of two nibbles the low one belongs to the first vector.
/// Values of 6 bits are nibbles, and after those of two steps their highest bits: two of each vector in a byte.
template <int Bits>
[[gnu::always_inline]] inline void load_nibbles(const uint8_t* b, int step, I (&x)[kWeightVecs]) {
    const uint8_t* first = b + (Bits == 6 ? step / 2 * 2 : step) * kStepBytes<Bits>;
    const I both = iload(Bits == 6 ? first + step % 2 * sizeof(I) : first);
    x[0] = low_nibbles(both);
    x[1] = high_nibbles(both);
    if constexpr (Bits == kFp4Bits)
        for (I& each : x) each = fp4_values(each);
    if constexpr (Bits == 6) {
        const I high = iload(first + 2 * sizeof(I)), mask = iset(0x30303030);
        x[0] = x[0] | iand(step % 2 ? high : ishift<4>(high), mask);
        x[1] = x[1] | iand(step % 2 ? ishift<-2>(high) : ishift<2>(high), mask);
    }
}

/// A part of the columns of kDotSteps steps of a panel.
template <int Bits>
[[gnu::always_inline]] inline void load_columns(const uint8_t* b, int step, int part,
                                                typename LinearDot<Bits>::Weights (&w)[kWeightVecs][kDotSteps<Bits>]) {
#pragma GCC unroll 2
    for (int s = 0; s < kDotSteps<Bits>; s++)
        if constexpr (Bits != 8) {
            I x[kWeightVecs];
            load_nibbles<Bits>(b, step + s, x);
#pragma GCC unroll 2
            for (int v = 0; v < kWeightVecs; v++) w[v][s] = LinearDot<Bits>::prepare(x[v]);
        } else {
#pragma GCC unroll 2
            for (int v = 0; v < kWeightVecs; v++) {
                const uint8_t* at = b + (step + s) * kStepBytes<Bits> + v * sizeof(I);
                if constexpr (kDotParts<Bits> == 1)
                    w[v][s] = LinearDot<Bits>::prepare(iload(at));
                else
                    w[v][s] = LinearDot<Bits>::load(at + part * sizeof(I) / 2);
            }
        }
}

}  // namespace fd
