#include "program.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "kernels.h"

namespace chatrt {
namespace {

// Tasks per thread: enough that a thread which lost its core leaves little behind, few enough that claiming (0.1 us a
// task) costs little. A few rows of norms or sums take less than a microsecond each.
constexpr int kTasksPerThread = 4;
constexpr int kManyRows = 32;
constexpr int kAttentionTasksPerThread = 12;

// A phase of the pool: a call, or the second phase of attention.
struct Phase {
    int call;
    bool is_fold;
    int num_items;  // rows, units or tasks of the call
};

}  // namespace

struct Program {
    std::vector<Call> calls;
    std::vector<Phase> phases;
    std::vector<int32_t> num_tasks;
    std::vector<int64_t> ended_ns;
    AttentionPlan attention;
    const Step* step = nullptr;
    uint64_t run = 0;
};

namespace {

int num_rows_of(const Call& call, const Step& step) {
    const int rows = call.rows_of == kAllRows     ? step.num_rows
                     : call.rows_of == kLogitRows ? step.num_logit_rows
                                                  : step.num_feature_rows;
    return rows * call.rows_per;
}

int num_items(const Program& program, const Phase& phase, const Step& step) {
    const Call& call = program.calls[phase.call];
    const int num_rows = num_rows_of(call, step);
    if (call.kind == kLinear) return num_rows ? num_units(*static_cast<const Linear*>(call.arguments)) : 0;
    if (call.kind != kAttention) return num_rows;
    const auto& attention = *static_cast<const Attention*>(call.arguments);
    return phase.is_fold ? num_fold_tasks(program.attention, attention)
                         : num_attention_tasks(program.attention, attention);
}

void run_items(const Call& call, const Program& program, bool is_fold, int first, int last) {
    const Step& step = *program.step;
    const void* arguments = call.arguments;
    switch (call.kind) {
        case kEmbed: embed_rows(*static_cast<const Embed*>(arguments), step, first, last); break;
        case kNorm: norm_rows(*static_cast<const Norm*>(arguments), first, last); break;
        case kQuantise: quantise_rows(*static_cast<const Quantise*>(arguments), first, last); break;
        case kLinear:
            linear_units(*static_cast<const Linear*>(arguments), program.run, num_rows_of(call, step), first, last);
            break;
        case kRope: rope_rows(*static_cast<const Rope*>(arguments), step, first, last); break;
        case kAttention:
            for (int task = first; task < last; ++task) {
                const auto& attention = *static_cast<const Attention*>(arguments);
                if (is_fold) fold_task(attention, program.attention, task);
                else attend_task(attention, step, program.attention, task);
            }
            break;
        case kAdd: add_rows(*static_cast<const Pairwise*>(arguments), first, last); break;
        case kSwiglu: swiglu_rows(*static_cast<const Pairwise*>(arguments), first, last); break;
        default: {
            const int64_t* rows = call.rows_of == kLogitRows ? step.logit_rows : step.feature_rows;
            gather_rows(*static_cast<const Gather*>(arguments), rows, first, last);
        }
    }
}

// Rows that are wanted together, and soon again, lie first in a matrix: read last, they are still in a cache then.
bool ends_with_first_rows(const Call& call) {
    return call.kind == kLinear && static_cast<const Linear*>(call.arguments)->weights[0].order;
}

void run_task(void* context, int index, int task, int) {
    const Program& program = *static_cast<const Program*>(context);
    const Phase& phase = program.phases[index];
    if (ends_with_first_rows(program.calls[phase.call])) task = program.num_tasks[index] - 1 - task;
    // Tasks differ by one item at most: a thread that ends early costs the others what it did not take.
    const int64_t num_tasks = program.num_tasks[index], num_items = phase.num_items;
    const int first = int(task * num_items / num_tasks), last = int((task + 1) * num_items / num_tasks);
    run_items(program.calls[phase.call], program, phase.is_fold, first, last);
}

const Attention* first_attention(const Program& program) {
    for (const Call& call : program.calls) {
        if (call.kind == kAttention) return static_cast<const Attention*>(call.arguments);
    }
    return nullptr;
}

int max_tasks(int32_t kind, const Phase& phase, int num_threads) {
    if (kind == kAttention) return num_threads * kAttentionTasksPerThread;  // later rows see more keys
    const bool is_small = kind != kLinear && phase.num_items < kManyRows;
    return is_small ? num_threads : num_threads * kTasksPerThread;
}

// Cuts each phase into tasks for the rows of this step; false if they are too many.
bool plan_phases(Program* program, const Step& step, int num_threads) {
    if (const Attention* attention = first_attention(*program)) {
        plan_attention(step, *attention, num_threads, &program->attention);
    }
    for (size_t p = 0; p < program->phases.size(); ++p) {
        Phase& phase = program->phases[p];
        phase.num_items = num_items(*program, phase, step);
        program->num_tasks[p] = std::min(phase.num_items, max_tasks(program->calls[phase.call].kind, phase, num_threads));
        if (program->num_tasks[p] > kMaxTasks) return false;
    }
    return true;
}

}  // namespace

Program* create_program(const Call* calls, int num_calls) {
    auto* program = new Program;
    program->calls.assign(calls, calls + num_calls);
    for (int c = 0; c < num_calls; ++c) {
        program->phases.push_back({c, false, 0});
        if (calls[c].kind == kAttention) program->phases.push_back({c, true, 0});
    }
    program->num_tasks.resize(program->phases.size());
    program->ended_ns.resize(program->phases.size());
    return program;
}

void destroy_program(Program* program) { delete program; }

// Of all programs, so that what a thread remembers of one run is never taken for another's.
static std::atomic<uint64_t> num_runs{0};

bool run_program(Program* program, Pool* pool, const Step& step, int64_t* call_ns) {
    const int num_phases = int(program->phases.size());
    if (num_phases > kMaxPhases || !plan_phases(program, step, num_threads(pool))) return false;
    program->step = &step;
    program->run = num_runs.fetch_add(1, std::memory_order_relaxed) + 1;
    const auto start = std::chrono::steady_clock::now().time_since_epoch();
    run_phases(pool, num_phases, program->num_tasks.data(), run_task, program,
               call_ns ? program->ended_ns.data() : nullptr);
    if (!call_ns) return true;
    int64_t before = std::chrono::duration_cast<std::chrono::nanoseconds>(start).count();
    for (int p = 0; p < num_phases; ++p) {
        const int call = program->phases[p].call;
        const int64_t taken = program->ended_ns[p] - before;
        call_ns[call] = program->phases[p].is_fold ? call_ns[call] + taken : taken;
        before = program->ended_ns[p];
    }
    return true;
}

}  // namespace chatrt
