// Offsets of a block's keys and values in the pool, and their prefetch, interleaved with other work.
//
// Many prefetches at once would wait for each other (a core has some 20 lines in flight), and memory would then be idle
// until the next ones. All heads of a block are prefetched in memory order, which is a fifth faster than head by head.
#pragma once

#include "attention_plan.h"

namespace baton {
namespace {

// Offsets of a block's positions in a pool, in elements. An incomplete block is padded with its last position, which is
// then masked; a block after the row's end has no positions.
struct Places {
  int64_t at[KEYS];
  int64_t count, first_slot;

  Places(const AttentionShape& s, const Row& row, int64_t block) {
    const int64_t apart = s.kv_heads * s.head_dim;
    count = std::clamp<int64_t>(row.start + row.length - block * KEYS, 0, KEYS);
    first_slot = block * KEYS % s.block_size;
    int64_t table = block * KEYS / s.block_size, slot = first_slot;
    for (int64_t key = 0; key < count; ++table, slot = 0)
      for (int64_t at_slot = row.blocks[table] * s.block_size + slot; key < count && slot < s.block_size; ++slot)
        at[key++] = at_slot++ * apart;
    for (int64_t key = count; count > 0 && key < KEYS; ++key) at[key] = at[count - 1];
  }
};

// Consecutive cache lines. After the last run, the last line is returned again, with a step of 0.
struct Run {
  const char *line, *end;
  int64_t step;
};

// The runs of the keys of some heads of a block, and then those of the values.
class Runs {
 public:
  template <class E>
  Runs(const AttentionShape& s, const Places& places, const E* keys, const E* values, int64_t heads)
      : places_(places), pools_{reinterpret_cast<const char*>(keys), reinterpret_cast<const char*>(values)},
        last_(pools_[0]), element_(sizeof(E)), bytes_(heads * s.head_dim * sizeof(E)),
        together_(heads == s.kv_heads ? s.block_size : 1) {}

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
      _mm_prefetch(run.line, _MM_HINT_T0);
      run.line += run.step;
      if (run.line >= run.end) run = runs->next();
    }
  }
};

}  // namespace
}  // namespace baton
