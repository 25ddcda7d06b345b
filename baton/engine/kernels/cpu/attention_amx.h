// Attention's products of bf16 by AMX tiles. These overloads are preferred to the templates of attention_wide.h.
#pragma once

#include "attention_pairs.h"
#include "tiles.h"

namespace baton {
namespace {

// scores [64 keys][16 columns] of a block of keys and a query tile.
inline void score(const Plan<bf16>& plan, const char* block, const char* query, int64_t, float* scores) {
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
inline void add_values(const Plan<bf16>& plan, const char* values, const char* weights, int64_t, float* output) {
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

}  // namespace
}  // namespace baton
