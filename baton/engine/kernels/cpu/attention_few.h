// Attention of rows with few queries (decode steps, verified draft tokens); products in float32 by registers of 8 lanes.
//
// So few columns do not fill a register. Therefore lanes are keys when scores are summed, with keys transposed, and
// elements when values are summed. A column has the same bits as in a tile: scores are summed over elements
// and values over keys, front to back (in bf16 as in attention_few_tiles.h at level amx, as in attention_dot.h at
// avx512_bf16), the weights of a block in four sums, by key modulo 4.
//
// Keys and values mostly come from memory, and those of the next block are prefetched while this one is computed.
#pragma once

#include "attention_ahead.h"
#include "fp8.h"
#if BATON_LEVEL >= 3
#include "attention_few_tiles.h"
#elif BATON_LEVEL == 2
#include "attention_dot.h"
#endif

namespace baton {
namespace {

thread_local Scratch few_memory;

BATON_LANES __m256i eight_dwords(const void* from, int64_t there) {
  if (there >= 8) return _mm256_loadu_si256(integers(from));
  return first_of_eight(from, there);
}

// Element `n` of each of 8 dwords as a float.
template <class E>
BATON_LANES __m256 element(__m256i dwords, int n) {
  if (sizeof(E) == 4) return _mm256_castsi256_ps(dwords);
  if (n == 0) return _mm256_castsi256_ps(_mm256_slli_epi32(dwords, 16));
  return _mm256_castsi256_ps(_mm256_and_si256(dwords, _mm256_set1_epi32(int32_t(0xffff0000))));
}

// The same from memory. The upper element is computed by inline assembly in one register: compilers keep the mask, or
// the dwords for both elements, in a second one, and then spill a sum to memory.
template <class E>
BATON_LANES __m256 element(const __m256i_u* dwords, int n) {
  alignas(32) static constexpr uint32_t UPPER[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                    0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
  if (sizeof(E) == 4 || n == 0) return element<E>(_mm256_loadu_si256(dwords), n);
  __m256 upper;
  asm("vmovaps %1, %0\n\tvandps %2, %0, %0" : "=x"(upper) : "m"(UPPER), "m"(*dwords));
  return upper;
}

// Transposes 32 keys of `size` elements to [elements][32] in float32. Prefetches as many bytes as they have.
template <class E>
void transpose_keys(const E* keys, const int64_t* at, int64_t size, float* to, Ahead& shared) {
  Ahead ahead = shared;
  for (int64_t key = 0; key < HALF; key += 8)
    for (int64_t first = 0; first < size; first += 8 * PER_DWORD<E>) {
      __m256i rows[8];
      for (int i = 0; i < 8; ++i) rows[i] = eight_dwords(keys + at[key + i] + first, (size - first) / PER_DWORD<E>);
      transpose(rows);
      float* column = to + first * HALF + key;
      for (int i = 0; i < 8; ++i)
        for (int n = 0; n < PER_DWORD<E>; ++n, column += HALF) _mm256_store_ps(column, element<E>(rows[i], n));
      ahead.lines(4);
    }
  shared = ahead;
}

// scores [COLUMNS][64], 32 of each, of transposed keys and queries [COLUMNS][width].
template <int COLUMNS>
void score_few(const float* keys, int64_t size, const float* queries, int64_t width, float* scores) {
  __m256 sums[COLUMNS][4];
#pragma GCC unroll 3
  for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[c][i] = _mm256_setzero_ps();
  for (int64_t element = 0; element < size; ++element, keys += HALF) {
    __m256 query[COLUMNS];
#pragma GCC unroll 3
    for (int c = 0; c < COLUMNS; ++c) query[c] = _mm256_broadcast_ss(queries + c * width + element);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256 key = _mm256_load_ps(keys + 8 * i);
#pragma GCC unroll 3
      for (int c = 0; c < COLUMNS; ++c) sums[c][i] = _mm256_fmadd_ps(key, query[c], sums[c][i]);
    }
  }
#pragma GCC unroll 3
  for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) _mm256_store_ps(scores + c * KEYS + 8 * i, sums[c][i]);
}

// output [COLUMNS][width] += weights [COLUMNS][64] times the values of keys [key, end), of the elements in CHUNKS times 8
// dwords from `first` on. In bf16 the output's elements are deinterleaved: of each 16 the even ones and then the odd ones.
// Prefetches as many bytes as it reads.
template <int COLUMNS, int CHUNKS, class E>
BATON_LANES void add_elements(
    const E* values, const int64_t* at, int64_t key, int64_t end, int64_t first, int64_t size, const float* weights,
    float* output, int64_t width, Ahead& shared) {
  Ahead ahead = shared;
  constexpr int PER = PER_DWORD<E>, REGISTERS = CHUNKS * PER;
  __m256 sums[COLUMNS][REGISTERS];
#pragma GCC unroll 8
  for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 8
    for (int i = 0; i < REGISTERS; ++i) sums[c][i] = _mm256_load_ps(output + c * width + first + 8 * i);
  for (; key < end; ++key) {
    __m256 weight[COLUMNS];
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) weight[c] = _mm256_broadcast_ss(weights + c * KEYS + key);
#pragma GCC unroll 8
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      const E* from = values + at[key] + first + chunk * 8 * PER;
      const __m256i_u* dwords = reinterpret_cast<const __m256i_u*>(from);
      __m256i some;
      if (CHUNKS == 1) dwords = &some, some = eight_dwords(from, (size - first) / PER);
#pragma GCC unroll 8
      for (int n = 0; n < PER; ++n) {
        const __m256 value = element<E>(dwords, n);
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; ++c)
          sums[c][chunk * PER + n] = _mm256_fmadd_ps(value, weight[c], sums[c][chunk * PER + n]);
      }
    }
    ahead.lines(sizeof(E) / 2);
  }
#pragma GCC unroll 8
  for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 8
    for (int i = 0; i < REGISTERS; ++i) _mm256_store_ps(output + c * width + first + 8 * i, sums[c][i]);
  shared = ahead;
}

template <int COLUMNS, class E>
void add_few(
    const E* values, const int64_t* at, int64_t key, int64_t end, int64_t size, const float* weights, float* output,
    int64_t width, Ahead& ahead) {
  constexpr int64_t CHUNK = 8 * PER_DWORD<E>;
  int64_t first = 0;
  for (; first + 32 <= size; first += 32)
    add_elements<COLUMNS, 32 / CHUNK>(values, at, key, end, first, size, weights, output, width, ahead);
  for (; first < size; first += CHUNK)
    add_elements<COLUMNS, 1>(values, at, key, end, first, size, weights, output, width, ahead);
}

// scores [heads][columns][64], 32 of each, of the keys of all heads at 32 places and queries [heads][columns][width].
// `turned` is scratch memory for 32 transposed keys.
template <class E>
void score_heads(
    const E* keys, const int64_t* at, int64_t heads, int64_t size, const float* queries, int64_t columns, int64_t width,
    Factor<E>* turned, float* scores, Ahead& ahead) {
  for (int64_t head = 0; head < heads; ++head) {
    transpose_keys(keys + head * size, at, size, turned, ahead);
    in_turns(columns, [&](int64_t c, auto number) {
      const int64_t i = head * columns + c;
      score_few<number>(turned, size, queries + i * width, width, scores + i * KEYS);
    });
  }
}

BATON_LANES void put_query(float* query, int64_t at, Floats x, float) { store_aligned(query + at, x); }
BATON_LANES void put_weight(float* weights, int64_t key, Floats x, float) { store_aligned(weights + key, x); }

// Running state of a column.
struct Column {
  int64_t position;
  float* output;  // [width]
  float maximum = NO_SCORE, sum = 0.0f, shrink = 1.0f;

  // Updates the maximum by a block's `count` scores, padded to a multiple of 16, and multiplies the output accordingly;
  // keys outside [from, to) are masked.
  void raise(float* scores, int64_t count, int64_t from, int64_t to, float factor, int64_t width) {
    const int64_t end = round_up(count, 16);
    for (int64_t key = 0; key < std::min(from, end); ++key) scores[key] = -__builtin_inff();
    for (int64_t key = std::max<int64_t>(to, 0); key < end; ++key) scores[key] = -__builtin_inff();
    const Floats before = floats(maximum);
    Floats most = before;
    for (int64_t key = 0; key < end; key += 16) most = max(load_aligned(scores + key), most);
    maximum = baton::most(most);
    // Multiplied even by 1: whether a maximum rises is hard to predict.
    const Floats power = exp2_negative<float>((before - floats(maximum)) * floats(factor));
    for (int64_t i = 0; i < width; i += 16) store_aligned(output + i, load_aligned(output + i) * power);
    shrink = first(power);
  }

  // Converts the scores to weights.
  template <class E>
  void weigh(float* scores, int64_t count, float factor) {
    const Floats now = floats(maximum), scale = floats(factor), shift = now * scale;
    __m128 sums = _mm_setzero_ps();
    for (int64_t key = 0; key < count; key += 16) {
      const Floats score = load_aligned(scores + key);
      const Floats weight = exp2_negative<E>(sizeof(E) == 2 ? fms(score, scale, shift) : (score - now) * scale);
      for (const __m256 half : {low_half(weight), high_half(weight)}) {
        sums = _mm_add_ps(sums, _mm256_castps256_ps128(half));
        sums = _mm_add_ps(sums, _mm256_extractf128_ps(half, 1));
      }
      put_weight(scores, key, weight, Factor<E>());
    }
    sum = __builtin_fmaf(sum, shrink, (sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
};

// Elements of a column's output that are deinterleaved together.
template <class E>
constexpr int64_t TURN = IN_BF16<E> ? 32 : 16;

// 16 elements of a column's output from `at` on, in natural order.
template <class E>
BATON_LANES Floats in_order(const float* output, int64_t at) {
  if (sizeof(E) == 4) return load_aligned(output + at);
  const float* first = output + at / TURN<E> * TURN<E> + at % TURN<E> / 2;
  const __m256 a = _mm256_load_ps(first), b = _mm256_load_ps(first + TURN<E> / 2);
#if BATON_LEVEL == 2
  return by_fours(a, b);
#else
  return by_turns(a, b);
#endif
}

// Computes a row of few columns (token, head) for KV heads [first_head, last_head): all heads of 32 keys, then the next
// keys, as in memory. `fetched`: the first block is prefetched already; that of the row `after`, if any, will be.
template <class E>
void attend_few(
    const Plan<E>& plan, const Row& row, bool fetched, const Row* after, int64_t first_head, int64_t last_head,
    const E* queries, int64_t stride, const Pool& pool, E* to, int64_t to_stride) {
  const AttentionShape& s = plan.shape;
  const int64_t columns = row.length * plan.group, size = s.head_dim, width = round_up(size, TURN<E>);
  const int64_t heads = last_head - first_head, all = heads * columns;
  const int64_t floats_needed = width * HALF + all * (KEYS + 2 * width);
  float* memory = reinterpret_cast<float*>(few_memory.get(floats_needed * sizeof(float) + all * sizeof(Column)));
  Factor<E>* turned = reinterpret_cast<Factor<E>*>(memory);
  float *scores = memory + width * HALF, *query = scores + all * KEYS, *output = query + all * width;
  Column* state = reinterpret_cast<Column*>(output + all * width);
  const auto place = [&](int64_t i, int64_t apart) {  // offset of column i, counted over all heads
    const int64_t c = i % columns, head = first_head + i / columns;
    return (row.first + c / plan.group) * apart + (head * plan.group + c % plan.group) * size;
  };
  for (int64_t i = 0; i < all; ++i) {
    const E* from = queries + place(i, stride);
    for (int64_t at = 0; at < width; at += 16) {
      put_query(query + i * width, at, load(from + at, first_lanes(size - at)), Factor<E>());
      store_aligned(output + i * width + at, zero());
    }
    state[i] = {row.start + i % columns / plan.group, output + i * width};
  }
  const int64_t end = row.start + row.length;
  int64_t block = plan.first_block(row.start);
  Places now(s, row, block);
  Runs runs[2];  // of a block and the next one, by turns
  runs[block % 2].set(s, pool, now, sizeof(E), first_head, heads);
  if (!fetched)
    for (Cursor first(runs[block % 2]); !first.ended();) first.lines(1);
  for (; block * KEYS < end; ++block) {
    const bool over = (block + 1) * KEYS >= end && after != nullptr;
    const Places next(s, over ? *after : row, over ? plan.first_block(after->start) : block + 1);
    const Runs &own = runs[block % 2], &later = runs[(block + 1) % 2];
    runs[(block + 1) % 2].set(s, pool, next, sizeof(E), first_head, heads);
    Ahead ahead{Cursor(later), Cursor(own, &later), (next.count + now.count - 1) / now.count}, nothing{{}, {}, 0};
    ahead.again.skip(AGAIN);
    const Opened<E> opened(s, pool, now, first_head, heads);
    const int64_t* at = opened.places;
    for (int64_t key = 0; key < now.count; key += HALF)
      score_heads(opened.keys, at + key, heads, size, query, columns, width, turned, scores + key, ahead);
    for (int64_t i = 0; i < all; ++i) {
      const int64_t last = state[i].position - block * KEYS;  // the key at the column's own position
      state[i].raise(scores + i * KEYS, now.count, s.window ? last - s.window + 1 : 0, last + 1, plan.scale, width);
    }
    for (int64_t i = 0; i < all; ++i) state[i].template weigh<E>(scores + i * KEYS, now.count, plan.scale);
    for (int64_t key = 0; key < now.count; key += HALF)
      for (int64_t head = 0; head < heads; ++head)
        in_turns(columns, [&](int64_t c, auto number) {
          const int64_t i = head * columns + c;
          add_few<number>(
              opened.values + head * size, at, key, std::min(key + HALF, now.count), size, scores + i * KEYS,
              output + i * width, width, c == 0 ? ahead : nothing);
        });
    now = next;
  }
  for (int64_t i = 0; i < all; ++i) {
    E* into = to + place(i, to_stride);
    const Floats share = floats(1.0f) / floats(state[i].sum);
    for (int64_t at = 0; at < size; at += 16)
      store(into + at, in_order<E>(output + i * width, at) * share, first_lanes(size - at));
  }
}

}  // namespace
}  // namespace baton
