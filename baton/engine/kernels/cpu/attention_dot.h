// Attention's products of bf16 by vectors (vdpbf16ps): a lane adds both products of a dword to its sum; subnormal numbers
// are zero. Tiles of queries and rows of few queries use the same instruction in the same order of dwords, so a row has
// the same bits on both paths. These overloads are preferred to the templates of attention_wide.h and attention_few.h.
#pragma once

#include "attention_pairs.h"
#include "tiles.h"

namespace baton {
namespace {

// sums [16][16] += the products of each of 16 rows' first dwords [row][16] with columns [dword][16], front to back.
BATON_LANES void dot(const char* rows, const char* columns, int64_t dwords, Floats sums[16]) {
  for (int64_t d = 0; d < dwords; ++d) {
    const Ints column = _mm512_load_si512(columns + d * 64);
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) sums[r] = multiply_add<bf16>(sums[r], broadcast_dword(rows + r * 64 + d * 4), column);
  }
}

// scores [keys][16 columns] of a block's first `count` keys, a multiple of 16, and a query tile.
inline void score(const Plan<bf16>& plan, const char* block, const char* query, int64_t count, float* scores) {
  for (int64_t i = 0; i < count / TILE; ++i, scores += TILE * 16) {
    Floats sums[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) sums[r] = zero();
    for (int64_t tile = 0; tile < plan.key_tiles; ++tile, block += TILE_BYTES)
      dot(block, query + tile * TILE_BYTES, TILE, sums);
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) store_aligned(scores + r * 16, sums[r]);
  }
}

// output [elements][16 columns] += the first `count` values times weights.
inline void add_values(const Plan<bf16>& plan, const char* values, const char* weights, int64_t count, float* output) {
  for (int64_t tile = 0; tile < plan.value_tiles; ++tile, output += TILE * 16) {
    Floats sums[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) sums[r] = load_aligned(output + r * 16);
    for (int64_t step = 0; step < plan.steps; ++step, values += TILE_BYTES)
      dot(values, weights + step * TILE_BYTES, std::clamp<int64_t>(count / 2 - step * TILE, 0, TILE), sums);
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) store_aligned(output + r * 16, sums[r]);
  }
}

// Few queries. A column's query and its weights are stored in bf16, in the first half of its floats.
BATON_LANES void put_query(float* query, int64_t at, Floats x, bf16) { store(reinterpret_cast<bf16*>(query) + at, x); }
BATON_LANES void put_weight(float* weights, int64_t key, Floats x, bf16) { put_query(weights, key, x, bf16()); }

// pairs[d] lane k = pair d of 8 in key k of 16; `load` returns the 8 pairs of a key.
template <class Load>
BATON_LANES void transpose_pairs(Load load, Ints pairs[8]) {
  Ints half[2][4];  // four pairs of keys k, four of keys k + 4, then the same of 8 keys farther
#pragma GCC unroll 2
  for (int n = 0; n < 2; ++n) {
    Ints keys[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k)
      keys[k] = _mm512_inserti64x4(_mm512_castsi256_si512(load(8 * n + k)), load(8 * n + k + 4), 1);
    const Ints a = zip_low(keys[0], keys[1]), b = zip_high(keys[0], keys[1]);
    const Ints c = zip_low(keys[2], keys[3]), d = zip_high(keys[2], keys[3]);
    half[n][0] = zip_low_pairs(a, c), half[n][1] = zip_high_pairs(a, c);
    half[n][2] = zip_low_pairs(b, d), half[n][3] = zip_high_pairs(b, d);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    pairs[i] = _mm512_shuffle_i32x4(half[0][i], half[1][i], 0x88);
    pairs[i + 4] = _mm512_shuffle_i32x4(half[0][i], half[1][i], 0xdd);
  }
}

// scores [heads][columns][64], 32 of each, of the keys of all heads at 32 places and queries [heads][columns][width]. 8
// pairs of elements of one head are multiplied as soon as they are transposed; those of the next head do not wait for them.
inline void score_heads(
    const bf16* keys, const int64_t* at, int64_t heads, int64_t size, const float* queries, int64_t columns, int64_t width,
    bf16*, float* scores, Ahead& shared) {
  Ahead ahead = shared;
  for (int64_t first = 0; first < size; first += 16)
    for (int64_t head = 0; head < heads; ++head) {
      Ints pairs[2][8];
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n) {
        const auto from = [&](int k) { return keys + at[16 * n + k] + head * size + first; };
        if (size - first >= 16)
          transpose_pairs([&](int k) { return _mm256_loadu_si256(integers(from(k))); }, pairs[n]);
        else
          transpose_pairs([&](int k) { return _mm256_maskz_loadu_epi16(first_lanes(size - first), from(k)); }, pairs[n]);
      }
      in_turns(columns, [&](int64_t c, auto number) {
        const int64_t i = head * columns + c;
        const char* query = reinterpret_cast<const char*>(queries + i * width) + first * sizeof(bf16);
        float* to = scores + i * KEYS;
        Floats sums[number][2];
        for (int i = 0; i < number; ++i)
          for (int n = 0; n < 2; ++n) sums[i][n] = first == 0 ? zero() : load_aligned(to + i * KEYS + 16 * n);
#pragma GCC unroll 8
        for (int d = 0; d < 8; ++d)
          for (int i = 0; i < number; ++i) {
            const Ints pair = broadcast_dword(query + i * width * 4 + d * 4);
            for (int n = 0; n < 2; ++n) sums[i][n] = multiply_add<bf16>(sums[i][n], pairs[n][d], pair);
          }
        for (int i = 0; i < number; ++i)
          for (int n = 0; n < 2; ++n) store_aligned(to + i * KEYS + 16 * n, sums[i][n]);
      });
      ahead.lines(16);
    }
  shared = ahead;
}

// output [COLUMNS][width] += weights [COLUMNS][64] times the values of keys [key, end), of CHUNKS times 32 elements from
// `first` on. Of each 32 elements the output has four of each eight, then the other four. Prefetches as many bytes as it
// reads.
template <int COLUMNS, int CHUNKS>
void add_pairs(
    const bf16* values, const int64_t* at, int64_t key, int64_t end, int64_t first, int64_t size, const float* weights,
    float* output, int64_t width, Ahead& shared) {
  Ahead ahead = shared;
  const __mmask32 lanes = CHUNKS > 1 || size - first >= 32 ? ~0u : (1u << (size - first)) - 1;
  Floats sums[COLUMNS][2 * CHUNKS];
#pragma GCC unroll 3
  for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * CHUNKS; ++i) sums[c][i] = load_aligned(output + c * width + first + 16 * i);
  for (; key < end; key += 2) {
    Ints weight[COLUMNS];
#pragma GCC unroll 3
    for (int c = 0; c < COLUMNS; ++c)
      weight[c] = broadcast_dword(reinterpret_cast<const char*>(weights + c * KEYS) + key * sizeof(bf16));
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
    const bf16* values, const int64_t* at, int64_t key, int64_t end, int64_t size, const float* weights, float* output,
    int64_t width, Ahead& ahead) {
  int64_t first = 0;
  for (; first + 64 <= size; first += 64)
    add_pairs<COLUMNS, 2>(values, at, key, end, first, size, weights, output, width, ahead);
  for (; first < size; first += 32)
    add_pairs<COLUMNS, 1>(values, at, key, end, first, size, weights, output, width, ahead);
}

}  // namespace
}  // namespace baton
