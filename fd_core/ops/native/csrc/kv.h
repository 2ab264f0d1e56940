// The paged KV cache: inside a block, each head's keys and values lie in the order in which `tile` reads them.
//
//   keys    [padded d / kStep][padded block][kStep]   a matrix with one column for each token
//   values  [padded block / kStep][padded d][kStep]   a matrix with one row for each token
//
// so that attention multiplies with blocks in place and never gathers. The blocks of one head lie side by side: a request
// whose blocks have consecutive numbers, as they mostly have, is read in one run.
#pragma once

#include "rows.h"
#include "tile.h"

namespace fd {

struct KvLayout {
    int layers, blocks, block_size, heads, d;
    int block_k, block_v;  // tokens of a block as stored for keys (columns) and values (rows)
    int d_k, d_v;          // head dimension as stored for keys (rows) and values (columns)
    char* data;

    template <class E>
    void pad() {
        constexpr int kAlign = TileShape<E>::kAlign;
        block_k = block_v = round_up(block_size, kAlign > kLanes ? kAlign : kLanes);
        d_k = round_up(d, kAlign);
        d_v = round_up(d, kLanes);
    }
    size_t head_elements() const { return size_t(d_k) * block_k + size_t(block_v) * d_v; }
    size_t block_elements() const { return head_elements() * heads; }
    size_t total_elements() const { return block_elements() * blocks * layers; }
};

template <class E>
struct KvLayer {
    const KvLayout* layout;
    E* data;

    KvLayer(const KvLayout& l, int layer)
        : layout(&l), data((E*)l.data + size_t(layer) * l.blocks * l.block_elements()) {}

    E* keys(int block, int head) const {
        return data + (size_t(head) * layout->blocks + block) * layout->head_elements();
    }
    E* values(int block, int head) const { return keys(block, head) + size_t(layout->d_k) * layout->block_k; }

    E* key(int block, int head, int offset, int i) const {
        constexpr int S = Product<E>::kStep;
        return keys(block, head) + (size_t(i / S) * layout->block_k + offset) * S + i % S;
    }
    E* value(int block, int head, int offset, int i) const {
        constexpr int S = Product<E>::kStep;
        return values(block, head) + (size_t(offset / S) * layout->d_v + i) * S + offset % S;
    }
    /// Called before the first token of a block is written. Attention multiplies values it must not see by zero, which
    /// would not hide a NaN that the block's previous owner left.
    void clear_block(int block) const {
        for (int head = 0; head < layout->heads; head++)
            std::memset((void*)keys(block, head), 0, layout->head_elements() * sizeof(E));
    }
    void write(int slot, int head, const float* k, const float* v) const {
        constexpr int S = Product<E>::kStep;
        const int block = slot / layout->block_size, offset = slot % layout->block_size, d = layout->d;
        alignas(64) E rounded[kMostElements];
        for (int from = 0; from < d; from += kMostElements) {
            const int count = d - from < kMostElements ? d - from : kMostElements;
            // A token is a column of the keys: its consecutive elements travel in groups of kStep.
            convert(k + from, count, rounded);
            E* column = key(block, head, offset, from);
            int i = 0;
            for (; i + S <= count; i += S) std::memcpy((void*)(column + size_t(i) * layout->block_k), rounded + i, S * sizeof(E));
            for (; i < count; i++) *key(block, head, offset, from + i) = rounded[i];
            convert(v + from, count, rounded);
            E* row = value(block, head, offset, from);
            for (i = 0; i < count; i++) row[size_t(i) * S] = rounded[i];
        }
    }

   private:
    static constexpr int kMostElements = 256;  // of a head that are converted at once; even
};

}  // namespace fd
