// A recorded list of calls, replayed as one job of the pool.
#pragma once

#include "calls.h"
#include "pool.h"

namespace chatrt {

struct Program;

// Keeps a copy of the calls; what their arguments point to must outlive the program.
Program* create_program(const Call* calls, int num_calls);
void destroy_program(Program* program);

// Runs all calls in order on the rows of `step`. A program runs once at a time. `call_ns`, where given, receives the
// nanoseconds of each call. Returns false if a call has more tasks than a pool can count.
bool run_program(Program* program, Pool* pool, const Step& step, int64_t* call_ns);

}  // namespace chatrt
