// Choosing tokens from rows of logits; the C interface that cpu/sampling.py binds.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// What one turn asked for, and what its penalties count. Arrays belong to the caller; their ids are distinct and below
// vocab_size. `seen_ids` are those of the answer, and of the prompt where the repetition penalty is on;
// `seen_counts` says how often the answer holds them.
struct ChatrtSampler {
    uint64_t seed;
    double top_p;              // 1 is off
    int32_t vocab_size;        // ids at or above it are never chosen
    int32_t top_k;             // 0 is off
    float temperature;         // 0 is greedy
    float log_min_p;           // minus infinity is off
    float repetition_penalty;  // 1 is off
    float presence_penalty;    // 0 is off
    float frequency_penalty;   // 0 is off
    int32_t num_bias;
    int32_t num_seen;
    const int32_t* bias_ids;
    const float* bias_values;
    const int32_t* seen_ids;
    const int32_t* seen_counts;
};

// Some tokens of the vocabulary, of which alone there are logits. Arrays belong to the caller.
struct ChatrtSubset {
    const int32_t* listed;  // [num], distinct ids in the order of their logits
    const int32_t* ids;     // [num], the same ids, ascending
    const int32_t* places;  // [num], where the logit of ids[i] stands
    const int32_t* ranks;   // [num_ranks], i where the index is ids[i], -1 where it is none of them
    int32_t num;
    int32_t num_ranks;
};

// Bytes of scratch memory that the functions below need for rows of up to so many logits.
int64_t chatrt_sampling_scratch_bytes(int32_t vocab_size);

// The target's own token for each row of a verify, in order, up to and including the first that differs from its
// draft; returns how many were chosen. Row i (at logits + i * row_stride) follows the history and drafts[0, i). There
// are num_drafts + 1 rows, and token_ids has room for as many. `position` is that of the first token. NaN is never
// chosen; without a logit above minus infinity the choice is id 0, with an infinite one it is the first of these.
int32_t chatrt_choose_rows(const ChatrtSampler* sampler, const float* logits, int64_t row_stride, const int32_t* drafts,
                           int32_t num_drafts, int64_t position, void* memory, int32_t* token_ids);

// The token that a row of the whole vocabulary would give that had the `num` logits of the subset, and minus infinity
// for all other tokens. The row follows the history and `drafts`, and `position` is that of the token. `probability`
// receives the softmax of the logits as they are, among the subset; where none of them is finite, it means nothing.
int32_t chatrt_choose_among(const ChatrtSampler* sampler, const ChatrtSubset* subset, const float* logits,
                            const int32_t* drafts, int32_t num_drafts, int64_t position, void* memory,
                            float* probability);

// Log-softmax of one row at `token_id` (into logprobs[0]) and at its `num_top` likeliest ids, likeliest first and the
// lower id first among equals (into logprobs[1 ...] and top_ids). Returns the number of these: less than num_top where
// fewer logits are finite, none where the maximum is not.
int32_t chatrt_log_probs(const float* logits, int32_t vocab_size, int32_t token_id, int32_t num_top, void* memory,
                         float* logprobs, int32_t* top_ids);

}  // extern "C"
#pragma GCC visibility pop
