// Shared by all kernels: element types, loops over threads, scratch memory, functions of 16 lanes.
//
// A "dword" is the content of one lane of a packed operand: one float32, or two neighbouring bf16. In dwords, the
// products of both types have the same shape. Baton compiles these files for one of four levels: BATON_LEVEL 0 uses
// AVX2, 1 AVX-512, 2 adds bf16 products by avx512_bf16, 3 bf16 products by AMX tiles. Without such products bf16 is
// widened to float32 when it is read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "lanes.h"

namespace baton {

constexpr int64_t TILE = 16;  // rows of a tile, and dwords in one of its rows
constexpr int64_t TILE_BYTES = TILE * TILE * 4;

template <class E>
constexpr int64_t PER_DWORD = 4 / sizeof(E);

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// The number of dwords of a row of E that is padded to whole tiles.
template <class E>
int64_t padded_dwords(int64_t elements) {
  return round_up(elements, TILE * PER_DWORD<E>) / PER_DWORD<E>;
}

// 2^x for x <= 0 and for -inf, exactly 1 at 0. Error below 1e-7 (degree 6), or 3e-6, far below the precision of bf16
// (degree 4); a NaN stays NaN.
template <class E>
inline Floats exp2_negative(Floats x) {
  x = max(floats(-200.0f), x);
  const Floats whole = nearest(x);
  const Floats rest = x - whole;
  Floats y;
  if constexpr (sizeof(E) == 2) {
    y = floats(9.6181291e-3f);
  } else {
    y = floats(1.5403530e-4f);
    y = fma(y, rest, floats(1.3333558e-3f));
    y = fma(y, rest, floats(9.6181291e-3f));
  }
  y = fma(y, rest, floats(5.5504109e-2f));
  y = fma(y, rest, floats(2.4022651e-1f));
  y = fma(y, rest, floats(6.9314718e-1f));
  y = fma(y, rest, floats(1.0f));
  return times_power(y, whole);
}

// x / (1 + e^-x), by the same exponential for every lane.
template <class E>
inline Floats silu(Floats x) {
  const Floats small = exp2_negative<E>(absolute(x) * floats(-1.4426950408889634f));  // e^-|x|
  const Floats below = floats(1.0f) + small;
  return multiply_where(negative(x), x, small) / below;
}

// Requests a line before it is read. With avx512_bf16 alone (AMD) into L2, since L1 waits for too few lines at once to
// keep memory busy (decision 0014); elsewhere into L1.
BATON_LANES void prefetch(const void* line) {
  _mm_prefetch(static_cast<const char*>(line), BATON_LEVEL == 2 ? _MM_HINT_T1 : _MM_HINT_T0);
}

// A reusable buffer of one thread (or of one step) that grows on demand. Its contents are lost when it grows.
class Scratch {
 public:
  ~Scratch() { std::free(bytes_); }

  char* get(size_t size) {
    if (size > size_) {
      std::free(bytes_);
      size_ = (size + size / 4 + 4095) / 4096 * 4096;
      bytes_ = static_cast<char*>(std::aligned_alloc(4096, size_));
      if (bytes_ == nullptr) std::abort();
    }
    return bytes_;
  }

 private:
  char* bytes_ = nullptr;
  size_t size_ = 0;
};

// Calls work(unit) for each of `units`, divided over `threads`. A unit's result does not depend on the thread.
template <class Work>
void parallel(int64_t units, int threads, Work work) {
  if (threads <= 1 || units <= 1) {
    for (int64_t unit = 0; unit < units; ++unit) work(unit);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(std::min<int64_t>(threads, units)))
  for (int64_t unit = 0; unit < units; ++unit) work(unit);
}

}  // namespace baton

// Makes a call of the C interface with the element type E.
#define BATON_BY_TYPE(is_bf16, call) \
  if (is_bf16) { \
    using E = bf16; \
    call; \
  } else { \
    using E = float; \
    call; \
  }
