// Products of activation rows with weight matrices.
#include <algorithm>

#include "kernels.h"
#include "tiles.h"
#include "vector_math.h"

namespace chatrt {
namespace {

// Rows whose activations stay in the second-level cache while a task's strips pass over them.
constexpr int kPanelRows = 64;

template <int kFormat, int kRows>
void block_sums(const Linear& linear, const Weight& weight, int strip, int row, const FineGroups& fine, Floats* out) {
    Floats sums[kRows];
    const uint8_t* data = weight.strips + size_t(strip) * strip_bytes(kFormat, weight.num_inputs);
    if constexpr (kFormat <= kBF16) {
        const float* x = linear.x + row * linear.x_stride;
        strip_sums<kFormat, kRows>(data, x, linear.x_stride, weight.num_inputs, sums);
    } else {
        strip_sums<kFormat, kRows>(data, QuantisedBlock(linear.quantised.first, row, weight.num_inputs), sums);
    }
    for (int r = 0; r < kRows; ++r) out[r] = sums[r];
    if constexpr (kFormat > kBF16) {
        const FineGroup* const end = fine.end(row);
        for (const FineGroup* group = fine.begin(row); group < end; ++group) {
            add_fine_group<kFormat>(data, *group, out);
        }
    }
}

using BlockSums = void (*)(const Linear&, const Weight&, int strip, int row, const FineGroups&, Floats* out);

template <int kFormat, int kRows = kMaxRowBlock>
BlockSums find_block_sums(int num_rows) {
    if constexpr (kRows > 1) {
        if (num_rows < kRows) return find_block_sums<kFormat, kRows - 1>(num_rows);
    }
    return block_sums<kFormat, kRows>;
}

BlockSums block_sums_of(int32_t format, int num_rows) {
    switch (format) {
        case kF32: return find_block_sums<kF32>(num_rows);
        case kF16: return find_block_sums<kF16>(num_rows);
        case kBF16: return find_block_sums<kBF16>(num_rows);
        case kQ8_0: return find_block_sums<kQ8_0>(num_rows);
        case kQ4_0: return find_block_sums<kQ4_0>(num_rows);
        case kQ4_1: return find_block_sums<kQ4_1>(num_rows);
        case kQ4_K: return find_block_sums<kQ4_K>(num_rows);
        case kQ5_K: return find_block_sums<kQ5_K>(num_rows);
        default: return find_block_sums<kQ6_K>(num_rows);
    }
}

// Sums of one strip of matrix `w` for a block of rows, bias added.
void biased_sums(const Linear& linear, int w, int strip, int row, int num_rows, const FineGroups& fine, Floats* sums) {
    const Weight& weight = linear.weights[w];
    block_sums_of(weight.format, num_rows)(linear, weight, strip, row, fine, sums);
    if (!linear.bias[w]) return;
    const int first = strip * kStripRows, count = std::min(kStripRows, weight.num_outputs - first);
    float ordered[kStripRows];
    const float* biases = linear.bias[w] + first;
    if (weight.order) {
        for (int i = 0; i < count; ++i) ordered[i] = linear.bias[w][weight.order[first + i]];
        biases = ordered;
    }
    const Floats bias = load_first(biases, count);
    for (int r = 0; r < num_rows; ++r) sums[r] = add(sums[r], bias);
}

// Which of the 32 numbers from the first on the rows of a whole strip have; 0 where they reach further or do not
// ascend.
uint32_t spread_of(const int32_t* order, int count) {
    if (count < kStripRows || order[kStripRows - 1] - order[0] >= 32) return 0;
    uint32_t bits = 0, falls = 0;
    for (int i = 0; i + 1 < kStripRows; ++i) falls |= order[i] >= order[i + 1];
    for (int i = 0; i < kStripRows; ++i) bits |= 1u << ((order[i] - order[0]) & 31);
    return falls ? 0 : bits;
}

// Puts the outputs of one strip where the numbers of its rows say. Most rows ascend, with few gaps, and scatter
// instructions take longer than two stores.
void scatter(Floats sums, const int32_t* order, uint32_t spread, int count, float* out) {
    if (spread) {
        store_spread(out + order[0], sums, spread);
        return;
    }
    float values[kStripRows];
    store(values, sums);
    for (int i = 0; i < count; ++i) out[order[i]] = values[i];
}

// The numbers that `scatter` replaces.
Floats gathered(const int32_t* order, int count, const float* out) {
    float values[kStripRows];
    for (int i = 0; i < count; ++i) values[i] = out[order[i]];
    return load_first(values, count);
}

void store_strip(const Linear& linear, int w, int strip, int row, int num_rows, const FineGroups& fine) {
    Floats sums[kMaxRowBlock];
    const int first = strip * kStripRows, count = std::min(kStripRows, linear.weights[w].num_outputs - first);
    const int32_t* order = linear.weights[w].order;
    const uint32_t spread = order ? spread_of(order + first, count) : 0;
    biased_sums(linear, w, strip, row, num_rows, fine, sums);
    for (int r = 0; r < num_rows; ++r) {
        float* out = linear.out[w] + (row + r) * linear.out_stride[w];
        if (order) {
            if (linear.mode == kAddTo) sums[r] = add(gathered(order + first, count, out), sums[r]);
            scatter(sums[r], order + first, spread, count, out);
            continue;
        }
        out += first;
        if (linear.mode == kAddTo) sums[r] = add(load_first(out, count), sums[r]);
        if (count == kStripRows) store(out, sums[r]);
        else store_first(out, sums[r], count);
    }
}

// 32 outputs of silu(gate) * up: two strips of each matrix (one at the end, if their number is odd).
void gated_pair(const Linear& linear, int pair, int row, int num_rows, const FineGroups& fine) {
    Floats activated[2][kMaxRowBlock];
    const int num_outputs = linear.weights[0].num_outputs;
    const int last = std::min(2, num_strips(linear.weights[0]) - 2 * pair);
    for (int s = 0; s < last; ++s) {
        Floats gate[kMaxRowBlock], up[kMaxRowBlock];
        biased_sums(linear, 0, 2 * pair + s, row, num_rows, fine, gate);
        biased_sums(linear, 1, 2 * pair + s, row, num_rows, fine, up);
        for (int r = 0; r < num_rows; ++r) activated[s][r] = mul(silu(gate[r]), up[r]);
    }
    for (int r = 0; r < num_rows; ++r) {
        if (linear.activated.first.values) {
            quantise_group(activated[0][r], activated[1][r], linear.activated, row + r, num_outputs, pair);
            continue;
        }
        for (int s = 0; s < last; ++s) {
            const int first = (2 * pair + s) * kStripRows;
            float* out = linear.out[0] + (row + r) * linear.out_stride[0] + first;
            store_first(out, activated[s][r], std::min(kStripRows, num_outputs - first));
        }
    }
}

void linear_unit(const Linear& linear, int unit, int row, int num_rows, const FineGroups& fine) {
    if (linear.mode == kGated) {
        gated_pair(linear, unit, row, num_rows, fine);
        return;
    }
    int w = 0;
    while (unit >= num_strips(linear.weights[w])) unit -= num_strips(linear.weights[w++]);
    store_strip(linear, w, unit, row, num_rows, fine);
}

}  // namespace

int num_units(const Linear& linear) {
    if (linear.mode == kGated) return (num_strips(linear.weights[0]) + 1) / 2;
    int count = 0;
    for (int w = 0; w < linear.num_weights; ++w) count += num_strips(linear.weights[w]);
    return count;
}

void linear_units(const Linear& linear, uint64_t run, int num_rows, int first, int last) {
    thread_local FineGroups fine;
    for (int panel = 0; panel < num_rows; panel += kPanelRows) {
        const int panel_end = std::min(panel + kPanelRows, num_rows);
        if (linear.quantised.first.values) {
            // Matrices that share a call are all of one kind.
            const float ratio = linear.weights[0].sensitive ? kSensitiveFineRatio : kFineRatio;
            fine.find(&linear, run, linear.quantised, ratio, panel, panel_end, linear.weights[0].num_inputs);
        }
        for (int unit = first; unit < last; ++unit) {
            for (int row = panel; row < panel_end; row += kMaxRowBlock) {
                linear_unit(linear, unit, row, std::min(kMaxRowBlock, panel_end - row), fine);
            }
        }
    }
}

}  // namespace chatrt
