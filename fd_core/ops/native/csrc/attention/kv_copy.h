// Copies between blocks of the cache and canonical order [layers, 2, block_size, heads, d], in which a scale follows its d
// elements; latent: [layers, 1, block_size, 1, d], each part before its scale. The bits are kept as they are.
#pragma once

#include "attention/kv.h"

namespace fd {

/// Elements of type T, of which the cache holds S consecutive ones along k together.
template <class T, int S, bool kToCache>
class BlockCopy {
   public:
    BlockCopy(const KvLayout& layout, char* canonical) : l_(layout), canonical_(canonical) {}

    template <class E>
    void layer(const KvLayer<E>& kv, int block) {
        for (int h = 0; h < l_.heads; h++) {
            T* keys = reinterpret_cast<T*>(kv.head(block, h));
            char* from = canonical_ + h * token_bytes();
            columns(keys, 0, l_.key_part(), from);
            if (l_.latent) {
                char* rest = from + l_.key_part() * sizeof(T) + scale_bytes();
                columns(keys, l_.key_part(), l_.latent, rest);
                scales(kv.key_scales(block, h), from + l_.key_part() * sizeof(T));
                scales(kv.value_scales(block, h), rest + l_.latent * sizeof(T));
            } else {
                char* values = from + l_.block_size * stride();
                rows(keys + l_.key_elements(), values);
                scales(kv.key_scales(block, h), from + l_.d * sizeof(T));
                scales(kv.value_scales(block, h), values + l_.d * sizeof(T));
            }
        }
        canonical_ += (l_.latent ? 1 : 2) * l_.block_size * stride();
    }

   private:
    // Tokens of keys that are copied together: their elements fill a cache line of the cache's order, and as many lines of
    // canonical order stay in the first level, however far apart they are.
    static constexpr int kTokens = 16;

    static void copy(void* stored, void* canonical, size_t bytes) {
        kToCache ? std::memcpy(stored, canonical, bytes) : std::memcpy(canonical, stored, bytes);
    }
    size_t scale_bytes() const { return l_.quantized ? sizeof(float) : 0; }
    /// Of one head's token, and from token to token.
    size_t token_bytes() const { return l_.d * sizeof(T) + scale_bytes() * (l_.latent ? 2 : 1); }
    size_t stride() const { return l_.heads * token_bytes(); }

    /// Elements [first, first + count) of the keys.
    void columns(T* keys, int first, int count, char* from) const {
        // Locals, since what is written might be the layout as far as a compiler knows.
        const size_t stride = this->stride(), step = size_t(l_.block_k) * S;
        const int tokens = l_.block_size;
        for (int t = 0; t < tokens; t += kTokens) {
            const int end = std::min(t + kTokens, tokens);
            auto column = [&](int i, auto elements) {
                T* to = keys + (first + i) / S * step + (first + i) % S;
                char* token = from + t * stride + i * sizeof(T);
                for (int o = t; o < end; o++, token += stride) copy(to + o * S, token, elements * sizeof(T));
            };
            int i = 0;
            for (; first % S == 0 && i + S <= count; i += S) column(i, std::integral_constant<int, S>{});
            for (; i < count; i++) column(i, std::integral_constant<int, 1>{});
        }
    }

    /// The values, S tokens at a time.
    void rows(T* values, char* from) const {
        const size_t stride = this->stride(), step = size_t(S) * l_.d_v;
        const int tokens = l_.block_size, d = l_.d;
        for (int t = 0; t < tokens; t += S, values += step, from += S * stride) {
            auto some = [&](auto count) {
                for (int i = 0; i < d; i++)
                    for (int s = 0; s < count; s++) copy(values + i * S + s, from + s * stride + i * sizeof(T), sizeof(T));
            };
            t + S <= tokens ? some(std::integral_constant<int, S>{}) : some(tokens - t);
        }
    }

    void scales(float* stored, char* from) const {
        if (!l_.quantized) return;
        for (int o = 0; o < l_.block_size; o++) copy(stored + o, from + o * stride(), sizeof(float));
    }

    const KvLayout& l_;
    char* canonical_;
};

/// Copy `count` blocks in a program of type E.
template <class E>
void copy_blocks(const KvLayout& l, const int32_t* blocks, int count, char* canonical, bool to_cache) {
    auto all = [&](auto copy) {
        for (int b = 0; b < count; b++)
            for (int layer = 0; layer < l.layers; layer++) copy.layer(KvLayer<E>(l, layer), blocks[b]);
    };
    auto elements = [&](auto type, auto step) {
        using T = decltype(type);
        to_cache ? all(BlockCopy<T, step, true>(l, canonical)) : all(BlockCopy<T, step, false>(l, canonical));
    };
    if (l.integers)
        elements(int8_t{}, std::integral_constant<int, kDotK>{});
    else if (l.quantized)
        elements(int8_t{}, std::integral_constant<int, Product<E>::kStep>{});
    else
        elements(E{}, std::integral_constant<int, Product<E>::kStep>{});
}

}  // namespace fd
