#include "chains.h"

#include <vector>

namespace chatrt {
namespace {

// The inputs of one step: a row for each chain that goes on. Sequence c is chain c; one that has ended has no rows, so
// that nobody's pages move.
class Rows {
public:
    Rows(const Chains& shared, int num_chains)
        : numbers_(4 * size_t(num_chains)), bounds_(2 * size_t(num_chains) + 1), capacity_(num_chains) {
        step_.token_ids = numbers(0);
        step_.positions = numbers(1);
        step_.write_slots = numbers(2);
        step_.feature_rows = numbers(3);
        step_.page_table = shared.page_table;
        step_.page_table_stride = shared.page_table_stride;
        step_.q_start = bounds_.data();
        step_.kv_len = kv_len();
        step_.num_sequences = num_chains;
    }

    void clear() { step_.num_rows = step_.num_feature_rows = 0; }

    void add(const Chains& shared, int chain, int32_t token_id, int64_t position, int32_t base_row) {
        const int32_t* page_ids = shared.page_table + chain * shared.page_table_stride;
        const int row = step_.num_rows;
        numbers(0)[row] = token_id;
        numbers(1)[row] = position;
        numbers(2)[row] = int64_t(page_ids[position / shared.page_size]) * shared.page_size +
                          position % shared.page_size;
        numbers(3)[row] = base_row;
        kv_len()[chain] = int32_t(position + 1);
        step_.num_rows = step_.num_feature_rows = row + 1;
    }

    // To be called for every chain in turn, behind its row if it has one.
    void end_sequence(int chain) { bounds_[chain + 1] = step_.num_rows; }

    const Step& step() const { return step_; }

private:
    int64_t* numbers(int which) { return numbers_.data() + which * capacity_; }
    int32_t* kv_len() { return bounds_.data() + capacity_ + 1; }

    std::vector<int64_t> numbers_;
    std::vector<int32_t> bounds_;
    size_t capacity_;
    Step step_{};
};

struct Progress {
    int32_t token_id;
    int32_t base_row;
    double likelihood;
};

bool goes_on(const Chain& chain, const Progress& progress) {
    return chain.num_drafts < chain.max_tokens && progress.likelihood >= chain.floor;
}

void lay_out(const Chains& shared, const Chain* chains, const std::vector<Progress>& progress, Rows* rows) {
    rows->clear();
    for (int c = 0; c < int(progress.size()); ++c) {
        const Progress& one = progress[c];
        if (goes_on(chains[c], one)) {
            rows->add(shared, c, one.token_id, chains[c].position + chains[c].num_drafts, one.base_row);
        }
        rows->end_sequence(c);
    }
}

// One more draft, from the logits of row `row`.
void extend(const Chains& shared, int row, Chain* chain, Progress* progress) {
    float probability;
    const int32_t token_id = chatrt_choose_among(
        chain->sampler, shared.subset, shared.logits + row * shared.logits_stride, chain->drafts, chain->num_drafts,
        chain->position + 1 + chain->num_drafts, shared.memory, &probability);
    chain->drafts[chain->num_drafts++] = token_id;
    *progress = {token_id, shared.first_following + row, progress->likelihood * double(probability)};
}

}  // namespace

bool run_chains(const Chains& shared, Chain* chains, int num_chains) {
    Rows rows(shared, num_chains);
    std::vector<Progress> progress;
    for (int c = 0; c < num_chains; ++c) {
        chains[c].num_drafts = 0;
        progress.push_back({chains[c].token_id, chains[c].base_row, 1.0});
    }
    for (lay_out(shared, chains, progress, &rows); rows.step().num_rows > 0;
         lay_out(shared, chains, progress, &rows)) {
        if (!run_program(shared.program, shared.pool, rows.step(), nullptr)) return false;
        int row = 0;
        for (int c = 0; c < num_chains; ++c) {
            if (goes_on(chains[c], progress[c])) extend(shared, row++, &chains[c], &progress[c]);
        }
    }
    return true;
}

}  // namespace chatrt
