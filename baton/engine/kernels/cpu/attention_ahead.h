// Prefetch of a block's keys and values, interleaved with other work.
//
// Many prefetches at once would wait for each other (a core has some 20 lines in flight), and memory would then be idle
// until the next ones. All heads of a block are prefetched in memory order, which is a fifth faster than head by head.
#pragma once

#include "attention_plan.h"

namespace baton {
namespace {

// Consecutive cache lines. After the last run, the last line is returned again, with a step of 0.
struct Run {
  const char *line, *end;
  int64_t step;
};

// The runs of the keys of some heads of a block, and then those of the values.
class Runs {
 public:
  // `element` is the size of an element of x.
  Runs(const AttentionShape& s, const Pool& pool, const Places& places, int64_t element, int64_t head, int64_t heads)
      : places_(places), element_(pool.is_fp8 ? 1 : element), bytes_(heads * s.head_dim * element_),
        together_(heads == s.kv_heads ? s.block_size : 1) {
    pools_[0] = static_cast<const char*>(pool.keys) + head * s.head_dim * element_;
    pools_[1] = static_cast<const char*>(pool.values) + head * s.head_dim * element_;
    last_ = pools_[0];
  }

  [[gnu::noinline]] Run next() {
    if (place_ == places_.count) place_ = 0, ++pool_;
    if (pool_ >= 2 || places_.count == 0) return {last_, last_ + 1, 0};
    const int64_t positions = std::min(places_.count - place_, together_ - (places_.first_slot + place_) % together_);
    const char* first = pools_[pool_] + places_.at[place_] * element_;
    place_ += positions;
    last_ = first + positions * bytes_ - 1;
    return {first, last_ + 1, 64};
  }

 private:
  const Places& places_;
  const char *pools_[2], *last_;
  int64_t element_, bytes_;  // of a position
  int64_t together_;         // positions that are contiguous, starting at a multiple of this number
  int64_t place_ = 0, pool_ = 0;
};

// Prefetches the lines of `runs`, a few at a time.
struct Ahead {
  Runs* runs;
  Run run;

  explicit Ahead(Runs* from) : runs(from), run(from->next()) {}
  // A no-op: prefetches only the line at `there`, which is cached already.
  explicit Ahead(const float* there) : runs(nullptr) {
    run.line = reinterpret_cast<const char*>(there), run.end = run.line + 1, run.step = 0;
  }

  BATON_LANES void lines(int64_t count) {
    for (; count > 0; --count) {
      prefetch(run.line);
      run.line += run.step;
      if (run.line >= run.end) run = runs->next();
    }
  }
};

}  // namespace
}  // namespace baton
