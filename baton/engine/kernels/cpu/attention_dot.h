// Attention's products of bf16 by vectors (vdpbf16ps): a lane adds both products of a dword to its sum; subnormal numbers
// are zero. Tiles of queries and rows of few queries use the same instruction in the same order of dwords, so a row has
// the same bits on both paths. These overloads are preferred to the templates of attention_wide.h and attention_few.h.
#pragma once

#include "attention_pairs.h"
#include "tiles.h"

namespace baton {
namespace {

// sums [16][16] += the products of each of 16 rows' dwords [row][16] with columns [dword][16], front to back.
BATON_LANES void dot(const char* rows, const char* columns, Floats sums[16]) {
  for (int64_t d = 0; d < TILE; ++d) {
    const Ints column = _mm512_load_si512(columns + d * 64);
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) sums[r] = multiply_add<bf16>(sums[r], broadcast_dword(rows + r * 64 + d * 4), column);
  }
}

// scores [64 keys][16 columns] of a block of keys and a query tile.
inline void score(const Plan<bf16>& plan, const char* block, const char* query, float* scores) {
  for (int64_t i = 0; i < KEY_TILES; ++i, scores += TILE * 16) {
    Floats sums[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) sums[r] = zero();
    for (int64_t tile = 0; tile < plan.key_tiles; ++tile, block += TILE_BYTES)
      dot(block, query + tile * TILE_BYTES, sums);
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) store_aligned(scores + r * 16, sums[r]);
  }
}

// output [elements][16 columns] += values times weights.
inline void add_values(const Plan<bf16>& plan, const char* values, const char* weights, float* output) {
  for (int64_t tile = 0; tile < plan.value_tiles; ++tile, output += TILE * 16) {
    Floats sums[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) sums[r] = load_aligned(output + r * 16);
    for (int64_t step = 0; step < plan.steps; ++step, values += TILE_BYTES)
      dot(values, weights + step * TILE_BYTES, sums);
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) store_aligned(output + r * 16, sums[r]);
  }
}

// Few queries. A column's query is stored in bf16, in the first half of its floats; its weights are rounded later.
BATON_LANES void put_query(float* query, int64_t at, Floats x, bf16) { store(reinterpret_cast<bf16*>(query) + at, x); }
BATON_LANES Floats as_factor(Floats weight, bf16) { return weight; }

// scores [COLUMNS][64], 32 of each, of transposed keys and queries [COLUMNS][width].
template <int COLUMNS>
void score_few(const bf16* keys, int64_t size, const float* queries, int64_t width, float* scores) {
  Floats sums[COLUMNS][2];
#pragma GCC unroll 3
  for (int c = 0; c < COLUMNS; ++c) sums[c][0] = sums[c][1] = zero();
  const char* pair = reinterpret_cast<const char*>(queries);
  for (int64_t element = 0; element < size; element += 2, keys += 2 * HALF, pair += 4)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const Ints key = _mm512_load_si512(keys + 32 * i);
#pragma GCC unroll 3
      for (int c = 0; c < COLUMNS; ++c)
        sums[c][i] = multiply_add<bf16>(sums[c][i], broadcast_dword(pair + c * width * 4), key);
    }
#pragma GCC unroll 3
  for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) store_aligned(scores + c * KEYS + 16 * i, sums[c][i]);
}

// output [COLUMNS][width] += weights [COLUMNS][64] times `count` values, of CHUNKS times 32 elements from `first` on. Of
// each 32 elements the output has four of each eight, then the other four. Prefetches as many bytes as it reads.
template <int COLUMNS, int CHUNKS>
void add_pairs(
    const bf16* values, const int64_t* at, int64_t count, int64_t first, int64_t size, const bf16* weights, float* output,
    int64_t width, Ahead& shared) {
  Ahead ahead = shared;
  const __mmask32 lanes = CHUNKS > 1 || size - first >= 32 ? ~0u : (1u << (size - first)) - 1;
  Floats sums[COLUMNS][2 * CHUNKS];
#pragma GCC unroll 3
  for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * CHUNKS; ++i) sums[c][i] = load_aligned(output + c * width + first + 16 * i);
  for (int64_t key = 0; key < count; key += 2) {
    Ints weight[COLUMNS];
#pragma GCC unroll 3
    for (int c = 0; c < COLUMNS; ++c) weight[c] = broadcast_dword(reinterpret_cast<const char*>(weights + c * KEYS + key));
#pragma GCC unroll 2
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      const Ints even = _mm512_maskz_loadu_epi16(lanes, values + at[key] + first + 32 * chunk);
      const Ints odd = _mm512_maskz_loadu_epi16(lanes, values + at[key + 1] + first + 32 * chunk);
      const Ints low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
#pragma GCC unroll 3
      for (int c = 0; c < COLUMNS; ++c) {
        sums[c][2 * chunk] = multiply_add<bf16>(sums[c][2 * chunk], low, weight[c]);
        sums[c][2 * chunk + 1] = multiply_add<bf16>(sums[c][2 * chunk + 1], high, weight[c]);
      }
    }
    ahead.lines(2 * CHUNKS);
  }
#pragma GCC unroll 3
  for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * CHUNKS; ++i) store_aligned(output + c * width + first + 16 * i, sums[c][i]);
  shared = ahead;
}

template <int COLUMNS>
void add_few(
    const bf16* values, const int64_t* at, int64_t count, int64_t size, const float* weights, float* output, int64_t width,
    Ahead& ahead) {
  alignas(64) bf16 rounded[COLUMNS * KEYS];
  for (int64_t i = 0; i < COLUMNS * KEYS; i += 16) store(rounded + i, load_aligned(weights + i));
  int64_t first = 0;
  for (; first + 64 <= size; first += 64)
    add_pairs<COLUMNS, 2>(values, at, count, first, size, rounded, output, width, ahead);
  for (; first < size; first += 32)
    add_pairs<COLUMNS, 1>(values, at, count, first, size, rounded, output, width, ahead);
}

}  // namespace
}  // namespace baton
