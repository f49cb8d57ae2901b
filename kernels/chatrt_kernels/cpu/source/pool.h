// Threads that run the phases of a job together.
//
// Knows: phases, tasks, who waits. Does not know: what a task computes.
// A phase is a number of tasks that may run in any order on any thread; a phase starts when every task of the phase
// before it has ended. Tasks are claimed one by one, so a thread that the system has put aside delays only the task it
// holds; nobody waits for threads, only for tasks. Waiting is a brief spin, then sleep.
#pragma once

#include <cstdint>

namespace chatrt {

// Runs task `task` of phase `phase` on thread `thread`; the caller of `run_phases` is thread 0.
using Task = void (*)(void* context, int phase, int task, int thread);

struct Pool;

constexpr int kMaxPhases = 1 << 14;
constexpr int kMaxTasks = (1 << 20) - 1;

// Starts `num_threads - 1` threads; null if the system refuses them.
Pool* create_pool(int num_threads);
void destroy_pool(Pool* pool);
int num_threads(const Pool* pool);

// One job: `num_phases` phases in order, phase p with `num_tasks[p]` tasks. Returns when all have ended. Calls from
// several threads at once are served one after the other. Where `ended_ns` is given, the time at which each phase was
// seen to have ended is left there (steady clock).
void run_phases(Pool* pool, int num_phases, const int32_t* num_tasks, Task task, void* context,
                int64_t* ended_ns = nullptr);

}  // namespace chatrt
