// The ops as plain structs over plain pointers: what Python fills in once and a step reads.
//
// Every struct here is mirrored by `structs.py`, field by field. Strides are in numbers, not bytes.
#pragma once

#include <cstdint>

#include "quantise.h"
#include "weights.h"

namespace chatrt {

// What changes from step to step. Tensors as in `chatrt_kernels.ops.RowMeta`.
struct Step {
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* write_slots;
    const int32_t* page_table;
    int64_t page_table_stride;
    const int32_t* q_start;
    const int32_t* kv_len;
    const int64_t* logit_rows;
    const int64_t* feature_rows;
    int32_t num_rows;
    int32_t num_sequences;
    int32_t num_logit_rows;
    int32_t num_feature_rows;
};

enum Kind : int32_t {
    kEmbed = 0,
    kNorm = 1,
    kQuantise = 2,
    kLinear = 3,
    kRope = 4,
    kAttention = 5,
    kAdd = 6,
    kSwiglu = 7,
    kGather = 8,
};

// Which of the step's counts is the number of rows of a call.
enum RowsOf : int32_t { kAllRows = 0, kLogitRows = 1, kFeatureRows = 2 };

struct Call {
    int32_t kind;
    int32_t rows_of;
    int32_t rows_per;  // rows of this call for each of the step's rows: heads, where heads are normed
    int32_t padding;
    const void* arguments;  // the struct of the kind
};

// out[r] = row token_ids[r] of the weight
struct Embed {
    Weight weight;
    float* out;
    int64_t out_stride;
};

// out = x / rms(x) * weight; `out.values` null: floats only, `floats` null: quantised only.
struct Norm {
    const float* x;
    int64_t x_stride;
    const float* weight;
    int32_t width;
    float eps;
    float* floats;
    int64_t out_stride;
    Quantised quantised;
};

struct Quantise {
    const float* x;
    int64_t x_stride;
    int64_t width;
    Quantised quantised;
};

enum LinearMode : int32_t { kStore = 0, kAddTo = 1, kGated = 2 };

// Up to three matrices over one input. kStore: out = x @ weight.T + bias. kAddTo: out += that. kGated: the first two
// matrices are gate and up, and out[0] (or `activated`, where its values are not null) = silu(gate) * up; the rows of
// these two lie in the order of their numbers.
struct Linear {
    int32_t mode;
    int32_t num_weights;
    Weight weights[3];
    const float* bias[3];
    float* out[3];
    int64_t out_stride[3];
    const float* x;  // for plain weights
    int64_t x_stride;
    Quantised quantised;  // for the others
    Quantised activated;
};

// How the numbers of a page are stored. kInt8: codes, and a float32 scale for each token and head. kInt4: byte j of a
// head has dimension j low and j + head_dim / 2 high; groups of 16 dimensions have a step and a minimum in half precision.
enum KVFormat : int32_t { kFloat32 = 0, kHalf = 1, kInt8 = 2, kInt4 = 3 };

constexpr int kNibbleGroup = 16;  // dimensions that share a step

// Keys of a page lie as [kv_heads, width, page_size], values as [kv_heads, page_size, width]; scales as
// [kv_heads, page_size], those of kInt4 as [kv_heads, groups, 2, page_size].
struct KVLayer {
    void* keys;
    void* values;
    void* key_scales;
    void* value_scales;
    int64_t page_stride;   // stored numbers from one page to the next
    int64_t scale_stride;  // scales from one page to the next
    int32_t format;
    int32_t page_size;  // a multiple of 16
    int32_t kv_heads;
    int32_t head_dim;
};

// Stored numbers of one token's head.
inline int stored_width(const KVLayer& kv) { return kv.format == kInt4 ? kv.head_dim / 2 : kv.head_dim; }
// Scales of one head in a page.
inline int64_t scales_of_head(const KVLayer& kv) {
    return int64_t(kv.page_size) * (kv.format == kInt4 ? 2 * kv.head_dim / kNibbleGroup : 1);
}
// So many scales further on; null where there are none.
inline const void* scales_from(const KVLayer& kv, const void* scales, int64_t count) {
    if (!scales) return nullptr;
    return static_cast<const uint8_t*>(scales) + count * (kv.format == kInt4 ? 2 : 4);
}

struct Rope {
    const float* q;
    const float* k;
    const float* v;
    int64_t q_stride, k_stride, v_stride;
    const float* table;  // [positions, head_dim]: cosines of head_dim / 2 angles, then their sines
    float* out;
    int64_t out_stride;
    int32_t num_heads;
    int32_t padding;
    KVLayer kv;
};

struct Attention {
    const float* q;
    int64_t q_stride;
    float* out;
    int64_t out_stride;
    Quantised quantised;  // where its values are not null, instead of `out`
    int32_t num_heads;
    float scale;
    KVLayer kv;
    float* partials;  // results of splits that different threads compute
    int64_t num_partials;
};

// kAdd: out = x + y. kSwiglu: out = silu(x) * y.
struct Pairwise {
    const float* x;
    const float* y;
    float* out;
    int64_t x_stride, y_stride, out_stride;
    int64_t width;
};

// out[i] = x[rows[i]], the rows being the step's logit or feature rows.
struct Gather {
    const float* x;
    float* out;
    int64_t x_stride, out_stride;
    int64_t width;
};

}  // namespace chatrt
