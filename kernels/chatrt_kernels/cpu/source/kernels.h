// The kernels behind the calls. Each computes one task of its call; tasks touch disjoint results.
#pragma once

#include <vector>

#include "calls.h"

namespace chatrt {

// Rows [first, last).
void embed_rows(const Embed& embed, const Step& step, int first, int last);
void norm_rows(const Norm& norm, int first, int last);
void quantise_rows(const Quantise& quantise, int first, int last);
void add_rows(const Pairwise& add, int first, int last);
void swiglu_rows(const Pairwise& swiglu, int first, int last);
void gather_rows(const Gather& gather, const int64_t* rows, int first, int last);
void rope_rows(const Rope& rope, const Step& step, int first, int last);

// What a linear call is cut into: strips of all its matrices (kGated: pairs of strips of gate and up).
int num_units(const Linear& linear);
// Units [first, last) for `num_rows` rows; `run` is another number in every run of any program.
void linear_units(const Linear& linear, uint64_t run, int num_rows, int first, int last);

// Rows of one sequence that are attended together.
struct RowBlock {
    int32_t sequence;
    int32_t first_row;
    int32_t num_rows;
    int32_t num_keys;  // keys that the last of the rows sees
};

// How the rows of a step are attended; the same for every layer.
struct AttentionPlan {
    std::vector<RowBlock> blocks;
    int num_splits = 1;      // of the longest block
    bool by_split = false;  // splits are tasks of their own, and are folded in a second phase
};
void plan_attention(const Step& step, const Attention& attention, int num_threads, AttentionPlan* plan);
int num_attention_tasks(const AttentionPlan& plan, const Attention& attention);
int num_fold_tasks(const AttentionPlan& plan, const Attention& attention);
void attend_task(const Attention& attention, const Step& step, const AttentionPlan& plan, int task);
void fold_task(const Attention& attention, const AttentionPlan& plan, int task);

}  // namespace chatrt
