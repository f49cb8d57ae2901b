// Compares the vector functions, and the products made of them, with scalar loops; prints a digest of the results.
//
// Compiled for ARM it runs under qemu, so NEON is checked on other machines too; compiled for the machine itself it
// has to print the same digest if both have fused multiply-adds. Prints "path NAME", one line for each difference,
// and "digest HEX". Exit code 1: there are differences.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "quantise.h"
#include "simd.h"
#include "tiles.h"
#include "vector_math.h"
#include "weights.h"

using namespace chatrt;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kMaxReports = 20;

int num_differences = 0;
uint64_t digest = 14695981039346656037u;
uint64_t random_state = 88172645463325252u;

uint32_t random_bits() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return uint32_t(random_state >> 32);
}
float random_float(float bound) { return bound * (float(int32_t(random_bits())) * 0x1p-31f); }

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return x != x ? 0x7fc00000 : bits;  // which NaN it is means nothing here
}

void differ(const char* name, int lane, float got, float want) {
    if (++num_differences <= kMaxReports) std::printf("%s: lane %d gives %.9g, not %.9g\n", name, lane, got, want);
}
void digest_float(float x) { digest = (digest ^ bits_of(x)) * 1099511628211u; }

void expect(const char* name, float got, float want, int lane = 0) {
    digest_float(got);
    if (bits_of(got) != bits_of(want)) differ(name, lane, got, want);
}

// `want(i)` is what lane i has to be.
template <class Want>
void expect_lanes(const char* name, Floats got, Want want) {
    float lanes[kLanes];
    store(lanes, got);
    for (int i = 0; i < kLanes; ++i) expect(name, lanes[i], want(i), i);
}
template <class Want>
void expect_lanes(const char* name, Ints got, Want want) {
    expect_lanes(name, to_floats(got), [&](int i) { return float(want(i)); });
}

// Rounds to nearest even, as IEEE 754 defines half precision.
uint16_t half_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    const double magnitude = std::fabs(double(x));
    if (magnitude == 0) return sign;
    if (magnitude >= 65520.0) return sign | 0x7c00;
    int exponent = 0;
    std::frexp(magnitude, &exponent);
    const int step = std::max(exponent - 11, -24);
    const uint32_t units = uint32_t(std::nearbyint(std::ldexp(magnitude, -step)));
    return uint16_t(sign | (units + (uint32_t(step + 24) << 10)));
}

void check_loads() {
    float x[kLanes + 1], out[kLanes + 1];
    uint16_t halves[kLanes + 1], stored[kLanes + 1];
    for (int i = 0; i <= kLanes; ++i) {
        x[i] = random_float(100);
        halves[i] = half_of(random_float(100));
    }
    expect_lanes("load", load(x + 1), [&](int i) { return x[i + 1]; });
    expect_lanes("splat", splat(x[0]), [&](int) { return x[0]; });
    expect_lanes("zeros", zeros(), [](int) { return 0.0f; });
    for (int n = 0; n <= kLanes; ++n) {
        expect_lanes("load_first", load_first(x, n), [&](int i) { return i < n ? x[i] : 0.0f; });
        expect_lanes("load_first_halves", load_first_halves(halves, n),
                     [&](int i) { return i < n ? half_to_float(halves[i]) : 0.0f; });
        expect_lanes("first_of", first_of(load(x), load(x + 1), n), [&](int i) { return i < n ? x[i] : x[i + 1]; });
        std::fill(out, out + kLanes + 1, -1.0f);
        store_first(out, load(x), n);
        for (int i = 0; i <= kLanes; ++i) expect("store_first", out[i], i < n ? x[i] : -1.0f, i);
        std::fill(stored, stored + kLanes + 1, uint16_t(7));
        store_first_halves(stored, load(x), n);
        for (int i = 0; i <= kLanes; ++i) expect("store_first_halves", stored[i], i < n ? half_of(x[i]) : 7, i);
    }
    uint8_t bytes[256];
    for (int i = 0; i < 256; ++i) bytes[i] = uint8_t(i);
    for (int start = 0; start < 256; start += kLanes) {
        const int8_t* with_sign = reinterpret_cast<const int8_t*>(bytes) + start;
        expect_lanes("load_unsigned_bytes", load_unsigned_bytes(bytes + start),
                     [&](int i) { return float(bytes[start + i]); });
        expect_lanes("load_signed_bytes", load_signed_bytes(with_sign), [&](int i) { return float(with_sign[i]); });
    }
}

// Every half and every bfloat in memory, and halves rounded from numbers of every size.
void check_small_floats() {
    for (uint32_t start = 0; start < 0x10000; start += kLanes) {
        uint16_t codes[kLanes], stored[kLanes];
        for (int i = 0; i < kLanes; ++i) codes[i] = uint16_t(start + i);
        expect_lanes("load_halves", load_halves(codes), [&](int i) { return half_to_float(codes[i]); });
        expect_lanes("load_bfloats", load_bfloats(codes), [&](int i) { return bfloat_to_float(codes[i]); });
        // Between this half and its neighbour: on it, and below, at and above the tie.
        float x[kLanes];
        for (int i = 0; i < kLanes; ++i) {
            const float low = half_to_float(codes[i]), high = half_to_float(uint16_t(codes[i] ^ 1));
            const bool finite = std::isfinite(low) && std::isfinite(high);
            x[i] = finite ? low + (high - low) * 0.25f * float(i / 2 % 4) : 0.0f;
        }
        store_first_halves(stored, load(x), kLanes);
        for (int i = 0; i < kLanes; ++i) expect("store_first_halves", stored[i], half_of(x[i]), i);
    }
    const float edges[kLanes] = {65519.0f, 65520.0f,   -65520.0f, 1e9f,       kInfinity, -kInfinity,   1e-9f, -1e-9f,
                                 0x1p-25f, 0x1.1p-25f, 0x1p-24f,  0x1.8p-24f, 0x1p-14f,  0x1.ffep-15f, 0.0f,  -0.0f};
    uint16_t stored[kLanes];
    store_first_halves(stored, load(edges), kLanes);
    for (int i = 0; i < kLanes; ++i) expect("store_first_halves", stored[i], half_of(edges[i]), i);
}

float sum_in_order(const float* x) {
    float lanes[kLanes];
    std::copy(x, x + kLanes, lanes);
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

void check_arithmetic(float bound) {
    float a[kLanes], b[kLanes], c[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        a[i] = random_float(bound);
        b[i] = random_float(bound);
        c[i] = random_float(bound * bound);
    }
    const Floats va = load(a), vb = load(b), vc = load(c);
    expect_lanes("add", add(va, vb), [&](int i) { return a[i] + b[i]; });
    expect_lanes("sub", sub(va, vb), [&](int i) { return a[i] - b[i]; });
    expect_lanes("mul", mul(va, vb), [&](int i) { return a[i] * b[i]; });
    expect_lanes("div", div(va, vb), [&](int i) { return a[i] / b[i]; });
    expect_lanes("fma", fma(va, vb, vc), [&](int i) { return fused(a[i], b[i], c[i]); });
    expect_lanes("maximum", maximum(va, vb), [&](int i) { return std::max(a[i], b[i]); });
    expect_lanes("minimum", minimum(va, vb), [&](int i) { return std::min(a[i], b[i]); });
    expect_lanes("absolute", absolute(va), [&](int i) { return std::fabs(a[i]); });
    expect_lanes("round_to_even", round_to_even(va), [&](int i) { return std::nearbyint(a[i]); });
    expect("sum", sum(va), sum_in_order(a));
    expect("highest", highest(va), *std::max_element(a, a + kLanes));
}

void check_edges() {
    const Floats one = splat(1.0f), nan = splat(kNan), infinite = splat(kInfinity);
    expect_lanes("maximum of NaN and 1", maximum(nan, one), [](int) { return 1.0f; });
    expect_lanes("maximum of 1 and NaN", maximum(one, nan), [](int) { return kNan; });
    expect_lanes("minimum of NaN and 1", minimum(nan, one), [](int) { return 1.0f; });
    expect_lanes("minimum of 1 and NaN", minimum(one, nan), [](int) { return kNan; });
    expect_lanes("maximum of infinities", maximum(sub(zeros(), infinite), infinite), [](int) { return kInfinity; });
    expect("highest of infinities", highest(sub(zeros(), infinite)), -kInfinity);
    for (int n = -126; n <= 127; ++n) {
        expect_lanes("power_of_two", power_of_two(splat(float(n))), [&](int) { return std::ldexp(1.0f, n); });
    }
    for (int half = -9; half <= 9; ++half) {
        const float x = 0.5f * float(half);
        expect_lanes("round_to_even", round_to_even(splat(x)), [&](int) { return std::nearbyint(x); });
        expect_lanes("to_ints", to_ints(splat(x)), [&](int) { return int(std::nearbyint(x)); });
    }
    for (float x = -100.0f; x <= 100.0f; x += 0.37f) {
        float lanes[kLanes];
        store(lanes, chatrt::exp(splat(x)));
        const double want = std::exp(std::min(88.0, std::max(-87.33654, double(x))));
        digest_float(lanes[0]);
        if (std::fabs(lanes[0] - want) > 3e-7 * want) differ("exp", 0, lanes[0], float(want));
    }
}

void check_ints() {
    float x[kLanes];
    int8_t stored[kLanes];
    for (int start = -128; start < 128; start += kLanes) {
        for (int i = 0; i < kLanes; ++i) x[i] = float(start + i);
        const Ints ints = to_ints(load(x));
        expect_lanes("to_ints", ints, [&](int i) { return start + i; });
        expect_lanes("add_ints", add_ints(ints, ints), [&](int i) { return 2 * (start + i); });
        expect("sum of ints", float(sum(ints)), float(kLanes * start + kLanes * (kLanes - 1) / 2));
        store_int8(stored, ints);
        for (int i = 0; i < kLanes; ++i) expect("store_int8", stored[i], x[i], i);
    }
    const int32_t number = -1234;
    expect_lanes("zero_ints", zero_ints(), [](int) { return 0; });
    expect_lanes("splat_shifted", splat_shifted<3>(&number), [&](int) { return number * 8; });
    expect_lanes("splat_shifted", splat_shifted<7>(&number), [&](int) { return number * 128; });
}

template <class Want>
void expect_bytes(const char* name, Bytes got, Want want) {
    uint8_t bytes[65];
    bytes[64] = 7;
    store_bytes(bytes, got);
    for (int i = 0; i < 64; ++i) expect(name, bytes[i], float(want(i)), i);
    expect("store_bytes", bytes[64], 7);
}

template <int kShift>
void check_shifts(const uint8_t* bytes) {
    const uint8_t right = uint8_t(0xff >> kShift), left = uint8_t(0xff << kShift);
    expect_bytes("shift_right", and_bytes(shift_right<kShift>(load_bytes(bytes)), right),
                 [&](int i) { return bytes[i] >> kShift; });
    expect_bytes("shift_left", and_bytes(shift_left<kShift>(load_bytes(bytes)), left),
                 [&](int i) { return uint8_t(bytes[i] << kShift); });
}

// `dot_bytes` without what it is too large by on this path.
Ints dot_signed(Ints sums, Bytes line, const int8_t* quad) {
    const int32_t excess = -kByteOffset * (quad[0] + quad[1] + quad[2] + quad[3]);
    return add_ints(dot_bytes(sums, line, quad), splat_shifted<0>(&excess));
}

void check_bytes() {
    uint8_t bytes[65], others[64];
    int8_t quad[5];
    for (uint8_t& byte : bytes) byte = uint8_t(random_bits());
    for (uint8_t& byte : others) byte = uint8_t(random_bits());
    for (int8_t& value : quad) value = int8_t(int(random_bits() % 255) - 127);
    const Bytes line = load_bytes(bytes + 1);
    expect_bytes("load_bytes", line, [&](int i) { return bytes[i + 1]; });
    expect_bytes("and_bytes", and_bytes(line, 0x5a), [&](int i) { return bytes[i + 1] & 0x5a; });
    expect_bytes("or_bytes", or_bytes(line, load_bytes(others)), [&](int i) { return bytes[i + 1] | others[i]; });
    check_shifts<1>(bytes);
    check_shifts<2>(bytes);
    check_shifts<3>(bytes);
    check_shifts<4>(bytes);
    const int32_t start = -70001;
    const auto dot = [&](int lane, uint8_t mask, int offset) {
        int total = start;
        for (int j = 0; j < 4; ++j) total += ((bytes[1 + 4 * lane + j] & mask) - offset) * quad[1 + j];
        return total;
    };
    expect_lanes("dot_small", dot_small(splat_shifted<0>(&start), and_bytes(line, 0x3f), quad + 1),
                 [&](int i) { return dot(i, 0x3f, 0); });
    expect_lanes("dot_bytes", dot_signed(splat_shifted<0>(&start), line, quad + 1),
                 [&](int i) { return dot(i, 0xff, 128); });
}

// Where an intermediate of 16 bits would saturate: all bytes at their ends.
void check_byte_extremes() {
    for (int weight : {0, 1, 63, 127, 128, 255}) {
        for (int activation : {-127, 127}) {
            uint8_t bytes[64];
            int8_t quad[4];
            std::fill(bytes, bytes + 64, uint8_t(weight));
            std::fill(quad, quad + 4, int8_t(activation));
            expect_lanes("dot_bytes", dot_signed(zero_ints(), load_bytes(bytes), quad),
                         [&](int) { return 4 * (weight - 128) * activation; });
            if (weight > 63) continue;
            expect_lanes("dot_small", dot_small(zero_ints(), load_bytes(bytes), quad),
                         [&](int) { return 4 * weight * activation; });
        }
    }
}

struct Rows {
    int width;
    std::vector<int8_t> values;
    std::vector<float> scales, scaled_sums;
    std::vector<int32_t> negative_sums;

    Rows(int num_rows, int row_width)
        : width(row_width), values(size_t(num_rows) * width), scales(size_t(num_rows) * width / kGroup),
          scaled_sums(scales.size()), negative_sums(2 * scales.size()) {}
    Term view() { return {values.data(), scales.data(), scaled_sums.data(), negative_sums.data()}; }
};

// `got` is the product of `weights` with row `r`, up to the rounding of float sums.
void expect_product(const char* name, float got, const std::vector<float>& weights, const Rows& rows, int r) {
    double want = 0, size = 0;
    for (int input = 0; input < rows.width; ++input) {
        const size_t at = size_t(r) * rows.width + input;
        const double term = double(weights[input]) * rows.scales[at / kGroup] * rows.values[at];
        want += term;
        size += std::fabs(term);
    }
    digest_float(got);
    if (!(std::fabs(got - want) <= 1e-6 * size)) differ(name, r, got, float(want));
}

void write_half(uint8_t* at, float x) {
    const uint16_t half = half_of(x);
    std::memcpy(at, &half, 2);
}

// Random blocks in the file's order, with scales that are numbers.
std::vector<uint8_t> random_blocks(int format, int num_rows, int width) {
    const bool k_quant = format >= kQ4_K;
    const int block_bytes[] = {34, 18, 20, 144, 176, 210};
    const int size = block_bytes[format - kQ8_0];
    std::vector<uint8_t> blocks(size_t(num_rows) * (width / (k_quant ? kSuperGroup : kGroup)) * size);
    for (uint8_t& byte : blocks) byte = uint8_t(random_bits());
    for (size_t at = 0; at < blocks.size(); at += size) {
        write_half(&blocks[at + (format == kQ6_K ? 208 : 0)], random_float(0.1f));
        if (format == kQ4_1 || format == kQ4_K || format == kQ5_K) write_half(&blocks[at + 2], random_float(0.1f));
    }
    return blocks;
}

// One strip of each format: rows alone against its own numbers, and rows in a block against rows alone.
template <int kFormat>
void check_strip(const char* name) {
    constexpr int kWidth = 2 * kSuperGroup, kRows = 8;
    const std::vector<uint8_t> blocks = random_blocks(kFormat, kStripRows, kWidth);
    std::vector<uint8_t> strip(strip_bytes(kFormat, kWidth));
    repack_strip(kFormat, blocks.data(), nullptr, kStripRows, kWidth, 0, strip.data());
    Rows rows(kRows, kWidth), remainder(kRows, kWidth);
    for (int r = 0; r < kRows; ++r) {
        std::vector<float> x(kWidth);
        for (float& number : x) number = random_float(3);
        quantise_row(x.data(), {rows.view(), remainder.view()}, r, kWidth);
    }
    for (int8_t value : rows.values) digest_float(value);
    float alone[kRows][kLanes];
    for (int r = 0; r < kRows; ++r) {
        Floats sums[1];
        strip_sums<kFormat, 1>(strip.data(), QuantisedBlock(rows.view(), r, kWidth), sums);
        store(alone[r], sums[0]);
    }
    std::vector<float> numbers(kWidth);
    for (int i = 0; i < kLanes; ++i) {
        unpack_row({kFormat, kStripRows, kWidth, 0, strip.data()}, i, numbers.data());
        for (float number : numbers) digest_float(number);
        for (int r = 0; r < kRows; ++r) expect_product(name, alone[r][i], numbers, rows, r);
    }
    // Not part of the digest: how many rows a block has is a matter of the path.
    for (int start = 0; start + kMaxRowBlock <= kRows; start += kMaxRowBlock) {
        Floats sums[kMaxRowBlock];
        strip_sums<kFormat, kMaxRowBlock>(strip.data(), QuantisedBlock(rows.view(), start, kWidth), sums);
        for (int r = 0; r < kMaxRowBlock; ++r) {
            float lanes[kLanes];
            store(lanes, sums[r]);
            for (int i = 0; i < kLanes; ++i) {
                if (bits_of(lanes[i]) != bits_of(alone[start + r][i])) differ(name, i, lanes[i], alone[start + r][i]);
            }
        }
    }
}

}  // namespace

int main() {
    check_loads();
    check_small_floats();
    for (float bound : {1e-3f, 1.0f, 300.0f, 1e6f}) {
        for (int repeat = 0; repeat < 50; ++repeat) check_arithmetic(bound);
    }
    check_edges();
    check_ints();
    for (int repeat = 0; repeat < 100; ++repeat) check_bytes();
    check_byte_extremes();
    check_strip<kQ8_0>("Q8_0");
    check_strip<kQ4_0>("Q4_0");
    check_strip<kQ4_1>("Q4_1");
    check_strip<kQ4_K>("Q4_K");
    check_strip<kQ5_K>("Q5_K");
    check_strip<kQ6_K>("Q6_K");
    std::printf("path %s\ndigest %016llx\n", CHATRT_PATH, static_cast<unsigned long long>(digest));
    return num_differences != 0;
}
