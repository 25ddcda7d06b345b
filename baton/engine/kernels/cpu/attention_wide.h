// Attention's packing and products in float32: bf16 is widened when it is packed.
//
// A factor for 16 columns is broadcast from memory, so keys and values are packed as consecutive rows of floats,
// without a transpose.
#pragma once

#include "attention_plan.h"

namespace baton {
namespace {

// The floats [16 * tile, 16 * tile + 16) of `elements` of E, and zeros after the last.
template <class E>
inline Ints load_row(const E* from, int64_t elements, int64_t tile) {
  return as_ints(load(from + tile * TILE, first_lanes(elements - tile * TILE)));
}

// Packs keys and then values of a block's places in one KV head as rows of floats, each padded to whole tiles. Positions
// after the end of the row are zeros, whatever the pool holds there.
template <class E>
void pack_block(const Plan<E>& plan, const int64_t* places, int64_t known, const E* keys, const E* values, char* to) {
  const AttentionShape& s = plan.shape;
  const int64_t width = plan.value_tiles * TILE;
  float *key_to = reinterpret_cast<float*>(to), *value_to = reinterpret_cast<float*>(to + plan.key_bytes);
  for (int64_t key = 0; key < known; ++key) {
    const int64_t at = places[key];
    for (int64_t tile = 0; tile < plan.value_tiles; ++tile) {
      store_aligned(key_to + key * width + tile * TILE, as_floats(load_row(keys + at, s.head_dim, tile)));
      store_aligned(value_to + key * width + tile * TILE, as_floats(load_row(values + at, s.head_dim, tile)));
    }
  }
  for (float* rest : {key_to, value_to}) std::memset(rest + known * width, 0, (KEYS - known) * width * sizeof(float));
}

// Rows of sums that a product computes at a time: enough for eight chains of FMA, which hide its latency.
constexpr int ROWS = BATON_LEVEL == 0 ? 4 : 8;

// sums [ROWS][16] += the sum over i of left[r * row + i * step] times right [i][16], front to back.
inline void product(
    const float* left, int64_t row, int64_t step, const float* right, int64_t count, Floats sums[ROWS]) {
  for (int64_t i = 0; i < count; ++i) {
    const Floats b = load_aligned(right + i * 16);
    for (int r = 0; r < ROWS; ++r) sums[r] = fma(floats(left[r * row + i * step]), b, sums[r]);
  }
}

// scores [keys][16 columns] of a block's first `count` keys, a multiple of 16, and a query tile.
template <class E>
void score(const Plan<E>& plan, const char* block, const char* query, int64_t count, float* scores) {
  const float *keys = reinterpret_cast<const float*>(block), *columns = reinterpret_cast<const float*>(query);
  const int64_t width = plan.value_tiles * TILE;
  for (int64_t key = 0; key < count; key += ROWS) {
    Floats sums[ROWS];
    for (Floats& sum : sums) sum = zero();
    product(keys + key * width, width, 1, columns, plan.shape.head_dim, sums);
    for (int r = 0; r < ROWS; ++r) store_aligned(scores + (key + r) * 16, sums[r]);
  }
}

// output [elements][16 columns] += the first `count` values times weights.
template <class E>
void add_values(const Plan<E>& plan, const char* values, const char* weights, int64_t count, float* output) {
  const float *from = reinterpret_cast<const float*>(values), *columns = reinterpret_cast<const float*>(weights);
  for (int64_t element = 0; element < plan.shape.head_dim; element += ROWS) {
    Floats sums[ROWS];
    for (int r = 0; r < ROWS; ++r) sums[r] = load_aligned(output + (element + r) * 16);
    product(from + element, 1, plan.value_tiles * TILE, columns, count, sums);
    for (int r = 0; r < ROWS; ++r) store_aligned(output + (element + r) * 16, sums[r]);
  }
}

inline void put_weights(char* to, int64_t key, Floats low, Floats high, float) {
  store_aligned(reinterpret_cast<float*>(to) + key * 16, low);
  store_aligned(reinterpret_cast<float*>(to) + key * 16 + 16, high);
}

}  // namespace
}  // namespace baton
