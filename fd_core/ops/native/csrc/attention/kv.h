// The paged KV cache: inside a block, each head's keys and values lie in the order in which `tile` reads them.
//
//   keys    [padded d / kStep][padded block][kStep]   a matrix with one column for each token
//   values  [padded block / kStep][padded d][kStep]   a matrix with one row for each token
//
// so that attention multiplies with blocks in place and never gathers. The blocks of one head lie side by side: a request
// whose blocks have consecutive numbers, as they mostly have, is read in one run.
//
// A latent cache keeps the keys alone, whose last elements are the values, which attention transposes.
//
// A quantized cache keeps int8, and behind them the scales of keys and values, one for each token, which attention applies
// to scores and to weights. A program of float expands a block; one of bf16 multiplies integers, four of them in a step.
#pragma once

#include <algorithm>

#include "base/dot.h"
#include "base/rows.h"
#include "base/tile.h"

namespace fd {

struct KvLayout {
    int layers, blocks, block_size, heads, d;
    int latent;  // width of values that are the last elements of the keys, with another scale; 0 where they are apart
    bool quantized;
    bool integers;         // quantized, and multiplied as integers
    int item_bytes;        // of an element as stored
    int step;              // kStep above: consecutive elements that a product takes at once
    int block_k, block_v;  // tokens of a block as stored for keys (columns) and values (rows)
    int d_k, d_v;          // head dimension as stored for keys (rows) and values (columns)
    char* data;

    template <class E>
    void pad() {
        integers = quantized && sizeof(E) == 2 && !latent;
        step = integers ? kDotK : Product<E>::kStep;
        const int align = integers ? kDotK : TileShape<E>::kAlign;
        block_k = block_v = round_up(block_size, align > kLanes ? align : kLanes);
        d_k = round_up(d, align);
        d_v = round_up(latent ? latent : d, kLanes);
        item_bytes = quantized ? 1 : sizeof(E);
    }
    size_t key_elements() const { return size_t(d_k) * block_k; }
    size_t value_elements() const { return size_t(block_v) * d_v; }
    size_t head_elements() const { return key_elements() + (latent ? 0 : value_elements()); }
    int key_part() const { return d - latent; }  // elements of a key with a scale of their own
    size_t head_bytes() const {
        return head_elements() * item_bytes + (quantized ? size_t(block_k + block_v) * sizeof(float) : 0);
    }
    size_t layer_bytes() const { return head_bytes() * heads * blocks; }
    int64_t slots() const { return int64_t(blocks) * block_size; }
    size_t total_bytes() const { return layer_bytes() * layers; }
};

/// What a key or value of d elements is divided by so that 8 bits hold it; not finite if one of them is not.
inline float int8_scale(const float* x, int d) {
    int32_t most = 0;  // by bits, so that a NaN is the largest
    for (int i = 0; i < d; i++) {
        int32_t bits;
        std::memcpy(&bits, x + i, 4);
        most = std::max(most, bits & 0x7fffffff);
    }
    float largest;
    std::memcpy(&largest, &most, 4);
    return largest / 127.0f;
}

/// Round n elements divided by their scale; a scale of 0 has elements of 0, and a NaN is 0.
inline void convert_int8(const float* x, int n, float scale, int8_t* y) {
    const float by = scale == 0 ? 1.0f : scale;
    for (int i = 0; i < n; i++) {
        const float steps = std::min(std::max(std::nearbyint(x[i] / by), -127.0f), 127.0f);
        y[i] = steps == steps ? int8_t(int32_t(steps)) : int8_t(0);
    }
}

template <class E>
struct KvLayer {
    const KvLayout* layout;
    char* data;

    KvLayer(const KvLayout& l, int layer) : layout(&l), data(l.data + size_t(layer) * l.layer_bytes()) {}

    /// Keys, values behind them, and scales behind these. All heads share latent ones.
    char* head(int block, int head) const {
        return data + (size_t(layout->latent ? 0 : head) * layout->blocks + block) * layout->head_bytes();
    }
    float* key_scales(int block, int head) const {
        return reinterpret_cast<float*>(this->head(block, head) + layout->head_elements());
    }
    float* value_scales(int block, int head) const { return key_scales(block, head) + layout->block_k; }

    // Places of element i of a token in a head's elements.
    size_t key(int offset, int i) const {
        const int step = layout->step;
        return (size_t(i / step) * layout->block_k + offset) * step + i % step;
    }
    size_t value(int offset, int i) const {
        const int step = layout->step;
        return layout->key_elements() + (size_t(offset / step) * layout->d_v + i) * step + offset % step;
    }
    /// Called before the first token of a block is written. Attention multiplies values it must not see by zero, which
    /// would not hide a NaN that the block's previous owner left.
    void clear_block(int block) const {
        for (int h = 0; h < layout->heads; h++) std::memset((void*)head(block, h), 0, layout->head_bytes());
    }
    /// k and v have d elements; of a latent cache, key_part() and those that follow them.
    void write(int slot, int head, const float* k, const float* v) const {
        const int block = slot / layout->block_size, offset = slot % layout->block_size;
        char* to = this->head(block, head);
        if (!layout->quantized) {
            auto round = [](const float* x, int n, E* y) { convert(x, n, y); };
            write_token<Product<E>::kStep>(reinterpret_cast<E*>(to), offset, k, v, round, round);
            return;
        }
        const float ks = int8_scale(k, layout->key_part());
        const float vs = int8_scale(v, layout->latent ? layout->latent : layout->d);
        auto write_as = [&](auto step) {
            write_token<step>(
                reinterpret_cast<int8_t*>(to), offset, k, v,
                [&](const float* x, int n, int8_t* y) { convert_int8(x, n, ks, y); },
                [&](const float* x, int n, int8_t* y) { convert_int8(x, n, vs, y); });
        };
        if (layout->integers)
            write_as(std::integral_constant<int, kDotK>{});
        else
            write_as(std::integral_constant<int, Product<E>::kStep>{});
        key_scales(block, head)[offset] = ks;
        value_scales(block, head)[offset] = vs;
    }

   private:
    static constexpr int kMostElements = 256;  // of a head that are converted at once

    template <int S, class T, class RoundKey, class RoundValue>
    void write_token(T* to, int offset, const float* k, const float* v, RoundKey&& round_key,
                     RoundValue&& round_value) const {
        const int parts = layout->key_part();
        write_column<S>(to, offset, 0, k, parts, round_key);
        if (layout->latent) return write_column<S>(to, offset, parts, v, layout->latent, round_value);
        alignas(64) T rounded[kMostElements];
        for (int from = 0; from < layout->d; from += kMostElements) {
            const int count = std::min(layout->d - from, kMostElements);
            round_value(v + from, count, rounded);
            T* row = to + value(offset, from);
            for (int i = 0; i < count; i++) row[size_t(i) * S] = rounded[i];
        }
    }

    /// A token is a column of the keys: its consecutive elements travel in groups of kStep.
    template <int S, class T, class Round>
    void write_column(T* to, int offset, int first, const float* x, int d, Round&& round) const {
        alignas(64) T rounded[kMostElements];
        for (int from = 0; from < d; from += kMostElements) {
            const int count = std::min(d - from, kMostElements);
            round(x + from, count, rounded);
            T* column = to + key(offset, first + from);
            int i = 0;
            for (; i + S <= count; i += S) std::memcpy((void*)(column + size_t(i) * layout->block_k), rounded + i, S * sizeof(T));
            for (; i < count; i++) to[key(offset, first + from + i)] = rounded[i];
        }
    }
};

}  // namespace fd
