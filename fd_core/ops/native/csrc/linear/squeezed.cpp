#include "linear/squeezed.h"

#include <array>
#include <numeric>
#include <utility>

#include "base/dot.h"

namespace fd {

#if defined(FD_SQUEEZES)

namespace {

constexpr int kFewestBetween = 16;   // units of which one may be an exception, else weights stay whole
constexpr int kStepValues = kUnitValues / 2;
constexpr uint8_t kNowhere = 16;     // place of an upper byte that the table lacks

uint8_t upper_of(bf16 x) { return uint8_t(x.bits >> 8); }

/// Places of a unit's upper bytes in the table. The loops have fixed bounds, so that compilers make vectors of them.
struct Places {
    uint8_t of[kUnitValues];

    Places(const bf16* unit, const uint8_t* table) {
        uint8_t upper[kUnitValues];
        for (int i = 0; i < kUnitValues; i++) upper[i] = upper_of(unit[i]), of[i] = kNowhere;
        for (uint8_t place = 0; place < 16; place++)
            for (int i = 0; i < kUnitValues; i++) of[i] = upper[i] == table[place] ? place : of[i];
    }
    bool is_exception() const {
        uint8_t all = 0;
        for (int i = 0; i < kUnitValues; i++) all |= of[i];
        return all & kNowhere;
    }
};

void squeeze_unit(const bf16* unit, const Places& places, uint8_t* to) {
    uint8_t lower[kUnitValues];
    for (int i = 0; i < kUnitValues; i++) lower[i] = uint8_t(unit[i].bits);
    uint8_t of_step[2][kPairBytes];
    for (int vec = 0; vec < kSqueezedVecs; vec++)
        for (int i = 0; i < 2 * kLanes; i += 8)  // which stay side by side
            for (int step = 0; step < 2; step++) {
                const int from = step * kStepValues + vec * 2 * kLanes + i;
                std::memcpy(to + lower_byte(step, vec, i), lower + from, 8);
                std::memcpy(of_step[step] + byte_of_step(vec, i), places.of + from, 8);
            }
    uint8_t* const joined = to + place_byte(0, 0);
    for (int i = 0; i < kPairBytes; i++) joined[i] = uint8_t((of_step[0][i] & 15) | of_step[1][i] << 4);
}

/// Add up how often each upper byte occurs, in turns, so that one count does not wait for the one before.
void count_upper(const bf16* values, size_t count, std::array<size_t, 256>& found) {
    constexpr size_t kTurns = 4;
    std::array<std::array<size_t, 256>, kTurns> turns{};
    for (size_t i = 0; i < count; i += kTurns)  // of whole panels
        for (size_t turn = 0; turn < kTurns; turn++) turns[turn][upper_of(values[i + turn])]++;
    for (const auto& turn : turns)
        for (size_t i = 0; i < found.size(); i++) found[i] += turn[i];
}

template <int R>
[[gnu::flatten]] void tile_of(const Squeezed& squeezed, const SqueezedPanel& panel, const SqueezedCall& call) {
    constexpr int N = kSqueezedVecs;
    V acc[R * N];
    unroll<R * N>([&](int i) { acc[i] = vset(0.0f); });
    const Row<bf16>* a = call.a.data;
    auto multiply = [&](auto&& columns) {
        multiply_step<bf16, Row<bf16>, R, N>(acc, a, call.a.stride, columns);
        a += Product<bf16>::kStep;
    };
    auto multiply_joined = [&](I lower, I upper) {
        const I columns[N]{_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
        multiply([&](int v) { return columns[v]; });
    };

    const __m128i table = _mm_loadu_si128((const __m128i*)squeezed.upper);
    const uint8_t* b = panel.units;
    const bf16* whole = panel.whole;
    const char* ahead = call.ahead;
    const int* next = panel.exceptions;
    for (int unit = 0;; unit++, b += kUnitBytes) {
        for (const int until = next < panel.end ? *next : call.units; unit < until; unit++, b += kUnitBytes) {
            for (int i = 0; i < call.ahead_lines; i++, ahead += kCacheLine) prefetch(ahead);
            const I places = iload(b + 2 * kPairBytes);
            multiply_joined(iload(b), lookup(table, low_nibbles(places)));
            multiply_joined(iload(b + kPairBytes), lookup(table, high_nibbles(places)));
        }
        if (unit == call.units) break;
        for (int step = 0; step < 2; step++, whole += kStepValues)
            multiply([&](int v) { return iload(whole + v * 2 * kLanes); });
        next++;
    }
    unroll<R * N>([&](int i) { vstore(call.c + i * kLanes, acc[i]); });
}

template <size_t... I>
constexpr auto kernels_of(std::index_sequence<I...>) {
    return std::array<void (*)(const Squeezed&, const SqueezedPanel&, const SqueezedCall&), sizeof...(I)>{tile_of<I + 1>...};
}

}  // namespace

void squeezed_tile(const Squeezed& squeezed, const SqueezedPanel& panel, int rows, const SqueezedCall& call) {
    static constexpr auto kernels = kernels_of(std::make_index_sequence<kSqueezedRows>{});
    kernels[rows - 1](squeezed, panel, call);
}

size_t squeeze(Linear& w, Team& team) {
    constexpr int kHalves = TileShape<bf16>::kVecs / kSqueezedVecs;
    if (w.type != Type::bf16 || w.vecs % TileShape<bf16>::kVecs || w.padded_k % kUnitK || !w.vecs || !w.k) return 0;
    const int panels = w.vecs / kSqueezedVecs, wholes = panels / kHalves, units = w.padded_k / kUnitK;
    const size_t panel_values = size_t(units) * kUnitValues, panel_bytes = size_t(units) * kUnitBytes;
    const auto* values = static_cast<const bf16*>(w.data);

    std::vector<std::array<size_t, 256>> counts(team.size());
    team.run([&](int thread) {
        const Range mine = share(panels, thread, team.size());
        count_upper(values + mine.begin * panel_values, (mine.end - mine.begin) * panel_values, counts[thread]);
    });
    for (int thread = 1; thread < team.size(); thread++)
        for (int i = 0; i < 256; i++) counts[0][i] += counts[thread][i];
    std::array<int, 256> by_count;
    std::iota(by_count.begin(), by_count.end(), 0);
    std::stable_sort(by_count.begin(), by_count.end(), [&](int a, int b) { return counts[0][a] > counts[0][b]; });
    Squeezed squeezed{};
    std::copy_n(by_count.begin(), 16, squeezed.upper);

    // A panel that is stored whole is cut into halves, each of its steps beside the next one.
    auto each_unit = [&](int panel, auto&& take) {
        const bf16* step = values + panel / kHalves * kHalves * panel_values + panel % kHalves * kStepValues;
        for (int unit = 0; unit < units; unit++) {
            bf16 both[kUnitValues];
            for (int i = 0; i < 2; i++, step += kHalves * kStepValues)
                std::copy_n(step, kStepValues, both + i * kStepValues);
            take(unit, both);
        }
    };
    std::vector<int> starts(panels + 1);
    team.run([&](int thread) {
        const Range mine = share(panels, thread, team.size());
        for (int p = mine.begin; p < mine.end; p++)
            each_unit(p, [&](int, const bf16* unit) { starts[p + 1] += Places(unit, squeezed.upper).is_exception(); });
    });
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    const size_t count = starts[panels];
    if (count * kFewestBetween > size_t(panels) * units) return 0;
    std::vector<int> exceptions(count);
    std::vector<bf16> kept(count * kUnitValues);

    // In place, a whole panel of each thread at a time: where one writes, all have read.
    std::vector<uint8_t> written(team.size() * kHalves * panel_bytes);
    team.run([&](int thread) {
        uint8_t* const bytes = &written[thread * kHalves * panel_bytes];
        for (int first = 0; first < wholes; first += team.size()) {
            const Range mine{std::min(wholes, first + thread) * kHalves, std::min(wholes, first + thread + 1) * kHalves};
            for (int p = mine.begin; p < mine.end; p++) {
                int exception = starts[p];
                each_unit(p, [&](int unit, const bf16* both) {
                    const Places places(both, squeezed.upper);
                    squeeze_unit(both, places, bytes + (p - mine.begin) * panel_bytes + size_t(unit) * kUnitBytes);
                    if (!places.is_exception()) return;
                    std::copy_n(both, kUnitValues, &kept[size_t(exception) * kUnitValues]);
                    exceptions[exception++] = unit;
                });
            }
            team.wait_for_all();
            std::memcpy(static_cast<char*>(w.data) + mine.begin * panel_bytes, bytes, (mine.end - mine.begin) * panel_bytes);
            team.wait_for_all();
        }
    });
    // Behind them, where the last quarter was.
    char* to = static_cast<char*>(w.data) + panels * panel_bytes;
    auto moved = [&](const auto& from) {
        const size_t bytes = from.size() * sizeof from[0];
        std::memcpy((void*)to, (const void*)from.data(), bytes);
        return std::exchange(to, to + bytes);
    };
    squeezed.whole = reinterpret_cast<const bf16*>(moved(kept));
    squeezed.exceptions = reinterpret_cast<const int*>(moved(exceptions));
    squeezed.starts = reinterpret_cast<const int*>(moved(starts));
    w.squeezed = squeezed;
    return to - static_cast<char*>(w.data);
}

#else

size_t squeeze(Linear&, Team&) { return 0; }
void squeezed_tile(const Squeezed&, const SqueezedPanel&, int, const SqueezedCall&) {}

#endif

}  // namespace fd
