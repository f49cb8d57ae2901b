#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "simd.h"

namespace chatrt {
namespace {

using Clock = std::chrono::steady_clock;

// Between two phases of a step; a phase takes 1 to 100 us. Sleeping early lets the system move a thread that waits for
// a busy core onto this one.
constexpr std::chrono::microseconds kPhaseSpin{30};
// Between two steps, in which the caller samples and plans.
constexpr std::chrono::microseconds kJobSpin{300};
constexpr int kPausesPerLook = 32;

// What is left of a phase. Both words carry the job's number, so that a thread that comes late from an older job finds
// that nothing here is its own. claim: job (24 bits), tasks (20), next task (20). left: job (32), tasks not ended (32).
// They lie on lines of their own: those who wait for the one would slow down those who take from the other.
struct Phase {
    alignas(64) std::atomic<uint64_t> claim{0};
    alignas(64) std::atomic<uint64_t> left{0};
};

constexpr uint64_t kJobMask = (1u << 24) - 1;
constexpr uint64_t kTaskMask = (1u << 20) - 1;

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

}  // namespace

struct Pool {
    explicit Pool(int count) : num_threads(count), phases(new Phase[kMaxPhases]) {}

    const int num_threads;
    std::unique_ptr<Phase[]> phases;
    std::vector<std::thread> workers;
    std::mutex one_caller;

    // The job. Written by the caller before `job` is; a late thread may read the next job's, and finds no task in it.
    std::atomic<int> num_phases{0};
    std::atomic<Task> task{nullptr};
    std::atomic<void*> context{nullptr};
    alignas(64) std::atomic<uint64_t> job{0};
    std::atomic<bool> stopping{false};

    alignas(64) std::atomic<int> num_sleepers{0};
    std::mutex mutex;
    std::condition_variable wake;
};

namespace {

// Waits until `ready()`: spins for `spin`, then sleeps until somebody who may have made it true wakes all sleepers.
template <class Condition>
void wait_until(Pool& pool, std::chrono::microseconds spin, Condition ready) {
    if (ready()) return;
    const auto end = Clock::now() + spin;
    do {
        for (int i = 0; i < kPausesPerLook; ++i) {
            if (ready()) return;
            pause();
        }
    } while (Clock::now() < end);
    std::unique_lock<std::mutex> lock(pool.mutex);
    pool.num_sleepers.fetch_add(1);
    pool.wake.wait(lock, ready);
    pool.num_sleepers.fetch_sub(1);
}

// To be called behind the (sequentially consistent) store that a sleeper waits for.
void wake_sleepers(Pool& pool) {
    if (pool.num_sleepers.load() == 0) return;
    { const std::lock_guard<std::mutex> lock(pool.mutex); }
    pool.wake.notify_all();
}

// The next task of a phase, or -1 if all are claimed or the job is over.
int claim_task(Phase& phase, uint64_t job) {
    // Asked for with the right to change it: a plain load would have to be followed by a second request.
    __builtin_prefetch(&phase.claim, 1);
    uint64_t word = phase.claim.load(std::memory_order_acquire);
    for (;;) {
        const uint64_t next = word & kTaskMask;
        const uint64_t count = word >> 20 & kTaskMask;
        if (word >> 40 != (job & kJobMask) || next >= count) return -1;
        if (phase.claim.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel)) return int(next);
    }
}

bool is_over(const Phase& phase, uint64_t job) {
    const uint64_t left = phase.left.load();
    return uint32_t(left) == 0 || left >> 32 != (job & 0xffffffff);
}

void run_job(Pool& pool, uint64_t job, int thread, int64_t* ended_ns) {
    const int num_phases = pool.num_phases.load(std::memory_order_acquire);
    const Task task = pool.task.load(std::memory_order_relaxed);
    void* const context = pool.context.load(std::memory_order_relaxed);
    for (int p = 0; p < num_phases; ++p) {
        Phase& phase = pool.phases[p];
        uint64_t num_done = 0;
        for (int claimed; (claimed = claim_task(phase, job)) >= 0; ++num_done) task(context, p, claimed, thread);
        if (num_done > 0 && uint32_t(phase.left.fetch_sub(num_done)) == num_done) wake_sleepers(pool);
        wait_until(pool, kPhaseSpin, [&] { return is_over(phase, job); });
        if (ended_ns) ended_ns[p] = now_ns();
        if (thread > 0 && pool.job.load(std::memory_order_relaxed) != job) return;
    }
}

void work(Pool& pool, int thread) {
    uint64_t seen = 0;
    for (;;) {
        wait_until(pool, kJobSpin, [&] { return pool.job.load() != seen || pool.stopping.load(); });
        if (pool.stopping.load()) return;
        seen = pool.job.load();
        run_job(pool, seen, thread, nullptr);
    }
}

}  // namespace

Pool* create_pool(int num_threads) {
    auto pool = std::make_unique<Pool>(num_threads < 1 ? 1 : num_threads);
    try {
        for (int i = 1; i < pool->num_threads; ++i) pool->workers.emplace_back(work, std::ref(*pool), i);
    } catch (const std::system_error&) {
        destroy_pool(pool.release());
        return nullptr;
    }
    return pool.release();
}

void destroy_pool(Pool* pool) {
    if (!pool) return;
    pool->stopping.store(true);
    { const std::lock_guard<std::mutex> lock(pool->mutex); }
    pool->wake.notify_all();
    for (std::thread& worker : pool->workers) worker.join();
    delete pool;
}

int num_threads(const Pool* pool) { return pool->num_threads; }

void run_phases(Pool* pool, int num_phases, const int32_t* num_tasks, Task task, void* context,
                int64_t* ended_ns) {
    const std::lock_guard<std::mutex> one_caller(pool->one_caller);
    const uint64_t job = pool->job.load(std::memory_order_relaxed) + 1;
    for (int p = 0; p < num_phases; ++p) {
        const uint64_t count = uint64_t(num_tasks[p]);
        pool->phases[p].left.store((job & 0xffffffff) << 32 | count, std::memory_order_relaxed);
        pool->phases[p].claim.store((job & kJobMask) << 40 | count << 20, std::memory_order_release);
    }
    pool->task.store(task, std::memory_order_relaxed);
    pool->context.store(context, std::memory_order_relaxed);
    pool->num_phases.store(num_phases, std::memory_order_release);
    pool->job.store(job);
    wake_sleepers(*pool);
    run_job(*pool, job, 0, ended_ns);
}

}  // namespace chatrt
