// The vector types that every kernel is written in, and the one place that names instruction sets.
//
// Floats: 16 float32. Ints: 16 int32. Bytes: 64 uint8, seen as 16 quads of 4. A kernel calls only the functions
// that simd_avx512.h lists; each other header gives the same ones for its instruction set, with the same results
// bit for bit wherever the machine has fused multiply-adds. Reductions have one fixed order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Vector types that are several registers cost memory traffic at every call that stays a call.
#define CHATRT_INLINE inline __attribute__((always_inline))

#if defined(__FP_FAST_FMAF) || defined(__FMA__) || defined(__aarch64__)
#define CHATRT_HAS_FMA 1
#else
#define CHATRT_HAS_FMA 0
#endif

namespace chatrt {

constexpr int kLanes = 16;

// One multiply-add for single numbers, fused where the machine has the instruction.
inline float fused(float a, float b, float c) {
#if CHATRT_HAS_FMA
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// IEEE half precision to float, for single numbers.
inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16;
    const uint32_t rest = half & 0x7fff;
    uint32_t bits;
    if (rest >= 0x7c00) {
        bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    } else if (rest >= 0x0400) {
        bits = sign | ((rest << 13) + 0x38000000);
    } else {
        const float magnitude = float(rest) * 0x1p-24f;
        std::memcpy(&bits, &magnitude, 4);
        bits |= sign;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float bfloat_to_float(uint16_t bfloat) {
    const uint32_t bits = uint32_t(bfloat) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

}  // namespace chatrt

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

#ifndef CHATRT_HAS_SPREAD
namespace chatrt {

inline void store_spread(float* p, Floats x, uint32_t bits) {
    float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; bits; bits &= bits - 1) p[__builtin_ctz(bits)] = lanes[i++];
}

}  // namespace chatrt
#endif
