// Products of one strip of weights with a block of activation rows: the loops in which a step spends its time.
//
// Each row's sums are made by the same operations in the same order whatever rows stand beside it: an integer dot
// product per group (exact), then one fused multiply-add per group, groups in order.
#pragma once

#include "fine.h"
#include "quantise.h"
#include "weights.h"

namespace chatrt {

// How far ahead memory is asked for: about eight tiles.
constexpr int kPrefetchBytes = 2560;

inline void prefetch_lines(const uint8_t* p, int num_bytes) {
    for (int i = 0; i < num_bytes; i += 64) prefetch(p + kPrefetchBytes + i);
}

// The first row of a block of quantised rows; the others follow at the row's width.
struct QuantisedBlock {
    const int8_t* values;
    const float* scales;
    const float* scaled_sums;
    const int32_t* negative_sums;
    int width;

    QuantisedBlock(const Term& all, int row, int row_width)
        : values(all.values + size_t(row) * row_width),
          scales(all.scales + size_t(row) * (row_width / kGroup)),
          scaled_sums(all.scaled_sums + size_t(row) * (row_width / kGroup)),
          negative_sums(all.negative_sums + size_t(row) * (row_width / 16)),
          width(row_width) {}

    // A packed fine group: one group of the rows that share it.
    explicit QuantisedBlock(const FineGroup& fine)
        : values(fine.values),
          scales(fine.scales),
          scaled_sums(fine.scaled_sums),
          negative_sums(fine.negative_sums),
          width(kGroup) {}

    const int8_t* quad(int row, int input) const { return values + size_t(row) * width + input; }
    Floats scale(int row, int group) const { return splat(scales[size_t(row) * (width / kGroup) + group]); }
    Floats scaled_sum(int row, int group) const {
        return splat(scaled_sums[size_t(row) * (width / kGroup) + group]);
    }
    template <int kShift>
    Ints negative_sum(int row, int half) const {
        return splat_shifted<kShift>(negative_sums + size_t(row) * (width / 16) + half);
    }
};

// Adds the products of weights (codes below 128) with quad `quad` of the group that starts at input `first`.
template <int kRows>
inline void add_quad(Ints (&dots)[kRows], Bytes codes, const QuantisedBlock& x, int first, int quad) {
    for (int r = 0; r < kRows; ++r) dots[r] = dot_small(dots[r], codes, x.quad(r, first + 4 * quad));
}

// The bits above the nibble of quad `quad`, in place.
template <int kFormat>
inline Bytes upper_bits(const uint8_t* tile, int quad) {
    if constexpr (kFormat == kQ5_K) {
        const Bytes line = load_bytes(tile + kNibbles);
        switch (quad) {
            case 0: return and_bytes(shift_left<4>(line), 0x10);
            case 1: return and_bytes(shift_left<3>(line), 0x10);
            case 2: return and_bytes(shift_left<2>(line), 0x10);
            case 3: return and_bytes(shift_left<1>(line), 0x10);
            case 4: return and_bytes(line, 0x10);
            case 5: return and_bytes(shift_right<1>(line), 0x10);
            case 6: return and_bytes(shift_right<2>(line), 0x10);
            default: return and_bytes(shift_right<3>(line), 0x10);
        }
    } else {
        const Bytes line = load_bytes(tile + kNibbles + 64 * (quad / 4));
        switch (quad % 4) {
            case 0: return and_bytes(shift_left<4>(line), 0x30);
            case 1: return and_bytes(shift_left<2>(line), 0x30);
            case 2: return and_bytes(line, 0x30);
            default: return and_bytes(shift_right<2>(line), 0x30);
        }
    }
}

template <int kFormat>
constexpr bool has_upper_bits = kFormat == kQ5_K || kFormat == kQ6_K;

// Integer products of a tile of 4-, 5- or 6-bit codes: quads 0 to 3 into `low`, 4 to 7 into `high`.
template <int kFormat, int kRows>
inline void nibble_dots(const uint8_t* tile, const QuantisedBlock& x, int group, Ints (&low)[kRows],
                        Ints (&high)[kRows]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const Bytes line = load_bytes(tile + 64 * j);
        Bytes first = and_bytes(line, 0x0f), second = and_bytes(shift_right<4>(line), 0x0f);
        if constexpr (has_upper_bits<kFormat>) {
            first = or_bytes(first, upper_bits<kFormat>(tile, j));
            second = or_bytes(second, upper_bits<kFormat>(tile, j + 4));
        }
        add_quad<kRows>(low, first, x, kGroup * group, j);
        add_quad<kRows>(high, second, x, kGroup * group, j + 4);
    }
}

inline Floats halves_at(const uint8_t* p) { return load_halves(reinterpret_cast<const uint16_t*>(p)); }

// Adds one tile's products to each row's 16 sums. `head` lies in front of the super-group (K-quants only).
template <int kFormat, int kRows>
inline void add_tile(const uint8_t* tile, const uint8_t* head, const QuantisedBlock& x, int group,
                     Floats (&sums)[kRows]) {
    Ints low[kRows], high[kRows];
    for (int r = 0; r < kRows; ++r) low[r] = high[r] = zero_ints();
    if constexpr (kFormat == kQ8_0) {
        for (int r = 0; r < kRows; ++r) {
            if (kByteOffset) low[r] = add_ints(x.negative_sum<7>(r, 2 * group), x.negative_sum<7>(r, 2 * group + 1));
        }
        for (int quad = 0; quad < 8; ++quad) {
            const Bytes line = load_bytes(tile + 64 * quad);
            for (int r = 0; r < kRows; ++r) low[r] = dot_bytes(low[r], line, x.quad(r, kGroup * group + 4 * quad));
        }
        const Floats scales = halves_at(tile + 512);
        for (int r = 0; r < kRows; ++r) sums[r] = fma(to_floats(low[r]), mul(scales, x.scale(r, group)), sums[r]);
        return;
    }
    if constexpr (kFormat == kQ4_0) {
        for (int r = 0; r < kRows; ++r) {
            low[r] = x.negative_sum<3>(r, 2 * group);
            high[r] = x.negative_sum<3>(r, 2 * group + 1);
        }
    }
    if constexpr (kFormat == kQ6_K) {
        for (int r = 0; r < kRows; ++r) {
            low[r] = x.negative_sum<5>(r, 2 * group);
            high[r] = x.negative_sum<5>(r, 2 * group + 1);
        }
    }
    nibble_dots<kFormat, kRows>(tile, x, group, low, high);
    if constexpr (kFormat == kQ6_K) {
        const int8_t* scales = reinterpret_cast<const int8_t*>(tile + kNibbles + 128);
        const Floats d = halves_at(head);
        const Floats first = mul(d, load_signed_bytes(scales)), second = mul(d, load_signed_bytes(scales + 16));
        for (int r = 0; r < kRows; ++r) {
            const Floats scale = x.scale(r, group);
            sums[r] = fma(to_floats(low[r]), mul(first, scale), sums[r]);
            sums[r] = fma(to_floats(high[r]), mul(second, scale), sums[r]);
        }
        return;
    }
    Floats scales, minima = zeros();
    if constexpr (kFormat == kQ4_K || kFormat == kQ5_K) {
        const uint8_t* small = tile + kNibbles + (kFormat == kQ5_K ? 64 : 0);
        scales = mul(halves_at(head), load_unsigned_bytes(small));
        minima = mul(halves_at(head + 32), load_unsigned_bytes(small + 16));
    } else {
        scales = halves_at(tile + kNibbles);
        if constexpr (kFormat == kQ4_1) minima = halves_at(tile + kNibbles + 32);
    }
    for (int r = 0; r < kRows; ++r) {
        const Floats dots = to_floats(add_ints(low[r], high[r]));
        sums[r] = fma(dots, mul(scales, x.scale(r, group)), sums[r]);
        if constexpr (kFormat == kQ4_1) sums[r] = fma(minima, x.scaled_sum(r, group), sums[r]);
        if constexpr (kFormat == kQ4_K || kFormat == kQ5_K) {
            sums[r] = fma(sub(zeros(), minima), x.scaled_sum(r, group), sums[r]);
        }
    }
}

// Where tile `group` of a strip lies, and the head of its super-group.
template <int kFormat>
inline const uint8_t* tile_of(const uint8_t* strip, int group) {
    constexpr int kHead = head_bytes(kFormat);
    return strip + size_t(group) * tile_bytes(kFormat) + (kHead ? size_t(group / 8 + 1) * kHead : 0);
}
template <int kFormat>
inline const uint8_t* head_of(const uint8_t* strip, int group) {
    return strip + size_t(group / 8) * (8 * tile_bytes(kFormat) + head_bytes(kFormat));
}

// Adds the remainders of one fine group to the sums of its rows.
template <int kFormat, int kRows>
void add_fine_rows(const uint8_t* strip, const FineGroup& fine, Floats* sums) {
    const QuantisedBlock x(fine);
    Floats chosen[kRows];
    for (int r = 0; r < kRows; ++r) chosen[r] = sums[fine.rows[r]];
    const uint8_t *tile = tile_of<kFormat>(strip, fine.group), *head = head_of<kFormat>(strip, fine.group);
    add_tile<kFormat, kRows>(tile, head, x, 0, chosen);
    for (int r = 0; r < kRows; ++r) sums[fine.rows[r]] = chosen[r];
}

template <int kFormat, int kRows = kMaxRowBlock>
void add_fine_group(const uint8_t* strip, const FineGroup& fine, Floats* sums) {
    if constexpr (kRows > 1) {
        if (fine.num_rows < kRows) {
            add_fine_group<kFormat, kRows - 1>(strip, fine, sums);
            return;
        }
    }
    add_fine_rows<kFormat, kRows>(strip, fine, sums);
}

// The 16 outputs of one strip for kRows rows of quantised activations.
template <int kFormat, int kRows>
void strip_sums(const uint8_t* strip, const QuantisedBlock& x, Floats (&sums)[kRows]) {
    constexpr int kTile = tile_bytes(kFormat), kHead = head_bytes(kFormat);
    for (int r = 0; r < kRows; ++r) sums[r] = zeros();
    const int num_groups = x.width / kGroup;
    const uint8_t* tile = strip;
    const uint8_t* head = strip;
    for (int g = 0; g < num_groups; ++g) {
        if (kHead && g % 8 == 0) {
            head = tile;
            tile += kHead;
        }
        prefetch_lines(tile, kTile);
        add_tile<kFormat, kRows>(tile, head, x, g, sums);
        tile += kTile;
    }
}

// The same for plain weights and float rows `x`, `stride` numbers apart.
template <int kFormat, int kRows>
void strip_sums(const uint8_t* strip, const float* x, int64_t stride, int num_inputs, Floats (&sums)[kRows]) {
    constexpr int kLine = kStripRows * (kFormat == kF32 ? 4 : 2);
    for (int r = 0; r < kRows; ++r) sums[r] = zeros();
    for (int i = 0; i < num_inputs; ++i) {
        const uint8_t* line = strip + size_t(i) * kLine;
        prefetch(line + kPrefetchBytes);
        Floats weights;
        if constexpr (kFormat == kF32) weights = load(reinterpret_cast<const float*>(line));
        else if constexpr (kFormat == kF16) weights = halves_at(line);
        else weights = load_bfloats(reinterpret_cast<const uint16_t*>(line));
        for (int r = 0; r < kRows; ++r) sums[r] = fma(weights, splat(x[r * stride + i]), sums[r]);
    }
}

}  // namespace chatrt
