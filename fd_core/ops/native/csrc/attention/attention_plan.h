// Which queries of a step are computed together, once a step for all layers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fd {

struct Step;

/// One token of the step that asks: it sees positions before `end`, in the blocks of its row: those up to its own or to
/// the end of its image, or all. Then (`both`) a window is as wide on both sides. Or it is the size of chunks, of which a
/// token sees its own.
struct Query {
    int token, row, position, end;
    bool both;
    int low(int window, bool chunked) const {
        return !window ? 0 : chunked ? position - position % window : std::max(0, position + 1 - window);
    }
    int high(int window, bool chunked) const {
        return window && both ? std::min(end, (chunked ? low(window, true) : position) + window) : end;
    }
};

/// Queries that read the same blocks up to `shared` tokens; beyond, each goes on alone through its own row's blocks.
struct QueryTile {
    int first, count;  // in AttentionPlan::queries
    int shared;        // tokens, a whole number of chunks (or all that any query of the tile sees)
    int spans;         // that are computed apart, or 0 where one thread goes through all
    size_t partials;   // where they are kept, in AttentionPlan::partials
};

/// What a thread computes for a KV head: a tile's positions [begin, end).
struct TilePart {
    int tile;
    int begin, end;
    int64_t cost;
};

/// The context is cut into chunks from position 0 on, whatever the query: each chunk's softmax is computed apart and
/// then merged in order, so a row's result depends neither on its batch nor on how its prompt was cut. The chunks of a span
/// are merged first, and then the spans: so the threads may share a long context, and no number of them changes a bit.
constexpr int kChunkTokens = 128;
constexpr int kSpanTokens = 512;
/// Rows (tokens times query heads of a KV head) of one tile: enough to reuse keys and values from registers, few enough
/// for their scores to stay in the first-level cache.
constexpr int kTileRows = 48;

struct AttentionPlan {
    std::vector<Query> queries;
    std::vector<QueryTile> tiles;
    std::vector<TilePart> parts;   // dearest first
    std::vector<int> split;        // tiles whose spans are computed apart
    std::vector<float> partials;   // of each of these and each KV head: what its spans come to
    int span_floats = 0;           // of one row: a head as stored, maximum and sum; the most that a layer needs
    int chunk_blocks = 0;          // blocks of a chunk
    int span_blocks = 0;
    int tile_queries = 0;          // largest number of queries of a tile
    bool causal = true;

    void build(const Step& step, int block_size, int heads_per_kv, int kv_heads, int threads);

   private:
    void cut_tiles(int block_size, int heads_per_kv, int kv_heads, int threads);
    void add_prefill(const Step& step, int row);
    void add_decodes(const Step& step, int block_size, std::vector<int>& rows, int most);
    int common_blocks(const Step& step, int block_size, int a, int b) const;
};

}  // namespace fd
