// Eight tile registers of 16 rows by 64 bytes: Intel AMX, or the same arithmetic in plain C++ to test the code that
// uses them on processors without it (-DFD_AMX_EMULATED).
#pragma once

#if defined(__AMX_BF16__) || defined(FD_AMX_EMULATED)
#define FD_AMX 1

#include "simd.h"

#if !defined(FD_AMX_EMULATED)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fd::amx {

#if defined(FD_AMX_EMULATED)

struct alignas(64) Register {
    uint8_t row[16][64];
};
inline thread_local Register registers[8];

inline bool request() { return true; }
inline void configure() {}
inline void release() {}
template <int T>
void zero() {
    std::memset(&registers[T], 0, sizeof(Register));
}
template <int T>
void load(const void* p, size_t stride) {
    for (int r = 0; r < 16; r++) std::memcpy(registers[T].row[r], (const char*)p + r * stride, 64);
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
inline void configure() {
    Configuration c;
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
template <int T>
void load(const void* p, size_t stride) {
#define FD_DO(I) \
    if constexpr (T == I) _tile_loadd(I, p, stride);
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
/// The four products that a block of 2 x 2 tiles needs: accumulators 0 to 3, A in 4 and 5, B in 6 and 7.
template <int C, int A, int B>
void multiply_add() {
    if constexpr (C == 0 && A == 4 && B == 6) _tile_dpbf16ps(0, 4, 6);
    if constexpr (C == 1 && A == 4 && B == 7) _tile_dpbf16ps(1, 4, 7);
    if constexpr (C == 2 && A == 5 && B == 6) _tile_dpbf16ps(2, 5, 6);
    if constexpr (C == 3 && A == 5 && B == 7) _tile_dpbf16ps(3, 5, 7);
}

#endif

}  // namespace fd::amx
#endif
