// Ops that take each row by itself: embedding, norms, sums, rotation and writing of keys and values.
#include <algorithm>
#include <cmath>
#include <cstring>

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
inline void store_piece(uint16_t* p, Floats x, int n) {
    store_first_halves(p, minimum(maximum(x, splat(-65504.0f)), splat(65504.0f)), n);
}
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

template <class Number>
void write_kv(const Rope& rope, const float* angles, int row, int64_t slot) {
    const KVLayer& kv = rope.kv;
    const int head_dim = kv.head_dim, page_size = kv.page_size;
    const int64_t page = slot / page_size, offset = slot % page_size;
    float turned[1024];
    for (int h = 0; h < kv.kv_heads; ++h) {
        const int64_t head = page * kv.page_stride + int64_t(h) * head_dim * page_size;
        Number* keys = static_cast<Number*>(kv.keys) + head + offset;
        Number* values = static_cast<Number*>(kv.values) + head + offset * head_dim;
        rotate(rope.k + row * rope.k_stride + h * head_dim, angles, head_dim, turned);
        Number stored[1024];
        for_pieces(head_dim, [&](int i, int n) { store_piece(stored + i, load_first(turned + i, n), n); });
        for (int d = 0; d < head_dim; ++d) keys[int64_t(d) * page_size] = stored[d];
        const float* v = rope.v + row * rope.v_stride + h * head_dim;
        for_pieces(head_dim, [&](int i, int n) { store_piece(values + i, load_first(v + i, n), n); });
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
            rotate(rope.q + r * rope.q_stride + h * head_dim, angles, head_dim, turned);
            std::memcpy(rope.out + r * rope.out_stride + h * head_dim, turned, size_t(head_dim) * 4);
        }
        if (rope.kv.is_half) write_kv<uint16_t>(rope, angles, r, step.write_slots[r]);
        else write_kv<float>(rope, angles, r, step.write_slots[r]);
    }
}

}  // namespace chatrt
