// The fine groups of a block of rows, packed: the remainders of all rows that share a group stand side by side, so one
// reading of a tile serves them together.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "quantise.h"

namespace chatrt {

// One group of inputs, and the rows of a block for which it is fine.
struct FineGroup {
    int group;
    int num_rows;
    int rows[kMaxRowBlock];  // in the block
    int8_t values[kMaxRowBlock * kGroup];
    float scales[kMaxRowBlock];
    float scaled_sums[kMaxRowBlock];
    int32_t negative_sums[2 * kMaxRowBlock];

    void add(const Term& remainder, int row, int width, int row_in_block) {
        const size_t at = size_t(row) * (width / kGroup) + group;
        std::memcpy(values + kGroup * num_rows, remainder.values + kGroup * at, kGroup);
        std::memcpy(negative_sums + 2 * num_rows, remainder.negative_sums + 2 * at, 2 * sizeof(int32_t));
        scales[num_rows] = remainder.scales[at];
        scaled_sums[num_rows] = remainder.scaled_sums[at];
        rows[num_rows++] = row_in_block;
    }
};

// The fine groups of the row blocks of a panel, found once by each thread for all its tasks of a call.
class FineGroups {
   public:
    // `call` and `run` tell one call of one run of a program from all others.
    void find(const void* call, uint64_t run, const Quantised& x, float ratio, int first, int last, int width) {
        if (call == call_ && run == run_ && first == first_row_) return;
        call_ = call;
        run_ = run;
        first_row_ = first;
        ends_.assign(1, 0);
        groups_.clear();
        for (int row = first; row < last; row += kMaxRowBlock) {
            find_block(x, ratio, row, std::min(kMaxRowBlock, last - row), width);
            ends_.push_back(int(groups_.size()));
        }
    }

    // Of the block that starts at `row`.
    const FineGroup* begin(int row) const { return groups_.data() + ends_[(row - first_row_) / kMaxRowBlock]; }
    const FineGroup* end(int row) const { return groups_.data() + ends_[(row - first_row_) / kMaxRowBlock + 1]; }

   private:
    void find_block(const Quantised& x, float ratio, int row, int num_rows, int width) {
        const int num_groups = width / kGroup;
        float bounds[kMaxRowBlock];
        for (int r = 0; r < num_rows; ++r) bounds[r] = fine_bound(x, ratio, row + r, width);
        for (int g = 0; g < num_groups; ++g) {
            FineGroup found;
            found.group = g;
            found.num_rows = 0;
            for (int r = 0; r < num_rows; ++r) {
                const float scale = x.first.scales[size_t(row + r) * num_groups + g];
                if (scale > bounds[r]) found.add(x.remainder, row + r, width, r);
            }
            if (found.num_rows) groups_.push_back(found);
        }
    }

    const void* call_ = nullptr;
    uint64_t run_ = 0;
    int first_row_ = 0;
    std::vector<int> ends_;  // of each block's groups
    std::vector<FineGroup> groups_;
};

}  // namespace chatrt
