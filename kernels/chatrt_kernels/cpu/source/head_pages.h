// One head's pages of one sequence: where its keys and values lie, the scores of keys, the weighted sum of values.
//
// Floats, halves and 8-bit codes share the code: codes are multiplied as they are, and their scales, one for a token,
// go into scores and weights, which lie token by token as well. Four bits are in nibbles.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "calls.h"
#include "simd.h"

namespace chatrt {

constexpr int kSplit = 128;      // keys of a split
constexpr int kMaxQueries = 6;   // query heads that share one pass over keys; their sums stay in registers
constexpr int kChunk = 4;        // vectors of a head's dimensions that are summed at once

inline Floats load_numbers(const uint16_t* p) { return load_halves(p); }
inline Floats load_numbers(const float* p) { return load(p); }
inline Floats load_numbers(const int8_t* p) { return load_signed_bytes(p); }
inline Floats load_first_numbers(const uint16_t* p, int n) { return load_first_halves(p, n); }
inline Floats load_first_numbers(const float* p, int n) { return load_first(p, n); }
inline Floats load_first_numbers(const int8_t* p, int n) {
    int8_t codes[kLanes] = {};
    for (int i = 0; i < n; ++i) codes[i] = p[i];
    return load_signed_bytes(codes);
}

// The result of one split, or of several folded: sum of exp(score - peak), and of that times the values.
struct Partial {
    float* peak_mass;  // [2]
    float* values;     // [head_dim]
};
constexpr int partial_size(int head_dim) { return head_dim + 2; }
inline Partial partial_at(float* base, int64_t index, int head_dim) {
    float* p = base + index * partial_size(head_dim);
    return {p, p + 2};
}

// Queries that share a KV head, with the number of keys that each sees in the split at hand.
struct Queries {
    const float* q[kMaxQueries];
    int num_keys[kMaxQueries];
};

template <class Number>
struct HeadPages {
    const Number* keys;    // of this head in page 0
    const Number* values;
    const void* key_scales;  // of this head in page 0, where the format has scales
    const void* value_scales;
    const int32_t* pages;
    int64_t page_stride;
    int64_t scale_stride;  // scales from one page to the next
    int page_size;
    int head_dim;
    int width;     // stored numbers of a token: head_dim, or half of it
    int num_keys;  // of the sequence

    int64_t page_at(int position) const { return pages[position / page_size] * page_stride; }
    // Scales of the 16 positions from `position` on, for formats that have one for each token.
    const float* scales_at(const void* scales, int position) const {
        return static_cast<const float*>(scales) + pages[position / page_size] * scale_stride + position % page_size;
    }
    // Where the keys, or the values, of the 16 positions from `position` on begin; whoever asks for memory in advance may
    // ask behind the last position, and gets the first page.
    const uint8_t* keys_ahead(int position) const { return bytes_at(keys_at(position < num_keys ? position : 0)); }
    const uint8_t* values_ahead(int position) const { return bytes_at(values_at(position < num_keys ? position : 0)); }
    static const uint8_t* bytes_at(const Number* p) { return reinterpret_cast<const uint8_t*>(p); }

    const Number* keys_at(int position) const { return keys + page_at(position) + position % page_size; }
    const Number* values_at(int position) const {
        return values + page_at(position) + int64_t(position % page_size) * width;
    }
};

// Whether numbers are codes whose scale is one for each token and head.
template <class Number>
constexpr bool kHasScales = std::is_same_v<Number, int8_t>;

// Codes' sums become scores.
template <class Number, int kQueries>
inline void scale_scores(const HeadPages<Number>& head, int position, Floats (&scores)[kQueries]) {
    if constexpr (kHasScales<Number>) {
        const Floats scales = load(head.scales_at(head.key_scales, position));
        for (int i = 0; i < kQueries; ++i) scores[i] = mul(scores[i], scales);
    }
}

// Weights of tokens become weights of their codes; behind the last key may lie anything.
template <class Number, int kQueries>
inline void scale_weights(const HeadPages<Number>& head, int start, int num_keys, float (&weights)[kQueries][kSplit]) {
    if constexpr (kHasScales<Number>) {
        for (int b = 0; b < num_keys; b += kLanes) {
            const int lanes = std::min(kLanes, num_keys - b);
            const Floats scales = first_of(load(head.scales_at(head.value_scales, start + b)), zeros(), lanes);
            for (int i = 0; i < kQueries; ++i) store(weights[i] + b, mul(load(weights[i] + b), scales));
        }
    }
}

// Scores of 16 keys from `position` on (a multiple of 16) for each query.
template <class Number, int kQueries>
inline void score_keys(const HeadPages<Number>& head, const Queries& queries, int position, Floats (&scores)[kQueries]) {
    const Number* keys = head.keys_at(position);
    for (int i = 0; i < kQueries; ++i) scores[i] = zeros();
    for (int d = 0; d < head.head_dim; ++d) {
        const Floats column = load_numbers(keys + int64_t(d) * head.page_size);
        for (int i = 0; i < kQueries; ++i) scores[i] = fma(column, splat(queries.q[i][d]), scores[i]);
    }
    scale_scores<Number, kQueries>(head, position, scores);
}

// The same for 32 keys: twice the independent sums, so that the units are busy with few queries.
template <class Number, int kQueries>
inline void score_more_keys(const HeadPages<Number>& head, const Queries& queries, int position,
                            Floats (&scores)[2][kQueries]) {
    const Number *first = head.keys_at(position), *second = head.keys_at(position + kLanes);
    // Memory is asked for line by line between products: requests in one burst would wait for each other.
    const uint8_t *ahead = head.keys_ahead(position + 4 * kLanes), *further = head.keys_ahead(position + 5 * kLanes);
    for (int i = 0; i < kQueries; ++i) scores[0][i] = scores[1][i] = zeros();
    for (int d = 0; d < head.head_dim; ++d) {
        const int64_t at = int64_t(d) * head.page_size;
        const Floats a = load_numbers(first + at), b = load_numbers(second + at);
        prefetch((d % 2 ? further : ahead) + int64_t(d / 2) * 64);
        for (int i = 0; i < kQueries; ++i) {
            const Floats q = splat(queries.q[i][d]);
            scores[0][i] = fma(a, q, scores[0][i]);
            scores[1][i] = fma(b, q, scores[1][i]);
        }
    }
    scale_scores<Number, kQueries>(head, position, scores[0]);
    scale_scores<Number, kQueries>(head, position + kLanes, scores[1]);
}

// Adds weights times values over the keys, for `count` vectors of dimensions from `first` on.
template <class Number, int kQueries, int kVectors>
inline void weigh_values(const HeadPages<Number>& head, int start, int num_keys, int first, int lanes,
                         const float (&weights)[kQueries][kSplit], Partial* out) {
    Floats sums[kQueries][kVectors];
    for (int i = 0; i < kQueries; ++i) {
        for (int v = 0; v < kVectors; ++v) sums[i][v] = zeros();
    }
    for (int block = 0; block < num_keys; block += kLanes) {
        // 16 positions lie in one page, one after the other.
        const Number* row = head.values_at(start + block) + first;
        const uint8_t* ahead = head.values_ahead(start + block + 2 * kLanes) + first * sizeof(Number);
        const int end = std::min(block + kLanes, num_keys);
        for (int j = block; j < end; ++j, row += head.head_dim, ahead += head.head_dim * sizeof(Number)) {
            for (int line = 0; line < kVectors * kLanes * int(sizeof(Number)); line += 64) prefetch(ahead + line);
            Floats values[kVectors];
            for (int v = 0; v < kVectors; ++v) {
                values[v] = lanes == kLanes ? load_numbers(row + kLanes * v) : load_first_numbers(row + kLanes * v, lanes);
            }
            for (int i = 0; i < kQueries; ++i) {
                const Floats weight = splat(weights[i][j]);
                for (int v = 0; v < kVectors; ++v) sums[i][v] = fma(values[v], weight, sums[i][v]);
            }
        }
    }
    for (int i = 0; i < kQueries; ++i) {
        for (int v = 0; v < kVectors; ++v) store_first(out[i].values + first + kLanes * v, sums[i][v], lanes);
    }
}

}  // namespace chatrt
