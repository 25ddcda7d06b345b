// Attention's packing of bf16 for products of pairs: a dword is two neighbouring elements of a key or a query, or the
// same element of two neighbouring keys' values. AMX tiles (attention_amx.h) and vectors (attention_dot.h) read it
// unchanged. These overloads are preferred to the templates of attention_wide.h and attention_few.h.
#pragma once

#include "attention_ahead.h"

namespace baton {
namespace {

// The dwords [16 * tile, 16 * tile + 16) of `elements`; an odd last element is padded with zeros.
inline __m512i load_row(const bf16* from, int64_t elements, int64_t tile) {
  const int64_t left = elements - tile * 32;
  if (left >= 32) return _mm512_loadu_si512(from + tile * 32);
  const __mmask32 lanes = left <= 0 ? 0u : (1u << left) - 1;
  return _mm512_maskz_loadu_epi16(lanes, from + tile * 32);
}

// Packs keys and values of a block's places in one KV head: keys as tiles of 16 keys by 16 dwords, values as tiles of 16
// elements by 16 dwords of keys. Positions after the end of the row are zeros, whatever the pool holds there.
inline void pack_block(
    const Plan<bf16>& plan, const int64_t* at, int64_t known, const bf16* keys, const bf16* values, char* to) {
  const AttentionShape& s = plan.shape;
  for (int64_t i = 0; i < KEY_TILES; ++i)
    for (int64_t tile = 0; tile < plan.key_tiles; ++tile)
      for (int64_t r = 0; r < TILE; ++r) {
        const int64_t key = i * TILE + r;
        const __m512i dwords = key < known ? load_row(keys + at[key], s.head_dim, tile) : _mm512_setzero_si512();
        _mm512_store_si512(to + ((i * plan.key_tiles + tile) * TILE + r) * 64, dwords);
      }
  to += plan.key_bytes;
  for (int64_t tile = 0; tile < plan.value_tiles; ++tile) {
    const __mmask16 lanes = first_lanes(s.head_dim - tile * TILE);
    for (int64_t step = 0; step < plan.steps; ++step, to += TILE_BYTES) {
      __m512i matrix[16];
      for (int64_t r = 0; r < TILE; ++r) {
        const int64_t key = (step * TILE + r) * 2;
        auto half = [&](int64_t k) {
          if (k >= known) return _mm512_setzero_si512();
          return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, values + at[k] + tile * TILE));
        };
        matrix[r] = _mm512_or_si512(half(key), _mm512_slli_epi32(half(key + 1), 16));
      }
      transpose(matrix);
      for (int64_t r = 0; r < TILE; ++r) _mm512_store_si512(to + r * 64, matrix[r]);
    }
  }
}

// Rounds the weights of two neighbouring keys.
inline void put_weights(char* to, int64_t key, __m512 low, __m512 high, bf16) {
  alignas(64) static const int16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  _mm512_store_si512(to + key / 2 * 64, _mm512_permutexvar_epi16(_mm512_load_si512(order), pair));
}

}  // namespace
}  // namespace baton
