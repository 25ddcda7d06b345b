#include "attention.h"

#include "tiles.h"

namespace baton {
namespace {

constexpr int64_t KEY_TILES = KEYS / TILE;
constexpr int64_t TILES_PER_UNIT = 8;  // query tiles that pass by a block of keys while it is in L1
constexpr float NO_SCORE = -1e30f;     // a maximum before any key was seen; finite, so that differences are numbers

thread_local Scratch tile_memory, block_memory;
thread_local Scratch row_memory;  // of the thread that calls; its workers read and write their parts

// Sizes and places in packed memory, all in bytes.
template <class E>
struct Plan {
  AttentionShape shape;
  int64_t group;        // query heads of a KV head
  int64_t key_tiles;    // tiles along the dwords of a key
  int64_t value_tiles;  // tiles along the elements of a value
  int64_t steps;        // tiles along the keys of a block, in dwords
  int64_t key_bytes, block_bytes, query_bytes, output_bytes, state_bytes;
  float scale;

  explicit Plan(const AttentionShape& s) : shape(s) {
    group = s.heads / s.kv_heads;
    key_tiles = padded_dwords<E>(s.head_dim) / TILE;
    value_tiles = round_up(s.head_dim, TILE) / TILE;
    steps = KEY_TILES / PER_DWORD<E>;
    key_bytes = KEY_TILES * key_tiles * TILE_BYTES;
    block_bytes = key_bytes + value_tiles * steps * TILE_BYTES;
    query_bytes = key_tiles * TILE_BYTES;
    output_bytes = value_tiles * TILE_BYTES;
    state_bytes = query_bytes + output_bytes + 3 * 64;
    scale = 1.4426950408889634f / __builtin_sqrtf(float(s.head_dim));
  }

  int64_t first_block(int64_t position) const {
    return shape.window ? std::max<int64_t>(0, position - shape.window + 1) / KEYS : 0;
  }
  int64_t tiles_of(const Row& row) const { return (row.length * group + TILE - 1) / TILE; }
};

inline __m512i load_dwords(const void* from, int64_t dwords) {
  return _mm512_maskz_loadu_epi32(first_lanes(dwords), from);
}

// The dwords [16 * tile, 16 * tile + 16) of `elements` of E; an odd element at the end comes with zeros behind it.
template <class E>
inline __m512i load_row(const E* from, int64_t elements, int64_t tile) {
  const int64_t left = elements - tile * TILE * PER_DWORD<E>;
  if constexpr (sizeof(E) == 4) return load_dwords(from + tile * TILE, left);
  if (left >= 32) return _mm512_loadu_si512(from + tile * 32);
  const __mmask32 lanes = left <= 0 ? 0u : (1u << left) - 1;
  return _mm512_maskz_loadu_epi16(lanes, from + tile * 32);
}

// Packs keys and values of positions [64 * block, 64 * block + 64) of one KV head: keys as tiles of 16 keys by 16 dwords,
// values as tiles of 16 elements by 16 dwords of keys. Positions from `end` on are zeros, whatever the pool holds there.
template <class E>
void pack_block(const Plan<E>& plan, const Row& row, int64_t head, int64_t block, const E* keys, const E* values, char* to) {
  const AttentionShape& s = plan.shape;
  const int64_t token = s.kv_heads * s.head_dim, end = row.start + row.length;
  int64_t at[KEYS];
  int64_t known = std::min(KEYS, end - block * KEYS);
  for (int64_t key = 0; key < known; ++key) {
    const int64_t position = block * KEYS + key;
    at[key] = (row.blocks[position / s.block_size] * s.block_size + position % s.block_size) * token + head * s.head_dim;
  }
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
        const int64_t key = (step * TILE + r) * PER_DWORD<E>;
        if constexpr (sizeof(E) == 4) {
          matrix[r] = key < known ? _mm512_maskz_loadu_epi32(lanes, values + at[key] + tile * TILE) : _mm512_setzero_si512();
        } else {
          auto half = [&](int64_t k) {
            if (k >= known) return _mm512_setzero_si512();
            return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, values + at[k] + tile * TILE));
          };
          matrix[r] = _mm512_or_si512(half(key), _mm512_slli_epi32(half(key + 1), 16));
        }
      }
      transpose(matrix);
      for (int64_t r = 0; r < TILE; ++r) _mm512_store_si512(to + r * 64, matrix[r]);
    }
  }
}

// sums [16][16] = left (`count` tiles, `left_step` bytes apart) times right (`count` tiles one after the other).
template <class E>
void vector_product(const char* left, int64_t left_step, const char* right, int64_t count, float* sums, bool add) {
  for (int64_t half = 0; half < 2; ++half) {
    __m512 sum[8];
    for (int r = 0; r < 8; ++r) sum[r] = add ? _mm512_load_ps(sums + r * 16) : _mm512_setzero_ps();
    for (int64_t tile = 0; tile < count; ++tile)
      for (int64_t d = 0; d < TILE; ++d) {
        const __m512i b = _mm512_load_si512(right + tile * TILE_BYTES + d * 64);
        for (int r = 0; r < 8; ++r)
          sum[r] = multiply_add<E>(sum[r], broadcast_dword(left + tile * left_step + r * 64 + d * 4), b);
      }
    for (int r = 0; r < 8; ++r) _mm512_store_ps(sums + r * 16, sum[r]);
    left += 512;
    sums += 128;
  }
}

// scores [64 keys][16 columns] of a block of keys and a query tile.
template <class E>
void score(const Plan<E>& plan, const char* block, const char* query, float* scores) {
#if BATON_LEVEL >= 2
  if constexpr (sizeof(E) == 2) {
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
    return;
  }
#endif
  for (int64_t i = 0; i < KEY_TILES; ++i)
    vector_product<E>(
        block + i * plan.key_tiles * TILE_BYTES, TILE_BYTES, query, plan.key_tiles, scores + i * 256, false);
}

// output [elements][16 columns] += values times weights.
template <class E>
void add_values(const Plan<E>& plan, const char* values, const char* weights, float* output) {
#if BATON_LEVEL >= 2
  if constexpr (sizeof(E) == 2) {
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
    return;
  }
#endif
  for (int64_t tile = 0; tile < plan.value_tiles; ++tile)
    vector_product<E>(
        values + tile * plan.steps * TILE_BYTES, TILE_BYTES, weights, plan.steps, output + tile * 256, true);
}

inline void put_weights(char* to, int64_t key, __m512 low, __m512 high, float) {
  _mm512_store_ps(to + key * 64, low);
  _mm512_store_ps(to + key * 64 + 64, high);
}

#if BATON_LEVEL >= 1
inline void put_weights(char* to, int64_t key, __m512 low, __m512 high, bf16) {
  alignas(64) static const int16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  _mm512_store_si512(to + key / 2 * 64, _mm512_permutexvar_epi16(_mm512_load_si512(order), pair));
}
#endif

// A query tile: its packed queries, and for each of its 16 columns position, maximum, sum and output so far.
template <class E>
struct QueryTile {
  char* query;
  float* output;  // [elements][16]
  int32_t* position;
  float *maximum, *sum;
  int64_t lowest, highest;  // position

  QueryTile(const Plan<E>& plan, char* memory) {
    query = memory;
    output = reinterpret_cast<float*>(memory + plan.query_bytes);
    position = reinterpret_cast<int32_t*>(memory + plan.query_bytes + plan.output_bytes);
    maximum = reinterpret_cast<float*>(position + 16);
    sum = maximum + 16;
  }

  // Takes columns [16 * number, 16 * number + 16) of the row: column = token * group + head.
  void open(const Plan<E>& plan, const Row& row, int64_t kv_head, int64_t number, const E* queries, int64_t stride) {
    const int64_t columns = row.length * plan.group, size = plan.shape.head_dim;
    const E* from[16];
    for (int64_t i = 0; i < TILE; ++i) {
      const int64_t column = std::min(number * TILE + i, columns - 1), token = column / plan.group;
      position[i] = int32_t(row.start + token);
      from[i] = queries + (row.first + token) * stride + (kv_head * plan.group + column % plan.group) * size;
    }
    lowest = position[0];
    highest = position[15];
    for (int64_t tile = 0; tile < plan.key_tiles; ++tile) {
      __m512i matrix[16];
      for (int64_t i = 0; i < TILE; ++i)
        matrix[i] = number * TILE + i < columns ? load_row(from[i], size, tile) : _mm512_setzero_si512();
      transpose(matrix);
      for (int64_t i = 0; i < TILE; ++i) _mm512_store_si512(query + tile * TILE_BYTES + i * 64, matrix[i]);
    }
    _mm512_store_ps(maximum, _mm512_set1_ps(NO_SCORE));
    _mm512_store_ps(sum, _mm512_setzero_ps());
    std::memset(output, 0, plan.output_bytes);
  }

  bool meets(const Plan<E>& plan, int64_t block) const {
    return block * KEYS <= highest && block >= plan.first_block(lowest);
  }

  // `scores` and `weights` are memory for one block's.
  void meet(const Plan<E>& plan, int64_t block, const char* packed, float* scores, char* weights) {
    score(plan, packed, query, scores);
    const int64_t first = block * KEYS, window = plan.shape.window;
    if (first + KEYS - 1 > lowest || (window && first <= highest - window)) hide(first, window, scores);
    const __m512 before = _mm512_load_ps(maximum);
    __m512 most[4] = {before, before, before, before};
    for (int64_t key = 0; key < KEYS; key += 4)
      for (int i = 0; i < 4; ++i) most[i] = _mm512_max_ps(_mm512_load_ps(scores + (key + i) * 16), most[i]);
    const __m512 now = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
    const __m512 scale = _mm512_set1_ps(plan.scale), shift = _mm512_mul_ps(now, scale);
    __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t key = 0; key < KEYS; key += 4) {
      __m512 weight[4];
      for (int i = 0; i < 4; ++i) {
        const __m512 score = _mm512_load_ps(scores + (key + i) * 16);
        // One operation where the result is rounded to bf16; in float32 the difference first, which is exact.
        weight[i] = exp2_negative<E>(
            sizeof(E) == 2 ? _mm512_fmsub_ps(score, scale, shift) : _mm512_mul_ps(_mm512_sub_ps(score, now), scale));
        sums[i] = _mm512_add_ps(sums[i], weight[i]);
      }
      put_weights(weights, key, weight[0], weight[1], E());
      put_weights(weights, key + 2, weight[2], weight[3], E());
    }
    const __m512 total = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
    if (_mm512_cmp_ps_mask(before, now, _CMP_NEQ_UQ)) {
      const __m512 shrink = exp2_negative<float>(_mm512_mul_ps(_mm512_sub_ps(before, now), scale));
      for (int64_t i = 0; i < plan.value_tiles * TILE; ++i)
        _mm512_store_ps(output + i * 16, _mm512_mul_ps(_mm512_load_ps(output + i * 16), shrink));
      _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_load_ps(sum), shrink, total));
      _mm512_store_ps(maximum, now);
    } else {
      _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), total));
    }
    add_values(plan, packed + plan.key_bytes, weights, output);
  }

  void close(const Plan<E>& plan, const Row& row, int64_t kv_head, int64_t number, E* to, int64_t stride) const {
    const int64_t columns = std::min(TILE, row.length * plan.group - number * TILE), size = plan.shape.head_dim;
    const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(sum));
    for (int64_t tile = 0; tile < plan.value_tiles; ++tile) {
      __m512i matrix[16];
      for (int64_t i = 0; i < TILE; ++i)
        matrix[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(output + (tile * TILE + i) * 16), share));
      transpose(matrix);
      for (int64_t i = 0; i < columns; ++i) {
        const int64_t column = number * TILE + i, token = row.first + column / plan.group;
        E* at = to + token * stride + (kv_head * plan.group + column % plan.group) * size + tile * TILE;
        store(at, _mm512_castsi512_ps(matrix[i]), first_lanes(size - tile * TILE));
      }
    }
  }

 private:
  // Scores of keys that a column may not see become -inf.
  void hide(int64_t first, int64_t window, float* scores) const {
    const __m512i positions = _mm512_load_si512(position);
    const __m512i oldest = _mm512_sub_epi32(positions, _mm512_set1_epi32(int32_t(window)));
    const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
    for (int64_t key = 0; key < KEYS; ++key) {
      const __m512i at = _mm512_set1_epi32(int32_t(first + key));
      __mmask16 hidden = _mm512_cmpgt_epi32_mask(at, positions);
      if (window) hidden |= _mm512_cmple_epi32_mask(at, oldest);
      _mm512_mask_store_ps(scores + key * 16, hidden, nothing);
    }
  }
};

// Query tiles [first, last) of one row and KV head, block by block; `get(block)` gives the packed block.
template <class E, class Get>
void attend_tiles(
    const Plan<E>& plan, const Row& row, int64_t kv_head, int64_t first, int64_t last, const E* queries, int64_t stride,
    E* output, int64_t output_stride, Get get) {
#if BATON_LEVEL >= 2
  const Tiles configured;
#endif
  const int64_t each = round_up(plan.state_bytes, 64), scores_bytes = KEYS * 64;
  char* memory = tile_memory.get(TILES_PER_UNIT * each + 2 * scores_bytes);
  float* scores = reinterpret_cast<float*>(memory);
  char* weights = memory + scores_bytes;
  memory += 2 * scores_bytes;
  for (; first < last; first += TILES_PER_UNIT) {
    const int64_t count = std::min(TILES_PER_UNIT, last - first);
    int64_t begin = INT64_MAX, end = 0;
    for (int64_t i = 0; i < count; ++i) {
      QueryTile<E> tile(plan, memory + i * each);
      tile.open(plan, row, kv_head, first + i, queries, stride);
      begin = std::min(begin, plan.first_block(tile.lowest));
      end = std::max(end, tile.highest / KEYS + 1);
    }
    const int64_t group = plan.group;
    for (int64_t block = begin; block < end; ++block) {
      const char* packed = get(block);
      for (int64_t i = 0; i < count; ++i) {
        QueryTile<E> tile(plan, memory + i * each);
        tile.lowest = row.start + (first + i) * TILE / group;
        tile.highest = row.start + std::min(row.length * group - 1, (first + i) * TILE + TILE - 1) / group;
        if (tile.meets(plan, block)) tile.meet(plan, block, packed, scores, weights);
      }
    }
    for (int64_t i = 0; i < count; ++i)
      QueryTile<E>(plan, memory + i * each).close(plan, row, kv_head, first + i, output, output_stride);
  }
}

}  // namespace

template <class E>
void attend(
    const AttentionShape& shape, const Row* rows, int64_t num_rows, const E* queries, int64_t query_stride,
    const E* keys, const E* values, E* output, int64_t output_stride, int threads) {
  const Plan<E> plan(shape);
  // Rows of few tiles: a unit is a row and a KV head, its blocks are packed as they come.
  parallel(num_rows * shape.kv_heads, threads, [&](int64_t unit) {
    const Row& row = rows[unit / shape.kv_heads];
    const int64_t head = unit % shape.kv_heads, tiles = plan.tiles_of(row);
    if (tiles > TILES_PER_UNIT) return;
    char* block_at = block_memory.get(plan.block_bytes);
    attend_tiles<E>(plan, row, head, 0, tiles, queries, query_stride, output, output_stride, [&](int64_t block) {
      pack_block(plan, row, head, block, keys, values, block_at);
      return block_at;
    });
  });
  // Long rows: all blocks of a KV head are packed once, then read by units of a few tiles.
  for (int64_t r = 0; r < num_rows; ++r) {
    const Row& row = rows[r];
    const int64_t tiles = plan.tiles_of(row), units = (tiles + TILES_PER_UNIT - 1) / TILES_PER_UNIT;
    if (tiles <= TILES_PER_UNIT) continue;
    const int64_t begin = plan.first_block(row.start), end = (row.start + row.length + KEYS - 1) / KEYS;
    char* packed = row_memory.get((end - begin) * plan.block_bytes);
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      parallel(end - begin, threads, [&](int64_t i) {
        pack_block(plan, row, head, begin + i, keys, values, packed + i * plan.block_bytes);
      });
      parallel(units, threads, [&](int64_t i) {
        const int64_t unit = units - 1 - i;  // the longest first
        const int64_t first = unit * TILES_PER_UNIT, last = std::min(first + TILES_PER_UNIT, tiles);
        attend_tiles<E>(plan, row, head, first, last, queries, query_stride, output, output_stride, [&](int64_t block) {
          return packed + (block - begin) * plan.block_bytes;
        });
      });
    }
  }
}

#define BATON_INSTANTIATE(E) \
  template void attend<E>( \
      const AttentionShape&, const Row*, int64_t, const E*, int64_t, const E*, const E*, E*, int64_t, int);
BATON_INSTANTIATE(float)
#if BATON_LEVEL >= 1
BATON_INSTANTIATE(bf16)
#endif

}  // namespace baton
