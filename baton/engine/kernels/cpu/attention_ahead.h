// Prefetch of a block's keys and values, interleaved with other work.
//
// Many prefetches at once would wait for each other (a core has some 20 lines in flight), and memory would then be idle
// until the next ones. All heads of a block are prefetched in memory order, which is a fifth faster than head by head.
// With avx512_bf16 alone (AMD) prefetches beyond those in flight are dropped, so each is repeated shortly before its use.
#pragma once

#include "attention_plan.h"

namespace baton {
namespace {

constexpr bool TWICE = BATON_LEVEL == 2;
constexpr int64_t AGAIN = 256;  // lines before their use that they are prefetched again

// The bytes of consecutive cache lines.
struct Run {
  const char *line, *end;
};

// The runs of the keys of some heads of a block, and then those of the values; after the last an empty one.
struct Runs {
  Run at[2 * KEYS + 1];

  // `element` is the size of an element of x.
  void set(const AttentionShape& s, const Pool& pool, const Places& places, int64_t element, int64_t head, int64_t heads) {
    const int64_t size = pool.is_fp8 ? 1 : element, bytes = heads * s.head_dim * size;
    const int64_t together = heads == s.kv_heads ? s.block_size : 1;  // contiguous positions, from a multiple of it on
    Run* run = at;
    for (const void* from : {pool.keys, pool.values})
      for (int64_t place = 0, count; place < places.count; place += count) {
        count = std::min(places.count - place, together - (places.first_slot + place) % together);
        const char* line = static_cast<const char*>(from) + (places.at[place] + head * s.head_dim) * size;
        *run++ = {line, line + count * bytes};
      }
    *run = {nullptr, nullptr};
  }
};

// Prefetches the lines of some runs, a few at a time, and then those of others.
class Cursor {
 public:
  explicit Cursor(const Runs& runs, const Runs* then = nullptr) : run_(runs.at), then_(then), line_(run_->line) {}
  Cursor() : run_(nullptr), then_(nullptr), line_(nullptr) {}  // of no lines

  bool ended() const { return line_ == nullptr; }
  void skip(int64_t lines) {
    for (; lines > 0 && !ended(); --lines) advance();
  }
  BATON_LANES void lines(int64_t count) {
    if (!ended() && run_->end - line_ > count * 64) {
#pragma GCC unroll 16
      for (int64_t n = 0; n < count; ++n) prefetch(line_ + n * 64);
      line_ += count * 64;
      return;
    }
    for (; count > 0 && !ended(); --count) {
      prefetch(line_);
      advance();
    }
  }

 private:
  BATON_LANES void advance() {
    line_ += 64;
    if (line_ < run_->end) return;
    ++run_;
    if (run_->line == nullptr && then_ != nullptr) run_ = then_->at, then_ = nullptr;
    line_ = run_->line;
  }

  const Run* run_;
  const Runs* then_;
  const char* line_;
};

// Prefetches the next block's lines while a block is computed.
struct Ahead {
  Cursor next, again;
  int64_t times;  // how many lines are prefetched for each one computed with; 0: none

  BATON_LANES void lines(int64_t count) {
    if (times != 1) return others(count);
    next.lines(count);
    if (TWICE) again.lines(count);
  }

 private:
  [[gnu::noinline]] void others(int64_t count) {
    for (int64_t i = 0; i < times && !next.ended(); ++i) {
      next.lines(count);
      if (TWICE) again.lines(count);
    }
  }
};

}  // namespace
}  // namespace baton
