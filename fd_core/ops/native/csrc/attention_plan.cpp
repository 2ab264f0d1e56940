#include "attention_plan.h"

#include "program.h"

namespace fd {

void AttentionPlan::build(const Step& step, int block_size, int heads_per_kv, int kv_heads, int threads) {
    queries.clear();
    tiles.clear();
    chunk_blocks = std::max(1, kChunkTokens / block_size);
    tile_queries = std::max(1, kTileRows / heads_per_kv);

    std::vector<int> decodes;
    for (int row = 0; row < step.rows; row++) {
        const int count = step.query_start[row + 1] - step.query_start[row];
        if (count > 1) add_prefill(step, row);
        if (count == 1) decodes.push_back(row);
    }
    // Sharing must leave every thread several units to draw.
    const int units = int(decodes.size()) * kv_heads;
    add_decodes(step, block_size, decodes, std::clamp(units / (3 * threads), 1, tile_queries));

    const int chunk = chunk_blocks * block_size;
    for (QueryTile& tile : tiles) {
        tile.cost = int64_t(tile.shared) * (8 + tile.count * heads_per_kv);
        for (int i = tile.first; i < tile.first + tile.count; i++)
            tile.cost += int64_t(std::max(0, queries[i].position + 1 - tile.shared) + chunk) * (8 + heads_per_kv);
    }
    std::stable_sort(tiles.begin(), tiles.end(),
                     [](const QueryTile& a, const QueryTile& b) { return a.cost > b.cost; });
}

void AttentionPlan::add_prefill(const Step& step, int row) {
    const int end = step.query_start[row + 1];
    for (int token = step.query_start[row]; token < end; token += tile_queries) {
        QueryTile tile{int(queries.size()), std::min(tile_queries, end - token), 0, 0};
        for (int i = token; i < token + tile.count; i++)
            queries.push_back({i, row, step.context_len[row] - (end - i)});
        tile.shared = queries.back().position + 1;
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
            QueryTile tile{int(queries.size()), part.end - part.begin, 0, 0};
            const int first = rows[begin + part.begin];
            int shared = step.context_len[first];
            for (int j = part.begin; j < part.end; j++) {
                const int row = rows[begin + j];
                queries.push_back({step.query_start[row], row, step.context_len[row] - 1});
                if (j > part.begin) shared = std::min(shared, common_blocks(step, block_size, first, row) * block_size);
            }
            tile.shared = shared;
            tiles.push_back(tile);
        }
    }
}

}  // namespace fd
