// Choosing tokens: bias, penalties, temperature, the filters of candidates.h, then score + keyed Gumbel noise.
//
// Noise is computed only for candidates whose random bits could beat the best so far, which a cheap bound on the bits
// decides without a logarithm. A choice is a function of the row, the parameters, the seed, the position and the tokens
// before it.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "candidates.h"
#include "simd.h"

namespace chatrt::sampling {
namespace {

// ---- tokens of a row -------------------------------------------------------------------------------------------

// Which token each score of a row is of, ascending: all of a vocabulary, or some of it.
struct Tokens {
    const ChatrtSubset* some;  // null: all
    int num;

    int32_t id(int index) const { return some ? some->ids[index] : index; }
    // -1 for a token that the row does not have.
    int index(int32_t id) const { return !some ? id : id < some->num_ranks ? some->ranks[id] : -1; }
};

// ---- bias and penalties ----------------------------------------------------------------------------------------

int occurrences(const int32_t* ids, int n, int32_t id) {
    int count = 0;
    for (int i = 0; i < n; ++i) count += ids[i] == id;
    return count;
}

bool has_penalties(const ChatrtSampler& sampler) {
    return sampler.repetition_penalty != 1.0f || sampler.presence_penalty != 0.0f || sampler.frequency_penalty != 0.0f;
}

// The logit of an id that the prompt holds, or that the answer holds `count` times.
float penalised(const ChatrtSampler& sampler, float logit, int count) {
    const float penalty = sampler.repetition_penalty;
    if (penalty != 1.0f) logit = logit > 0.0f ? logit / penalty : logit * penalty;
    logit -= sampler.frequency_penalty * float(count);
    return count > 0 ? logit - sampler.presence_penalty : logit;
}

bool has_edits(const ChatrtSampler& sampler, int num_before) {
    return sampler.num_bias || (has_penalties(sampler) && sampler.num_seen + num_before);
}

// Drafts before the row count as emitted.
void edit(const ChatrtSampler& sampler, const Tokens& tokens, const int32_t* drafts, int num_before, float* logits) {
    for (int i = 0; i < sampler.num_bias; ++i) {
        const int index = tokens.index(sampler.bias_ids[i]);
        if (index >= 0) logits[index] += sampler.bias_values[i];
    }
    if (!has_penalties(sampler)) return;
    for (int i = 0; i < sampler.num_seen; ++i) {
        const int32_t id = sampler.seen_ids[i];
        const int index = tokens.index(id);
        if (index < 0) continue;
        const int count = sampler.seen_counts[i] + occurrences(drafts, num_before, id);
        logits[index] = penalised(sampler, logits[index], count);
    }
    for (int i = 0; i < num_before; ++i) {
        const int32_t id = drafts[i];
        if (id < 0 || id >= sampler.vocab_size || tokens.index(id) < 0) continue;
        if (occurrences(drafts, i, id) || occurrences(sampler.seen_ids, sampler.num_seen, id)) continue;
        float& logit = logits[tokens.index(id)];
        logit = penalised(sampler, logit, occurrences(drafts, num_before, id));
    }
}

void divide(const float* from, float divisor, int n, float* to) {
    const Floats divisors = splat(divisor);
    for (int i = 0; i < n; i += kLanes) {
        const int num = std::min(kLanes, n - i);
        store_first(to + i, div(load_first(from + i, num), divisors), num);
    }
}

// ---- noise -----------------------------------------------------------------------------------------------------

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
// Noise comes from 32-bit uniforms in the open interval: none is larger.
constexpr double kMaxGumbel = 22.8739;

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

uint32_t noise_bits(uint64_t key, int32_t id) { return uint32_t(mix(uint64_t(id) * kGolden + key) >> 32); }

double gumbel_noise(uint32_t bits) { return -std::log(-std::log((double(bits) + 0.5) * 0x1p-32)); }

struct Best {
    double noisy;
    int32_t id;
};

// For what rounding to float32 may lose where `noisy` is compared with a score.
float margin_of(double noisy) { return 1e-3f + 1e-6f * std::fabs(float(noisy)); }

// Marks which of up to 64 candidates could beat the best; returns whether any could. A noise from best - score on has
// a uniform u with log2(1 - u) <= (score - best) * log2(e); 1 - u is the complement of the bits, and a float's own
// bits, read as a number, bound its logarithm from below.
bool find_rivals(const uint32_t* bits, const float* scores, int n, double noisy, int32_t* rivals) {
    const float best = float(noisy);
    const float offset = 127 + 31 + margin_of(noisy);
    int32_t any = 0;
    for (int j = 0; j < n; ++j) {
        const float complement = float(int32_t(~bits[j] >> 1)) + 0.25f;
        int32_t complement_bits;
        std::memcpy(&complement_bits, &complement, 4);
        const float least_log2 = float(complement_bits) * 0x1p-23f;
        rivals[j] = least_log2 <= (scores[j] - best) * 1.44269504f + offset;
        any |= rivals[j];
    }
    return any != 0;
}

// argmax of score + noise over up to 64 candidates, on from the best so far; the lower id of equals.
Best choose_of_block(const int32_t* ids, const float* scores, int n, uint64_t key, Best best) {
    uint32_t bits[kBlock];
    int32_t rivals[kBlock];
    for (int j = 0; j < n; ++j) bits[j] = noise_bits(key, ids[j]);
    if (!find_rivals(bits, scores, n, best.noisy, rivals)) return best;
    for (int j = 0; j < n; ++j) {
        if (!rivals[j]) continue;
        const double noisy = double(scores[j]) + gumbel_noise(bits[j]);
        if (noisy > best.noisy || (noisy == best.noisy && ids[j] < best.id)) best = {noisy, ids[j]};
    }
    return best;
}

int32_t choose_of_list(const Scratch& scratch, const Tokens& tokens, int num, uint64_t key, Best best) {
    int32_t ids[kBlock];
    for (int i = 0; i < num; i += kBlock) {
        const int end = std::min(kBlock, num - i);
        for (int j = 0; j < end; ++j) ids[j] = tokens.id(scratch.list_indices[i + j]);
        best = choose_of_block(ids, scratch.list_scores + i, end, key, best);
    }
    return best.id;
}

int32_t choose_of_row(const Row& row, const Tokens& tokens, const float* block_max, uint64_t key, Best best) {
    int32_t ids[kBlock];
    for (int b = 0; b < num_blocks(row.num); ++b) {
        if (double(block_max[b]) < best.noisy - kMaxGumbel) continue;
        const int start = b * kBlock, end = std::min(kBlock, row.num - start);
        for (int j = 0; j < end; ++j) ids[j] = tokens.id(start + j);
        best = choose_of_block(ids, row.scores + start, end, key, best);
    }
    return best.id;
}

// ---- one row ---------------------------------------------------------------------------------------------------

// The row's numbers, those of a subset put in order; `scratch.scores` holds them where they may be changed.
const float* scores_of(const Tokens& tokens, const float* logits, bool is_edited, const Scratch& scratch) {
    if (tokens.some) {
        for (int i = 0; i < tokens.num; ++i) scratch.scores[i] = logits[tokens.some->places[i]];
        return scratch.scores;
    }
    if (!is_edited) return logits;
    std::copy_n(logits, tokens.num, scratch.scores);
    return scratch.scores;
}

int32_t choose(const ChatrtSampler& sampler, const Tokens& tokens, const float* logits, const int32_t* drafts,
               int num_before, int64_t position, const Scratch& scratch) {
    const int n = tokens.num;
    const bool is_edited = has_edits(sampler, num_before);
    const float* scores = scores_of(tokens, logits, is_edited, scratch);
    if (is_edited) edit(sampler, tokens, drafts, num_before, scratch.scores);
    const bool greedy = sampler.temperature == 0.0f;
    if (!greedy && sampler.temperature != 1.0f) {
        divide(scores, sampler.temperature, n, scratch.scores);
        scores = scratch.scores;
    }
    const Row row = find_maxima(scores, n, scratch.block_max);
    const int32_t likeliest = tokens.id(first_of_maximum(row, scratch.block_max));
    if (greedy || !std::isfinite(row.max)) return likeliest;
    const uint64_t key = mix(sampler.seed + kGolden * (uint64_t(position) + 1));
    const Best best{double(row.max) + gumbel_noise(noise_bits(key, likeliest)), likeliest};
    const Filters filters{sampler.top_k, sampler.top_p, sampler.log_min_p};
    if (!filters.any()) return choose_of_row(row, tokens, scratch.block_max, key, best);
    return choose_of_list(scratch, tokens, gather_candidates(filters, row, scratch), key, best);
}

// The lowest id whose logit is the row's maximum; the row's ids are in any order.
int32_t lowest_of_maximum(const Row& row, const int32_t* listed, const float* block_max) {
    int32_t lowest = std::numeric_limits<int32_t>::max();
    for (int b = 0; b < num_blocks(row.num); ++b) {
        if (block_max[b] != row.max) continue;
        const int start = b * kBlock, end = std::min(start + kBlock, row.num);
        for (int i = start; i < end; ++i) {
            if (row.scores[i] == row.max) lowest = std::min(lowest, listed[i]);
        }
    }
    return lowest;
}

}  // namespace
}  // namespace chatrt::sampling

using namespace chatrt::sampling;

int64_t chatrt_sampling_scratch_bytes(int32_t vocab_size) { return scratch_bytes(vocab_size); }

int32_t chatrt_choose_rows(const ChatrtSampler* sampler, const float* logits, int64_t row_stride, const int32_t* drafts,
                           int32_t num_drafts, int64_t position, void* memory, int32_t* token_ids) {
    const Scratch scratch = carve(memory, sampler->vocab_size);
    const Tokens tokens{nullptr, sampler->vocab_size};
    for (int32_t i = 0; i <= num_drafts; ++i) {
        token_ids[i] = choose(*sampler, tokens, logits + i * row_stride, drafts, i, position + i, scratch);
        if (i < num_drafts && token_ids[i] != drafts[i]) return i + 1;
    }
    return num_drafts + 1;
}

int32_t chatrt_choose_among(const ChatrtSampler* sampler, const ChatrtSubset* subset, const float* logits,
                            const int32_t* drafts, int32_t num_drafts, int64_t position, void* memory,
                            float* probability) {
    const Scratch scratch = carve(memory, subset->num);
    const Row row = find_maxima(logits, subset->num, scratch.block_max);
    const double total = weigh_row(row, scratch);
    const Tokens tokens{subset, subset->num};
    const bool is_argmax = sampler->temperature == 0.0f && !has_edits(*sampler, num_drafts) && std::isfinite(row.max);
    const int32_t chosen = is_argmax ? lowest_of_maximum(row, subset->listed, scratch.block_max)
                                     : choose(*sampler, tokens, logits, drafts, num_drafts, position, scratch);
    const float logit = logits[subset->places[subset->ranks[chosen]]];
    *probability = float(std::exp(double(logit) - double(row.max)) / total);
    return chosen;
}

int32_t chatrt_log_probs(const float* logits, int32_t vocab_size, int32_t token_id, int32_t num_top, void* memory,
                         float* logprobs, int32_t* top_ids) {
    const Scratch scratch = carve(memory, vocab_size);
    const Row row = find_maxima(logits, vocab_size, scratch.block_max);
    const float log_total = float(std::log(weigh_row(row, scratch)));
    logprobs[0] = logits[token_id] - row.max - log_total;
    if (num_top == 0 || !std::isfinite(row.max)) return 0;
    const int num = gather_top(row, num_top, scratch);
    // Insertion keeps the lower id first among equals; the list is short.
    for (int i = 0; i < num; ++i) {
        const float value = scratch.list_scores[i] - row.max - log_total;
        int at = i;
        for (; at > 0 && logprobs[at] < value; --at) {
            logprobs[at + 1] = logprobs[at];
            top_ids[at] = top_ids[at - 1];
        }
        logprobs[at + 1] = value;
        top_ids[at] = scratch.list_indices[i];
    }
    return num;
}
