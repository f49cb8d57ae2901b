// AVX2 with FMA and F16C: two registers for each vector type, lanes 0 to 7 and 8 to 15.
#pragma once

#include <immintrin.h>

#include <cstdint>

#if defined(__AVXVNNI__)
#define CHATRT_PATH "avx2-vnni"
#else
#define CHATRT_PATH "avx2"
#endif

namespace chatrt {

struct Floats {
    __m256 low, high;
};
struct Ints {
    __m256i low, high;
};
struct Bytes {
    __m256i low, high;
};

// The integer sums of four rows are all sixteen registers where both halves of a group have their own; those that go
// to the nearest memory cost less than taking weights apart again.
constexpr int kMaxRowBlock = 4;

// `dot_bytes` takes weights that are stored + 128; its result is too large by this times the activations' sum.
#if defined(__AVXVNNI__)
constexpr int kByteOffset = 128;
#else
constexpr int kByteOffset = 0;
#endif

CHATRT_INLINE Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
CHATRT_INLINE Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
CHATRT_INLINE Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
CHATRT_INLINE void store(float* p, Floats x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}

// All bits of the first n lanes.
CHATRT_INLINE Ints first_lanes(int n) {
    const __m256i end = _mm256_set1_epi32(n);
    return {_mm256_cmpgt_epi32(end, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
            _mm256_cmpgt_epi32(end, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}

// The first n of 16 lanes (0 <= n <= 16); the others are 0, and their memory is not touched.
CHATRT_INLINE Floats load_first(const float* p, int n) {
    const Ints lanes = first_lanes(n);
    return {_mm256_maskload_ps(p, lanes.low), _mm256_maskload_ps(p + 8, lanes.high)};
}
CHATRT_INLINE void store_first(float* p, Floats x, int n) {
    const Ints lanes = first_lanes(n);
    _mm256_maskstore_ps(p, lanes.low, x.low);
    _mm256_maskstore_ps(p + 8, lanes.high, x.high);
}

// Lanes below n of x, lanes from n on of y.
CHATRT_INLINE Floats first_of(Floats x, Floats y, int n) {
    const Ints lanes = first_lanes(n);
    return {_mm256_blendv_ps(y.low, x.low, _mm256_castsi256_ps(lanes.low)),
            _mm256_blendv_ps(y.high, x.high, _mm256_castsi256_ps(lanes.high))};
}

CHATRT_INLINE __m128i load_16_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

// Half precision in memory, 16 numbers; stores round to nearest even.
CHATRT_INLINE Floats load_halves(const uint16_t* p) {
    return {_mm256_cvtph_ps(load_16_bytes(p)), _mm256_cvtph_ps(load_16_bytes(p + 8))};
}
CHATRT_INLINE Floats load_first_halves(const uint16_t* p, int n) {
    uint16_t halves[16] = {};
    for (int i = 0; i < n; ++i) halves[i] = p[i];
    return load_halves(halves);
}
CHATRT_INLINE void store_first_halves(uint16_t* p, Floats x, int n) {
    uint16_t halves[16];
    __m128i* out = reinterpret_cast<__m128i*>(halves);
    _mm_storeu_si128(out, _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(out + 1, _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT));
    for (int i = 0; i < n; ++i) p[i] = halves[i];
}

CHATRT_INLINE __m256 bfloats_to_floats(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
// bfloat16 in memory, 16 numbers.
CHATRT_INLINE Floats load_bfloats(const uint16_t* p) {
    return {bfloats_to_floats(load_16_bytes(p)), bfloats_to_floats(load_16_bytes(p + 8))};
}

// 16 bytes in memory as numbers.
CHATRT_INLINE Floats load_unsigned_bytes(const uint8_t* p) {
    const __m128i x = load_16_bytes(p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
CHATRT_INLINE Floats load_signed_bytes(const int8_t* p) {
    const __m128i x = load_16_bytes(p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}

CHATRT_INLINE Floats add(Floats a, Floats b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
CHATRT_INLINE Floats sub(Floats a, Floats b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
CHATRT_INLINE Floats mul(Floats a, Floats b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
CHATRT_INLINE Floats div(Floats a, Floats b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
// Where an operand is NaN, the second one: so `maximum(x, bound)` is a bound for any x.
CHATRT_INLINE Floats maximum(Floats a, Floats b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
CHATRT_INLINE Floats minimum(Floats a, Floats b) {
    return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
CHATRT_INLINE Floats absolute(Floats a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
CHATRT_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
CHATRT_INLINE Floats round_to_even(Floats a) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.low, kMode), _mm256_round_ps(a.high, kMode)};
}

// Sums lane i with lane i + 8, then i + 4, i + 2, i + 1: the one order of all paths.
CHATRT_INLINE float sum(Floats x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
CHATRT_INLINE float highest(Floats x) {
    const __m256 eight = _mm256_max_ps(x.high, x.low);
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

CHATRT_INLINE Ints zero_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
CHATRT_INLINE Ints add_ints(Ints a, Ints b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
// One int32 of memory in all lanes, shifted left.
template <int kShift>
CHATRT_INLINE Ints splat_shifted(const int32_t* p) {
    const __m256i shifted = _mm256_slli_epi32(_mm256_set1_epi32(*p), kShift);
    return {shifted, shifted};
}
CHATRT_INLINE Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }
// Rounds to nearest even; the lowest int32 for what is out of range.
CHATRT_INLINE Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
CHATRT_INLINE int32_t sum(Ints x) {
    const __m256i eight = _mm256_add_epi32(x.low, x.high);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
// The low byte of each lane, for lanes in [-128, 127].
CHATRT_INLINE void store_int8(int8_t* p, Ints x) {
    const __m256i byte = _mm256_set1_epi32(0xff);
    // Packing works on halves of 128 bits: the 64-bit quarters come out as 0, 2, 1, 3.
    const __m256i words = _mm256_permute4x64_epi64(
        _mm256_packus_epi32(_mm256_and_si256(x.low, byte), _mm256_and_si256(x.high, byte)), 0xd8);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
// 2 to the power of whole numbers in [-126, 127].
CHATRT_INLINE Floats power_of_two(Floats n) {
    const __m256i bias = _mm256_set1_epi32(127);
    const Ints x = to_ints(n);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(x.low, bias), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(x.high, bias), 23))};
}

CHATRT_INLINE Bytes load_bytes(const uint8_t* p) {
    const __m256i* lines = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(lines), _mm256_loadu_si256(lines + 1)};
}
CHATRT_INLINE void store_bytes(uint8_t* p, Bytes x) {
    __m256i* lines = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(lines, x.low);
    _mm256_storeu_si256(lines + 1, x.high);
}
CHATRT_INLINE Bytes and_bytes(Bytes a, uint8_t mask) {
    const __m256i masks = _mm256_set1_epi8(char(mask));
    return {_mm256_and_si256(a.low, masks), _mm256_and_si256(a.high, masks)};
}
CHATRT_INLINE Bytes or_bytes(Bytes a, Bytes b) {
    return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
// Shift pairs of bytes as one number: mask the result, bits cross from one byte to the other.
template <int kShift>
CHATRT_INLINE Bytes shift_right(Bytes a) {
    return {_mm256_srli_epi16(a.low, kShift), _mm256_srli_epi16(a.high, kShift)};
}
template <int kShift>
CHATRT_INLINE Bytes shift_left(Bytes a) {
    return {_mm256_slli_epi16(a.low, kShift), _mm256_slli_epi16(a.high, kShift)};
}

CHATRT_INLINE __m256i splat_quad(const int8_t* quad) {
    int32_t four;
    __builtin_memcpy(&four, quad, 4);
    return _mm256_set1_epi32(four);
}

// Adds products of unsigned bytes with signed ones, quad by quad. Without VNNI a pair's sum has 16 bits.
CHATRT_INLINE __m256i add_products(__m256i sums, __m256i weights, __m256i x) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sums, weights, x);
#else
    const __m256i pairs = _mm256_maddubs_epi16(weights, x);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}
// Adds to each lane the product of its quad of weights in [0, 127] with the same four activations in [-127, 127].
// 2 * 127 * 127 fits 16 bits.
CHATRT_INLINE Ints dot_small(Ints sums, Bytes weights, const int8_t* quad) {
    const __m256i x = splat_quad(quad);
    return {add_products(sums.low, weights.low, x), add_products(sums.high, weights.high, x)};
}

// The same for weights of 8 bits, stored + 128.
#if defined(__AVXVNNI__)
CHATRT_INLINE Ints dot_bytes(Ints sums, Bytes weights, const int8_t* quad) {
    return dot_small(sums, weights, quad);
}
#else
// The weights' signs move to the activations; 2 * 128 * 127 fits 16 bits, 2 * 255 * 127 would not.
CHATRT_INLINE __m256i add_signed_products(__m256i sums, __m256i weights, __m256i x) {
    const __m256i centred = _mm256_xor_si256(weights, _mm256_set1_epi8(char(0x80)));
    return add_products(sums, _mm256_abs_epi8(centred), _mm256_sign_epi8(x, centred));
}
CHATRT_INLINE Ints dot_bytes(Ints sums, Bytes weights, const int8_t* quad) {
    const __m256i x = splat_quad(quad);
    return {add_signed_products(sums.low, weights.low, x), add_signed_products(sums.high, weights.high, x)};
}
#endif

CHATRT_INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
CHATRT_INLINE void pause() { _mm_pause(); }

}  // namespace chatrt
