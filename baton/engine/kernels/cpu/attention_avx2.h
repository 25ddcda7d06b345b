// Attention's packing and products by AVX2, all in float32: bf16 is widened where it is packed.
//
// A factor that meets 16 columns is broadcast from memory, so keys and values are packed as rows of floats, one after the
// other, and nothing of them is transposed.
#pragma once

#include "attention_plan.h"

namespace baton {
namespace {

// The floats [16 * tile, 16 * tile + 16) of `elements` of E, and zeros behind the last.
template <class E>
inline Ints load_row(const E* from, int64_t elements, int64_t tile) {
  return as_ints(load(from + tile * TILE, first_lanes(elements - tile * TILE)));
}

// Packs keys and then values of positions [64 * block, 64 * block + 64) of one KV head as rows of floats, each filled up
// to whole tiles. Positions from `end` on are zeros, whatever the pool holds there.
template <class E>
void pack_block(const Plan<E>& plan, const Row& row, int64_t head, int64_t block, const E* keys, const E* values, char* to) {
  const AttentionShape& s = plan.shape;
  const int64_t width = plan.value_tiles * TILE, known = std::min(KEYS, row.start + row.length - block * KEYS);
  float *key_to = reinterpret_cast<float*>(to), *value_to = reinterpret_cast<float*>(to + plan.key_bytes);
  int64_t table = block * KEYS / s.block_size, slot = block * KEYS % s.block_size;
  for (int64_t key = 0; key < known; ++key) {
    const int64_t at = ((row.blocks[table] * s.block_size + slot) * s.kv_heads + head) * s.head_dim;
    if (++slot == s.block_size) ++table, slot = 0;
    for (int64_t tile = 0; tile < plan.value_tiles; ++tile) {
      store_aligned(key_to + key * width + tile * TILE, as_floats(load_row(keys + at, s.head_dim, tile)));
      store_aligned(value_to + key * width + tile * TILE, as_floats(load_row(values + at, s.head_dim, tile)));
    }
  }
  for (float* rest : {key_to, value_to}) std::memset(rest + known * width, 0, (KEYS - known) * width * sizeof(float));
}

// Which columns of a tile are queries: if they are 8 or less, as in decode steps of models with few heads to a KV head,
// only the first 8 are computed. A column's arithmetic is the same in both. Of a product 8 registers of sums are
// taken at a time, as many as hide the latency of FMA.
#define BATON_LIVE(argument) , argument
struct Live {
  bool eight;
  explicit Live(int64_t columns) : eight(columns <= 8) {}
};
struct All {
  using Columns = Floats;
  static constexpr int ROWS = 4;
  static Columns load(const float* from) { return load_aligned(from); }
  static Columns same(float x) { return floats(x); }
  static Columns fused(Columns a, Columns b, Columns c) { return fma(a, b, c); }
  static void store(float* to, Columns x) { store_aligned(to, x); }
};
struct FirstEight {
  using Columns = __m256;
  static constexpr int ROWS = 8;
  static Columns load(const float* from) { return _mm256_load_ps(from); }
  static Columns same(float x) { return _mm256_set1_ps(x); }
  static Columns fused(Columns a, Columns b, Columns c) { return _mm256_fmadd_ps(a, b, c); }
  static void store(float* to, Columns x) { _mm256_store_ps(to, x); }
};

// sums [ROWS][columns] += the sum over i of left[r * row + i * step] times right [i][16], front to back.
template <class C>
inline void product(
    const float* left, int64_t row, int64_t step, const float* right, int64_t count, typename C::Columns sums[C::ROWS]) {
  for (int64_t i = 0; i < count; ++i) {
    const auto b = C::load(right + i * 16);
    for (int r = 0; r < C::ROWS; ++r) sums[r] = C::fused(C::same(left[r * row + i * step]), b, sums[r]);
  }
}

template <class C>
void score_columns(const float* keys, int64_t width, int64_t head_dim, const float* query, float* scores) {
  for (int64_t key = 0; key < KEYS; key += C::ROWS) {
    typename C::Columns sums[C::ROWS];
    for (auto& sum : sums) sum = C::same(0.0f);
    product<C>(keys + key * width, width, 1, query, head_dim, sums);
    for (int r = 0; r < C::ROWS; ++r) C::store(scores + (key + r) * 16, sums[r]);
  }
}

// scores [64 keys][16 columns] of a block of keys and a query tile.
template <class E>
void score(const Plan<E>& plan, const char* block, const char* query, float* scores, Live live) {
  const float *keys = reinterpret_cast<const float*>(block), *columns = reinterpret_cast<const float*>(query);
  const int64_t width = plan.value_tiles * TILE, size = plan.shape.head_dim;
  if (!live.eight) return score_columns<All>(keys, width, size, columns, scores);
  score_columns<FirstEight>(keys, width, size, columns, scores);
  for (int64_t key = 0; key < KEYS; ++key) _mm256_store_ps(scores + key * 16 + 8, _mm256_setzero_ps());
}

template <class C>
void add_columns(const float* values, int64_t width, int64_t head_dim, const float* weights, float* output) {
  for (int64_t element = 0; element < head_dim; element += C::ROWS) {
    typename C::Columns sums[C::ROWS];
    for (int r = 0; r < C::ROWS; ++r) sums[r] = C::load(output + (element + r) * 16);
    product<C>(values + element, 1, width, weights, KEYS, sums);
    for (int r = 0; r < C::ROWS; ++r) C::store(output + (element + r) * 16, sums[r]);
  }
}

// output [elements][16 columns] += values times weights.
template <class E>
void add_values(const Plan<E>& plan, const char* values, const char* weights, float* output, Live live) {
  const float *from = reinterpret_cast<const float*>(values), *columns = reinterpret_cast<const float*>(weights);
  const auto add = live.eight ? add_columns<FirstEight> : add_columns<All>;
  add(from, plan.value_tiles * TILE, plan.shape.head_dim, columns, output);
}

inline void put_weights(char* to, int64_t key, Floats low, Floats high, float) {
  store_aligned(reinterpret_cast<float*>(to) + key * 16, low);
  store_aligned(reinterpret_cast<float*>(to) + key * 16 + 16, high);
}

}  // namespace
}  // namespace baton
