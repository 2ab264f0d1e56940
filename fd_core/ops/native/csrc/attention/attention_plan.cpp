#include "attention/attention_plan.h"

#include "program.h"

namespace fd {

constexpr int kShareParts = 8;  // of a thread's share of the work

void AttentionPlan::build(const Step& step, int block_size, int heads_per_kv, int kv_heads, int threads) {
    queries.clear();
    tiles.clear();
    chunk_blocks = std::max(1, kChunkTokens / block_size);
    span_blocks = std::max(1, kSpanTokens / (chunk_blocks * block_size)) * chunk_blocks;
    tile_queries = std::max(1, kTileRows / heads_per_kv);

    std::vector<int> decodes;
    int units = 0;
    for (int row = 0; row < step.rows; row++) {
        const int count = step.query_start[row + 1] - step.query_start[row];
        if (count > 1) add_prefill(step, row);
        if (count == 1) {
            decodes.push_back(row);
            units += kv_heads * ceil_div(step.context_len[row], span_blocks * block_size);
        }
    }
    // Sharing must leave every thread several units to draw.
    add_decodes(step, block_size, decodes, std::clamp(units / (3 * threads), 1, tile_queries));
    cut_tiles(block_size, heads_per_kv, kv_heads, threads);
}

/// Make each tile one part, or one for each of its spans where it is too much for one thread.
void AttentionPlan::cut_tiles(int block_size, int heads_per_kv, int kv_heads, int threads) {
    const int chunk = chunk_blocks * block_size, span = span_blocks * block_size;
    auto part_of = [&](int index, int begin, int end) {
        const QueryTile& tile = tiles[index];
        auto inside = [&](int from, int to) { return int64_t(std::max(0, std::min(to, end) - std::max(from, begin))); };
        int64_t cost = inside(0, tile.shared) * (8 + tile.count * heads_per_kv);
        for (int i = tile.first; i < tile.first + tile.count; i++)
            cost += (inside(tile.shared, queries[i].end) + chunk) * (8 + heads_per_kv);
        return TilePart{index, begin, end, cost};
    };
    int64_t total = 0;
    parts.clear();
    split.clear();
    for (int i = 0; i < int(tiles.size()); i++) {
        int end = 0;
        for (int j = tiles[i].first; j < tiles[i].first + tiles[i].count; j++) end = std::max(end, queries[j].end);
        parts.push_back(part_of(i, 0, end));
        total += parts.back().cost;
    }
    size_t floats = 0;
    for (int i = 0; i < int(tiles.size()); i++) {
        const TilePart whole = parts[i];
        const int spans = ceil_div(whole.end, span);
        // The last unit that a thread draws keeps the others waiting: it must be a small part of a thread's share.
        if (threads == 1 || spans == 1 || kShareParts * threads * whole.cost <= total * kv_heads) continue;
        tiles[i].spans = spans;
        tiles[i].partials = floats;
        floats += size_t(kv_heads) * spans * round_up(tiles[i].count * heads_per_kv, kLanes) * span_floats;
        split.push_back(i);
        parts[i] = part_of(i, 0, span);
        for (int begin = span; begin < whole.end; begin += span)
            parts.push_back(part_of(i, begin, std::min(begin + span, whole.end)));
    }
    if (partials.size() < floats) partials.resize(floats);
    std::stable_sort(parts.begin(), parts.end(), [](const TilePart& a, const TilePart& b) { return a.cost > b.cost; });
}

void AttentionPlan::add_prefill(const Step& step, int row) {
    const int end = step.query_start[row + 1];
    for (int token = step.query_start[row]; token < end; token += tile_queries) {
        QueryTile tile{int(queries.size()), std::min(tile_queries, end - token), 0, 0, 0};
        for (int i = token; i < token + tile.count; i++) {
            const int position = step.context_len[row] - (end - i);
            const int own = step.ends ? step.ends[i] : position + 1;
            queries.push_back({i, row, position, causal ? own : step.context_len[row], !causal});
        }
        tile.shared = queries.back().end;
        tiles.push_back(tile);
    }
}

int AttentionPlan::common_blocks(const Step& step, int block_size, int a, int b) const {
    const int32_t* x = step.block_tables + size_t(a) * step.max_blocks;
    const int32_t* y = step.block_tables + size_t(b) * step.max_blocks;
    const int most = std::min(step.context_len[a], step.context_len[b]) / block_size;
    int same = 0;
    while (same < most && x[same] == y[same]) same++;
    return same / chunk_blocks * chunk_blocks;
}

/// Put rows whose tables begin with the same blocks side by side, then cut them into even tiles of at most `most`.
void AttentionPlan::add_decodes(const Step& step, int block_size, std::vector<int>& rows, int most) {
    auto first_block = [&](int row) { return step.block_tables[size_t(row) * step.max_blocks]; };
    std::stable_sort(rows.begin(), rows.end(), [&](int a, int b) { return first_block(a) < first_block(b); });
    for (size_t begin = 0, end; begin < rows.size(); begin = end) {
        for (end = begin + 1; end < rows.size() && common_blocks(step, block_size, rows[begin], rows[end]) > 0;) end++;
        const int count = int(end - begin), cuts = (count + most - 1) / most;
        for (int i = 0; i < cuts; i++) {
            const Range part = share(count, i, cuts);
            QueryTile tile{int(queries.size()), part.end - part.begin, 0, 0, 0};
            const int first = rows[begin + part.begin];
            int shared = step.context_len[first];
            for (int j = part.begin; j < part.end; j++) {
                const int row = rows[begin + j];
                queries.push_back({step.query_start[row], row, step.context_len[row] - 1, step.context_len[row], false});
                if (j > part.begin) shared = std::min(shared, common_blocks(step, block_size, first, row) * block_size);
            }
            tile.shared = shared;
            tiles.push_back(tile);
        }
    }
}

}  // namespace fd
