#include "sampling.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/simd.h"

namespace fd {
namespace {

constexpr double kWeightOne = 4294967296.0;  // 2^32
constexpr double kLowest = -23.0;            // 2^32 * exp(-23) rounds to 0
constexpr int kGroup = 64;                   // logits that are skipped or weighed together
constexpr int kSeen = 16;                    // counts that are looked at together

/// e^x for x in [kLowest, 0], within one unit of the last place of a double; no branches, so that loops vectorize.
inline double exp_negative(double x) {
    const double n = std::nearbyint(x * 1.4426950408889634);
    const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    // Taylor's series: |r| <= 0.35, so the 14th term is below 2^-54.
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r * r + r + 1.0;
    const int64_t exponent = (int64_t(int(n)) + 1023) << 52;
    double scale;
    std::memcpy(&scale, &exponent, 8);
    return p * scale;
}

struct Candidate {
    double weight;
    float logit;
    int id;
};

/// Index of the largest logit, the lowest on a tie.
int argmax(const float* x, int n) {
    V largest = vset(-INFINITY);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) largest = vmax(vload(x + i), largest);
    float best = vmaximum(largest);
    for (; i < n; i++) best = std::max(best, x[i]);
    for (i = 0; i < n; i++)
        if (x[i] == best) return i;
    return 0;
}

/// NaN if one of the numbers is, else `largest`.
float peak(const float* x, int n, float largest) {
    int strange = 0;
    for (int i = 0; i < n; i++) strange |= x[i] != x[i];
    return strange ? NAN : largest;
}

/// Tokens whose weight is not zero, in order of id.
void weigh(const float* x, int n, float largest, float temperature, std::vector<Candidate>& found) {
    found.clear();
    const double top = largest, divisor = temperature;
    const float floor = float(top + kLowest * divisor) - 1e-3f * std::fabs(largest);
    double weight[kGroup];
    for (int begin = 0; begin < n; begin += kGroup) {
        const int count = std::min(kGroup, n - begin);
        float most = -INFINITY;
        for (int i = 0; i < count; i++) most = x[begin + i] > most ? x[begin + i] : most;
        if (most < floor) continue;
        for (int i = 0; i < count; i++) {
            const double scaled = (double(x[begin + i]) - top) / divisor;
            weight[i] = std::nearbyint(kWeightOne * exp_negative(scaled > kLowest ? scaled : kLowest));
        }
        for (int i = 0; i < count; i++)
            if (weight[i] > 0) found.push_back({weight[i], x[begin + i], begin + i});
    }
}

/// Drop what top_k, top_p and min_p leave out; keeps the order of ids.
void filter(std::vector<Candidate>& found, int top_k, double top_p, double min_p) {
    auto likelier = [](const Candidate& a, const Candidate& b) {
        return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
    };
    if (top_k > 0 && size_t(top_k) < found.size()) {
        std::nth_element(found.begin(), found.begin() + top_k, found.end(), likelier);
        found.resize(top_k);
    }
    if (top_p < 1.0) {
        double mass = 0;
        for (const Candidate& c : found) mass += c.weight;
        // Sort no more than the head that reaches the mass: its length doubles until it does.
        const double wanted = mass * top_p;
        size_t kept = 0, sorted = 0;
        double before = 0;
        for (size_t length = 64; kept == sorted && sorted < found.size(); length *= 4) {
            const size_t end = std::min(found.size(), sorted + length);
            std::partial_sort(found.begin() + sorted, found.begin() + end, found.end(), likelier);
            sorted = end;
            while (kept < sorted && (before < wanted || kept == 0)) before += found[kept++].weight;
        }
        found.resize(kept);
    }
    const double least = min_p * kWeightOne;
    found.erase(std::remove_if(found.begin(), found.end(), [&](const Candidate& c) { return c.weight < least; }),
                found.end());
    std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
}

int draw(const std::vector<Candidate>& kept, double uniform, int likeliest) {
    double mass = 0;
    for (const Candidate& c : kept) mass += c.weight;
    const double target = uniform * mass;
    double sum = 0;
    for (const Candidate& c : kept) {
        sum += c.weight;
        if (sum > target) return c.id;
    }
    return likeliest;
}

struct Penalty {
    float repetition;
    double presence, frequency;

    /// A product of a float and a count is exact in a double, so fusing it with the sum changes nothing.
    float operator()(float logit, int32_t count) const {
        const float changed = logit > 0 ? logit / repetition : logit * repetition;
        const int generated = count >> 1;
        const double added = frequency * generated + (generated > 0 ? presence : 0.0);
        return (count != 0 ? changed : logit) - float(added);
    }
};

/// Penalize one row; `drafts` ids are generated once more than `counts` says.
void penalize_row(float* x, const int32_t* counts, int n, const Penalty& penalty, const int32_t* drafts, int num) {
    std::vector<float> before(num);
    for (int i = 0; i < num; i++) before[i] = x[drafts[i]];
    for (int begin = 0; begin < n; begin += kSeen) {
        const int count = std::min(kSeen, n - begin);
        int32_t seen = 0;
        for (int i = 0; i < count; i++) seen |= counts[begin + i];
        if (seen == 0) continue;
        for (int i = begin; i < begin + count; i++) x[i] = penalty(x[i], counts[i]);
    }
    for (int i = 0; i < num; i++) {
        const int times = int(std::count(drafts, drafts + num, drafts[i]));
        x[drafts[i]] = penalty(before[i], counts[drafts[i]] + 2 * times);
    }
}

/// Set the logits of tokens whose bit is 0 to -inf.
void mask_row(float* x, const uint32_t* bits, int n) {
    for (int begin = 0; begin < n; begin += 32) {
        const uint32_t word = bits[begin / 32];
        if (word == ~0u) continue;
        const int count = std::min(32, n - begin);
        for (int i = 0; i < count; i++) x[begin + i] = word >> i & 1 ? x[begin + i] : -INFINITY;
    }
}

/// Call compute(row) for each of `rows` rows, side by side.
template <class F>
void each_row(int rows, Team& team, F&& compute) {
    std::atomic<int> next{0};
    auto work = [&](int) {
        for (int row; (row = next.fetch_add(1, std::memory_order_relaxed)) < rows;) compute(row);
    };
    if (rows == 1)
        work(0);  // waking the team costs more than one row
    else
        team.run(work);
}

}  // namespace

void penalize(const PenaltyRows& p, Team& team) {
    check_indices("row of logits", p.logits_rows, p.rows, p.logits_count);
    check_indices("row of counts", p.counts_rows, p.rows, p.counts_count);
    check_indices("row of drafts", p.draft_rows, p.drafts, p.rows);
    check_indices("draft token id", p.draft_ids, p.drafts, p.vocabulary);
    each_row(p.rows, team, [&](int row) {
        const int32_t* end = p.draft_rows + p.drafts;
        const auto [first, last] = std::equal_range(p.draft_rows, end, row);
        penalize_row(p.logits + p.logits_rows[row] * p.stride, p.counts + size_t(p.counts_rows[row]) * p.vocabulary,
                     p.vocabulary, {p.repetition[row], p.presence[row], p.frequency[row]},
                     p.draft_ids + (first - p.draft_rows), int(last - first));
    });
}

void mask_logits(const MaskRows& m, Team& team) {
    check_indices("row of logits", m.logits_rows, m.rows, m.logits_count);
    const size_t words = (m.vocabulary + 31) / 32;
    each_row(m.rows, team,
             [&](int row) { mask_row(m.logits + m.logits_rows[row] * m.stride, m.bits + row * words, m.vocabulary); });
}

void sample(const SampleRows& s, Team& team) {
    std::atomic<int> next{0};
    auto work = [&](int) {
        std::vector<Candidate> found;
        for (int row; (row = next.fetch_add(1, std::memory_order_relaxed)) < s.rows;) {
            const float* x = s.logits + row * s.stride;
            const int likeliest = argmax(x, s.vocabulary);
            s.tokens[row] = likeliest;
            s.peaks[row] = peak(x, s.vocabulary, x[likeliest]);
            if (s.uniform == nullptr || s.temperature[row] == 0.0f || !std::isfinite(s.peaks[row])) continue;
            weigh(x, s.vocabulary, x[likeliest], s.temperature[row], found);
            if (s.top_k[row] > 0 || s.top_p[row] < 1.0f || s.min_p[row] > 0.0f)
                filter(found, s.top_k[row], double(s.top_p[row]), double(s.min_p[row]));
            s.tokens[row] = draw(found, double(s.uniform[row]), likeliest);
        }
    };
    if (s.rows == 1)
        work(0);  // waking the team costs more than one row
    else
        team.run(work);
}

}  // namespace fd
