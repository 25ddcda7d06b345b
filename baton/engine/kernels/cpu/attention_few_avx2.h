// Attention of rows with few queries (of 16 columns at most: decode steps, verified guesses) by AVX2.
//
// So few columns fill no registers. So lanes are keys where scores are summed, from keys turned over eight at a time, and
// elements where values are. A column's bits are those that it has in a tile: scores are summed over elements and values
// over keys front to back, the weights of a block in four sums, by key modulo 4.
#pragma once

#include "attention_plan.h"

namespace baton {
namespace {

constexpr int64_t HALF = KEYS / 2;  // keys that are turned over at a time, so that they stay in L1
constexpr int64_t MOST_COLUMNS = 3;  // of a product: 12 registers of sums

thread_local Scratch few_memory;

BATON_LANES __m256i eight_dwords(const void* from, int64_t there) {
  if (there >= 8) return _mm256_loadu_si256(integers(from));
  return _mm256_maskload_epi32(static_cast<const int*>(from), spread(first_lanes(there)));
}

BATON_LANES __m256 eight(const float* from, int64_t there) { return _mm256_castsi256_ps(eight_dwords(from, there)); }
BATON_LANES __m256 eight(const bf16* from, int64_t there) {
  alignas(16) bf16 some[8] = {};
  if (there >= 8) return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  for (int64_t i = 0; i < there; ++i) some[i] = from[i];
  return widen(_mm_load_si128(reinterpret_cast<const __m128i*>(some)));
}

// 32 keys of `size` elements -> [elements][32] in float32.
template <class E>
void turn_over(const E* const* keys, int64_t size, float* to) {
  for (int64_t key = 0; key < HALF; key += 8)
    for (int64_t first = 0; first < size; first += 8 * PER_DWORD<E>) {
      __m256i rows[8];
      for (int i = 0; i < 8; ++i) rows[i] = eight_dwords(keys[key + i] + first, (size - first) / PER_DWORD<E>);
      transpose(rows);
      for (int i = 0; i < 8; ++i) {
        float* at = to + (first + i * PER_DWORD<E>) * HALF + key;
        if constexpr (sizeof(E) == 4) {
          _mm256_store_si256(integers(at), rows[i]);
        } else {  // a dword is two elements of a key
          _mm256_store_si256(integers(at), _mm256_slli_epi32(rows[i], 16));
          _mm256_store_si256(integers(at + HALF), _mm256_and_si256(rows[i], _mm256_set1_epi32(int32_t(0xffff0000))));
        }
      }
    }
}

// scores [COLUMNS][64], 32 of each, of keys that are turned over and queries [COLUMNS][width].
template <int COLUMNS>
void score_few(const float* keys, int64_t size, const float* queries, int64_t width, float* scores) {
  __m256 sums[COLUMNS][4];
  for (auto& column : sums)
    for (__m256& sum : column) sum = _mm256_setzero_ps();
  for (int64_t element = 0; element < size; ++element) {
    __m256 key[4];
    for (int i = 0; i < 4; ++i) key[i] = _mm256_load_ps(keys + element * HALF + 8 * i);
    for (int c = 0; c < COLUMNS; ++c) {
      const __m256 query = _mm256_broadcast_ss(queries + c * width + element);
      for (int i = 0; i < 4; ++i) sums[c][i] = _mm256_fmadd_ps(key[i], query, sums[c][i]);
    }
  }
  for (int c = 0; c < COLUMNS; ++c)
    for (int i = 0; i < 4; ++i) _mm256_store_ps(scores + c * KEYS + 8 * i, sums[c][i]);
}

// output [COLUMNS][width] += weights [COLUMNS][64] times `count` values, of the elements [first, first + 8 * EIGHTS).
template <int COLUMNS, int EIGHTS, class V>
BATON_LANES void add_elements(
    const V* const* values, int64_t count, int64_t first, int64_t size, const float* weights, float* output,
    int64_t width) {
  __m256 sums[COLUMNS][EIGHTS];
  for (int c = 0; c < COLUMNS; ++c)
    for (int i = 0; i < EIGHTS; ++i) sums[c][i] = _mm256_load_ps(output + c * width + first + 8 * i);
  for (int64_t key = 0; key < count; ++key) {
    __m256 weight[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) weight[c] = _mm256_broadcast_ss(weights + c * KEYS + key);
    for (int i = 0; i < EIGHTS; ++i) {
      const int64_t there = EIGHTS > 1 ? 8 : size - first;
      const __m256 value = eight(values[key] + first + 8 * i, there);
      for (int c = 0; c < COLUMNS; ++c) sums[c][i] = _mm256_fmadd_ps(value, weight[c], sums[c][i]);
    }
  }
  for (int c = 0; c < COLUMNS; ++c)
    for (int i = 0; i < EIGHTS; ++i) _mm256_store_ps(output + c * width + first + 8 * i, sums[c][i]);
}

template <int COLUMNS, class V>
void add_few(
    const V* const* values, int64_t count, int64_t size, const float* weights, float* output, int64_t width) {
  int64_t first = 0;
  for (; first + 32 <= size; first += 32) add_elements<COLUMNS, 4>(values, count, first, size, weights, output, width);
  for (; first < size; first += 8) add_elements<COLUMNS, 1>(values, count, first, size, weights, output, width);
}

// Calls work(first, std::integral_constant<int, count>) for columns in turns of up to MOST_COLUMNS, alike in size.
template <class Work>
void in_turns(int64_t columns, Work work) {
  for (int64_t first = 0; first < columns;) {
    const int64_t turns = (columns - first + MOST_COLUMNS - 1) / MOST_COLUMNS;
    const int64_t count = (columns - first + turns - 1) / turns;
    if (count == 3) work(first, std::integral_constant<int, 3>());
    if (count == 2) work(first, std::integral_constant<int, 2>());
    if (count == 1) work(first, std::integral_constant<int, 1>());
    first += count;
  }
}

// Where the keys and values of a block are. A block that ends early is filled up with its last key, which is hidden then.
template <class E>
struct Places {
  const E *keys[KEYS], *values[KEYS];
  int64_t count;

  // Fetches them as well, for the next block's turn.
  Places(const Plan<E>& plan, const Row& row, int64_t kv_head, int64_t block, const E* key_pool, const E* value_pool) {
    const AttentionShape& s = plan.shape;
    count = std::clamp<int64_t>(row.start + row.length - block * KEYS, 0, KEYS);
    for (int64_t key = 0; key < count; ++key) {
      const int64_t position = block * KEYS + key, slot = position % s.block_size;
      const int64_t at = ((row.blocks[position / s.block_size] * s.block_size + slot) * s.kv_heads + kv_head) * s.head_dim;
      keys[key] = key_pool + at;
      values[key] = value_pool + at;
      for (int64_t byte = 0; byte < s.head_dim * int64_t(sizeof(E)); byte += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(keys[key]) + byte, _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(values[key]) + byte, _MM_HINT_T0);
      }
    }
    for (int64_t key = count; count > 0 && key < KEYS; ++key) keys[key] = keys[count - 1];
  }
};

// What a column has seen so far.
struct Column {
  float maximum, sum;
  float* output;  // [width]

  // A block's `count` scores, filled up to whole 16s, become weights; those outside [from, to) are of hidden keys.
  template <class E>
  void weigh(float* scores, int64_t count, int64_t from, int64_t to, float factor, int64_t width) {
    const int64_t end = round_up(count, 16);
    for (int64_t key = 0; key < std::min(from, end); ++key) scores[key] = -__builtin_inff();
    for (int64_t key = std::max<int64_t>(to, 0); key < end; ++key) scores[key] = -__builtin_inff();
    Floats most = floats(maximum);
    for (int64_t key = 0; key < end; key += 16) most = max(load_aligned(scores + key), most);
    const float highest = baton::most(most);
    const Floats now = floats(highest), scale = floats(factor), shift = now * scale;
    __m128 sums = _mm_setzero_ps();
    for (int64_t key = 0; key < end; key += 16) {
      const Floats score = load_aligned(scores + key);
      const Floats weight = exp2_negative<E>(sizeof(E) == 2 ? fms(score, scale, shift) : (score - now) * scale);
      for (const __m256 half : {weight.low, weight.high}) {
        sums = _mm_add_ps(sums, _mm256_castps256_ps128(half));
        sums = _mm_add_ps(sums, _mm256_extractf128_ps(half, 1));
      }
      store_aligned(scores + key, weight);
    }
    const float total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if (maximum != highest) {
      const Floats shrink = exp2_negative<float>((floats(maximum) - now) * scale);
      for (int64_t i = 0; i < width; i += 16) store_aligned(output + i, load_aligned(output + i) * shrink);
      sum = __builtin_fmaf(sum, shrink.low[0], total);
      maximum = highest;
    } else {
      sum += total;
    }
  }
};

// A row of up to 16 columns (token, head) of one KV head.
template <class E>
void attend_few(
    const Plan<E>& plan, const Row& row, int64_t kv_head, const E* queries, int64_t stride, const E* keys,
    const E* values, E* to, int64_t to_stride) {
  const AttentionShape& s = plan.shape;
  const int64_t columns = row.length * plan.group, size = s.head_dim, width = round_up(size, 16);
  const bool widened = sizeof(E) == 2 && columns > MOST_COLUMNS;  // values, once for all turns
  const int64_t floats_needed = width * HALF + columns * (2 * width + KEYS) + (widened ? KEYS * width : 0);
  float* turned = reinterpret_cast<float*>(few_memory.get(floats_needed * sizeof(float)));
  float *query = turned + width * HALF, *output = query + columns * width, *scores = output + columns * width;
  float* wide = scores + columns * KEYS;
  Column state[TILE];
  for (int64_t c = 0; c < columns; ++c) {
    const E* from = queries + (row.first + c / plan.group) * stride + (kv_head * plan.group + c % plan.group) * size;
    for (int64_t i = 0; i < width; i += 16) {
      store_aligned(query + c * width + i, load(from + i, first_lanes(size - i)));
      store_aligned(output + c * width + i, zero());
    }
    state[c] = {NO_SCORE, 0.0f, output + c * width};
  }
  const float* wide_at[KEYS];
  const int64_t end = row.start + row.length;
  int64_t block = plan.first_block(row.start);
  Places<E> now(plan, row, kv_head, block, keys, values);
  for (; block * KEYS < end; ++block) {
    const Places<E> next(plan, row, kv_head, block + 1, keys, values);
    const int64_t first = block * KEYS, halves = (now.count + HALF - 1) / HALF;
    for (int64_t half = 0; half < halves; ++half) {
      turn_over(now.keys + half * HALF, size, turned);
      in_turns(columns, [&](int64_t c, auto number) {
        score_few<number>(turned, size, query + c * width, width, scores + c * KEYS + half * HALF);
      });
    }
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t last = row.start + c / plan.group - first;  // the key at the column's own position
      state[c].template weigh<E>(
          scores + c * KEYS, now.count, s.window ? last - s.window + 1 : 0, last + 1, plan.scale, width);
    }
    if (widened)
      for (int64_t key = 0; key < now.count; ++key) {
        wide_at[key] = wide + key * width;
        for (int64_t i = 0; i < width; i += 16)
          store_aligned(wide + key * width + i, load(now.values[key] + i, first_lanes(size - i)));
      }
    in_turns(columns, [&](int64_t c, auto number) {
      const float* weights = scores + c * KEYS;
      if (widened) return add_few<number>(wide_at, now.count, size, weights, output + c * width, width);
      add_few<number>(now.values, now.count, size, weights, output + c * width, width);
    });
    now = next;
  }
  for (int64_t c = 0; c < columns; ++c) {
    E* at = to + (row.first + c / plan.group) * to_stride + (kv_head * plan.group + c % plan.group) * size;
    const Floats share = floats(1.0f) / floats(state[c].sum);
    for (int64_t i = 0; i < size; i += 16)
      store(at + i, load_aligned(output + c * width + i) * share, first_lanes(size - i));
  }
}

}  // namespace
}  // namespace baton
