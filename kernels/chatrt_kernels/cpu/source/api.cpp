// What Python calls: plain C names, pointers and sizes.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>

#include "chains.h"
#include "program.h"
#include "simd.h"

#define CHATRT_API extern "C" __attribute__((visibility("default")))

namespace {

using namespace chatrt;

struct Repacking {
    int32_t format;
    const uint8_t* rows;
    const int32_t* order;
    int num_outputs;
    int num_inputs;
    uint8_t* strips;
};

constexpr int kStripsPerTask = 16;

void repack_task(void* context, int, int task, int) {
    const auto& work = *static_cast<const Repacking*>(context);
    const int count = (work.num_outputs + kStripRows - 1) / kStripRows;
    for (int s = task * kStripsPerTask; s < std::min(count, (task + 1) * kStripsPerTask); ++s) {
        repack_strip(work.format, work.rows, work.order, work.num_outputs, work.num_inputs, s, work.strips);
    }
}

struct Reading {
    const uint8_t* data;
    std::atomic<int> found;  // so that the reads have a result
};

constexpr int64_t kReadBytes = 1 << 18;

void read_task(void* context, int, int task, int) {
    auto& work = *static_cast<Reading*>(context);
    const uint8_t* data = work.data + task * kReadBytes;
    Bytes found[4] = {load_bytes(data), load_bytes(data), load_bytes(data), load_bytes(data)};
    for (int64_t i = 0; i < kReadBytes; i += 256) {
        for (int line = 0; line < 4; ++line) {
            prefetch(data + i + 64 * line + 4096);
            found[line] = or_bytes(found[line], load_bytes(data + i + 64 * line));
        }
    }
    uint8_t bytes[64];
    store_bytes(bytes, or_bytes(or_bytes(found[0], found[1]), or_bytes(found[2], found[3])));
    if (bytes[0]) work.found.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

CHATRT_API const char* chatrt_path() { return CHATRT_PATH; }

CHATRT_API Pool* chatrt_create_pool(int32_t num_threads) { return create_pool(num_threads); }
CHATRT_API void chatrt_destroy_pool(Pool* pool) { destroy_pool(pool); }

CHATRT_API int64_t chatrt_weight_bytes(int32_t format, int32_t num_outputs, int32_t num_inputs) {
    return int64_t(strip_bytes(format, num_inputs)) * ((num_outputs + kStripRows - 1) / kStripRows);
}

// Rows in file order to strips; `strips` has chatrt_weight_bytes bytes. `order`: the number of the row that comes to
// lie at each place, or null.
CHATRT_API void chatrt_repack(Pool* pool, int32_t format, const uint8_t* rows, const int32_t* order,
                              int32_t num_outputs, int32_t num_inputs, uint8_t* strips) {
    Repacking work{format, rows, order, num_outputs, num_inputs, strips};
    const int32_t num_tasks = ((num_outputs + kStripRows - 1) / kStripRows + kStripsPerTask - 1) / kStripsPerTask;
    run_phases(pool, 1, &num_tasks, repack_task, &work);
}

// Asks the system for large pages, which memory that is read at full speed needs. Harmless where there are none.
CHATRT_API void chatrt_advise_large_pages(void* start, int64_t num_bytes) {
#ifdef MADV_HUGEPAGE
    madvise(start, size_t(num_bytes), MADV_HUGEPAGE);
#else
    (void)start, (void)num_bytes;
#endif
}

CHATRT_API Program* chatrt_create_program(const Call* calls, int32_t num_calls) {
    return create_program(calls, num_calls);
}
CHATRT_API void chatrt_destroy_program(Program* program) { destroy_program(program); }
CHATRT_API int32_t chatrt_run(Program* program, Pool* pool, const Step* step, int64_t* call_ns) {
    return run_program(program, pool, *step, call_ns);
}
CHATRT_API int32_t chatrt_run_chains(const Chains* shared, Chain* chains, int32_t num_chains) {
    return run_chains(*shared, chains, num_chains);
}

// Nanoseconds that the pool's threads take to read a buffer once, whole tasks of it.
CHATRT_API int64_t chatrt_read(Pool* pool, const uint8_t* data, int64_t num_bytes) {
    Reading work{data, {0}};
    const int32_t num_tasks = int32_t(num_bytes / kReadBytes);
    const auto start = std::chrono::steady_clock::now();
    run_phases(pool, 1, &num_tasks, read_task, &work);
    const auto taken = std::chrono::steady_clock::now() - start;
    return std::chrono::duration_cast<std::chrono::nanoseconds>(taken).count();
}

// Sizes of the structs that Python mirrors, in the order of its list.
CHATRT_API const int32_t* chatrt_struct_sizes(int32_t* count) {
    static constexpr int32_t kSizes[] = {
        sizeof(Step), sizeof(Call),     sizeof(Weight), sizeof(Quantised), sizeof(KVLayer),  sizeof(Embed),  sizeof(Norm),
        sizeof(Quantise), sizeof(Linear), sizeof(Rope),  sizeof(Attention), sizeof(Pairwise), sizeof(Gather),
        sizeof(Chain), sizeof(Chains),
    };
    *count = int32_t(std::size(kSizes));
    return kSizes;
}
