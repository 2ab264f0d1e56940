// Linear layers in 4, 6 or 8 bits: what their panels and the rows that they multiply look like.
//
// Weights are value * scale + minimum, `group` values of a column sharing the last two. A panel holds kWeightVecs vectors
// of columns, group after group: a scale for each column, a minimum for each column if there are minima (see `Scales`), then
// the values, kDotK consecutive k of each column side by side, stored without a sign (`offset` is added), or the codes of
// FP4. If scales are multiples, the units of scales, and those of minima, stand before each kUnitSpan k.
//
// Rows are quantized to int8 with one scale for each kActivationK values. For each group of both, the integer dot product
// is exact; its float value is added to the element's one accumulator, in the order of k whatever the number of rows: a
// row's result does not depend on which rows it is computed with. Where there are tiles of AMX they multiply blocks of
// many rows, vectors the others, with the same bits.
#pragma once

#include "base/dot.h"
#include "linear/linear.h"

namespace fd {

/// k that one integer sum runs over.
inline int unit_of(const Linear& w) { return std::min(w.group, kActivationK); }
inline int dot_parts(const Linear& w) { return w.type == Type::u8 ? kDotParts<8> : kDotParts<4>; }
inline int step_bytes(const Linear& w) {
    return w.type == Type::u4 ? kStepBytes<4> : w.type == Type::u6 ? kStepBytes<6> : kStepBytes<8>;
}
inline size_t scale_bytes(const Linear& w) {
    return w.scales == Scales::f32 ? sizeof(float) : w.scales == Scales::f16 ? sizeof(uint16_t) : sizeof(int8_t);
}
/// Bytes of the scales of a group, or of its minima.
inline size_t scales_bytes(const Linear& w) { return kWeightVecs * kLanes * scale_bytes(w); }
inline size_t group_bytes(const Linear& w) {
    return (w.minima ? 2 : 1) * scales_bytes(w) + size_t(w.group / kDotK) * step_bytes(w);
}
/// Bytes of the units of scales, or of minima.
constexpr size_t kUnitsBytes = kWeightVecs * kLanes * sizeof(uint16_t);
/// Bytes of units before the group that begins at k.
inline size_t units_before(const Linear& w, int k) {
    return w.scales == Scales::multiples && k % kUnitSpan == 0 ? (w.minima ? 2 : 1) * kUnitsBytes : 0;
}
inline size_t packed_panel_bytes(const Linear& w) {
    return w.padded_k / w.group * group_bytes(w) + w.padded_k / kUnitSpan * units_before(w, 0);
}
inline char* packed_panel(const Linear& w, int vec) {
    return static_cast<char*>(w.data) + vec / kWeightVecs * packed_panel_bytes(w);
}

/// Hand the parts of kDotK values from i on, of a group of a column whose values are `bytes`, to `take(vector, at, bits, from)`:
/// these bits of each value, from one on, are in the vector's byte of it (see `byte_of`), from `at` on.
template <class Byte, class Take>
void each_part_of(const Linear& w, Byte* bytes, int column, int i, Take&& take) {
    const int v = column / kLanes, step = i / kDotK, odd = step % 2;
    if (w.type == Type::u8) return take(bytes + step * kStepBytes<8> + v * sizeof(I), 0, 8, 0);
    if (w.type == Type::u4) return take(bytes + step * kStepBytes<4>, 4 * v, 4, 0);
    bytes += (step - odd) * kStepBytes<6>;
    take(bytes + odd * sizeof(I), 4 * v, 4, 0);
    take(bytes + 2 * sizeof(I), 4 * odd + 2 * v, 2, 4);
}

/// Hand the values of a column to `take(k, value)`: the product and the sum each rounded to float32 once, as
/// `PackedTensor.to_float32` rounds them.
template <class Take>
void unpack_column(const Linear& w, int column, Take&& take) {
    const int c = column % (kWeightVecs * kLanes);
    const char *group = packed_panel(w, column / kLanes), *units = group;
    auto half = [&](const char* p) { return half_to_float(reinterpret_cast<const uint16_t*>(p)[c]); };
    auto number = [&](const char* p, const char* unit) {
        if (w.scales == Scales::multiples) return half(unit) * float(reinterpret_cast<const int8_t*>(p)[c]);
        return w.scales == Scales::f16 ? half(p) : reinterpret_cast<const float*>(p)[c];
    };
    for (int k = 0; k < w.k; k += w.group, group += group_bytes(w)) {
        if (const size_t before = units_before(w, k)) {
            units = group;
            group += before;
        }
        // In double, in which both are exact: a fused multiply-add would not round the product.
        const double scale = number(group, units);
        const double minimum = w.minima ? number(group + scales_bytes(w), units + kUnitsBytes) : 0.0;
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(group + (w.minima ? 2 : 1) * scales_bytes(w));
        for (int i = 0; i < w.group && k + i < w.k; i++) {
            int code = 0;
            const int place = byte_of(dot_parts(w), c % kLanes, i % kDotK);
            each_part_of(w, bytes, c, i, [&](const uint8_t* vector, int at, int bits, int from) {
                code |= (vector[place] >> at & ((1 << bits) - 1)) << from;
            });
            const int value = (w.fp4 ? kFp4[code] : code) - w.offset;
            const float product = float(value * scale);
            take(k + i, w.minima ? float(product + minimum) : product);
        }
    }
}

/// A quantized row: the values, in bytes or words, then at these bytes a scale for each kActivationK values and, for each
/// unit, what its integer sums start with (-offset times the sum of its values) and the sum of its values times their scale.
struct QuantizedRow {
    int scale, start, sum, bytes;

    explicit QuantizedRow(const Linear& w) {
        const int units = w.padded_k / unit_of(w);
        scale = w.padded_k * dot_parts(w);
        start = scale + w.padded_k / kActivationK * int(sizeof(float));
        sum = start + units * int(sizeof(int32_t));
        bytes = sum + units * int(sizeof(float));
    }
    /// Its size as a row of a float32 buffer.
    int floats() const { return bytes / int(sizeof(float)); }
};

/// Quantize w.k values for a product with w; `load(i, count, x)` writes `count` values from the i-th on to x.
template <class Load>
void quantize_row(const Linear& w, char* row, Load&& load) {
    const QuantizedRow at(w);
    const int unit = unit_of(w);
    float* scales = reinterpret_cast<float*>(row + at.scale);
    int32_t* starts = reinterpret_cast<int32_t*>(row + at.start);
    float* sums = reinterpret_cast<float*>(row + at.sum);
    for (int k = 0; k < w.padded_k; k += kActivationK) {
        alignas(64) int8_t q[kActivationK];
        alignas(64) float x[kActivationK] = {};
        load(k, std::min(kActivationK, w.k - k), x);
        const float largest = largest_magnitude(x);
        const float by = largest > 1e-30f ? 127.0f / largest : 0.0f, scale = largest / 127.0f;
        *scales++ = scale;
        for (int i = 0; i < kActivationK; i += kLanes) store_rounded(q + i, vload(x + i) * vset(by));
        if (dot_parts(w) == 1)
            std::memcpy(row + k, q, sizeof q);
        else
            std::copy_n(q, kActivationK, reinterpret_cast<int16_t*>(row) + k);
        int32_t half[2];
        sum_halves(q, half);
        if (unit == kActivationK) half[0] += half[1];
        for (int i = 0; i < kActivationK / unit; i++) {
            *starts++ = -w.offset * half[i];
            *sums++ = scale * float(half[i]);
        }
    }
}

/// Values of a row as they are.
template <class E>
auto plain(const E* x) {
    return [x](int first, int count, float* to) {
        if (count == kActivationK)
            for (int i = 0; i < kActivationK; i += kLanes) vstore(to + i, vload(x + first + i));
        else
            for (int i = 0; i < count; i++) to[i] = to_float(x[first + i]);
    };
}

struct PackedCall {
    const char* rows;  // the first row of the block
    size_t stride;     // bytes
    const char* panel;
    float* c;          // kWeightVecs * kLanes columns
    const char* ahead = nullptr;  // memory that will be needed next, fetched while this is computed
    int ahead_lines = 0;          // cache lines of it for each 16 k
};

/// Most cache lines fetched ahead for each 16 k: all of a panel, if a product of one block of rows comes by it.
constexpr int kMostAheadPacked = 12;

/// Rows that vectors compute at once.
inline int vector_rows(const Linear& w) {
    return w.type == Type::u4 ? kDotRows<4> : w.type == Type::u6 ? kDotRows<6> : kDotRows<8>;
}
#if defined(FD_AMX)
constexpr int kMostPackedRows = 2 * amx::kTile;
/// Whether tiles compute a block of so many rows. They take whole tiles: rows after the last one must be readable.
inline bool in_tiles(const Linear& w, int rows) { return rows > vector_rows(w); }
#else
constexpr int kMostPackedRows = 8;
inline bool in_tiles(const Linear&, int) { return false; }
#endif
/// Compute `rows` rows of one panel: at most kMostPackedRows in tiles, else at most vector_rows(w).
void packed_tile(const Linear& w, int rows, const PackedCall& call);

/// `matmul` of linear.h over packed weights; `x` are quantized rows, `stride` bytes apart.
template <class Epilogue>
void packed_matmul(const Linear& w, const char* x, size_t stride, int rows, Range vecs, Following after,
                   Epilogue&& epilogue) {
    constexpr int kColumns = kWeightVecs * kLanes;
    alignas(64) float c[kMostPackedRows * kColumns];
    const bool tiles = in_tiles(w, rows);
    const int most = tiles ? kMostPackedRows : vector_rows(w);
#if defined(FD_AMX)
    const amx::Depth depth(tiles ? unit_of(w) / kDotK : amx::kDepth);
#endif
    const size_t bytes = packed_panel_bytes(w);
    constexpr size_t kGroupBytes = TileShape<bf16>::kGroupBytes;
    const int groups = int((rows * QuantizedRow(w).bytes + kGroupBytes - 1) / kGroupBytes);
    for (int g = 0; g < groups; g++) {
        const Range group = share(rows, g, groups);
        const int count = group.end - group.begin, blocks = (count + most - 1) / most;
        for (int vec = vecs.begin; vec < vecs.end; vec += kWeightVecs) {
            const bool last = vec + kWeightVecs >= vecs.end;
            Following next{packed_panel(w, last ? vecs.begin : vec + kWeightVecs), bytes};
            if (last && g + 1 == groups) next = after;
            const int times = w.padded_k / 16, lines = int(next.bytes / kCacheLine);
            const int ahead_lines = std::min(kMostAheadPacked, ceil_div(lines, times * blocks));
            PackedCall call{x, stride, packed_panel(w, vec), c, next.data, 0};
            for (int i = 0; i < blocks; i++) {
                const Range r = tiles ? Range{i * most, std::min(count, (i + 1) * most)} : share(count, i, blocks);
                call.rows = x + (group.begin + r.begin) * stride;
                call.ahead_lines = call.ahead < next.data + next.bytes ? ahead_lines : 0;
                packed_tile(w, r.end - r.begin, call);
                call.ahead += size_t(ahead_lines) * times * kCacheLine;
                epilogue(Block{group.begin + r.begin, r.end - r.begin, vec, kWeightVecs, c, kColumns});
            }
        }
    }
}

}  // namespace fd
