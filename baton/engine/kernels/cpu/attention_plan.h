// Sizes of attention's packed operands: blocks of keys and values, query tiles; the places of a block in the pool.
#pragma once

#include <type_traits>

#include "attention.h"

namespace baton {
namespace {

constexpr int64_t KEY_TILES = KEYS / TILE;
constexpr int64_t HALF = KEYS / 2;  // keys that attention of few queries transposes at a time, so that they stay in L1
constexpr float NO_SCORE = -1e30f;  // the maximum before the first key; finite, so that differences are not NaN

// Whether AMX computes attention; whether its factors are in bf16: of AMX or of vdpbf16ps. Otherwise they are float32.
template <class E>
constexpr bool BY_AMX = BATON_LEVEL >= 3 && sizeof(E) == 2;
template <class E>
constexpr bool IN_BF16 = BATON_LEVEL >= 2 && sizeof(E) == 2;

// Element type of packed queries, keys, values and weights.
template <class E>
using Factor = std::conditional_t<IN_BF16<E>, E, float>;

// Sizes of packed operands; `*_bytes` are in bytes.
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
    key_tiles = padded_dwords<Factor<E>>(s.head_dim) / TILE;
    value_tiles = round_up(s.head_dim, TILE) / TILE;
    steps = KEY_TILES / PER_DWORD<Factor<E>>;
    key_bytes = KEY_TILES * key_tiles * TILE_BYTES;
    block_bytes = key_bytes + value_tiles * steps * TILE_BYTES;
    query_bytes = key_tiles * TILE_BYTES;
    output_bytes = value_tiles * TILE_BYTES;
    state_bytes = query_bytes + output_bytes + 3 * 64;
    scale = s.scale ? 1.4426950408889634f * s.scale : 1.4426950408889634f / __builtin_sqrtf(float(s.head_dim));
  }

  int64_t first_block(int64_t position) const {
    return shape.window ? std::max<int64_t>(0, position - shape.window + 1) / KEYS : 0;
  }
  int64_t tiles_of(const Row& row) const { return (row.length * group + TILE - 1) / TILE; }
};

// Calls work(first, std::integral_constant<int, count>) for groups of up to three columns (of whose sums attention of few
// queries has 12 registers); the last four as two and two.
template <class Work>
void in_turns(int64_t columns, Work work) {
  for (int64_t first = 0; first < columns;) {
    const int64_t left = columns - first, count = left == 4 ? 2 : std::min<int64_t>(left, 3);
    if (count == 3) work(first, std::integral_constant<int, 3>());
    if (count == 2) work(first, std::integral_constant<int, 2>());
    if (count == 1) work(first, std::integral_constant<int, 1>());
    first += count;
  }
}

// Offsets of a block's positions in a pool, in elements. An incomplete block is padded with its last position, which is
// then masked; a block after the row's end has no positions.
struct Places {
  int64_t at[KEYS];
  int64_t count, first_slot;

  Places(const AttentionShape& s, const Row& row, int64_t block) {
    const int64_t apart = s.kv_heads * s.head_dim;
    count = std::clamp<int64_t>(row.start + row.length - block * KEYS, 0, KEYS);
    first_slot = block * KEYS % s.block_size;
    int64_t table = block * KEYS / s.block_size, slot = first_slot;
    for (int64_t key = 0; key < count; ++table, slot = 0)
      for (int64_t at_slot = row.blocks[table] * s.block_size + slot; key < count && slot < s.block_size; ++slot)
        at[key++] = at_slot++ * apart;
    for (int64_t key = count; count > 0 && key < KEYS; ++key) at[key] = at[count - 1];
  }
};

}  // namespace
}  // namespace baton
