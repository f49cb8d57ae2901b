// Causal attention of ragged rows over paged keys and values.
//
// A row's keys are taken in splits of fixed size from position 0, each split giving (peak, mass, weighted values), and
// splits are folded in order. So the result of a row depends on its own keys only, whoever computes which split when.
// Source: the split and fold of FlashDecoding; keys lie transposed in their page, so 16 scores are made at once without
// sums across lanes.
#include <algorithm>
#include <cmath>
#include <limits>

#include "head_pages.h"
#include "kernels.h"
#include "nibbles.h"
#include "vector_math.h"

namespace chatrt {
namespace {

constexpr int kMaxBlockRows = kMaxQueries;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Turns scores into weights exp(score - peak), keys that a query does not see into 0.
inline void weigh(float* scores, int num_keys, int num_blocks, float* peak_mass) {
    Floats peaks = splat(kNothing);
    for (int b = 0; b < num_blocks; ++b) {
        const int lanes = std::clamp(num_keys - kLanes * b, 0, kLanes);
        const Floats piece = first_of(load(scores + kLanes * b), splat(kNothing), lanes);
        peaks = maximum(piece, peaks);
    }
    const float peak = highest(peaks);
    Floats mass = zeros();
    for (int b = 0; b < num_blocks; ++b) {
        const int lanes = std::clamp(num_keys - kLanes * b, 0, kLanes);
        const Floats piece = exp(sub(load(scores + kLanes * b), splat(peak)));
        const Floats weight = first_of(piece, zeros(), lanes);
        mass = add(mass, weight);
        store(scores + kLanes * b, weight);
    }
    peak_mass[0] = peak;
    peak_mass[1] = sum(mass);
}

// Scores of 16 keys for each of `num_blocks` blocks.
template <class Number, int kQueries>
inline void score_all_keys(const HeadPages<Number>& head, const Queries& queries, int start, int num_blocks, float scale,
                           float (&scores)[kQueries][kSplit]) {
    int b = 0;
    if constexpr (!std::is_same_v<Number, uint8_t>) {
        for (; b + 1 < num_blocks; b += 2) {
            Floats found[2][kQueries];
            score_more_keys<Number, kQueries>(head, queries, start + kLanes * b, found);
            for (int i = 0; i < kQueries; ++i) {
                store(scores[i] + kLanes * b, mul(found[0][i], splat(scale)));
                store(scores[i] + kLanes * (b + 1), mul(found[1][i], splat(scale)));
            }
        }
    }
    for (; b < num_blocks; ++b) {
        Floats found[kQueries];
        if constexpr (std::is_same_v<Number, uint8_t>) score_nibbles<kQueries>(head, queries, start + kLanes * b, found);
        else score_keys<Number, kQueries>(head, queries, start + kLanes * b, found);
        for (int i = 0; i < kQueries; ++i) store(scores[i] + kLanes * b, mul(found[i], splat(scale)));
    }
}

// All dimensions of the weighted sum of values.
template <class Number, int kQueries>
inline void weigh_all_values(const HeadPages<Number>& head, int start, int num_keys, float (&weights)[kQueries][kSplit],
                             Partial* out) {
    if constexpr (std::is_same_v<Number, uint8_t>) {
        weigh_nibbles<kQueries>(head, start, num_keys, weights, out);
    } else {
        scale_weights<Number, kQueries>(head, start, num_keys, weights);
        int first = 0;
        for (; first + kChunk * kLanes <= head.head_dim; first += kChunk * kLanes) {
            weigh_values<Number, kQueries, kChunk>(head, start, num_keys, first, kLanes, weights, out);
        }
        for (; first < head.head_dim; first += kLanes) {
            const int lanes = std::min(kLanes, head.head_dim - first);
            weigh_values<Number, kQueries, 1>(head, start, num_keys, first, lanes, weights, out);
        }
    }
}

template <class Number, int kQueries>
void attend_split(const HeadPages<Number>& head, const Queries& queries, int start, float scale, Partial* out) {
    float scores[kQueries][kSplit];
    int num_keys = 0;
    for (int i = 0; i < kQueries; ++i) num_keys = std::max(num_keys, queries.num_keys[i]);
    const int num_blocks = (num_keys + kLanes - 1) / kLanes;
    score_all_keys<Number, kQueries>(head, queries, start, num_blocks, scale, scores);
    for (int i = 0; i < kQueries; ++i) weigh(scores[i], queries.num_keys[i], num_blocks, out[i].peak_mass);
    weigh_all_values<Number, kQueries>(head, start, num_keys, scores, out);
}

template <class Number, int kQueries = kMaxQueries>
void attend_queries(const HeadPages<Number>& head, const Queries& queries, int count, int start, float scale,
                    Partial* out) {
    if constexpr (kQueries > 1) {
        if (count < kQueries) {
            attend_queries<Number, kQueries - 1>(head, queries, count, start, scale, out);
            return;
        }
    }
    attend_split<Number, kQueries>(head, queries, start, scale, out);
}

// Adds a later split to what is folded so far.
void fold(const Partial& total, const Partial& part, int head_dim) {
    const float peak = std::max(total.peak_mass[0], part.peak_mass[0]);
    float factors[kLanes];
    store(factors, exp(first_of(splat(total.peak_mass[0] - peak), splat(part.peak_mass[0] - peak), 1)));
    const Floats old_factor = splat(factors[0]), new_factor = splat(factors[1]);
    for (int d = 0; d < head_dim; d += kLanes) {
        const int lanes = std::min(kLanes, head_dim - d);
        const Floats kept = mul(load_first(total.values + d, lanes), old_factor);
        store_first(total.values + d, fma(load_first(part.values + d, lanes), new_factor, kept), lanes);
    }
    total.peak_mass[1] = fused(part.peak_mass[1], factors[1], total.peak_mass[1] * factors[0]);
    total.peak_mass[0] = peak;
}

// Divides by the mass, into the result's row.
void finish(const Attention& attention, const Partial& total, int row, int head) {
    const int head_dim = attention.kv.head_dim;
    const Floats mass = splat(total.peak_mass[1]);
    const int width = attention.num_heads * head_dim;
    if (attention.quantised.first.values) {
        for (int d = 0; d < head_dim; d += kGroup) {
            const Floats low = div(load(total.values + d), mass), high = div(load(total.values + d + kLanes), mass);
            quantise_group(low, high, attention.quantised, row, width, (head * head_dim + d) / kGroup);
        }
        return;
    }
    float* out = attention.out + row * attention.out_stride + head * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) {
        const int lanes = std::min(kLanes, head_dim - d);
        store_first(out + d, div(load_first(total.values + d, lanes), mass), lanes);
    }
}

inline int num_splits_of(int num_keys) { return (num_keys + kSplit - 1) / kSplit; }

// Partials of by-split tasks: [blocks, rows of a block, heads, splits].
int64_t partial_index(const AttentionPlan& plan, const Attention& attention, int block, int row, int head, int split) {
    return ((int64_t(block) * kMaxBlockRows + row) * attention.num_heads + head) * plan.num_splits + split;
}

template <class Number>
HeadPages<Number> head_pages(const Attention& attention, const Step& step, int sequence, int kv_head) {
    const KVLayer& kv = attention.kv;
    const int width = stored_width(kv);
    const int64_t head_size = int64_t(width) * kv.page_size, scales = kv_head * scales_of_head(kv);
    return {static_cast<const Number*>(kv.keys) + kv_head * head_size,
            static_cast<const Number*>(kv.values) + kv_head * head_size,
            scales_from(kv, kv.key_scales, scales),
            scales_from(kv, kv.value_scales, scales),
            step.page_table + sequence * step.page_table_stride,
            kv.page_stride,
            kv.scale_stride,
            kv.page_size,
            kv.head_dim,
            width,
            step.kv_len[sequence]};
}

// All query heads of one KV head, for the rows of one block, in one split: `out(row, head)` says where to.
template <class Number, class Out>
void attend_block(const Attention& attention, const HeadPages<Number>& head, const RowBlock& block, int kv_head,
                  int split, Out out) {
    const int group = attention.num_heads / attention.kv.kv_heads, head_dim = attention.kv.head_dim;
    const int start = split * kSplit;
    Queries queries;
    Partial partials[kMaxQueries];
    int count = 0;
    for (int i = 0; i < block.num_rows * group; ++i) {
        const int row = i / group, query_head = kv_head * group + i % group;
        const int keys_of_row = block.num_keys - (block.num_rows - 1 - row) - start;
        if (keys_of_row > 0) {
            queries.q[count] = attention.q + (block.first_row + row) * attention.q_stride + query_head * head_dim;
            queries.num_keys[count] = std::min(keys_of_row, kSplit);
            partials[count++] = out(row, query_head);
        }
        if (count == kMaxQueries || (count > 0 && i + 1 == block.num_rows * group)) {
            attend_queries<Number>(head, queries, count, start, attention.scale, partials);
            count = 0;
        }
    }
}

template <class Number>
void attend_whole(const Attention& attention, const Step& step, const RowBlock& block, int kv_head) {
    const auto head = head_pages<Number>(attention, step, block.sequence, kv_head);
    const int group = attention.num_heads / attention.kv.kv_heads, head_dim = attention.kv.head_dim;
    const int num_splits = num_splits_of(block.num_keys);
    // Totals and the split at hand, of every query head that shares the keys.
    thread_local std::vector<float> scratch;
    const int num_queries = block.num_rows * group;
    scratch.resize(size_t(2) * num_queries * partial_size(head_dim));
    const auto index = [&](int row, int query_head) { return row * group + query_head - kv_head * group; };
    for (int split = 0; split < num_splits; ++split) {
        const int shift = split == 0 ? 0 : num_queries;
        attend_block(attention, head, block, kv_head, split, [&](int row, int query_head) {
            return partial_at(scratch.data(), shift + index(row, query_head), head_dim);
        });
        if (split == 0) continue;
        for (int i = 0; i < num_queries; ++i) {
            if (num_splits_of(block.num_keys - (block.num_rows - 1 - i / group)) <= split) continue;
            fold(partial_at(scratch.data(), i, head_dim), partial_at(scratch.data(), num_queries + i, head_dim), head_dim);
        }
    }
    for (int i = 0; i < num_queries; ++i) {
        finish(attention, partial_at(scratch.data(), i, head_dim), block.first_row + i / group, kv_head * group + i % group);
    }
}

template <class Number>
void attend(const Attention& attention, const Step& step, const AttentionPlan& plan, int task) {
    const int kv_heads = attention.kv.kv_heads;
    if (!plan.by_split) {
        attend_whole<Number>(attention, step, plan.blocks[task / kv_heads], task % kv_heads);
        return;
    }
    const int split = task % plan.num_splits, kv_head = task / plan.num_splits % kv_heads;
    const int index = task / plan.num_splits / kv_heads;
    const RowBlock& block = plan.blocks[index];
    const auto head = head_pages<Number>(attention, step, block.sequence, kv_head);
    attend_block(attention, head, block, kv_head, split, [&](int row, int query_head) {
        return partial_at(attention.partials, partial_index(plan, attention, index, row, query_head, split),
                          attention.kv.head_dim);
    });
}

}  // namespace

void plan_attention(const Step& step, const Attention& attention, int num_threads, AttentionPlan* plan) {
    plan->blocks.clear();
    const int group = attention.num_heads / attention.kv.kv_heads;
    const int rows_per_block = std::clamp(kMaxQueries / group, 1, kMaxBlockRows);
    int longest = 1;
    for (int s = 0; s < step.num_sequences; ++s) {
        const int first = step.q_start[s], last = step.q_start[s + 1];
        for (int row = first; row < last; row += rows_per_block) {
            const int count = std::min(rows_per_block, last - row);
            plan->blocks.push_back({s, row, count, step.kv_len[s] - (last - row - count)});
        }
        if (last > first) longest = std::max(longest, int(step.kv_len[s]));
    }
    plan->num_splits = num_splits_of(longest);
    const int64_t num_blocks = int64_t(plan->blocks.size());
    const int64_t needed = num_blocks * kMaxBlockRows * attention.num_heads * plan->num_splits *
                           partial_size(attention.kv.head_dim);
    // Where there are tasks enough without, the second phase would only cost.
    const bool few = num_blocks * attention.kv.kv_heads < 8 * num_threads;
    plan->by_split = num_threads > 1 && plan->num_splits > 1 && few && needed <= attention.num_partials;
}

int num_attention_tasks(const AttentionPlan& plan, const Attention& attention) {
    return int(plan.blocks.size()) * attention.kv.kv_heads * (plan.by_split ? plan.num_splits : 1);
}

int num_fold_tasks(const AttentionPlan& plan, const Attention& attention) {
    return plan.by_split ? int(plan.blocks.size()) * attention.kv.kv_heads : 0;
}

void attend_task(const Attention& attention, const Step& step, const AttentionPlan& plan, int task) {
    switch (attention.kv.format) {
        case kFloat32: return attend<float>(attention, step, plan, task);
        case kHalf: return attend<uint16_t>(attention, step, plan, task);
        case kInt8: return attend<int8_t>(attention, step, plan, task);
        case kInt4: return attend<uint8_t>(attention, step, plan, task);
    }
}

void fold_task(const Attention& attention, const AttentionPlan& plan, int task) {
    const int kv_heads = attention.kv.kv_heads, group = attention.num_heads / kv_heads;
    const int head_dim = attention.kv.head_dim, index = task / kv_heads;
    const RowBlock& block = plan.blocks[index];
    for (int i = 0; i < block.num_rows * group; ++i) {
        const int row = i / group, head = task % kv_heads * group + i % group;
        const int num_splits = num_splits_of(block.num_keys - (block.num_rows - 1 - row));
        const auto part = [&](int split) {
            return partial_at(attention.partials, partial_index(plan, attention, index, row, head, split), head_dim);
        };
        for (int split = 1; split < num_splits; ++split) fold(part(0), part(split), head_dim);
        finish(attention, part(0), block.first_row + row, head);
    }
}

}  // namespace chatrt
