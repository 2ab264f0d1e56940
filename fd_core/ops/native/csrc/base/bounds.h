// Checks of what callers hand over, before any thread reads by it: an index out of range is an error, not a stray access.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fd {

/// A call that would have left its memory; the text says which value, and what the limit is.
struct OutOfBounds : std::out_of_range {
    using std::out_of_range::out_of_range;
};

/// Throw unless all of `count` indices are in [0, limit).
inline void check_indices(const char* what, const int32_t* indices, size_t count, int64_t limit) {
    uint32_t largest = 0;  // without a sign, so that a negative one is too large
    for (size_t i = 0; i < count; i++) largest = std::max(largest, uint32_t(indices[i]));
    if (count == 0 || int64_t(largest) < limit) return;
    size_t i = 0;
    while (indices[i] >= 0 && indices[i] < limit) i++;
    throw OutOfBounds(std::string(what) + " " + std::to_string(indices[i]) + " at index " + std::to_string(i) +
                      " is not in 0 to " + std::to_string(limit - 1));
}

/// Throw if `value` is more than `limit`.
inline void check_at_most(const char* what, int64_t value, int64_t limit) {
    if (value > limit)
        throw OutOfBounds(std::string(what) + ": " + std::to_string(value) + " exceeds " + std::to_string(limit));
}

}  // namespace fd
