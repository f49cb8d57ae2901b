// AVX-512 with VNNI: one register for each vector type.
#pragma once

// GCC 12 warns of registers that its own header leaves undefined on purpose.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstdint>

#define CHATRT_PATH "avx512-vnni"

namespace chatrt {

using Floats = __m512;
using Ints = __m512i;
using Bytes = __m512i;

// Rows of activations that one pass over a tile of weights serves: their sums stay in registers.
constexpr int kMaxRowBlock = 8;

// `dot_bytes` takes weights that are stored + 128; its result is too large by this times the activations' sum.
constexpr int kByteOffset = 128;

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }

inline __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1u); }

// The first n of 16 lanes (0 <= n <= 16); the others are 0, and their memory is not touched.
inline Floats load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store_first(float* p, Floats x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }

// The lanes in order to those of 32 numbers whose bits are set, which are 16; the others' memory is not touched.
#define CHATRT_HAS_SPREAD 1
inline void store_spread(float* p, Floats x, uint32_t bits) {
    const __mmask16 low = __mmask16(bits), high = __mmask16(bits >> 16);
    _mm512_mask_storeu_ps(p, low, _mm512_maskz_expand_ps(low, x));
    if (!high) return;
    const Floats rest = _mm512_maskz_compress_ps(__mmask16(0xffffu << __builtin_popcount(low)), x);
    _mm512_mask_storeu_ps(p + kLanes, high, _mm512_maskz_expand_ps(high, rest));
}

// Lanes below n of x, lanes from n on of y.
inline Floats first_of(Floats x, Floats y, int n) { return _mm512_mask_blend_ps(first_lanes(n), y, x); }

// Half precision in memory, 16 numbers; stores round to nearest even.
inline Floats load_halves(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Floats load_first_halves(const uint16_t* p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
inline void store_first_halves(uint16_t* p, Floats x, int n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// bfloat16 in memory, 16 numbers.
inline Floats load_bfloats(const uint16_t* p) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// 16 bytes in memory as numbers.
inline Floats load_unsigned_bytes(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Floats load_signed_bytes(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
// Where an operand is NaN, the second one: so `maximum(x, bound)` is a bound for any x.
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats absolute(Floats a) { return _mm512_abs_ps(a); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats round_to_even(Floats a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// 2 to the power of whole numbers in [-126, 127].
inline Floats power_of_two(Floats n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}

// Sums lane i with lane i + 8, then i + 4, i + 2, i + 1: the one order of all paths.
inline float sum(Floats x) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float highest(Floats x) { return _mm512_reduce_max_ps(x); }

inline Ints zero_ints() { return _mm512_setzero_si512(); }
inline Ints add_ints(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
// One int32 of memory in all lanes, shifted left.
template <int kShift>
inline Ints splat_shifted(const int32_t* p) {
    return _mm512_slli_epi32(_mm512_set1_epi32(*p), kShift);
}
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }  // rounds to nearest even
inline int32_t sum(Ints x) { return _mm512_reduce_add_epi32(x); }
// The low byte of each lane, for lanes in [-128, 127].
inline void store_int8(int8_t* p, Ints x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}

inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x); }
inline Bytes and_bytes(Bytes a, uint8_t mask) { return _mm512_and_si512(a, _mm512_set1_epi8(char(mask))); }
inline Bytes or_bytes(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
// Shift pairs of bytes as one number: mask the result, bits cross from one byte to the other.
template <int kShift>
inline Bytes shift_right(Bytes a) { return _mm512_srli_epi16(a, kShift); }
template <int kShift>
inline Bytes shift_left(Bytes a) { return _mm512_slli_epi16(a, kShift); }

inline Ints splat_quad(const int8_t* quad) {
    int32_t four;
    __builtin_memcpy(&four, quad, 4);
    return _mm512_set1_epi32(four);
}
// Adds to each lane the product of its quad of weights in [0, 127] with the same four activations in [-127, 127].
inline Ints dot_small(Ints sums, Bytes weights, const int8_t* quad) {
    return _mm512_dpbusd_epi32(sums, weights, splat_quad(quad));
}
// The same for weights of 8 bits, stored + 128.
inline Ints dot_bytes(Ints sums, Bytes weights, const int8_t* quad) {
    return _mm512_dpbusd_epi32(sums, weights, splat_quad(quad));
}

inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
inline void pause() { _mm_pause(); }

}  // namespace chatrt
