// Attention over pages of 4-bit codes: scores of keys and the weighted sum of values, group by group of 16 dimensions.
//
// number = step * code + minimum, so a group of a key adds step * sum(q * code) + minimum * sum(q) to a score, and a
// group of values adds sum(weight * step * code) + sum(weight * minimum). Codes are taken apart as floats, exactly.
#pragma once

#include "head_pages.h"

namespace chatrt {

static_assert(kNibbleGroup == kLanes, "a group is a vector");

// 16 bytes as their low and their high halves.
struct NibblePair {
    Floats low, high;
};
inline NibblePair load_nibbles(const uint8_t* p) {
    const Floats bytes = load_unsigned_bytes(p);
    // bytes / 16 - 15 / 32 is less than a half away from the high one
    const Floats high = round_to_even(fma(bytes, splat(0.0625f), splat(-0.46875f)));
    return {fma(high, splat(-16.0f), bytes), high};
}

// A group's steps (`which` 0) or minima (1) of the 16 positions from `position` on.
inline Floats load_group(const HeadPages<uint8_t>& head, const void* scales, int group, int which, int position) {
    const int64_t page = head.pages[position / head.page_size] * head.scale_stride;
    const int64_t row = int64_t(2 * group + which) * head.page_size;
    return load_halves(static_cast<const uint16_t*>(scales) + page + row + position % head.page_size);
}

template <int kQueries>
inline void score_nibbles(const HeadPages<uint8_t>& head, const Queries& queries, int position,
                          Floats (&scores)[kQueries]) {
    const uint8_t* keys = head.keys_at(position);
    const int num_groups = head.width / kNibbleGroup;  // of either half of the dimensions
    for (int i = 0; i < kQueries; ++i) scores[i] = zeros();
    for (int g = 0; g < num_groups; ++g) {
        Floats low[kQueries], high[kQueries];
        float low_sums[kQueries], high_sums[kQueries];
        for (int i = 0; i < kQueries; ++i) {
            low[i] = high[i] = zeros();
            const float *q = queries.q[i] + g * kNibbleGroup, *other = q + head.width;
            low_sums[i] = sum(load(q));
            high_sums[i] = sum(load(other));
        }
        for (int d = g * kNibbleGroup; d < (g + 1) * kNibbleGroup; ++d) {
            const NibblePair codes = load_nibbles(keys + int64_t(d) * head.page_size);
            for (int i = 0; i < kQueries; ++i) {
                low[i] = fma(codes.low, splat(queries.q[i][d]), low[i]);
                high[i] = fma(codes.high, splat(queries.q[i][d + head.width]), high[i]);
            }
        }
        for (const bool upper : {false, true}) {
            const int group = upper ? g + num_groups : g;
            const Floats steps = load_group(head, head.key_scales, group, 0, position);
            const Floats minima = load_group(head, head.key_scales, group, 1, position);
            for (int i = 0; i < kQueries; ++i) {
                scores[i] = fma(upper ? high[i] : low[i], steps, scores[i]);
                scores[i] = fma(splat(upper ? high_sums[i] : low_sums[i]), minima, scores[i]);
            }
        }
    }
}

// Weights of tokens times a group's steps, and the sum of weights times its minima.
template <int kQueries>
struct GroupWeights {
    float steps[kQueries][kSplit];
    float minima[kQueries];

    GroupWeights(const HeadPages<uint8_t>& head, int group, int start, int num_keys,
                 const float (&weights)[kQueries][kSplit]) {
        Floats sums[kQueries];
        for (int i = 0; i < kQueries; ++i) sums[i] = zeros();
        for (int b = 0; b < num_keys; b += kLanes) {
            // Behind the last key may lie anything.
            const int lanes = std::min(kLanes, num_keys - b);
            const Floats step = first_of(load_group(head, head.value_scales, group, 0, start + b), zeros(), lanes);
            const Floats least = first_of(load_group(head, head.value_scales, group, 1, start + b), zeros(), lanes);
            for (int i = 0; i < kQueries; ++i) {
                const Floats weight = load(weights[i] + b);
                store(steps[i] + b, mul(weight, step));
                sums[i] = fma(weight, least, sums[i]);
            }
        }
        for (int i = 0; i < kQueries; ++i) minima[i] = sum(sums[i]);
    }
};

template <int kQueries>
inline void weigh_nibbles(const HeadPages<uint8_t>& head, int start, int num_keys,
                          const float (&weights)[kQueries][kSplit], Partial* out) {
    const int num_groups = head.width / kNibbleGroup;
    for (int g = 0; g < num_groups; ++g) {
        const GroupWeights<kQueries> low(head, g, start, num_keys, weights);
        const GroupWeights<kQueries> high(head, g + num_groups, start, num_keys, weights);
        const int first = g * kNibbleGroup;
        Floats low_sums[kQueries], high_sums[kQueries];
        for (int i = 0; i < kQueries; ++i) {
            low_sums[i] = splat(low.minima[i]);
            high_sums[i] = splat(high.minima[i]);
        }
        for (int block = 0; block < num_keys; block += kLanes) {
            const uint8_t* row = head.values_at(start + block) + first;
            const int end = std::min(block + kLanes, num_keys);
            for (int j = block; j < end; ++j, row += head.width) {
                const NibblePair codes = load_nibbles(row);
                for (int i = 0; i < kQueries; ++i) {
                    low_sums[i] = fma(codes.low, splat(low.steps[i][j]), low_sums[i]);
                    high_sums[i] = fma(codes.high, splat(high.steps[i][j]), high_sums[i]);
                }
            }
        }
        for (int i = 0; i < kQueries; ++i) {
            store(out[i].values + first, low_sums[i]);
            store(out[i].values + head.width + first, high_sums[i]);
        }
    }
}

}  // namespace chatrt
