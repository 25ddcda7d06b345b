// Linear layers computed together with cores of other workers, while those are idle.
//
// A helper thread is pinned to such a core under SCHED_IDLE: it runs only while nothing else is runnable there, so the
// core's own worker preempts it at once, in the middle of a unit. The step never waits for a preempted helper: units
// are claimed one by one, a helper writes only into memory of its own, and a unit that is late is computed again by the
// step. A helper that runs again later reads nothing but weights and its helpers' copy of x, and its result is ignored.
// A unit has the same bits whoever computes it (gemm.h).
#pragma once

#include "gemm.h"

namespace baton {

// The units of one linear layer: `per_unit` groups each. `compute` writes outputs of groups [first, last) to y; `take`
// applies results of a helper (in an `Into` that does not read y), packed from `from` on, to the step's own y.
struct Product {
  Linear layer;
  int64_t ldx, rows, groups, per_unit;
  Into into;
  int64_t row_bytes, element_bytes;  // of x; of an element of x and y
  void (*compute)(const Product&, const void* x, void* y, int64_t ldy, Into into, int64_t first, int64_t last);
  void (*take)(const Product&, const char* from, void* y, int64_t ldy, int64_t first, int64_t last);

  int64_t units() const { return (groups + per_unit - 1) / per_unit; }
};

// The duration of a step, in which helpers wait actively for products of the calling thread.
class Borrowing {
 public:
  Borrowing();
  ~Borrowing();

 private:
  bool begun_ = false;
};

// Helpers of the calling thread's step.
int helpers();

// Whether helpers can take part in the product; if so, computes it with them.
bool compute_with_helpers(const Product& product, const void* x, void* y, int64_t ldy, int threads);

}  // namespace baton
