// Weights of bf16 in 12 bits, without loss.
//
// The upper bytes of trained weights, sign and most of the exponent, have few values: 16 of them cover all but some of
// 10,000. So a unit of weights, 4 consecutive k of two vectors of columns, is stored as their lower bytes and, in 4 bits
// each, the places of the upper ones in a table of the 16 most frequent. A unit with another upper byte is an exception and
// stored whole, apart. Products take the same values in the same order as of whole panels, so their bits are the same; they
// read three quarters of the bytes, and put values together while they wait for memory.
//
// That exponents of weights have less than 3 bits of information is from Zhang et al., arXiv:2504.11651, who store them in
// codes of various lengths.
#pragma once

#include "linear/linear.h"

namespace fd {

#if defined(__AVX512F__) && !defined(FD_AMX)
#define FD_SQUEEZES 1
#endif

constexpr int kSqueezedVecs = 2;              // vectors of a panel
constexpr int kUnitK = 4;                     // consecutive k of a unit: two steps
constexpr int kPairBytes = 4 * kLanes;        // lower bytes of a step
constexpr int kUnitValues = 2 * kPairBytes;   // step by step and vector by vector, as `Product` reads them
constexpr int kUnitBytes = 3 * kPairBytes;
/// Rows that are computed at once. Widening takes registers, and more sums beside it are spilled.
constexpr int kSqueezedRows = std::is_same_v<Row<bf16>, bf16> ? 12 : 8;

/// Store weights of bf16 in 12 bits if their values and sizes allow, and return the bytes that `data` has then, or 0.
size_t squeeze(Linear& w, Team& team);

/// A panel of squeezed weights: vectors `vec` and `vec` + 1.
struct SqueezedPanel {
    const uint8_t* units;
    size_t bytes;
    const int *exceptions, *end;  // units that are stored whole
    const bf16* whole;            // [end - exceptions, kUnitValues]

    SqueezedPanel(const Linear& w, int vec) {
        const Squeezed& s = w.squeezed;
        const int panel = vec / kSqueezedVecs;
        bytes = size_t(w.padded_k) / kUnitK * kUnitBytes;
        units = static_cast<const uint8_t*>(w.data) + panel * bytes;
        exceptions = s.exceptions + s.starts[panel];
        end = s.exceptions + s.starts[panel + 1];
        whole = s.whole + size_t(s.starts[panel]) * kUnitValues;
    }
};

/// Byte of a step with value `i` of a vector: 8 of each in turn, so that instructions that interleave bytes by halves of 128
/// bits put lower and upper ones together.
constexpr int byte_of_step(int vec, int i) { return i / 8 * 16 + vec * 8 + i % 8; }
/// Byte of a unit with the lower byte of a value.
constexpr int lower_byte(int step, int vec, int i) { return step * kPairBytes + byte_of_step(vec, i); }
/// Byte with the place of its upper byte, from bit 4 * step on.
constexpr int place_byte(int vec, int i) { return 2 * kPairBytes + byte_of_step(vec, i); }

/// Hand the values of a column to `take(k, value)`.
template <class Take>
void unsqueeze_column(const Linear& w, int column, Take&& take) {
    SqueezedPanel panel(w, column / kLanes);
    const int vec = column / kLanes % kSqueezedVecs;
    for (int k = 0; k < w.k; k++) {
        const int unit = k / kUnitK, step = k % kUnitK / 2, i = column % kLanes * 2 + k % 2;
        while (panel.exceptions < panel.end && *panel.exceptions < unit) panel.exceptions++, panel.whole += kUnitValues;
        const uint8_t* bytes = panel.units + size_t(unit) * kUnitBytes;
        const int place = bytes[place_byte(vec, i)] >> 4 * step & 15;
        bf16 value{uint16_t(w.squeezed.upper[place] << 8 | bytes[lower_byte(step, vec, i)])};
        if (panel.exceptions < panel.end && *panel.exceptions == unit)
            value = panel.whole[(step * kSqueezedVecs + vec) * 2 * kLanes + i];
        take(k, to_float(value));
    }
}

/// A product of `rows` rows with a panel.
struct SqueezedCall {
    MultipliedRows<bf16> a;
    int units;
    float* c;  // [rows, kSqueezedVecs * kLanes]
    const char* ahead;
    int ahead_lines;  // cache lines fetched ahead for each unit
};
void squeezed_tile(const Squeezed& squeezed, const SqueezedPanel& panel, int rows, const SqueezedCall& call);

/// Exceptions of the next panel that are fetched ahead: no order of addresses leads to them.
constexpr int kExceptionsAhead = 8;

/// `whole_matmul` of linear.h over squeezed weights.
template <class Epilogue>
void squeezed_matmul(const Linear& w, const bf16* x, size_t stride, int rows, Range vecs, Following after,
                     Epilogue&& epilogue) {
    constexpr int kColumns = kSqueezedVecs * kLanes;
    alignas(64) float c[kSqueezedRows * kColumns];
    constexpr size_t kRowBytes = sizeof(Row<bf16>), kGroupBytes = TileShape<Row<bf16>>::kGroupBytes;
    const int units = w.padded_k / kUnitK;
    const int groups = int((size_t(rows) * w.padded_k * kRowBytes + kGroupBytes - 1) / kGroupBytes);
    for (int g = 0; g < groups; g++) {
        const Range group = share(rows, g, groups);
        const int count = group.end - group.begin, blocks = ceil_div(count, kSqueezedRows);
        const auto a = multiplied(x + group.begin * stride, stride, count, w.padded_k);
        for (int vec = vecs.begin; vec < vecs.end; vec += kSqueezedVecs) {
            const bool last = vec + kSqueezedVecs >= vecs.end;
            const SqueezedPanel panel(w, vec), next(w, last ? vecs.begin : vec + kSqueezedVecs);
            const int exceptions = std::min(kExceptionsAhead, int(next.end - next.exceptions));
            for (int i = 0; i < exceptions * kUnitValues; i += kCacheLine / sizeof(bf16)) prefetch((const char*)(next.whole + i));
            const Following following = last && g + 1 == groups ? after : Following{(const char*)next.units, next.bytes};
            const int ahead_lines = std::min(kMostAhead, ceil_div(int(following.bytes / kCacheLine), units * blocks));
            const char* ahead = following.data;
            for (int i = 0; i < blocks; i++, ahead += size_t(ahead_lines) * units * kCacheLine) {
                const Range r = share(count, i, blocks);
                const bool more = ahead < following.data + following.bytes;
                const MultipliedRows<bf16> block{a.data + r.begin * a.stride, a.stride};
                squeezed_tile(w.squeezed, panel, r.end - r.begin, {block, units, c, ahead, more ? ahead_lines : 0});
                epilogue(Block{group.begin + r.begin, r.end - r.begin, vec, kSqueezedVecs, c, kColumns});
            }
        }
    }
}

/// The product with weights of E, however they are stored; see `whole_matmul`.
template <class E, class Epilogue>
void matmul(const Linear& w, const E* x, size_t stride, int rows, Range vecs, Following after, Epilogue&& epilogue) {
    if constexpr (std::is_same_v<E, bf16>)
        if (w.squeezed) return squeezed_matmul(w, x, stride, rows, vecs, after, epilogue);
    whole_matmul(w, x, stride, rows, vecs, after, epilogue);
}

}  // namespace fd
