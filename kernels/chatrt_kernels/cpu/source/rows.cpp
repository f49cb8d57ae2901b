// Ops that take each row by itself: embedding, norms, sums, rotation and writing of keys and values.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels.h"
#include "vector_math.h"

namespace chatrt {
namespace {

// Calls `each(offset, count)` for pieces of at most 16 of `width` numbers.
template <class Each>
void for_pieces(int width, Each each) {
    for (int i = 0; i < width; i += kLanes) each(i, std::min(kLanes, width - i));
}

float inverse_rms(const float* x, int width, float eps) {
    Floats squares = zeros();
    for_pieces(width, [&](int i, int n) {
        const Floats piece = load_first(x + i, n);
        squares = fma(piece, piece, squares);
    });
    return 1.0f / std::sqrt(sum(squares) / float(width) + eps);
}

Floats normed(const float* x, const float* weight, float inverse, int i, int n) {
    return mul(mul(load_first(x + i, n), splat(inverse)), load_first(weight + i, n));
}

// Numbers of a cache in its own type.
// Infinity (or NaN) in a value would reach the rows before it, whose weight for it is 0, wherever they share a block.
inline Floats halved(Floats x) { return minimum(maximum(x, splat(-65504.0f)), splat(65504.0f)); }
inline Floats finite(Floats x) { return minimum(maximum(x, splat(-1e30f)), splat(1e30f)); }
inline void store_piece(uint16_t* p, Floats x, int n) { store_first_halves(p, halved(x), n); }
inline void store_piece(float* p, Floats x, int n) { store_first(p, x, n); }

// Both halves of one head, turned by the angles of its position.
void rotate(const float* x, const float* angles, int head_dim, float* out) {
    const int half = head_dim / 2;
    for_pieces(half, [&](int i, int n) {
        const Floats cosine = load_first(angles + i, n), sine = load_first(angles + half + i, n);
        const Floats first = load_first(x + i, n), second = load_first(x + half + i, n);
        store_first(out + i, sub(mul(first, cosine), mul(second, sine)), n);
        store_first(out + half + i, fma(first, sine, mul(second, cosine)), n);
    });
}

// Pages of 4 bits hold turned keys, which meet turned queries (kv_formats.turn has the reasons, and this order).
void turn(float* x, int head_dim) {
    const int half = head_dim / 2, block = half & -half;
    const auto add_and_subtract = [x](int first, int step) {
        for (int i = first; i < first + step; ++i) {
            const float a = x[i], b = x[i + step];
            x[i] = a + b;
            x[i + step] = a - b;
        }
    };
    add_and_subtract(0, half);
    for (int step = 1; step < block; step *= 2) {
        for (int first = 0; first < head_dim; first += 2 * step) add_and_subtract(first, step);
    }
    const float unit = 1.0f / std::sqrt(float(2 * block));
    for (int i = 0; i < head_dim; ++i) x[i] *= unit;
}

// One head of a query or a key as attention multiplies it.
void place(const KVLayer& kv, const float* x, const float* angles, float* out) {
    rotate(x, angles, kv.head_dim, out);
    if (kv.format == kInt4) turn(out, kv.head_dim);
}

// Where one head of one token is stored in its page.
struct Slot {
    int64_t page, offset;
};

template <class Number>
void write_floats(const KVLayer& kv, Slot slot, int head, const float* key, const float* value) {
    const int head_dim = kv.head_dim;
    const int64_t start = slot.page * kv.page_stride + int64_t(head) * head_dim * kv.page_size;
    Number* keys = static_cast<Number*>(kv.keys) + start + slot.offset;
    Number* values = static_cast<Number*>(kv.values) + start + slot.offset * head_dim;
    Number stored[1024];
    for_pieces(head_dim, [&](int i, int n) { store_piece(stored + i, load_first(key + i, n), n); });
    for (int d = 0; d < head_dim; ++d) keys[int64_t(d) * kv.page_size] = stored[d];
    for_pieces(head_dim, [&](int i, int n) { store_piece(values + i, load_first(value + i, n), n); });
}

// 8-bit codes of a head into `codes`; its scale.
float code_bytes(const float* x, int head_dim, int8_t* codes) {
    Floats peaks = zeros();
    for_pieces(head_dim, [&](int i, int n) { peaks = maximum(absolute(finite(load_first(x + i, n))), peaks); });
    const float scale = highest(peaks) / 127.0f;
    // A head of zeros has scale 0 and stays 0.
    const Floats divisor = splat(std::max(scale, std::numeric_limits<float>::min()));
    for_pieces(head_dim, [&](int i, int n) {
        float rounded[kLanes];
        store(rounded, round_to_even(div(finite(load_first(x + i, n)), divisor)));
        for (int j = 0; j < n; ++j) codes[i + j] = int8_t(rounded[j]);
    });
    return scale;
}

void write_bytes(const KVLayer& kv, Slot slot, int head, const float* key, const float* value) {
    const int head_dim = kv.head_dim;
    const int64_t start = slot.page * kv.page_stride + int64_t(head) * head_dim * kv.page_size;
    const int64_t scale = slot.page * kv.scale_stride + int64_t(head) * kv.page_size + slot.offset;
    int8_t* keys = static_cast<int8_t*>(kv.keys) + start + slot.offset;
    int8_t codes[1024];
    static_cast<float*>(kv.key_scales)[scale] = code_bytes(key, head_dim, codes);
    for (int d = 0; d < head_dim; ++d) keys[int64_t(d) * kv.page_size] = codes[d];
    int8_t* values = static_cast<int8_t*>(kv.values) + start + slot.offset * head_dim;
    static_cast<float*>(kv.value_scales)[scale] = code_bytes(value, head_dim, values);
}

// 4-bit codes of a head into `codes`, one a byte; steps and minima go to `scales`, `stride` from one to the next.
void code_nibbles(const float* x, int head_dim, uint8_t* codes, uint16_t* scales, int64_t stride) {
    for (int g = 0; g < head_dim / kNibbleGroup; ++g) {
        const float* group = x + g * kNibbleGroup;
        const Floats numbers = halved(load(group));
        const float most = highest(numbers), least = -highest(sub(zeros(), numbers));
        uint16_t* pair = scales + 2 * g * stride;
        store_first_halves(pair, splat((most - least) / 15.0f), 1);
        store_first_halves(pair + stride, splat(least), 1);
        const float step = half_to_float(pair[0]);
        const Floats minimum_of_group = splat(half_to_float(pair[stride])), divisor = splat(step > 0.0f ? step : 1.0f);
        float rounded[kLanes];
        const Floats steps = round_to_even(div(sub(numbers, minimum_of_group), divisor));
        store(rounded, minimum(maximum(steps, zeros()), splat(15.0f)));
        for (int j = 0; j < kNibbleGroup; ++j) codes[g * kNibbleGroup + j] = uint8_t(rounded[j]);
    }
}

void write_nibbles(const KVLayer& kv, Slot slot, int head, const float* key, const float* value) {
    const int width = kv.head_dim / 2;
    const int64_t start = slot.page * kv.page_stride + int64_t(head) * width * kv.page_size;
    const int64_t scale = slot.page * kv.scale_stride + head * scales_of_head(kv) + slot.offset;
    uint8_t codes[1024];
    uint8_t* keys = static_cast<uint8_t*>(kv.keys) + start + slot.offset;
    code_nibbles(key, kv.head_dim, codes, static_cast<uint16_t*>(kv.key_scales) + scale, kv.page_size);
    for (int d = 0; d < width; ++d) keys[int64_t(d) * kv.page_size] = uint8_t(codes[d] | codes[d + width] << 4);
    uint8_t* values = static_cast<uint8_t*>(kv.values) + start + slot.offset * width;
    code_nibbles(value, kv.head_dim, codes, static_cast<uint16_t*>(kv.value_scales) + scale, kv.page_size);
    for (int d = 0; d < width; ++d) values[d] = uint8_t(codes[d] | codes[d + width] << 4);
}

void write_kv(const Rope& rope, const float* angles, int row, int64_t slot) {
    const KVLayer& kv = rope.kv;
    const Slot at = {slot / kv.page_size, slot % kv.page_size};
    float turned[1024];
    for (int h = 0; h < kv.kv_heads; ++h) {
        place(kv, rope.k + row * rope.k_stride + h * kv.head_dim, angles, turned);
        const float* v = rope.v + row * rope.v_stride + h * kv.head_dim;
        switch (kv.format) {
            case kFloat32: write_floats<float>(kv, at, h, turned, v); break;
            case kHalf: write_floats<uint16_t>(kv, at, h, turned, v); break;
            case kInt8: write_bytes(kv, at, h, turned, v); break;
            case kInt4: write_nibbles(kv, at, h, turned, v); break;
        }
    }
}

}  // namespace

void embed_rows(const Embed& embed, const Step& step, int first, int last) {
    for (int r = first; r < last; ++r) {
        const int64_t id = step.token_ids[r];
        float* out = embed.out + r * embed.out_stride;
        // Whoever asks for a row that is not there gets zeros, not what lies behind the matrix.
        if (id >= 0 && id < embed.weight.num_outputs) unpack_row(embed.weight, int(id), out);
        else std::fill_n(out, embed.weight.num_inputs, 0.0f);
    }
}

void norm_rows(const Norm& norm, int first, int last) {
    for (int r = first; r < last; ++r) {
        const float* x = norm.x + r * norm.x_stride;
        const float inverse = inverse_rms(x, norm.width, norm.eps);
        if (norm.quantised.first.values) {
            for (int g = 0; g < norm.width / kGroup; ++g) {
                const Floats low = normed(x, norm.weight, inverse, kGroup * g, kLanes);
                const Floats high = normed(x, norm.weight, inverse, kGroup * g + kLanes, kLanes);
                quantise_group(low, high, norm.quantised, r, norm.width, g);
            }
        }
        if (!norm.floats) continue;
        float* out = norm.floats + r * norm.out_stride;
        for_pieces(norm.width, [&](int i, int n) { store_first(out + i, normed(x, norm.weight, inverse, i, n), n); });
    }
}

void quantise_rows(const Quantise& quantise, int first, int last) {
    for (int r = first; r < last; ++r) {
        quantise_row(quantise.x + r * quantise.x_stride, quantise.quantised, r, int(quantise.width));
    }
}

void add_rows(const Pairwise& op, int first, int last) {
    for (int r = first; r < last; ++r) {
        const float *x = op.x + r * op.x_stride, *y = op.y + r * op.y_stride;
        float* out = op.out + r * op.out_stride;
        for_pieces(int(op.width), [&](int i, int n) {
            store_first(out + i, add(load_first(x + i, n), load_first(y + i, n)), n);
        });
    }
}

void swiglu_rows(const Pairwise& op, int first, int last) {
    for (int r = first; r < last; ++r) {
        const float *x = op.x + r * op.x_stride, *y = op.y + r * op.y_stride;
        float* out = op.out + r * op.out_stride;
        for_pieces(int(op.width), [&](int i, int n) {
            store_first(out + i, mul(silu(load_first(x + i, n)), load_first(y + i, n)), n);
        });
    }
}

void gather_rows(const Gather& gather, const int64_t* rows, int first, int last) {
    for (int r = first; r < last; ++r) {
        std::memcpy(gather.out + r * gather.out_stride, gather.x + rows[r] * gather.x_stride, size_t(gather.width) * 4);
    }
}

void rope_rows(const Rope& rope, const Step& step, int first, int last) {
    const int head_dim = rope.kv.head_dim;
    for (int r = first; r < last; ++r) {
        const float* angles = rope.table + step.positions[r] * head_dim;
        for (int h = 0; h < rope.num_heads; ++h) {
            float turned[1024];  // `out` may be q itself
            place(rope.kv, rope.q + r * rope.q_stride + h * head_dim, angles, turned);
            std::memcpy(rope.out + r * rope.out_stride + h * head_dim, turned, size_t(head_dim) * 4);
        }
        write_kv(rope, angles, r, step.write_slots[r]);
    }
}

}  // namespace chatrt
