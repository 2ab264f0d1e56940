// Eight tile registers of 16 rows by 64 bytes: Intel AMX, or the same arithmetic in plain C++ to test the code that
// uses them on processors without it (-DFD_AMX_EMULATED).
//
// Accumulators are 0 to 3, A is in 4 and 5, B in 6 and 7. `configure(depth)` says how many 32-bit words of k (pairs of
// bf16, or four bytes) a row of A has, which is also how many rows B has.
#pragma once

#include "base/simd.h"

#if defined(FD_AMX)

#if !defined(FD_AMX_EMULATED)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fd::amx {

constexpr int kTile = 16, kDepth = 16;  // rows and columns of an accumulator; most words of k

#if defined(FD_AMX_EMULATED)

struct alignas(64) Register {
    uint8_t row[16][64];
};
inline thread_local Register registers[8];
inline thread_local int words = kDepth;

inline bool request() { return true; }
inline void configure(int depth = kDepth) { words = depth; }
inline void release() {}
template <int T>
void zero() {
    std::memset(&registers[T], 0, sizeof(Register));
}
template <int T, bool Passes = false>
void load(const void* p, size_t stride) {
    const int rows = T < 6 ? kTile : words, bytes = T == 4 || T == 5 ? 4 * words : 64;
    for (int r = 0; r < rows; r++) std::memcpy(registers[T].row[r], (const char*)p + r * stride, bytes);
}
template <int T>
void store(void* p, size_t stride) {
    for (int r = 0; r < 16; r++) std::memcpy((char*)p + r * stride, registers[T].row[r], 64);
}
/// C += A * B; as the instruction does, even and odd k are summed apart before they meet the accumulator.
template <int C, int A, int B>
void multiply_add() {
    for (int m = 0; m < 16; m++) {
        const bf16* a = (const bf16*)registers[A].row[m];
        float* c = (float*)registers[C].row[m];
        for (int n = 0; n < 16; n++) {
            float even = 0, odd = 0;
            for (int k = 0; k < 16; k++) {
                const bf16* b = (const bf16*)registers[B].row[k] + 2 * n;
                even += to_float(a[2 * k]) * to_float(b[0]);
                odd += to_float(a[2 * k + 1]) * to_float(b[1]);
            }
            c[n] += even + odd;
        }
    }
}
/// C += A * B in integers: bytes of A have a sign, those of B have none.
template <int C, int A, int B>
void multiply_add_bytes() {
    for (int m = 0; m < 16; m++) {
        const int8_t* a = (const int8_t*)registers[A].row[m];
        int32_t* c = (int32_t*)registers[C].row[m];
        for (int n = 0; n < 16; n++)
            for (int k = 0; k < 4 * words; k++) c[n] += a[k] * registers[B].row[k / 4][4 * n + k % 4];
    }
}

#else

/// Ask the kernel for the tile state once per process; false where it is refused.
inline bool request() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline void configure(int depth = kDepth) {
    Configuration c;
    c.bytes_per_row[4] = c.bytes_per_row[5] = uint16_t(4 * depth);
    c.rows[6] = c.rows[7] = uint8_t(depth);
    // Some compilers believe that the load reads 8 bytes only: without this the stores above may come after it.
    __asm__ volatile("" ::"r"(&c) : "memory");
    _tile_loadconfig(&c);
}
inline void release() { _tile_release(); }
// The intrinsics are macros that need literal register numbers, hence one case for each.
#define FD_EACH_TILE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
template <int T>
void zero() {
#define FD_DO(I) \
    if constexpr (T == I) _tile_zero(I);
    FD_EACH_TILE(FD_DO)
#undef FD_DO
}
/// Load a tile; one that passes by once does not take the place of others in the first-level cache.
template <int T, bool Passes = false>
void load(const void* p, size_t stride) {
#define FD_DO(I)                                                      \
    if constexpr (T == I && Passes) _tile_stream_loadd(I, p, stride); \
    if constexpr (T == I && !Passes) _tile_loadd(I, p, stride);
    FD_EACH_TILE(FD_DO)
#undef FD_DO
}
template <int T>
void store(void* p, size_t stride) {
#define FD_DO(I) \
    if constexpr (T == I) _tile_stored(I, p, stride);
    FD_EACH_TILE(FD_DO)
#undef FD_DO
}
/// The four products that a block of 2 x 2 tiles needs.
template <int C, int A, int B>
void multiply_add() {
    if constexpr (C == 0 && A == 4 && B == 6) _tile_dpbf16ps(0, 4, 6);
    if constexpr (C == 1 && A == 4 && B == 7) _tile_dpbf16ps(1, 4, 7);
    if constexpr (C == 2 && A == 5 && B == 6) _tile_dpbf16ps(2, 5, 6);
    if constexpr (C == 3 && A == 5 && B == 7) _tile_dpbf16ps(3, 5, 7);
}
template <int C, int A, int B>
void multiply_add_bytes() {
    if constexpr (C == 0 && A == 4 && B == 6) _tile_dpbsud(0, 4, 6);
    if constexpr (C == 1 && A == 4 && B == 7) _tile_dpbsud(1, 4, 7);
    if constexpr (C == 2 && A == 5 && B == 6) _tile_dpbsud(2, 5, 6);
    if constexpr (C == 3 && A == 5 && B == 7) _tile_dpbsud(3, 5, 7);
}

#endif

/// Tiles of another depth as long as it lives.
struct Depth {
    const bool other;
    explicit Depth(int depth) : other(depth != kDepth) {
        if (other) configure(depth);
    }
    ~Depth() {
        if (other) configure();
    }
    Depth(const Depth&) = delete;
    Depth& operator=(const Depth&) = delete;
};

}  // namespace fd::amx
#endif
