// Functions of Floats that no instruction gives.
#pragma once

#include "simd.h"

namespace chatrt {

// e to the power of x, relative error below 2e-7, for x clamped to [-87.3, 88]: never 0, never infinite.
// Reduction by powers of two, then the Taylor series to degree 6.
inline Floats exp(Floats x) {
    const Floats clamped = maximum(minimum(x, splat(88.0f)), splat(-87.33654f));
    const Floats n = round_to_even(mul(clamped, splat(1.44269504f)));
    Floats r = fma(n, splat(-0.693145752f), clamped);
    r = fma(n, splat(-1.42860677e-6f), r);
    Floats p = splat(1.0f / 720);
    p = fma(p, r, splat(1.0f / 120));
    p = fma(p, r, splat(1.0f / 24));
    p = fma(p, r, splat(1.0f / 6));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    return mul(p, power_of_two(n));
}

// x * sigmoid(x)
inline Floats silu(Floats x) { return div(x, add(splat(1.0f), exp(sub(zeros(), x)))); }

}  // namespace chatrt
