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
    // Sharing must leave every thread several tiles to draw.
    const int units = int(decodes.size()) * kv_heads;
    add_decodes(step, block_size, decodes, std::clamp(units / (4 * threads), 1, tile_queries));

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

/// Put rows whose tables begin with the same blocks side by side, then cut them into tiles of at most `most`.
void AttentionPlan::add_decodes(const Step& step, int block_size, std::vector<int>& rows, int most) {
    auto table = [&](int row) { return step.block_tables + size_t(row) * step.max_blocks; };
    std::stable_sort(rows.begin(), rows.end(), [&](int a, int b) { return table(a)[0] < table(b)[0]; });
    for (size_t i = 0; i < rows.size();) {
        QueryTile tile{int(queries.size()), 0, 0, 0};
        int shared = step.context_len[rows[i]] / block_size;
        size_t end = i;
        for (; end < rows.size() && int(end - i) < most; end++) {
            const int common = end == i ? shared : std::min(shared, common_blocks(step, block_size, rows[i], rows[end]));
            if (common == 0 && end > i) break;
            if (end > i) shared = common;
            queries.push_back({step.query_start[rows[end]], rows[end], step.context_len[rows[end]] - 1});
        }
        tile.count = int(end - i);
        tile.shared = tile.count == 1 ? queries.back().position + 1 : shared * block_size;
        tiles.push_back(tile);
        i = end;
    }
}

}  // namespace fd
