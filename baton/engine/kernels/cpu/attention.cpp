#include "attention.h"

#include "attention_few.h"
#include "attention_wide.h"
#include "fp8.h"
#if BATON_LEVEL >= 3
#include "attention_amx.h"
#elif BATON_LEVEL == 2
#include "attention_dot.h"
#endif

namespace baton {
namespace {

constexpr int64_t TILES_PER_UNIT = 8;  // query tiles computed with a block of keys while it is in L1
constexpr int64_t FEW_BY_AMX = 6;      // columns up to which vectors are as fast as AMX; an estimate, not measured yet

thread_local Scratch tile_memory, block_memory;
thread_local Scratch row_memory;  // of the calling thread; its worker threads read and write their parts

// A query tile: its packed queries, and the position and running maximum, sum and output of each of its 16 columns.
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

  // Loads columns [16 * number, 16 * number + 16) of the row: column = token * group + head.
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
      Ints matrix[16];
      for (int64_t i = 0; i < TILE; ++i)
        matrix[i] = number * TILE + i < columns ? load_row(from[i], size, tile) : ints(0);
      transpose(matrix);
      for (int64_t i = 0; i < TILE; ++i) store_aligned(query + tile * TILE_BYTES + i * 64, matrix[i]);
    }
    store_aligned(maximum, floats(NO_SCORE));
    store_aligned(sum, zero());
    std::memset(output, 0, plan.output_bytes);
  }

  bool meets(const Plan<E>& plan, int64_t block) const {
    return block * KEYS <= highest && block >= plan.first_block(lowest);
  }

  // `scores` and `weights` are scratch memory for one block.
  void meet(const Plan<E>& plan, int64_t block, const char* packed, float* scores, char* weights) {
    const int64_t first = block * KEYS, window = plan.shape.window;
    // Keys after the last position are masked for all columns; tiles of AMX compute them, too.
    const int64_t keys = BY_AMX<E> ? KEYS : std::min(KEYS, round_up(highest + 1 - first, TILE));
    score(plan, packed, query, keys, scores);
    if (first + keys - 1 > lowest || (window && first <= highest - window)) hide(first, keys, window, scores);
    const Floats before = load_aligned(maximum);
    Floats most[4] = {before, before, before, before};
    for (int64_t key = 0; key < keys; key += 4)
      for (int i = 0; i < 4; ++i) most[i] = max(load_aligned(scores + (key + i) * 16), most[i]);
    const Floats now = max(max(most[0], most[1]), max(most[2], most[3]));
    const Floats scale = floats(plan.scale), shift = now * scale;
    Floats sums[4] = {zero(), zero(), zero(), zero()};
    for (int64_t key = 0; key < keys; key += 4) {
      Floats weight[4];
      for (int i = 0; i < 4; ++i) {
        const Floats score = load_aligned(scores + (key + i) * 16);
        // One operation if the result is rounded to bf16; in float32 the difference first, which is exact.
        weight[i] = exp2_negative<E>(sizeof(E) == 2 ? fms(score, scale, shift) : (score - now) * scale);
        sums[i] = add(sums[i], weight[i]);
      }
      put_weights(weights, key, weight[0], weight[1], Factor<E>());
      put_weights(weights, key + 2, weight[2], weight[3], Factor<E>());
    }
    const Floats total = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
    if (differ(before, now)) {
      const Floats shrink = exp2_negative<float>((before - now) * scale);
      for (int64_t i = 0; i < plan.value_tiles * TILE; ++i)
        store_aligned(output + i * 16, load_aligned(output + i * 16) * shrink);
      store_aligned(sum, fma(load_aligned(sum), shrink, total));
      store_aligned(maximum, now);
    } else {
      store_aligned(sum, add(load_aligned(sum), total));
    }
    add_values(plan, packed + plan.key_bytes, weights, keys, output);
  }

  void close(const Plan<E>& plan, const Row& row, int64_t kv_head, int64_t number, E* to, int64_t stride) const {
    const int64_t columns = std::min(TILE, row.length * plan.group - number * TILE), size = plan.shape.head_dim;
    const Floats share = floats(1.0f) / load_aligned(sum);
    for (int64_t tile = 0; tile < plan.value_tiles; ++tile) {
      Ints matrix[16];
      for (int64_t i = 0; i < TILE; ++i)
        matrix[i] = as_ints(load_aligned(output + (tile * TILE + i) * 16) * share);
      transpose(matrix);
      for (int64_t i = 0; i < columns; ++i) {
        const int64_t column = number * TILE + i, token = row.first + column / plan.group;
        E* at = to + token * stride + (kv_head * plan.group + column % plan.group) * size + tile * TILE;
        store(at, as_floats(matrix[i]), first_lanes(size - tile * TILE));
      }
    }
  }

 private:
  // Sets the scores of keys that are masked for a column to -inf.
  void hide(int64_t first, int64_t keys, int64_t window, float* scores) const {
    const Ints positions = load_aligned(position), oldest = subtract(positions, ints(int32_t(window)));
    for (int64_t key = 0; key < keys; ++key) {
      const Ints at = ints(int32_t(first + key));
      Mask hidden = above(at, positions);
      if (window) hidden |= up_to(at, oldest);
      store_where(hidden, scores + key * 16, floats(-__builtin_inff()));
    }
  }
};

// Computes query tiles [first, last) of one row and KV head, block by block; `get(block)` returns the packed block.
template <class E, class Get>
void attend_tiles(
    const Plan<E>& plan, const Row& row, int64_t kv_head, int64_t first, int64_t last, const E* queries, int64_t stride,
    E* output, int64_t output_stride, Get get) {
#if BATON_LEVEL >= 3
  const std::conditional_t<BY_AMX<E>, Tiles, char> configured{};
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
        if (tile.meets(plan, block))
          tile.meet(plan, block, packed, scores, weights);
      }
    }
    for (int64_t i = 0; i < count; ++i)
      QueryTile<E>(plan, memory + i * each).close(plan, row, kv_head, first + i, output, output_stride);
  }
}

// The largest number of columns of a row that attend_few computes.
template <class E>
int64_t most_few() {
  if constexpr (BY_AMX<E>) return few_rows_in_tiles ? 0 : FEW_BY_AMX;
  return TILE;
}

}  // namespace

template <class E>
void attend(
    const AttentionShape& shape, const Row* rows, int64_t num_rows, const E* queries, int64_t query_stride,
    const Pool& pool, E* output, int64_t output_stride, int threads) {
  const Plan<E> plan(shape);
  const auto pack = [&](const Row& row, int64_t head, int64_t block, char* to) {
    const Places places(shape, row, block);
    const Opened<E> opened(shape, pool, places, head, 1);
    pack_block(plan, opened.places, places.count, opened.keys, opened.values, to);
  };
  // KV heads that one unit computes for a row with few queries: all, if there are enough rows for the threads.
  const int64_t together = threads == 1 || num_rows >= 4 * threads ? shape.kv_heads : 1;
  // Rows with few tiles: a unit is one row and KV head, and packs each block just before using it.
  parallel(num_rows * shape.kv_heads, threads, [&](int64_t unit) {
    const Row& row = rows[unit / shape.kv_heads];
    const int64_t head = unit % shape.kv_heads, tiles = plan.tiles_of(row);
    if (tiles > TILES_PER_UNIT) return;
    if (row.length * plan.group <= most_few<E>()) {
      if (head % together != 0) return;
      const bool by_turns = threads == 1;  // rows are computed in order
      const Row* after = by_turns && &row + 1 < rows + num_rows ? &row + 1 : nullptr;
      return attend_few(
          plan, row, by_turns && &row > rows, after, head, head + together, queries, query_stride, pool, output,
          output_stride);
    }
    char* block_at = block_memory.get(plan.block_bytes);
    attend_tiles<E>(plan, row, head, 0, tiles, queries, query_stride, output, output_stride, [&](int64_t block) {
      pack(row, head, block, block_at);
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
        pack(row, head, begin + i, packed + i * plan.block_bytes);
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
      const AttentionShape&, const Row*, int64_t, const E*, int64_t, const Pool&, E*, int64_t, int);
BATON_INSTANTIATE(float)
BATON_INSTANTIATE(bf16)

}  // namespace baton
