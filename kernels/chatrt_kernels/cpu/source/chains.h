// Chains of drafts: a draft's step, the choice of its token, and again, without coming back to Python.
#pragma once

#include <cstdint>

#include "program.h"
#include "sampling.h"

namespace chatrt {

constexpr int kMaxDrafts = 32;  // of one chain; MAX_DRAFTS in structs.py

// The drafts of one sequence. A chain goes on while it has fewer than `max_tokens` and is as likely as `floor` or more.
// Mirrored by `structs.py`, like what follows.
struct Chain {
    const ChatrtSampler* sampler;
    int64_t position;  // of the first row; what it drafts comes behind it
    double floor;
    int32_t token_id;  // of the first row
    int32_t base_row;  // which the first row starts from
    int32_t max_tokens;
    int32_t num_drafts;  // how many were made
    int32_t drafts[kMaxDrafts];
};

// What all chains share. Row r of a step, whose base row is its feature row, leaves at logits + r * logits_stride the
// logits of the subset's tokens, and in row first_following + r of the bases what its successor starts from.
struct Chains {
    Program* program;
    Pool* pool;
    const ChatrtSubset* subset;
    const float* logits;
    int64_t logits_stride;
    const int32_t* page_table;  // row c: the pages of chain c, for all positions that its rows may have
    int64_t page_table_stride;
    void* memory;  // chatrt_sampling_scratch_bytes of the subset's size
    int32_t page_size;
    int32_t first_following;
};

// Runs all chains, those that still go on in one step together, in their order. Each row's token is what
// chatrt_choose_among gives. False where the pool cannot hold a step.
bool run_chains(const Chains& shared, Chain* chains, int num_chains);

}  // namespace chatrt
