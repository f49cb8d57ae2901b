// ARMv8.2 with the dot product instructions: four registers for each vector type.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "simd_four.h"

#define CHATRT_PATH "neon-dotprod"

namespace chatrt {

using Floats = Four<float32x4_t>;
using Ints = Four<int32x4_t>;
using Bytes = Four<uint8x16_t>;

// Two rows' integer sums are 16 of the 32 registers.
constexpr int kMaxRowBlock = 2;

// The products are signed, so `dot_bytes` has nothing to correct.
constexpr int kByteOffset = 0;

CHATRT_INLINE Floats zeros() { return all(vdupq_n_f32(0.0f)); }
CHATRT_INLINE Floats splat(float x) { return all(vdupq_n_f32(x)); }
CHATRT_INLINE Floats load(const float* p) {
    return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
CHATRT_INLINE void store(float* p, Floats x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}

// The first n of 16 lanes (0 <= n <= 16); the others are 0, and their memory is not touched.
CHATRT_INLINE Floats load_first(const float* p, int n) {
    float lanes[16] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
CHATRT_INLINE void store_first(float* p, Floats x, int n) {
    float lanes[16];
    store(lanes, x);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

// Lanes below n of x, lanes from n on of y.
CHATRT_INLINE Floats first_of(Floats x, Floats y, int n) {
    const int32x4_t end = vdupq_n_s32(n), four = vdupq_n_s32(4);
    const int32_t first[4] = {0, 1, 2, 3};
    const int32x4_t a = vld1q_s32(first), b = vaddq_s32(a, four), c = vaddq_s32(b, four);
    const Ints lanes = {a, b, c, vaddq_s32(c, four)};
    const auto choose = [end](int32x4_t lane, float32x4_t inside, float32x4_t outside) {
        return vbslq_f32(vcltq_s32(lane, end), inside, outside);
    };
    return each(choose, lanes, x, y);
}

CHATRT_INLINE float32x4_t halves_to_floats(uint16x4_t x) { return vcvt_f32_f16(vreinterpret_f16_u16(x)); }
CHATRT_INLINE uint16x4_t floats_to_halves(float32x4_t x) { return vreinterpret_u16_f16(vcvt_f16_f32(x)); }

// Half precision in memory, 16 numbers; stores round to nearest even.
CHATRT_INLINE Floats load_halves(const uint16_t* p) {
    return {halves_to_floats(vld1_u16(p)), halves_to_floats(vld1_u16(p + 4)), halves_to_floats(vld1_u16(p + 8)),
            halves_to_floats(vld1_u16(p + 12))};
}
CHATRT_INLINE Floats load_first_halves(const uint16_t* p, int n) {
    uint16_t halves[16] = {};
    for (int i = 0; i < n; ++i) halves[i] = p[i];
    return load_halves(halves);
}
CHATRT_INLINE void store_first_halves(uint16_t* p, Floats x, int n) {
    uint16_t halves[16];
    vst1_u16(halves, floats_to_halves(x.a));
    vst1_u16(halves + 4, floats_to_halves(x.b));
    vst1_u16(halves + 8, floats_to_halves(x.c));
    vst1_u16(halves + 12, floats_to_halves(x.d));
    for (int i = 0; i < n; ++i) p[i] = halves[i];
}

CHATRT_INLINE float32x4_t bfloats_to_floats(uint16x4_t x) { return vreinterpretq_f32_u32(vshll_n_u16(x, 16)); }
// bfloat16 in memory, 16 numbers.
CHATRT_INLINE Floats load_bfloats(const uint16_t* p) {
    return {bfloats_to_floats(vld1_u16(p)), bfloats_to_floats(vld1_u16(p + 4)), bfloats_to_floats(vld1_u16(p + 8)),
            bfloats_to_floats(vld1_u16(p + 12))};
}

CHATRT_INLINE Floats to_floats(Ints x) {
    return each([](int32x4_t v) { return vcvtq_f32_s32(v); }, x);
}

// 16 bytes in memory as numbers.
CHATRT_INLINE Floats load_signed_bytes(const int8_t* p) {
    const int8x16_t x = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_s8(vget_high_s8(x));
    return to_floats({vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
                      vmovl_s16(vget_high_s16(high))});
}
CHATRT_INLINE Floats load_unsigned_bytes(const uint8_t* p) {
    const uint8x16_t x = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(x)), high = vmovl_u8(vget_high_u8(x));
    const Four<uint32x4_t> wide = {vmovl_u16(vget_low_u16(low)), vmovl_u16(vget_high_u16(low)),
                                   vmovl_u16(vget_low_u16(high)), vmovl_u16(vget_high_u16(high))};
    return each([](uint32x4_t v) { return vcvtq_f32_u32(v); }, wide);
}

CHATRT_INLINE Floats add(Floats a, Floats b) {
    return each([](float32x4_t u, float32x4_t v) { return vaddq_f32(u, v); }, a, b);
}
CHATRT_INLINE Floats sub(Floats a, Floats b) {
    return each([](float32x4_t u, float32x4_t v) { return vsubq_f32(u, v); }, a, b);
}
CHATRT_INLINE Floats mul(Floats a, Floats b) {
    return each([](float32x4_t u, float32x4_t v) { return vmulq_f32(u, v); }, a, b);
}
CHATRT_INLINE Floats div(Floats a, Floats b) {
    return each([](float32x4_t u, float32x4_t v) { return vdivq_f32(u, v); }, a, b);
}
// Where an operand is NaN, the second one: so `maximum(x, bound)` is a bound for any x. The instruction of that name
// would give NaN.
CHATRT_INLINE Floats maximum(Floats a, Floats b) {
    return each([](float32x4_t u, float32x4_t v) { return vbslq_f32(vcgtq_f32(u, v), u, v); }, a, b);
}
CHATRT_INLINE Floats minimum(Floats a, Floats b) {
    return each([](float32x4_t u, float32x4_t v) { return vbslq_f32(vcltq_f32(u, v), u, v); }, a, b);
}
CHATRT_INLINE Floats absolute(Floats a) {
    return each([](float32x4_t v) { return vabsq_f32(v); }, a);
}
CHATRT_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return each([](float32x4_t u, float32x4_t v, float32x4_t w) { return vfmaq_f32(w, u, v); }, a, b, c);
}
CHATRT_INLINE Floats round_to_even(Floats a) {
    return each([](float32x4_t v) { return vrndnq_f32(v); }, a);
}

// Sums lane i with lane i + 8, then i + 4, i + 2, i + 1: the one order of all paths.
CHATRT_INLINE float sum(Floats x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
CHATRT_INLINE float highest(Floats x) {
    const auto higher = [](float32x4_t u, float32x4_t v) { return vbslq_f32(vcgtq_f32(u, v), u, v); };
    const float32x4_t four = higher(higher(x.d, x.b), higher(x.c, x.a));
    const float32x4_t two = higher(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(higher(two, vextq_f32(two, two, 1)), 0);
}

CHATRT_INLINE Ints zero_ints() { return all(vdupq_n_s32(0)); }
CHATRT_INLINE Ints add_ints(Ints a, Ints b) {
    return each([](int32x4_t u, int32x4_t v) { return vaddq_s32(u, v); }, a, b);
}
// One int32 of memory in all lanes, shifted left.
template <int kShift>
CHATRT_INLINE Ints splat_shifted(const int32_t* p) {
    return all(vshlq_n_s32(vdupq_n_s32(*p), kShift));
}
// Rounds to nearest even; the lowest int32 for what is out of range, where the instruction saturates.
CHATRT_INLINE Ints to_ints(Floats x) {
    const auto round = [](float32x4_t v) {
        const uint32x4_t in_range = vcltq_f32(vabsq_f32(v), vdupq_n_f32(0x1p31f));
        return vbslq_s32(in_range, vcvtnq_s32_f32(v), vdupq_n_s32(INT32_MIN));
    };
    return each(round, x);
}
CHATRT_INLINE int32_t sum(Ints x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.c), vaddq_s32(x.b, x.d))); }
// The low byte of each lane, for lanes in [-128, 127].
CHATRT_INLINE void store_int8(int8_t* p, Ints x) {
    const int16x8_t low = vcombine_s16(vmovn_s32(x.a), vmovn_s32(x.b));
    const int16x8_t high = vcombine_s16(vmovn_s32(x.c), vmovn_s32(x.d));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
// 2 to the power of whole numbers in [-126, 127].
CHATRT_INLINE Floats power_of_two(Floats n) {
    const auto raise = [](int32x4_t v) {
        return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(v, vdupq_n_s32(127)), 23));
    };
    return each(raise, to_ints(n));
}

CHATRT_INLINE Bytes load_bytes(const uint8_t* p) {
    return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)};
}
CHATRT_INLINE void store_bytes(uint8_t* p, Bytes x) {
    vst1q_u8(p, x.a);
    vst1q_u8(p + 16, x.b);
    vst1q_u8(p + 32, x.c);
    vst1q_u8(p + 48, x.d);
}
CHATRT_INLINE Bytes and_bytes(Bytes a, uint8_t mask) {
    return each([mask](uint8x16_t v) { return vandq_u8(v, vdupq_n_u8(mask)); }, a);
}
CHATRT_INLINE Bytes or_bytes(Bytes a, Bytes b) {
    return each([](uint8x16_t u, uint8x16_t v) { return vorrq_u8(u, v); }, a, b);
}
// Shift pairs of bytes as one number: mask the result, bits cross from one byte to the other.
template <int kShift>
CHATRT_INLINE Bytes shift_right(Bytes a) {
    return each([](uint8x16_t v) { return vreinterpretq_u8_u16(vshrq_n_u16(vreinterpretq_u16_u8(v), kShift)); }, a);
}
template <int kShift>
CHATRT_INLINE Bytes shift_left(Bytes a) {
    return each([](uint8x16_t v) { return vreinterpretq_u8_u16(vshlq_n_u16(vreinterpretq_u16_u8(v), kShift)); }, a);
}

CHATRT_INLINE int8x16_t splat_quad(const int8_t* quad) {
    int32_t four;
    __builtin_memcpy(&four, quad, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
// Adds to each lane the product of its quad of weights in [0, 127] with the same four activations in [-127, 127].
CHATRT_INLINE Ints dot_small(Ints sums, Bytes weights, const int8_t* quad) {
    const int8x16_t x = splat_quad(quad);
    return each([x](int32x4_t s, uint8x16_t w) { return vdotq_s32(s, vreinterpretq_s8_u8(w), x); }, sums, weights);
}
// The same for weights of 8 bits, stored + 128.
CHATRT_INLINE Ints dot_bytes(Ints sums, Bytes weights, const int8_t* quad) {
    const auto centre = [](uint8x16_t w) { return veorq_u8(w, vdupq_n_u8(0x80)); };
    return dot_small(sums, each(centre, weights), quad);
}

CHATRT_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p); }
CHATRT_INLINE void pause() { __asm__ volatile("yield"); }

}  // namespace chatrt
