// Weight matrices as the kernels read them: tiles of 16 output rows times 32 inputs.
//
// Knows: formats, where each number of a tile lies. Does not know: files, rows of activations.
// A strip is 16 output rows; its tiles follow each other over the inputs, and strips follow each other, so a thread
// that computes strips in order reads memory in order. Output rows are filled up with zeros to whole strips.
// In a tile, quad q of row r (inputs 4q to 4q + 3 of the tile) lies at byte 4r of a 64-byte line, so that one line of
// weights meets one broadcast quad of activations and no sum goes across lanes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace chatrt {

constexpr int kStripRows = 16;
constexpr int kGroup = 32;       // inputs that share a scale, and the width of a tile
constexpr int kSuperGroup = 256;  // inputs that share a K-quant's scale of scales

// The numbers are part of the interface with Python.
enum Format : int32_t {
    kF32 = 0,
    kF16 = 1,
    kBF16 = 2,
    kQ8_0 = 3,
    kQ4_0 = 4,
    kQ4_1 = 5,
    kQ4_K = 6,
    kQ5_K = 7,
    kQ6_K = 8,
};

struct Weight {
    int32_t format;
    int32_t num_outputs;
    int32_t num_inputs;
    int32_t sensitive;  // remainders of more groups of activations are read
    const uint8_t* strips;
    // Rows may lie in another order than they are numbered in; null where they do not.
    const int32_t* order;  // [num_outputs], the number of the row at each place
    const int32_t* ranks;  // [num_outputs], the place of the row of each number
};

inline bool is_float(int32_t format) { return format <= kBF16; }
inline int num_strips(const Weight& weight) { return (weight.num_outputs + kStripRows - 1) / kStripRows; }

// Where the parts of a tile lie, in bytes from its start. For the K-quants the scale of scales (and of minima) of the
// eight tiles of a super-group lie in front of them.
constexpr int kNibbles = 4 * 64;  // line j: quads j (low halves) and j + 4 (high halves)

// Bytes of one tile, without a super-group's head.
constexpr int tile_bytes(int32_t format) {
    switch (format) {
        case kF32: return kGroup * kStripRows * 4;
        case kF16: case kBF16: return kGroup * kStripRows * 2;
        case kQ8_0: return 8 * 64 + 32;               // lines of quads + 128, half scales
        case kQ4_0: return kNibbles + 32;             // half scales
        case kQ4_1: return kNibbles + 64;             // half scales, half minima
        case kQ4_K: return kNibbles + 32;             // scales, minima (a byte each)
        case kQ5_K: return kNibbles + 64 + 32;        // line of fifth bits (bit q: quad q), scales, minima
        case kQ6_K: return kNibbles + 128 + 32;       // two lines of bit pairs, scales of both halves
        default: return 0;
    }
}
// Bytes in front of each eight tiles: half scales, and half minima where the format has them.
constexpr int head_bytes(int32_t format) {
    return format == kQ4_K || format == kQ5_K ? 64 : format == kQ6_K ? 32 : 0;
}
// Tiles of a strip; inputs of the plain formats are filled up with zeros to whole tiles.
constexpr int num_tiles(int num_inputs) { return (num_inputs + kGroup - 1) / kGroup; }

constexpr size_t strip_bytes(int32_t format, int num_inputs) {
    const int tiles = num_tiles(num_inputs);
    return size_t(tiles) * tile_bytes(format) + size_t(tiles / 8) * head_bytes(format);
}

// Puts strip `strip` of a matrix in file order (`rows`: whole rows of the file's blocks) into place; `order` as in
// Weight.
void repack_strip(int32_t format, const uint8_t* rows, const int32_t* order, int num_outputs, int num_inputs, int strip,
                  uint8_t* strips);

// The row of number `row` of a matrix as numbers, each product and sum rounded on its own, as the file's format defines
// them.
void unpack_row(const Weight& weight, int row, float* out);

}  // namespace chatrt
