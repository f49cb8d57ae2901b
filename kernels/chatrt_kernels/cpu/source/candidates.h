// Candidates of one row: what top-k, top-p and min-p leave.
//
// Each filter keeps a prefix of the order "higher score first, then lower index". No row is sorted: a floor that is
// surely low enough leaves a short list, and weighing the list in buckets of scores, ever narrower ones, finds where
// the prefix ends. Everything is a function of the row alone, and nothing is allocated.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>

#include "vector_math.h"

namespace chatrt::sampling {

constexpr int kBlock = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLeast = std::numeric_limits<float>::lowest();
// Below the maximum by more than this, all of a vocabulary weighs less than float32 resolves.
constexpr float kNoWeight = 30.0f;
// Where a nucleus is looked for, below the maximum; less than kNoWeight.
constexpr float kDepths[] = {0.5f, 1.0f, 1.5f, 2.0f, 2.5f, 3.0f, 3.5f, 4.0f,
                             5.0f, 6.0f, 7.0f, 9.0f, 11.0f, 14.0f, 18.0f};

// Memory of one call. The list holds indices of scores, ascending; it never holds minus infinity or NaN.
struct Scratch {
    float* scores;        // [vocab], where the logits are not the scores themselves
    float* list_scores;   // [vocab]
    int32_t* list_indices;    // [vocab]
    float* weights;       // [vocab], exp(score - max) of the row or of the list
    float* work_scores;   // [vocab], used up while a cut is looked for
    float* work_weights;  // [vocab]
    float* block_max;     // [blocks]
};

struct Row {
    const float* scores;
    int num;
    float max;
};

struct Filters {
    int top_k;        // 0 is off
    double top_p;     // 1 is off
    float log_min_p;  // minus infinity is off

    bool any() const { return top_k > 0 || top_p < 1.0 || log_min_p > -kInfinity; }
};

inline int num_blocks(int n) { return (n + kBlock - 1) / kBlock; }

inline int64_t padded(int64_t n) { return (n + kBlock - 1) / kBlock * kBlock; }

inline int64_t scratch_bytes(int vocab_size) {
    return 64 + 4 * (6 * padded(vocab_size) + padded(num_blocks(vocab_size)));
}

inline Scratch carve(void* memory, int vocab_size) {
    float* start = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
    const int64_t row = padded(vocab_size);
    Scratch scratch;
    scratch.scores = start;
    scratch.list_scores = start + row;
    scratch.list_indices = reinterpret_cast<int32_t*>(start + 2 * row);
    scratch.weights = start + 3 * row;
    scratch.work_scores = start + 4 * row;
    scratch.work_weights = start + 5 * row;
    scratch.block_max = start + 6 * row;
    return scratch;
}

// The first n of 16 scores; the other lanes, and those that are NaN, are minus infinity.
inline Floats load_scores(const float* p, int n) {
    const Floats lowest = splat(-kInfinity);
    return maximum(n >= kLanes ? load(p) : first_of(load_first(p, n), lowest, n), lowest);
}

// Writes the maxima of blocks of 64 scores; returns the row with its maximum.
inline Row find_maxima(const float* scores, int n, float* block_max) {
    float max = -kInfinity;
    for (int b = 0; b < num_blocks(n); ++b) {
        const float* p = scores + b * kBlock;
        const int num = std::min(kBlock, n - b * kBlock);
        Floats block = splat(-kInfinity);
        for (int i = 0; i < num; i += kLanes) block = maximum(load_scores(p + i, num - i), block);
        block_max[b] = highest(block);
        max = std::max(max, block_max[b]);
    }
    return {scores, n, max};
}

// The lowest index of a score that is the row's maximum; 0 where there is no score above minus infinity.
inline int32_t first_of_maximum(const Row& row, const float* block_max) {
    if (row.max == -kInfinity) return 0;
    int b = 0;
    while (block_max[b] != row.max) ++b;
    int i = b * kBlock;
    while (row.scores[i] != row.max) ++i;
    return i;
}

// ---- where a prefix ends ---------------------------------------------------------------------------------------

// Scores above `score` stay, and the first `num_ties` of those equal to it.
struct Cut {
    float score;
    int64_t num_ties;
};

constexpr int kNumBuckets = 1024;

// Finite scores with their weights.
struct Weighed {
    float* scores;
    float* weights;
    int num;
};

// Buckets fall with the score, from 0 at the highest to the last or last but one at the lowest.
struct Buckets {
    double highest;
    double scale;

    // Of up to 64 scores.
    void of(const float* scores, int n, int32_t* buckets) const {
        for (int j = 0; j < n; ++j) buckets[j] = int32_t((highest - double(scores[j])) * scale);
    }
};

inline double lowest_of(const Weighed& all) {
    Floats negated = splat(-kInfinity);
    for (int i = 0; i < all.num; i += kLanes) {
        const int num = std::min(kLanes, all.num - i);
        const Floats scores = sub(zeros(), load_first(all.scores + i, num));
        negated = maximum(first_of(scores, splat(-kInfinity), num), negated);
    }
    return -double(highest(negated));
}

inline double highest_of(const Weighed& all) {
    Floats most = splat(-kInfinity);
    for (int i = 0; i < all.num; i += kLanes) most = maximum(load_scores(all.scores + i, all.num - i), most);
    return double(highest(most));
}

// Adds up the weights of each bucket, in order.
inline void fill(const Weighed& all, const Buckets& buckets, double (&mass)[kNumBuckets]) {
    int32_t of[kBlock];
    std::fill_n(mass, kNumBuckets, 0.0);
    for (int i = 0; i < all.num; i += kBlock) {
        const int num = std::min(kBlock, all.num - i);
        buckets.of(all.scores + i, num, of);
        for (int j = 0; j < num; ++j) mass[of[j]] += double(all.weights[i + j]);
    }
}

// Leaves what belongs to one bucket; returns how much that is.
inline int narrow(const Weighed& all, const Buckets& buckets, int bucket) {
    int32_t of[kBlock];
    int kept = 0;
    for (int i = 0; i < all.num; i += kBlock) {
        const int num = std::min(kBlock, all.num - i);
        buckets.of(all.scores + i, num, of);
        for (int j = 0; j < num; ++j) {
            all.scores[kept] = all.scores[i + j];
            all.weights[kept] = all.weights[i + j];
            kept += of[j] == bucket;
        }
    }
    return kept;
}

// Smallest prefix in order of score whose weights reach `target`, all if they never do. There is a score, weights are
// positive, and equal scores have equal ones. What `all` holds is used up.
inline Cut find_cut(Weighed all, double target) {
    double before = 0.0;
    for (;;) {
        const double low = lowest_of(all), high = highest_of(all);
        if (low == high) break;
        const Buckets buckets{high, (kNumBuckets - 1) / (high - low)};
        double mass[kNumBuckets];
        fill(all, buckets, mass);
        // Rounding may leave the sum of a bucket's parts below what it had as a whole: then the last part is it.
        int found = 0;
        double sum = before;
        for (int bucket = 0; bucket < kNumBuckets && sum < target; ++bucket) {
            if (mass[bucket] == 0.0) continue;
            found = bucket;
            before = sum;
            sum += mass[bucket];
        }
        all.num = narrow(all, buckets, found);
    }
    const double num_ties = std::ceil((target - before) / double(all.weights[0]));
    return {all.scores[0], int64_t(std::max(1.0, std::min(num_ties, 2147483647.0)))};
}

// The end of the smallest prefix of `count` scores; one of them is finite, and only such ones count.
inline Cut find_count_cut(const float* scores, int n, int count, const Scratch& scratch) {
    Weighed all{scratch.work_scores, scratch.work_weights, 0};
    for (int i = 0; i < n; ++i) {
        if (scores[i] > -kInfinity) all.scores[all.num++] = scores[i];
    }
    std::fill_n(all.weights, all.num, 1.0f);
    return find_cut(all, count);
}

// The end of the smallest prefix of the list whose weights reach `target`.
inline Cut find_mass_cut(const Scratch& scratch, int num, double target) {
    std::copy_n(scratch.list_scores, num, scratch.work_scores);
    std::copy_n(scratch.weights, num, scratch.work_weights);
    return find_cut({scratch.work_scores, scratch.work_weights, num}, target);
}

// ---- the list --------------------------------------------------------------------------------------------------

// Fills the list with the finite scores from `floor` on; returns its length.
inline int gather(const Row& row, float floor, const Scratch& scratch) {
    const float least = std::max(floor, kLeast);
    int num = 0;
    for (int b = 0; b < num_blocks(row.num); ++b) {
        if (scratch.block_max[b] < least) continue;
        const int start = b * kBlock;
        const int end = std::min(row.num - start, kBlock);
        // Flags first, then no branches: whether a score stays is hard to predict, but most groups of 16 have none.
        int32_t stays[kBlock] = {};
        for (int j = 0; j < end; ++j) stays[j] = row.scores[start + j] >= least;
        for (int group = 0; group < end; group += kLanes) {
            int32_t any = 0;
            for (int j = 0; j < kLanes; ++j) any |= stays[group + j];
            if (!any) continue;
            for (int j = group; j < std::min(end, group + kLanes); ++j) {
                scratch.list_indices[num] = start + j;
                scratch.list_scores[num] = row.scores[start + j];
                num += stays[j];
            }
        }
    }
    return num;
}

// Cuts the list; returns its new length.
inline int keep_prefix(const Scratch& scratch, int num, Cut cut) {
    int kept = 0;
    for (int i = 0; i < num; i += kBlock) {
        const int end = std::min(num - i, kBlock);
        int32_t above[kBlock], ties[kBlock];
        for (int j = 0; j < end; ++j) above[j] = scratch.list_scores[i + j] > cut.score;
        for (int j = 0; j < end; ++j) ties[j] = scratch.list_scores[i + j] == cut.score;
        for (int j = 0; j < end; ++j) {
            scratch.list_indices[kept] = scratch.list_indices[i + j];
            scratch.list_scores[kept] = scratch.list_scores[i + j];
            kept += above[j] | (ties[j] & (cut.num_ties > 0));
            cut.num_ties -= ties[j];
        }
    }
    return kept;
}

// The `top_k` highest scores. As many blocks have a maximum of at least the floor: that many scores reach it. (Blocks
// without a finite score do not count.)
inline int gather_top(const Row& row, int top_k, const Scratch& scratch) {
    float floor = kLeast;
    int num_finite = 0;
    for (int b = 0; b < num_blocks(row.num); ++b) num_finite += scratch.block_max[b] > -kInfinity;
    if (top_k <= num_finite) {
        floor = find_count_cut(scratch.block_max, num_blocks(row.num), top_k, scratch).score;
    }
    const int num = gather(row, floor, scratch);
    return num <= top_k ? num : keep_prefix(scratch, num, find_count_cut(scratch.list_scores, num, top_k, scratch));
}

// Writes exp(score - max) of the first n of 16 scores; returns these, and 0 in the other lanes.
inline Floats weigh(const float* scores, int n, float max, float* weights) {
    const Floats x = exp(sub(load_scores(scores, n), splat(max)));
    if (n >= kLanes) {
        store(weights, x);
        return x;
    }
    store_first(weights, x, n);
    return first_of(x, zeros(), n);
}

// Writes the weights of the list; returns their sum.
inline double weigh_list(const Scratch& scratch, int num, float max) {
    double total = 0.0;
    for (int i = 0; i < num; i += kLanes) {
        total += double(sum(weigh(scratch.list_scores + i, num - i, max, scratch.weights + i)));
    }
    return total;
}

// Writes the weights of the row, without those of no consequence; returns their sum.
inline double weigh_row(const Row& row, const Scratch& scratch) {
    double total = 0.0;
    for (int b = 0; b < num_blocks(row.num); ++b) {
        if (row.max - scratch.block_max[b] > kNoWeight) continue;
        const int start = b * kBlock;
        const int num = std::min(kBlock, row.num - start);
        Floats block = zeros();
        for (int i = 0; i < num; i += kLanes) {
            block = add(block, weigh(row.scores + start + i, num - i, row.max, scratch.weights + start + i));
        }
        total += double(sum(block));
    }
    return total;
}

// How much of the row's weights belongs to scores from `floor` on.
inline double mass_above(const Row& row, float floor, const Scratch& scratch) {
    double total = 0.0;
    for (int b = 0; b < num_blocks(row.num); ++b) {
        if (scratch.block_max[b] < floor) continue;
        const int start = b * kBlock;
        const int num = std::min(kBlock, row.num - start);
        float masses[kBlock] = {};
        for (int j = 0; j < num; ++j) {
            // A mask instead of a condition, which compilers do not vectorise for fear of traps.
            int32_t bits;
            std::memcpy(&bits, scratch.weights + start + j, 4);
            bits &= -int32_t(row.scores[start + j] >= floor);
            std::memcpy(masses + j, &bits, 4);
        }
        Floats sums = load(masses);
        for (int i = kLanes; i < kBlock; i += kLanes) sums = add(sums, load(masses + i));
        total += double(sum(sums));
    }
    return total;
}

// The nucleus of the whole row: first a depth to which it surely does not reach, then its exact end.
inline int gather_nucleus(const Row& row, double top_p, const Scratch& scratch) {
    const double target = top_p * weigh_row(row, scratch);
    const float* depth = std::partition_point(std::begin(kDepths), std::end(kDepths), [&](float below) {
        // The margin is for sums in another order.
        return mass_above(row, row.max - below, scratch) < target * (1.0 + 1e-5);
    });
    const int num = gather(row, depth == std::end(kDepths) ? kLeast : row.max - *depth, scratch);
    weigh_list(scratch, num, row.max);
    return keep_prefix(scratch, num, find_mass_cut(scratch, num, target));
}

// Fills the list with what all filters leave of a row with a finite maximum; returns its length. A filter is on.
inline int gather_candidates(const Filters& filters, const Row& row, const Scratch& scratch) {
    const bool nucleus = filters.top_p < 1.0;
    const float floor = row.max + filters.log_min_p;
    int num;
    if (filters.top_k > 0 && filters.top_k < row.num) {
        num = gather_top(row, filters.top_k, scratch);
        if (nucleus) {
            const double target = filters.top_p * weigh_list(scratch, num, row.max);
            num = keep_prefix(scratch, num, find_mass_cut(scratch, num, target));
        }
    } else {
        num = nucleus ? gather_nucleus(row, filters.top_p, scratch) : gather(row, floor, scratch);
    }
    if (floor == -kInfinity) return num;
    return keep_prefix(scratch, num, {floor, std::numeric_limits<int64_t>::max()});
}

}  // namespace chatrt::sampling
