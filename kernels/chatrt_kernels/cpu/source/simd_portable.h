// Any machine: four vectors of 128 bits for each type, in the vector extension of GCC and Clang, which both compile to
// whatever the machine has.
//
// Without a fused multiply-add `fma` rounds twice: it, and what is built on it, then differs from other paths in the
// last bits. All else is the same bit for bit.
#pragma once

#include <cstdint>

#include "simd_four.h"

#define CHATRT_PATH "portable"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pairs of bytes are taken apart as 16-bit numbers");

namespace chatrt {

using FloatVector [[gnu::vector_size(16)]] = float;
using IntVector [[gnu::vector_size(16)]] = int32_t;
using UintVector [[gnu::vector_size(16)]] = uint32_t;
using ShortVector [[gnu::vector_size(16)]] = int16_t;
using UshortVector [[gnu::vector_size(16)]] = uint16_t;
using ByteVector [[gnu::vector_size(16)]] = uint8_t;
using HalfVector [[gnu::vector_size(8)]] = uint16_t;  // four of them

using Floats = Four<FloatVector>;
using Ints = Four<IntVector>;
using Bytes = Four<ByteVector>;

// More than sixteen registers hold, but sums in the nearest memory cost less than taking weights apart again.
constexpr int kMaxRowBlock = 4;

// The products are signed, so `dot_bytes` has nothing to correct.
constexpr int kByteOffset = 0;

// The same bits as another type.
template <class To, class From>
CHATRT_INLINE To as(From x) {
    static_assert(sizeof(To) == sizeof(From), "only the type may change");
    To y;
    __builtin_memcpy(&y, &x, sizeof(y));
    return y;
}
template <class T>
CHATRT_INLINE T read(const void* p) {
    T x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
}
CHATRT_INLINE FloatVector splat_vector(float x) { return FloatVector{x, x, x, x}; }
CHATRT_INLINE FloatVector select(IntVector mask, FloatVector a, FloatVector b) {
    return as<FloatVector>((mask & as<IntVector>(a)) | (~mask & as<IntVector>(b)));
}
CHATRT_INLINE FloatVector magnitude(FloatVector x) { return as<FloatVector>(as<IntVector>(x) & 0x7fffffff); }
CHATRT_INLINE FloatVector higher(FloatVector a, FloatVector b) { return select(a > b, a, b); }

CHATRT_INLINE Floats zeros() { return all(splat_vector(0.0f)); }
CHATRT_INLINE Floats splat(float x) { return all(splat_vector(x)); }
CHATRT_INLINE Floats load(const float* p) { return read<Floats>(p); }
CHATRT_INLINE void store(float* p, Floats x) { __builtin_memcpy(p, &x, sizeof(x)); }

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
    const Ints lanes = {{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}};
    const auto choose = [n](IntVector lane, FloatVector inside, FloatVector outside) {
        return select(lane < IntVector{n, n, n, n}, inside, outside);
    };
    return each(choose, lanes, x, y);
}

CHATRT_INLINE FloatVector halves_to_floats(HalfVector halves) {
    const IntVector x = __builtin_convertvector(halves, IntVector);
    const IntVector sign = as<IntVector>(as<UintVector>(x & 0x8000) << 16), rest = x & 0x7fff;
    const FloatVector subnormal = __builtin_convertvector(rest, FloatVector) * 0x1p-24f;
    // Infinity and NaN keep the highest exponent; NaN comes out quiet.
    const IntVector special = rest > 0x7bff;
    const IntVector normal =
        (rest << 13) + 0x38000000 + (special & 0x38000000) + ((rest > 0x7c00) & ~(rest << 13) & 0x400000);
    return as<FloatVector>(as<IntVector>(select(rest < 0x0400, subnormal, as<FloatVector>(normal))) | sign);
}
// Rounds to nearest even.
CHATRT_INLINE HalfVector floats_to_halves(FloatVector floats) {
    const IntVector x = as<IntVector>(floats), rest = x & 0x7fffffff;
    const IntVector sign = (x >> 16) & 0x8000;
    // An even number stays when half a unit less one is added; what is carried may reach infinity.
    const IntVector normal = (rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13;
    // The last bit of a number just above a half is that of the smallest subnormal.
    const IntVector subnormal = as<IntVector>(as<FloatVector>(rest) + 0.5f) - 0x3f000000;
    const IntVector special = 0x7c00 | ((rest > 0x7f800000) & (0x200 | ((rest >> 13) & 0x3ff)));
    const IntVector small = rest < 0x38800000, large = rest > 0x477fffff;
    const IntVector half = (small & subnormal) | (large & special) | (~(small | large) & normal) | sign;
    return __builtin_convertvector(as<UintVector>(half), HalfVector);
}

// Half precision in memory, 16 numbers; stores round to nearest even.
CHATRT_INLINE Floats load_halves(const uint16_t* p) {
    return each([](HalfVector x) { return halves_to_floats(x); }, read<Four<HalfVector>>(p));
}
CHATRT_INLINE Floats load_first_halves(const uint16_t* p, int n) {
    uint16_t halves[16] = {};
    for (int i = 0; i < n; ++i) halves[i] = p[i];
    return load_halves(halves);
}
CHATRT_INLINE void store_first_halves(uint16_t* p, Floats x, int n) {
    const Four<HalfVector> vectors = each([](FloatVector v) { return floats_to_halves(v); }, x);
    uint16_t halves[16];
    __builtin_memcpy(halves, &vectors, sizeof(halves));
    for (int i = 0; i < n; ++i) p[i] = halves[i];
}

// bfloat16 in memory, 16 numbers.
CHATRT_INLINE Floats load_bfloats(const uint16_t* p) {
    const auto widen = [](HalfVector x) {
        return as<FloatVector>(__builtin_convertvector(x, UintVector) << 16);
    };
    return each(widen, read<Four<HalfVector>>(p));
}

// 16 bytes in memory as numbers.
template <class T>
CHATRT_INLINE Floats load_small(const T* p) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = float(p[i]);
    return load(lanes);
}
CHATRT_INLINE Floats load_unsigned_bytes(const uint8_t* p) { return load_small(p); }
CHATRT_INLINE Floats load_signed_bytes(const int8_t* p) { return load_small(p); }

CHATRT_INLINE Floats add(Floats a, Floats b) {
    return each([](FloatVector u, FloatVector v) { return u + v; }, a, b);
}
CHATRT_INLINE Floats sub(Floats a, Floats b) {
    return each([](FloatVector u, FloatVector v) { return u - v; }, a, b);
}
CHATRT_INLINE Floats mul(Floats a, Floats b) {
    return each([](FloatVector u, FloatVector v) { return u * v; }, a, b);
}
CHATRT_INLINE Floats div(Floats a, Floats b) {
    return each([](FloatVector u, FloatVector v) { return u / v; }, a, b);
}
// Where an operand is NaN, the second one: so `maximum(x, bound)` is a bound for any x.
CHATRT_INLINE Floats maximum(Floats a, Floats b) {
    return each([](FloatVector u, FloatVector v) { return higher(u, v); }, a, b);
}
CHATRT_INLINE Floats minimum(Floats a, Floats b) {
    return each([](FloatVector u, FloatVector v) { return select(u < v, u, v); }, a, b);
}
CHATRT_INLINE Floats absolute(Floats a) {
    return each([](FloatVector v) { return magnitude(v); }, a);
}
CHATRT_INLINE Floats fma(Floats a, Floats b, Floats c) {
    const auto multiply_add = [](FloatVector u, FloatVector v, FloatVector w) {
        return FloatVector{fused(u[0], v[0], w[0]), fused(u[1], v[1], w[1]), fused(u[2], v[2], w[2]),
                           fused(u[3], v[3], w[3])};
    };
    return each(multiply_add, a, b, c);
}

// Adding 2^23 leaves no bits behind the point; above it there are none. The sign stays, that of zeros too.
CHATRT_INLINE FloatVector round_vector(FloatVector x) {
    const FloatVector size = magnitude(x);
    const FloatVector whole = (size + 0x1p23f) - 0x1p23f;
    const IntVector sign = as<IntVector>(x) ^ as<IntVector>(size);
    return select(size < splat_vector(0x1p23f), as<FloatVector>(as<IntVector>(whole) | sign), x);
}
CHATRT_INLINE Floats round_to_even(Floats a) {
    return each([](FloatVector v) { return round_vector(v); }, a);
}

// Sums lane i with lane i + 8, then i + 4, i + 2, i + 1: the one order of all paths.
CHATRT_INLINE float sum(Floats x) {
    const FloatVector four = (x.a + x.c) + (x.b + x.d);
    return (four[0] + four[2]) + (four[1] + four[3]);
}
CHATRT_INLINE float highest(Floats x) {
    const FloatVector four = higher(higher(x.d, x.b), higher(x.c, x.a));
    const FloatVector two = higher(four, FloatVector{four[2], four[3], four[0], four[1]});
    return two[0] > two[1] ? two[0] : two[1];
}

CHATRT_INLINE Ints zero_ints() { return all(IntVector{}); }
CHATRT_INLINE Ints add_ints(Ints a, Ints b) {
    return each([](IntVector u, IntVector v) { return u + v; }, a, b);
}
// One int32 of memory in all lanes, shifted left.
template <int kShift>
CHATRT_INLINE Ints splat_shifted(const int32_t* p) {
    const int32_t shifted = int32_t(uint32_t(*p) << kShift);
    return all(IntVector{shifted, shifted, shifted, shifted});
}
CHATRT_INLINE Floats to_floats(Ints x) {
    return each([](IntVector v) { return __builtin_convertvector(v, FloatVector); }, x);
}
// Rounds to nearest even; the lowest int32 for what is out of range.
CHATRT_INLINE Ints to_ints(Floats x) {
    const auto round = [](FloatVector v) {
        const IntVector in_range = magnitude(v) < splat_vector(0x1p31f);
        const FloatVector whole = as<FloatVector>(as<IntVector>(round_vector(v)) & in_range);
        return __builtin_convertvector(whole, IntVector) | (~in_range & INT32_MIN);
    };
    return each(round, x);
}
CHATRT_INLINE int32_t sum(Ints x) {
    const auto wrapping = [](IntVector v) { return as<UintVector>(v); };
    const UintVector four = (wrapping(x.a) + wrapping(x.c)) + (wrapping(x.b) + wrapping(x.d));
    return int32_t((four[0] + four[2]) + (four[1] + four[3]));
}
// The low byte of each lane, for lanes in [-128, 127].
CHATRT_INLINE void store_int8(int8_t* p, Ints x) {
    int32_t lanes[16];
    __builtin_memcpy(lanes, &x, sizeof(lanes));
    for (int i = 0; i < 16; ++i) p[i] = int8_t(lanes[i]);
}
// 2 to the power of whole numbers in [-126, 127].
CHATRT_INLINE Floats power_of_two(Floats n) {
    return each([](IntVector v) { return as<FloatVector>((v + 127) << 23); }, to_ints(n));
}

CHATRT_INLINE Bytes load_bytes(const uint8_t* p) { return read<Bytes>(p); }
CHATRT_INLINE void store_bytes(uint8_t* p, Bytes x) { __builtin_memcpy(p, &x, sizeof(x)); }
CHATRT_INLINE Bytes and_bytes(Bytes a, uint8_t mask) {
    const uint32_t masks = mask * 0x01010101u;
    return each([masks](ByteVector v) { return as<ByteVector>(as<UintVector>(v) & masks); }, a);
}
CHATRT_INLINE Bytes or_bytes(Bytes a, Bytes b) {
    return each([](ByteVector u, ByteVector v) { return u | v; }, a, b);
}
// Shift pairs of bytes as one number: mask the result, bits cross from one byte to the other.
template <int kShift>
CHATRT_INLINE Bytes shift_right(Bytes a) {
    return each([](ByteVector v) { return as<ByteVector>(as<UshortVector>(v) >> kShift); }, a);
}
template <int kShift>
CHATRT_INLINE Bytes shift_left(Bytes a) {
    return each([](ByteVector v) { return as<ByteVector>(as<UshortVector>(v) << kShift); }, a);
}

// The first and the second signed byte of each pair.
CHATRT_INLINE ShortVector first_bytes(ByteVector x) { return as<ShortVector>(as<UshortVector>(x) << 8) >> 8; }
CHATRT_INLINE ShortVector second_bytes(ByteVector x) { return as<ShortVector>(x) >> 8; }

// Adds to each lane the products of its quad of signed weights, taken apart into first and second bytes of pairs, with
// `quad`. The sum of two products fits 16 bits (2 * 128 * 127), where every machine multiplies fast.
CHATRT_INLINE Ints add_products(Ints sums, Four<ShortVector> first, Four<ShortVector> second, const int8_t* quad) {
    const int32_t four = read<int32_t>(quad);
    const ByteVector x = as<ByteVector>(IntVector{four, four, four, four});
    const ShortVector first_x = first_bytes(x), second_x = second_bytes(x);
    const auto add_pairs = [first_x, second_x](IntVector total, ShortVector u, ShortVector v) {
        const ShortVector pairs = u * first_x + v * second_x;
        const IntVector low = as<IntVector>(as<UintVector>(pairs) << 16) >> 16, high = as<IntVector>(pairs) >> 16;
        return total + (low + high);
    };
    return each(add_pairs, sums, first, second);
}
// Adds to each lane the product of its quad of weights in [0, 127] with the same four activations in [-127, 127].
CHATRT_INLINE Ints dot_small(Ints sums, Bytes weights, const int8_t* quad) {
    const auto first = each([](ByteVector w) { return as<ShortVector>(w) & 0xff; }, weights);
    return add_products(sums, first, each([](ByteVector w) { return second_bytes(w); }, weights), quad);
}
// The same for weights of 8 bits, stored + 128.
CHATRT_INLINE Ints dot_bytes(Ints sums, Bytes weights, const int8_t* quad) {
    const Bytes centred = each([](ByteVector w) { return w ^ 0x80; }, weights);
    const auto first = each([](ByteVector w) { return first_bytes(w); }, centred);
    return add_products(sums, first, each([](ByteVector w) { return second_bytes(w); }, centred), quad);
}

CHATRT_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p); }
CHATRT_INLINE void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

}  // namespace chatrt
