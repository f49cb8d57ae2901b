// Prints what each vector function gives on fixed inputs, one line each: paths that agree print the same lines.
// Floats appear as their bits, any NaN as "nan"; long results as a hash. Lines whose names begin with "rounded" depend
// on fused multiply-adds.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "simd.h"
#include "vector_math.h"

namespace chatrt {
namespace {

constexpr uint32_t kEdges[] = {
    0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x00000001, 0x807fffff,  // 0, inf, NaN
    0x3f000000, 0xbf000000, 0x3fc00000, 0x40200000, 0xc0200000, 0x4b000000, 0x4affffff, 0xca800001,  // ties, 2^23
    0x4f000000, 0xcf000000, 0x4effffff, 0x7f7fffff, 0xc2fe0000, 0x42ff0000, 0x42fd0000, 0xc2ff8000,  // 2^31, 127
    0x477fe000, 0x477fefff, 0x477ff000, 0x38800000, 0x387fffff, 0x33000000, 0x33000001, 0x33c00000,  // edges of half
};
constexpr int kNumEdges = int(sizeof(kEdges) / sizeof(kEdges[0]));

struct Random {
    uint64_t state;
    uint32_t bits() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return uint32_t(state >> 32);
    }
    float within(float bound) { return (float(bits() >> 8) * 0x1p-23f - 1.0f) * bound; }
};

float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

void print(const char* name, const float* x, int n) {
    std::printf("%s", name);
    for (int i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        if (x[i] != x[i]) std::printf(" nan");
        else std::printf(" %08x", bits);
    }
    std::printf("\n");
}
void print(const char* name, Floats x) {
    float lanes[kLanes];
    store(lanes, x);
    print(name, lanes, kLanes);
}
void print_bytes(const char* name, const void* bytes, int n) {
    std::printf("%s ", name);
    for (int i = 0; i < n; ++i) std::printf("%02x", static_cast<const uint8_t*>(bytes)[i]);
    std::printf("\n");
}
void print_hash(const char* name, const void* bytes, size_t n) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < n; ++i) hash = (hash ^ static_cast<const uint8_t*>(bytes)[i]) * 1099511628211u;
    std::printf("%s %016llx\n", name, static_cast<unsigned long long>(hash));
}

// Up to 2^23 floats are whole numbers exactly.
void print_ints(const char* name, Ints x) { print(name, to_floats(x)); }

void check_numbers(Floats a, Floats b) {
    print("add", add(a, b));
    print("sub", sub(a, b));
    print("mul", mul(a, b));
    print("div", div(a, b));
    print("maximum", maximum(a, b));
    print("minimum", minimum(a, b));
    print("absolute", absolute(a));
    print("round_to_even", round_to_even(a));
    print_ints("to_ints", to_ints(a));
    std::printf("sum_ints %d\n", sum(to_ints(minimum(maximum(a, splat(-1e6f)), splat(1e6f)))));
    const float totals[] = {sum(a), highest(a), highest(maximum(a, zeros()))};
    print("sum highest", totals, 3);
    int8_t bytes[kLanes];
    store_int8(bytes, to_ints(a));
    print_bytes("store_int8", bytes, kLanes);
}

// Moderate numbers, so that paths without fused multiply-adds stay close.
void check_rounded(Random& random) {
    float x[3][kLanes];
    for (auto& row : x) for (float& value : row) value = random.within(4.0f);
    print("rounded fma", fma(load(x[0]), load(x[1]), load(x[2])));
    print("rounded exp", exp(mul(load(x[0]), splat(20.0f))));
    print("rounded silu", silu(load(x[1])));
    print("power_of_two", power_of_two(round_to_even(mul(load(x[2]), splat(31.0f)))));
}

// Memory from `end` on may not be touched; n lanes lie in front of it.
void check_first(Floats x, Floats y, uint8_t* end) {
    for (int n = 0; n <= kLanes; ++n) {
        float* floats = reinterpret_cast<float*>(end - 4 * n);
        store_first(floats, x, n);
        print("store_first", floats, n);
        print("load_first", load_first(floats, n));
        uint16_t* halves = reinterpret_cast<uint16_t*>(end - 2 * n);
        store_first_halves(halves, x, n);
        print_bytes("store_first_halves", halves, 2 * n);
        print("load_first_halves", load_first_halves(halves, n));
        print("first_of", first_of(x, y, n));
    }
    for (uint32_t bits : {0x0000ffffu, 0x55555555u, 0x00ff00ffu, 0x8000fffeu, 0x80007fffu}) {
        const int num_numbers = 32 - __builtin_clz(bits);
        float* floats = reinterpret_cast<float*>(end) - num_numbers;
        std::fill_n(floats, num_numbers, -1.0f);
        store_spread(floats, x, bits);
        print("store_spread", floats, num_numbers);
    }
}

void check_conversions() {
    std::vector<float> floats(65536);
    std::vector<uint16_t> halves(65536);
    for (int i = 0; i < 65536; ++i) halves[i] = uint16_t(i);
    for (int i = 0; i < 65536; i += kLanes) store(&floats[i], load_halves(&halves[i]));
    print_hash("load_halves", floats.data(), 4 * floats.size());
    for (int i = 0; i < 65536; i += kLanes) store(&floats[i], load_bfloats(&halves[i]));
    print_hash("load_bfloats", floats.data(), 4 * floats.size());
    // Every exponent, and the low bits that decide ties.
    for (uint32_t low : {0u, 0x0fffu, 0x1000u, 0x1001u, 0x2fffu, 0x3000u, 0x7001u}) {
        for (int i = 0; i < 65536; ++i) floats[i] = float_of(uint32_t(i) << 16 | low);
        for (int i = 0; i < 65536; i += kLanes) store_first_halves(&halves[i], load(&floats[i]), kLanes);
        print_hash("store_halves", halves.data(), 2 * halves.size());
    }
    uint8_t bytes[256];
    for (int i = 0; i < 256; ++i) bytes[i] = uint8_t(i);
    for (int i = 0; i < 256; i += kLanes) {
        print("load_unsigned_bytes", load_unsigned_bytes(bytes + i));
        print("load_signed_bytes", load_signed_bytes(reinterpret_cast<int8_t*>(bytes) + i));
    }
}

void print_small(const char* name, Bytes weights, const int8_t* quad) {
    print_ints(name, dot_small(zero_ints(), weights, quad));
}

void check_products(Random& random, bool extreme) {
    uint8_t weights[64];
    int8_t quad[4];
    for (uint8_t& weight : weights) weight = uint8_t(extreme ? 255 * (random.bits() >> 31) : random.bits() >> 24);
    for (int8_t& x : quad) x = int8_t(extreme ? 127 : int(random.bits() >> 24) % 255 - 127);
    if (extreme && random.bits() >> 31) for (int8_t& x : quad) x = -127;
    const Bytes line = load_bytes(weights);
    uint8_t stored[64];
    store_bytes(stored, and_bytes(line, 0x5a));
    print_bytes("store_bytes", stored, 64);
    print_small("dot_small", and_bytes(line, 0x7f), quad);
    print_small("shift_right", and_bytes(shift_right<4>(line), 0x0f), quad);
    print_small("shift_left", and_bytes(shift_left<3>(line), 0x30), quad);
    print_small("or_bytes", or_bytes(and_bytes(line, 0x0f), and_bytes(shift_right<2>(line), 0x30)), quad);
    const int32_t offset = -(quad[0] + quad[1] + quad[2] + quad[3]);
    const Ints start = kByteOffset ? splat_shifted<7>(&offset) : zero_ints();
    print_ints("dot_bytes", dot_bytes(start, line, quad));
    print_ints("add_ints", add_ints(splat_shifted<5>(&offset), dot_small(zero_ints(), and_bytes(line, 0x3f), quad)));
}

void check_all(uint8_t* end) {
    Random random{20240607};
    float edges[kNumEdges], numbers[4 * kLanes];
    for (int i = 0; i < kNumEdges; ++i) edges[i] = float_of(kEdges[i]);
    for (float& number : numbers) number = random.within(150.0f);
    for (int i = 0; i < kNumEdges; i += kLanes) {
        for (int j = 0; j < kNumEdges; j += kLanes) check_numbers(load(edges + i), load(edges + j));
        check_numbers(load(edges + i), load(numbers + i));
        check_numbers(load(numbers + i), load(edges + i));
        check_first(load(edges + i), load(numbers + i), end);
    }
    check_numbers(load(numbers), load(numbers + kLanes));
    check_numbers(load(numbers + 2 * kLanes), load(numbers + 3 * kLanes));
    print("rounded exp", exp(load(edges)));
    check_conversions();
    for (int i = 0; i < 8; ++i) check_rounded(random);
    for (int i = 0; i < 16; ++i) check_products(random, i % 2 == 1);
}

}  // namespace
}  // namespace chatrt

int main() {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 1;
    uint8_t* end = static_cast<uint8_t*>(memory) + page;
    if (mprotect(end, page, PROT_NONE) != 0) return 1;
    std::printf("path %s\n", CHATRT_PATH);
    chatrt::check_all(end);
    return 0;
}
