// What adapters add to a linear layer: up(down(x)), of the adapter that a row has, for rows that have one.
//
// A row's sums run over k in order by one accumulator each, and what a row adds starts from the linear's own product of
// that row: a row's result does not depend on which rows it is computed with, and one without an adapter has the same
// bits as in a step without adapters.
#pragma once

#include "linear/squeezed.h"

namespace fd {

constexpr int kMostParts = 3;  // linears that are stacked in one: q, k and v

/// One adapter on one linear. Parts have ranks of their own, side by side in the columns of `down`.
struct LoraDelta {
    const Linear* down;       // null where it leaves this linear alone
    const Linear* up;         // in the order of the linear: k is the rank of a part
    int starts[kMostParts];  // first column of down for each part, -1 where it leaves the part alone
};

/// All adapters on one linear; place p is entry p - 1.
struct LoraTable {
    int places;
    int ends[kMostParts];  // of the parts, in vectors of columns; a gated linear alternates its two parts
    const LoraDelta* deltas;

    const LoraDelta* of(int place) const {
        return place == 0 || deltas[place - 1].down == nullptr ? nullptr : deltas + place - 1;
    }
    int part(const Linear& up, int vec) const {
        if (up.gated) return vec % 2;
        int part = 0;
        while (vec >= ends[part] && part + 1 < kMostParts) part++;
        return part;
    }
};

/// The rows of a step that have adapters, adapter by adapter.
struct LoraPlan {
    struct Group {
        int place, begin, end;  // entries of `order`
    };
    const int32_t* places = nullptr;  // of each row of the step
    std::vector<int32_t> order;
    std::vector<Group> groups;

    void build(const int32_t* of_rows, int rows) {
        places = of_rows;
        order.clear();
        groups.clear();
        if (places == nullptr) return;
        for (int row = 0; row < rows; row++)
            if (places[row] > 0) order.push_back(row);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return places[a] < places[b]; });
        for (int i = 0; i < int(order.size()); i++) {
            const int place = places[order[i]];
            if (groups.empty() || groups.back().place != place) groups.push_back({place, i, i});
            groups.back().end = i + 1;
        }
    }
};

/// Rows of one adapter that a thread multiplies by `down` at a time.
constexpr int kLoraRows = 24;

/// This thread's share of down(x) of all rows; x(i) is the row of the i-th entry of the plan's order, each `stride`
/// elements behind the one before it. `take(row, vec, value)` gets a vector of the result for each row of the step.
template <class E, class Take>
void multiply_down(const LoraTable& table, const LoraPlan& plan, const E* x, size_t stride, int thread, int threads,
                   Take&& take) {
    auto units = [&](const LoraPlan::Group& group) {
        const LoraDelta* delta = table.of(group.place);
        return delta ? (group.end - group.begin + kLoraRows - 1) / kLoraRows * delta->down->vecs : 0;
    };
    int total = 0;
    for (const auto& group : plan.groups) total += units(group);
    const Range mine = share(total, thread, threads);
    int first = 0;
    for (const auto& group : plan.groups) {
        const int count = units(group);
        for (int unit = std::max(mine.begin, first); unit < std::min(mine.end, first + count);) {
            const Linear& down = *table.of(group.place)->down;
            const int vec = (unit - first) % down.vecs, begin = group.begin + (unit - first) / down.vecs * kLoraRows;
            const int vecs = std::min(down.vecs - vec, mine.end - unit), rows = std::min(kLoraRows, group.end - begin);
            matmul<E>(down, x + begin * stride, stride, rows, {vec, vec + vecs}, {nullptr, 0}, [&](const Block& block) {
                for (int r = 0; r < block.rows; r++)
                    for (int v = 0; v < block.vecs; v++)
                        take(plan.order[begin + block.row + r], block.vec + v, vload(block.at(r, v)));
            });
            unit += vecs;
        }
        first += count;
    }
}

/// c[R, kLanes] += h[R, up.k] * one vector of columns of up.
template <class E, int R>
void add_vector(const Linear& up, int vec, const E* h, size_t h_stride, float* c, int c_stride) {
    using P = Product<E>;
    const Panel<E> panel(up, vec);
    V sum[R];
    for (int r = 0; r < R; r++) sum[r] = vload(c + r * c_stride);
    const E* b = panel.b;
    for (int k = 0; k < up.k; k += P::kStep, b += panel.step(), h += P::kStep) {
        const typename P::Operand columns = P::load(b);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) sum[r] = P::multiply_add(sum[r], P::broadcast(h + r * h_stride), columns);
    }
    for (int r = 0; r < R; r++) vstore(c + r * c_stride, sum[r]);
}

/// Add up(h) to a block of a product; h(row) are the rows of down(x), `h_stride` elements apart.
template <class E>
void add_up(const LoraTable& table, const LoraPlan& plan, const E* h, size_t h_stride, const Block& block) {
    for (int r = 0, end; r < block.rows; r = end) {
        const int place = plan.places[block.row + r];
        for (end = r + 1; end < block.rows && plan.places[block.row + end] == place;) end++;
        const LoraDelta* delta = table.of(place);
        if (delta == nullptr) continue;
        for (int v = 0; v < block.vecs && block.vec + v < delta->up->vecs; v++) {
            const int vec = block.vec + v, start = delta->starts[table.part(*delta->up, vec)];
            if (start < 0) continue;
            for (int i = r; i < end; i += 4) {
                const E* from = h + (block.row + i) * h_stride + start;
                float* c = block.at(i, v);
                switch (std::min(4, end - i)) {
                    case 1: add_vector<E, 1>(*delta->up, vec, from, h_stride, c, block.stride); break;
                    case 2: add_vector<E, 2>(*delta->up, vec, from, h_stride, c, block.stride); break;
                    case 3: add_vector<E, 3>(*delta->up, vec, from, h_stride, c, block.stride); break;
                    default: add_vector<E, 4>(*delta->up, vec, from, h_stride, c, block.stride);
                }
            }
        }
    }
}

}  // namespace fd
