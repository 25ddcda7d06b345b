// Attention's packing and products of bf16 by AMX tiles. These overloads are preferred to the templates
// of attention_wide.h.
#pragma once

#include "attention_plan.h"
#include "tiles.h"

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

// scores [64 keys][16 columns] of a block of keys and a query tile.
inline void score(const Plan<bf16>& plan, const char* block, const char* query, float* scores) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int64_t next = plan.key_tiles * TILE_BYTES;
  for (int64_t tile = 0; tile < plan.key_tiles; ++tile) {
    const char* key = block + tile * TILE_BYTES;
    _tile_loadd(6, query + tile * TILE_BYTES, 64);
    _tile_loadd(4, key, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, key + next, 64);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(4, key + 2 * next, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(5, key + 3 * next, 64);
    _tile_dpbf16ps(3, 5, 6);
  }
  _tile_stored(0, scores, 64);
  _tile_stored(1, scores + 256, 64);
  _tile_stored(2, scores + 512, 64);
  _tile_stored(3, scores + 768, 64);
}

// output [elements][16 columns] += values times weights.
inline void add_values(const Plan<bf16>& plan, const char* values, const char* weights, float* output) {
  _tile_loadd(6, weights, 64);
  _tile_loadd(7, weights + TILE_BYTES, 64);
  int64_t tile = 0;
  for (; tile + 2 <= plan.value_tiles; tile += 2) {
    float* to = output + tile * 256;
    const char* from = values + tile * 2 * TILE_BYTES;
    _tile_loadd(0, to, 64);
    _tile_loadd(1, to + 256, 64);
    _tile_loadd(4, from, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, from + 2 * TILE_BYTES, 64);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(4, from + TILE_BYTES, 64);
    _tile_dpbf16ps(0, 4, 7);
    _tile_loadd(5, from + 3 * TILE_BYTES, 64);
    _tile_dpbf16ps(1, 5, 7);
    _tile_stored(0, to, 64);
    _tile_stored(1, to + 256, 64);
  }
  if (tile < plan.value_tiles) {
    _tile_loadd(2, output + tile * 256, 64);
    _tile_loadd(4, values + tile * 2 * TILE_BYTES, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(5, values + (tile * 2 + 1) * TILE_BYTES, 64);
    _tile_dpbf16ps(2, 5, 7);
    _tile_stored(2, output + tile * 256, 64);
  }
}

inline void put_weights(char* to, int64_t key, __m512 low, __m512 high, bf16) {
  alignas(64) static const int16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  _mm512_store_si512(to + key / 2 * 64, _mm512_permutexvar_epi16(_mm512_load_si512(order), pair));
}

}  // namespace
}  // namespace baton
