// Choosing tokens from logits; `fd_core.ops.contract.Ops.sample` defines the result to the last bit.
#pragma once

#include "threads.h"

namespace fd {

/// What sampling needs for R rows, each pointer to R values.
struct SampleRows {
    int rows, vocabulary;
    const float* logits;
    size_t stride;  // elements from row to row
    const float* temperature;
    const int32_t* top_k;
    const float* top_p;
    const float* min_p;
    const float* uniform;  // in [0, 1); null where every row is greedy
    int32_t* tokens;       // the result
};

void sample(const SampleRows& rows, Team& team);

}  // namespace fd
