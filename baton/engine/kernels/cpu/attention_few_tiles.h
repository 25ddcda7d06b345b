// Products of attention_few.h at level amx in bf16, in the order in which AMX tiles sum: a row has the same bits on
// both paths (except for the sign of zeros that result from underflow, which among tiles, too, depends on other
// queries). These overloads are preferred to the templates of attention_few.h.
//
// One product of tiles sums 32 elements (of a key, or keys of a value): the even ones front to back from 0, the odd
// ones likewise, by FMA in float32; then the sum of both is added to the previous value. Subnormal numbers are zero
// throughout (Intel's manual, TDPBF16PS). The same is done here by vectors, on bf16 widened to float32: decision 0014.
#pragma once

#include "attention_amx.h"

namespace baton {
namespace {

constexpr int64_t PRODUCT = 2 * TILE;  // elements that one product of tiles sums

// While an instance exists, subnormal inputs and outputs are zero, as in tiles. Only calls that are not inlined are
// safe in its scope: compilers move arithmetic across it.
class Flushed {
 public:
  Flushed() : before_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }  // FTZ, DAZ, to nearest, no exceptions
  ~Flushed() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
};

// The even or the odd ones of 32 elements, as floats.
BATON_LANES Floats even(const bf16* from, __mmask32 lanes) {
  return as_floats(_mm512_slli_epi32(_mm512_maskz_loadu_epi16(lanes, from), 16));
}
BATON_LANES Floats odd(const bf16* from, __mmask32 lanes) {
  return as_floats(_mm512_maskz_loadu_epi16(lanes & 0xaaaaaaaa, from));
}

// Transposes 32 keys to [pairs of elements][32], zero-padded to whole tiles. Prefetches as many bytes as they have.
inline void transpose_keys(const bf16* keys, const int64_t* at, int64_t size, bf16* to, Ahead& shared) {
  Ahead ahead = shared;
  for (int64_t key = 0; key < HALF; key += 16)
    for (int64_t tile = 0; tile * 2 * TILE < size; ++tile) {
      Ints rows[16];
      for (int i = 0; i < 16; ++i) {
        rows[i] = load_row(keys + at[key + i], size, tile);
        ahead.lines(1);
      }
      transpose(rows);
      for (int i = 0; i < 16; ++i) store_aligned(to + ((tile * TILE + i) * HALF + key) * 2, rows[i]);
    }
  shared = ahead;
}

BATON_LANES void put_query(float* query, int64_t at, Floats x, bf16) { store_aligned(query + at, x); }

// Rounds weights as put_weights does.
BATON_LANES void put_weight(float* weights, int64_t key, Floats x, bf16) {
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
  store_aligned(weights + key, as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16)));
}

template <int COLUMNS>
[[gnu::noinline]] void score_pairs(const bf16* keys, int64_t size, const float* queries, int64_t width, float* scores) {
  Floats totals[COLUMNS][2];
#pragma GCC unroll 3
  for (int c = 0; c < COLUMNS; ++c) totals[c][0] = totals[c][1] = zero();
  for (int64_t first = 0; first < size; first += PRODUCT) {
    Floats evens[COLUMNS][2], odds[COLUMNS][2];
#pragma GCC unroll 3
    for (int c = 0; c < COLUMNS; ++c) evens[c][0] = evens[c][1] = odds[c][0] = odds[c][1] = zero();
    for (int64_t element = first; element < first + PRODUCT; element += 2, keys += 2 * HALF)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Floats low = even(keys + 32 * i, ~0u), high = odd(keys + 32 * i, ~0u);
#pragma GCC unroll 3
        for (int c = 0; c < COLUMNS; ++c) {
          evens[c][i] = fma(low, floats(queries[c * width + element]), evens[c][i]);
          odds[c][i] = fma(high, floats(queries[c * width + element + 1]), odds[c][i]);
        }
      }
#pragma GCC unroll 3
    for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) totals[c][i] = add(totals[c][i], add(evens[c][i], odds[c][i]));
  }
#pragma GCC unroll 3
  for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) store_aligned(scores + c * KEYS + 16 * i, totals[c][i]);
}

// scores [COLUMNS][64], 32 of each, of transposed keys and queries [COLUMNS][width].
template <int COLUMNS>
void score_few(const bf16* keys, int64_t size, const float* queries, int64_t width, float* scores) {
  const Flushed flushed;
  score_pairs<COLUMNS>(keys, size, queries, width, scores);
}

// output [COLUMNS][width] += weights [COLUMNS][64] times the values of keys [key, end), those of one product, of CHUNKS
// times 32 elements from `first` on. The output is deinterleaved: of each 32 the even ones, then the odd ones. Prefetches
// as many bytes as it reads.
template <int COLUMNS, int CHUNKS>
[[gnu::noinline]] void add_pairs(
    const bf16* values, const int64_t* at, int64_t key, int64_t end, int64_t first, int64_t size, const float* weights,
    float* output, int64_t width, Ahead& shared) {
  Ahead ahead = shared;
  constexpr int REGISTERS = 2 * CHUNKS;
  const __mmask32 lanes = CHUNKS > 1 || size - first >= 32 ? ~0u : (1u << (size - first)) - 1;
  Floats sums[2][COLUMNS][REGISTERS];  // over even and odd keys
#pragma GCC unroll 2
  for (int n = 0; n < 2; ++n)
#pragma GCC unroll 3
    for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 4
      for (int i = 0; i < REGISTERS; ++i) sums[n][c][i] = zero();
  for (; key < end; key += 2) {
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
      const bf16* from = values + at[key + n] + first;
#pragma GCC unroll 2
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const Floats low = even(from + 32 * chunk, lanes), high = odd(from + 32 * chunk, lanes);
#pragma GCC unroll 3
        for (int c = 0; c < COLUMNS; ++c) {
          const Floats weight = floats(weights[c * KEYS + key + n]);
          sums[n][c][2 * chunk] = fma(low, weight, sums[n][c][2 * chunk]);
          sums[n][c][2 * chunk + 1] = fma(high, weight, sums[n][c][2 * chunk + 1]);
        }
      }
    }
    ahead.lines(2 * CHUNKS);
  }
#pragma GCC unroll 3
  for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 4
    for (int i = 0; i < REGISTERS; ++i) {
      float* to = output + c * width + first + 16 * i;
      store_aligned(to, add(load_aligned(to), add(sums[0][c][i], sums[1][c][i])));
    }
  shared = ahead;
}

template <int COLUMNS>
void add_few(
    const bf16* values, const int64_t* at, int64_t key, int64_t end, int64_t size, const float* weights, float* output,
    int64_t width, Ahead& ahead) {
  static_assert(HALF == PRODUCT);
  const Flushed flushed;
  int64_t first = 0;
  for (; first + 64 <= size; first += 64)
    add_pairs<COLUMNS, 2>(values, at, key, end, first, size, weights, output, width, ahead);
  for (; first < size; first += 32)
    add_pairs<COLUMNS, 1>(values, at, key, end, first, size, weights, output, width, ahead);
}

}  // namespace
}  // namespace baton
