// Activations in 8 bits: per row and group of 32, so that a row's numbers never depend on other rows.
//
// A few groups of a row hold outliers, and with them most of its rounding error: their remainder is kept in another 8
// bits, which products of "fine" groups read as well. Which groups these are depends on the row alone.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd.h"
#include "weights.h"

namespace chatrt {

// Rows of `width` numbers (a multiple of 32): value = scale * q, q in [-127, 127].
// Sums serve weights that are stored with an offset or a minimum.
struct Term {
    int8_t* values;          // [rows, width]
    float* scales;           // [rows, width / 32]
    float* scaled_sums;      // [rows, width / 32], scale times the sum of q
    int32_t* negative_sums;  // [rows, width / 16], minus the sum of q of each half group
};

// x = first term + remainder, up to the remainder's own rounding.
struct Quantised {
    Term first;
    Term remainder;
};

// A group is fine if its scale is this much above the root mean square of its row's scales.
constexpr float kFineRatio = 1.5f;
constexpr float kSensitiveFineRatio = 1.0f;  // for weights whose errors count for more

struct Halves {
    Floats low, high;
};

// One group of 32 numbers of row `row`, and what rounding leaves of it.
inline Halves quantise_term(Halves x, const Term& out, int row, int width, int group) {
    const float peak = highest(maximum(absolute(x.low), absolute(x.high)));
    const float scale = peak / 127.0f;
    // Below, the inverse would not be finite: such rows are zeros.
    const Floats inverse = splat(peak > 1e-36f ? 127.0f / peak : 0.0f);
    // NaN becomes 127, whatever garbage comes in nothing overflows.
    const auto rounded = [&](Floats half) {
        return to_ints(maximum(minimum(mul(half, inverse), splat(127.0f)), splat(-127.0f)));
    };
    const Ints low = rounded(x.low), high = rounded(x.high);
    int8_t* values = out.values + size_t(row) * width + kGroup * group;
    store_int8(values, low);
    store_int8(values + 16, high);
    const int32_t sum_low = sum(low), sum_high = sum(high);
    const size_t at = size_t(row) * (width / kGroup) + group;
    out.scales[at] = scale;
    out.scaled_sums[at] = scale * float(sum_low + sum_high);
    out.negative_sums[2 * at] = -sum_low;
    out.negative_sums[2 * at + 1] = -sum_high;
    const Floats negative = splat(-scale);
    return {fma(negative, to_floats(low), x.low), fma(negative, to_floats(high), x.high)};
}

inline void quantise_group(Floats low, Floats high, const Quantised& out, int row, int width, int group) {
    const Halves left = quantise_term({low, high}, out.first, row, width, group);
    quantise_term(left, out.remainder, row, width, group);
}

inline void quantise_row(const float* x, const Quantised& out, int row, int width) {
    for (int g = 0; g < width / kGroup; ++g) {
        quantise_group(load(x + kGroup * g), load(x + kGroup * g + 16), out, row, width, g);
    }
}

// Groups of a row whose scale is above this are fine.
inline float fine_bound(const Quantised& x, float ratio, int row, int width) {
    const int num_groups = width / kGroup;
    const float* scales = x.first.scales + size_t(row) * num_groups;
    Floats squares = zeros();
    for (int g = 0; g < num_groups; g += kLanes) {
        const Floats piece = load_first(scales + g, num_groups - g < kLanes ? num_groups - g : kLanes);
        squares = fma(piece, piece, squares);
    }
    return ratio * std::sqrt(sum(squares) / float(num_groups));
}

}  // namespace chatrt
