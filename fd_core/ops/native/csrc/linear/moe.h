// A mixture of experts: route, group the tokens by expert, run each expert on its group, add what they return.
#pragma once

#include "operations.h"

namespace fd {

struct ExpertWeights {
    const float* router;  // [experts, width]
    const float* router_bias;  // [experts], or null
    const float* bias;    // [experts], for the choice only; or null
    const float* shared_gate;  // [width], the sigmoid of its product weighs the shared experts; or null
    std::vector<const Linear*> gate_up, down;  // null for those that other ranks hold
    const Linear* shared_gate_up;  // or null
    const Linear* shared_down;
    int top_k;
    bool normalize;
    bool sigmoid;        // scores are sigmoids of the products, not their softmax
    bool weighs_inputs;  // weights multiply the inputs of experts, not their outputs
    int groups, top_groups;  // the chosen experts are in a token's `top_groups` best groups
    float norm_floor;
    float weight_scale;
};

/// Columns of each rank: of the rows between the two linears of an expert and of the shared one, and of the residual.
/// Ranks that hold experts whole exchange the results of these instead of `hidden`.
struct ExpertColumns {
    RankColumns hidden, shared_hidden, out;
    std::vector<int> experts;  // the first one of each rank, then their number; empty where all ranks hold all
};

/// residual += moe(norm(x)); the experts of a token are added in the order of their scores.
template <class E>
class MoeResidual : public Operation {
   public:
    MoeResidual(Program& program, NormRows<E> norm, ExpertWeights experts, Activation activation, ExpertColumns columns,
                int residual);
    const char* name() const override { return "moe_residual"; }
    void run(const Context& context) override;

   private:
    void route(const Context& context, int token, float* scores);
    void keep_best_groups(float* ranked, float* totals) const;
    void group_by_expert(int tokens);
    void gather(const Context& context) const;
    void quantize_hidden(const Context& context) const;
    void run_experts(const Context& context) const;
    void exchange_results(const Context& context);
    void combine(const Context& context) const;

    NormRows<E> norm_;
    ExpertWeights experts_;
    Activation activation_;
    ExpertColumns columns_;
    int residual_;
    int width_;                              // of the columns of the residual that this rank computes
    int gathered_, hidden_, result_;         // buffers with top_k rows for each token, grouped by expert
    int shared_hidden_, shared_result_;      // one row for each token
    // This rank's columns of the hidden rows and of the residual; of one rank alone, the hidden rows themselves.
    int hidden_part_, shared_hidden_part_, part_ = -1;
    // Quantized rows of what the packed of the experts multiply; -1 where none is packed.
    int quantized_ = -1, quantized_hidden_ = -1, shared_quantized_ = -1, shared_quantized_hidden_ = -1;
    std::vector<int> chosen_;                // [tokens, top_k]
    std::vector<float> weights_;             // [tokens, top_k]
    std::vector<float> shared_weights_;      // [tokens]
    std::vector<int> place_;                 // [tokens, top_k], row in the grouped buffers
    std::vector<int> starts_;                // [experts + 1]
    std::vector<const float*> results_;      // [experts], the first row of each in the slot of its rank
};

}  // namespace fd
