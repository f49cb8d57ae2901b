// Sixteen lanes as four registers of four: what the paths with 128-bit vectors share.
#pragma once

namespace chatrt {

template <class T>
struct Four {
    T a, b, c, d;
};

// `op` on each of the four registers of the operands.
template <class Op, class... T>
CHATRT_INLINE auto each(Op op, const Four<T>&... x) {
    return Four<decltype(op(x.a...))>{op(x.a...), op(x.b...), op(x.c...), op(x.d...)};
}

template <class T>
CHATRT_INLINE Four<T> all(T x) {
    return {x, x, x, x};
}

}  // namespace chatrt
