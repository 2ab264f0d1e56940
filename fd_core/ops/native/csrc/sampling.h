// Penalties on logits and choosing tokens from them; `sample` and `penalize` of `fd_core.ops.contract.Ops` define the
// results to the last bit.
#pragma once

#include "base/bounds.h"
#include "base/threads.h"

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
    float* peaks;          // the largest logit, NaN if one is NaN
};

void sample(const SampleRows& rows, Team& team);

/// What penalties on n rows of logits need; arrays of n values but for the drafts.
struct PenaltyRows {
    int rows, drafts, vocabulary;
    int logits_count, counts_count;  // rows of these
    float* logits;  // changed in place
    size_t stride;  // elements from row to row
    const int32_t* logits_rows;
    const int32_t* counts;  // [*, vocabulary]: 2 * times generated + (1 if in the prompt)
    const int32_t* counts_rows;
    const int32_t* draft_rows;  // [drafts], not falling: indices into the rows
    const int32_t* draft_ids;   // [drafts]: generated once more for their row
    const float* repetition;
    const float* presence;
    const float* frequency;
};

void penalize(const PenaltyRows& rows, Team& team);

/// Which tokens may be drawn in n rows of logits.
struct MaskRows {
    int rows, vocabulary;
    int logits_count;  // rows of these
    float* logits;  // changed in place
    size_t stride;  // elements from row to row
    const int32_t* logits_rows;
    const uint32_t* bits;  // [rows, ceil(vocabulary / 32)], the lowest bit first; what is not allowed becomes -inf
};

void mask_logits(const MaskRows& rows, Team& team);

}  // namespace fd
