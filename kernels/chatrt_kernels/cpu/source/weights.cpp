// Repacking: from the blocks of GGUF files to tiles, and back to numbers for embeddings.
// Source of the block layouts: ggml (ggml-common.h), as the `gguf` library states them.
#include "weights.h"

#include <cstring>

#include "simd.h"

namespace chatrt {
namespace {

uint16_t half_at(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

int block_inputs(int32_t format) {
    return is_float(format) ? 1 : format >= kQ4_K ? kSuperGroup : kGroup;
}
int block_bytes(int32_t format) {
    switch (format) {
        case kF32: return 4;
        case kF16: case kBF16: return 2;
        case kQ8_0: return 34;
        case kQ4_0: return 18;
        case kQ4_1: return 20;
        case kQ4_K: return 144;
        case kQ5_K: return 176;
        case kQ6_K: return 210;
        default: return 0;
    }
}

// The 6-bit scale and minimum of sub-block `t` of a Q4_K or Q5_K block.
void k_scale(const uint8_t* packed, int t, uint8_t* scale, uint8_t* minimum) {
    if (t < 4) {
        *scale = packed[t] & 63;
        *minimum = packed[t + 4] & 63;
    } else {
        *scale = uint8_t((packed[t + 4] & 15) | (packed[t - 4] >> 6) << 4);
        *minimum = uint8_t((packed[t + 4] >> 4) | (packed[t] >> 6) << 4);
    }
}

// The codes of 32 weights: group `t` of a block.
void read_codes(int32_t format, const uint8_t* block, int t, uint8_t* codes) {
    const uint8_t* nibbles = block + (format == kQ4_0 ? 2 : format == kQ4_1 ? 4 : 0);
    const bool k45 = format == kQ4_K || format == kQ5_K;
    if (k45) nibbles = block + (format == kQ4_K ? 16 : 48) + 32 * (t / 2);
    for (int i = 0; i < kGroup; ++i) {
        if (format == kQ8_0) {
            codes[i] = block[2 + i] ^ 0x80;
        } else if (k45) {
            codes[i] = t % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
            if (format == kQ5_K) codes[i] |= uint8_t((block[16 + i] >> t & 1) << 4);
        } else if (format == kQ6_K) {
            const uint8_t low = block[64 * (t / 4) + 32 * (t % 2) + i];
            const uint8_t high = block[128 + 32 * (t / 4) + i] >> 2 * (t % 4);
            codes[i] = uint8_t((t % 4 < 2 ? low & 15 : low >> 4) | (high & 3) << 4);
        } else {
            codes[i] = i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4;
        }
    }
}

// Row `r` of a tile: its codes, and the scales that lie in the tile.
void write_codes(int32_t format, const uint8_t* codes, int r, uint8_t* tile) {
    if (format == kQ8_0) {
        for (int i = 0; i < kGroup; ++i) tile[64 * (i / 4) + 4 * r + i % 4] = codes[i];
        return;
    }
    for (int i = 0; i < 16; ++i) {
        tile[64 * (i / 4) + 4 * r + i % 4] = uint8_t((codes[i] & 15) | (codes[i + 16] & 15) << 4);
    }
    for (int i = 0; i < kGroup; ++i) {
        const int quad = i / 4, byte = 4 * r + i % 4;
        if (format == kQ5_K) tile[kNibbles + byte] |= uint8_t((codes[i] >> 4) << quad);
        if (format == kQ6_K) {
            tile[kNibbles + 64 * (quad / 4) + byte] |= uint8_t((codes[i] >> 4) << 2 * (quad % 4));
        }
    }
}

// Offset of the scales in a tile.
int scales_at(int32_t format) {
    return format == kQ8_0 ? 512 : format == kQ5_K ? kNibbles + 64 : format == kQ6_K ? kNibbles + 128 : kNibbles;
}

// The scales of group `t` of a block, in a tile for row `r`.
void write_scales(int32_t format, const uint8_t* block, int t, int r, uint8_t* tile) {
    uint8_t* scales = tile + scales_at(format);
    if (format == kQ6_K) {
        scales[r] = block[192 + 2 * t];
        scales[16 + r] = block[192 + 2 * t + 1];
    } else if (format == kQ4_K || format == kQ5_K) {
        k_scale(block + 4, t, scales + r, scales + 16 + r);
    } else {
        std::memcpy(scales + 2 * r, block, 2);
        if (format == kQ4_1) std::memcpy(scales + 32 + 2 * r, block + 2, 2);
    }
}

// The head of a super-group, for row `r`.
void write_head(int32_t format, const uint8_t* block, int r, uint8_t* head) {
    std::memcpy(head + 2 * r, format == kQ6_K ? block + 208 : block, 2);
    if (format != kQ6_K) std::memcpy(head + 32 + 2 * r, block + 2, 2);
}

uint8_t* tile_at(int32_t format, uint8_t* strip, int tile) {
    return strip + size_t(tile) * tile_bytes(format) +
           (head_bytes(format) ? size_t(tile / 8 + 1) * head_bytes(format) : 0);
}
uint8_t* head_at(int32_t format, uint8_t* strip, int tile) {
    return strip + size_t(tile / 8) * (8 * tile_bytes(format) + head_bytes(format));
}

void repack_row(int32_t format, const uint8_t* row, int num_inputs, int r, uint8_t* strip) {
    if (is_float(format)) {
        const int size = block_bytes(format);
        for (int i = 0; i < num_inputs; ++i) {
            std::memcpy(strip + size_t(kStripRows * i + r) * size, row + size_t(i) * size, size);
        }
        return;
    }
    const int groups_per_block = block_inputs(format) / kGroup;
    uint8_t codes[kGroup];
    for (int tile = 0; tile < num_inputs / kGroup; ++tile) {
        const uint8_t* block = row + size_t(tile / groups_per_block) * block_bytes(format);
        const int t = tile % groups_per_block;
        uint8_t* out = tile_at(format, strip, tile);
        read_codes(format, block, t, codes);
        write_codes(format, codes, r, out);
        write_scales(format, block, t, r, out);
        if (head_bytes(format) && t == 0) write_head(format, block, r, head_at(format, strip, tile));
    }
}

// The codes of row `r` of a tile.
void codes_of(int32_t format, const uint8_t* tile, int r, uint8_t* codes) {
    for (int i = 0; i < kGroup; ++i) {
        const int quad = i / 4, byte = 4 * r + i % 4;
        if (format == kQ8_0) {
            codes[i] = tile[64 * quad + byte];
            continue;
        }
        const uint8_t pair = tile[64 * (quad % 4) + byte];
        codes[i] = quad < 4 ? pair & 15 : pair >> 4;
        if (format == kQ5_K) codes[i] |= uint8_t((tile[kNibbles + byte] >> quad & 1) << 4);
        if (format == kQ6_K) {
            codes[i] |= uint8_t((tile[kNibbles + 64 * (quad / 4) + byte] >> 2 * (quad % 4) & 3) << 4);
        }
    }
}

void unpack_tile(int32_t format, const uint8_t* tile, const uint8_t* head, int r, float* out) {
    uint8_t codes[kGroup];
    codes_of(format, tile, r, codes);
    const uint8_t* scales = tile + scales_at(format);
    if (head_bytes(format)) {
        const float d = half_to_float(half_at(head + 2 * r));
        if (format == kQ6_K) {
            for (int i = 0; i < kGroup; ++i) out[i] = (d * int8_t(scales[16 * (i / 16) + r])) * (int(codes[i]) - 32);
            return;
        }
        const float scale = d * scales[r];
        const float minimum = half_to_float(half_at(head + 32 + 2 * r)) * scales[16 + r];
        for (int i = 0; i < kGroup; ++i) out[i] = scale * codes[i] - minimum;
        return;
    }
    const float scale = half_to_float(half_at(scales + 2 * r));
    const float minimum = format == kQ4_1 ? half_to_float(half_at(scales + 32 + 2 * r)) : 0;
    const int offset = format == kQ8_0 ? 128 : format == kQ4_0 ? 8 : 0;
    for (int i = 0; i < kGroup; ++i) {
        const float value = scale * (int(codes[i]) - offset);
        out[i] = format == kQ4_1 ? value + minimum : value;
    }
}

}  // namespace

void repack_strip(int32_t format, const uint8_t* rows, const int32_t* order, int num_outputs, int num_inputs, int strip,
                  uint8_t* strips) {
    uint8_t* out = strips + size_t(strip) * strip_bytes(format, num_inputs);
    std::memset(out, 0, strip_bytes(format, num_inputs));
    const size_t row_bytes = size_t(num_inputs / block_inputs(format)) * block_bytes(format);
    for (int r = 0; r < kStripRows && strip * kStripRows + r < num_outputs; ++r) {
        const int place = strip * kStripRows + r;
        repack_row(format, rows + size_t(order ? order[place] : place) * row_bytes, num_inputs, r, out);
    }
}

void unpack_row(const Weight& weight, int row, float* out) {
    const int32_t format = weight.format;
    const int place = weight.ranks ? weight.ranks[row] : row;
    const int r = place % kStripRows;
    // The strip is only read here; the helpers serve repacking as well.
    uint8_t* strip = const_cast<uint8_t*>(weight.strips) +
                     size_t(place / kStripRows) * strip_bytes(format, weight.num_inputs);
    if (is_float(format)) {
        for (int i = 0; i < weight.num_inputs; ++i) {
            const uint8_t* p = strip + size_t(kStripRows * i + r) * block_bytes(format);
            if (format == kF32) std::memcpy(out + i, p, 4);
            else out[i] = format == kF16 ? half_to_float(half_at(p)) : bfloat_to_float(half_at(p));
        }
        return;
    }
    for (int tile = 0; tile < weight.num_inputs / kGroup; ++tile) {
        unpack_tile(format, tile_at(format, strip, tile), head_at(format, strip, tile), r, out + kGroup * tile);
    }
}

}  // namespace chatrt
