// Linear layers of the levels with bf16 products, by AVX-512 and AMX; gemm_wide.cpp has those of the lower levels.
#if BATON_LEVEL >= 2

#include <type_traits>

#include "gemm.h"

#include "gemm_blocks.h"
#if BATON_LEVEL == 2
#include "gemm_int8.h"
#endif
#include "gemm_put.h"
#include "tiles.h"

namespace baton {
namespace {

constexpr int64_t MOST_ROWS = 12;       // of a product: their sums leave registers for two factors
constexpr int64_t FEW_ROWS = MOST_ROWS;  // rows for which blocks are decoded in registers, once

thread_local Scratch unpacked;

template <class E, class Tile, int ROWS>
void vector_rows(
    const Linear& layer, const char* weight, const E* x, int64_t ldx, int64_t tiles, void* y, int64_t ldy, int64_t row,
    int64_t group, Into into) {
  __m512 left[ROWS], right[ROWS];
  for (int r = 0; r < ROWS; ++r) left[r] = right[r] = _mm512_setzero_ps();
  const char* from = reinterpret_cast<const char*>(x + row * ldx);
  const int64_t stride = ldx * sizeof(E);
  constexpr int64_t LINES = Tile::BYTES / TILE;  // bytes of a tile for each dword of k
  const auto half = [&](const Tile& of, __m512* sums) {
#pragma GCC unroll 1
    for (int64_t d = 0; d < TILE; ++d) {
      const __m512i a = of.dword(d);
      for (int r = 0; r < ROWS; ++r) sums[r] = multiply_add<E>(sums[r], broadcast_dword(from + r * stride + 4 * d), a);
    }
  };
  for (int64_t tile = 0; tile < tiles; ++tile, weight += 2 * Tile::BYTES) {
    const Tile upper(weight, 0), lower(weight, 1);
    if constexpr (ROWS <= IN_ORDER && std::is_same_v<Tile, StoredTile<E>>) {
      half(upper, left);
      half(lower, right);
      from += 4 * TILE;
      continue;
    }
    // By twos: then a tile of 8 bits is compiled for each of the two pairs of a register.
#pragma GCC unroll 1
    for (int64_t even = 0; even < TILE; even += 2)
#pragma GCC unroll 2
      for (int64_t d = even; d < even + 2; ++d) {
        const __m512i a = upper.dword(d), b = lower.dword(d);
        prefetch(weight + AHEAD + d * LINES);
        prefetch(weight + AHEAD + d * LINES + Tile::BYTES);
        for (int r = 0; r < ROWS; ++r) {
          const __m512i value = broadcast_dword(from + r * stride);
          left[r] = multiply_add<E>(left[r], value, a);
          right[r] = multiply_add<E>(right[r], value, b);
        }
        from += 4;
      }
  }
  alignas(64) float sums[2][ROWS][16];
  for (int r = 0; r < ROWS; ++r) {
    _mm512_store_ps(sums[0][r], left[r]);
    _mm512_store_ps(sums[1][r], right[r]);
  }
  put_tiles<E>(into, layer, &sums[0][0][0], &sums[1][0][0], int64_t(ROWS), y, ldy, row, group);
}

// Computes rows [first, last) in products of nearly equal numbers of rows: one of few rows would wait for its sums.
template <class E, class Tile>
void vector_group(
    const Linear& layer, const char* weight, const E* x, int64_t ldx, int64_t first, int64_t last, void* y, int64_t ldy,
    int64_t group, Into into) {
  const int64_t tiles = padded_dwords<E>(layer.k) / TILE;
  for (int64_t rows, products = (last - first + MOST_ROWS - 1) / MOST_ROWS; products > 0; --products, first += rows) {
    rows = (last - first + products - 1) / products;
    switch (rows) {
#define BATON_ROWS(n) \
  case n: \
    vector_rows<E, Tile, n>(layer, weight, x, ldx, tiles, y, ldy, first, group, into); \
    break;
      BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5) BATON_ROWS(6)
      BATON_ROWS(7) BATON_ROWS(8) BATON_ROWS(9) BATON_ROWS(10) BATON_ROWS(11) BATON_ROWS(12)
#undef BATON_ROWS
    }
  }
}

#if BATON_LEVEL >= 3
// Computes the sums [4][16][16] of up to 32 rows of one group, for which the tiles are configured. STREAM: the weights
// are read from memory, once, and prefetched.
template <bool TWO, bool STREAM>
void amx_group(const char* weight, const char* x, int64_t stride, int64_t tiles, float* sums) {
  const char* below = x + 16 * stride;
  _tile_zero(0);
  _tile_zero(1);
  if (TWO) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t tile = 0; tile < tiles; ++tile) {
    if (STREAM)
      for (int64_t line = 0; line < 2 * TILE_BYTES; line += 64) prefetch(weight + AHEAD + line);
    _tile_loadd(6, weight, 64);
    _tile_loadd(7, weight + TILE_BYTES, 64);
    _tile_loadd(4, x, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (TWO) {
      _tile_loadd(5, below, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    weight += 2 * TILE_BYTES;
    x += 64;
    below += 64;
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if (TWO) {
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
}

// Computes all rows of a unit of groups, 32 rows at a time; the weights are read again from L2 for each 32.
template <class Weight>
void amx_unit(
    const Linear& layer, const bf16* x, int64_t ldx, int64_t rows, void* y, int64_t ldy, Into into, int64_t first_group,
    int64_t last_group, Weight weight) {
  alignas(64) float sums[GROUPS_PER_UNIT][4 * 256];
  const int64_t tiles = padded_dwords<bf16>(layer.k) / TILE, stride = ldx * 2;
  int upper = -1, lower = -1;
  for (int64_t row = 0; row < rows; row += 32) {
    const int u = int(std::min<int64_t>(16, rows - row)), l = int(std::clamp<int64_t>(rows - row - 16, 0, 16));
    if (u != upper || l != lower) configure_tiles(upper = u, lower = l);
    const char* from = reinterpret_cast<const char*>(x + row * ldx);
    for (int64_t group = first_group; group < last_group; ++group) {
      float* sum = sums[group - first_group];
      if (rows <= 16)
        amx_group<false, true>(weight(group), from, stride, tiles, sum);
      else if (rows <= 32)
        amx_group<true, true>(weight(group), from, stride, tiles, sum);
      else if (l == 0)
        amx_group<false, false>(weight(group), from, stride, tiles, sum);
      else
        amx_group<true, false>(weight(group), from, stride, tiles, sum);
    }
    for (int64_t group = first_group; group < last_group; ++group) {
      const float* sum = sums[group - first_group];
      put_tiles<bf16>(into, layer, sum, sum + 256, int64_t(u), y, ldy, row, group);
      if (l > 0) put_tiles<bf16>(into, layer, sum + 512, sum + 768, int64_t(l), y, ldy, row + 16, group);
    }
  }
  _tile_release();
}
#endif

// int8 -> E: integers up to 127 are exact in both.
template <class E>
const char* widen(const int8_t* from, int64_t count) {
  E* to = reinterpret_cast<E*>(unpacked.get(count * sizeof(E)));
  for (int64_t i = 0; i < count; i += 16) {
    prefetch(reinterpret_cast<const char*>(from) + i + AHEAD);
    store(to + i, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + i)))));
  }
  return reinterpret_cast<const char*>(to);
}

// Decodes the blocks of groups [first, last).
template <class Tile>
const char* decode(const char* from, int64_t tiles) {
  char* to = unpacked.get(tiles * TILE_BYTES);
  for (int64_t i = 0; i < tiles; ++i) {
    const char* both = from + i / 2 * 2 * Tile::BYTES;
    for (int64_t line = 0; line < Tile::BYTES; line += 64) prefetch(both + AHEAD + i % 2 * Tile::BYTES + line);
    const Tile tile(both, i % 2);
    for (int64_t d = 0; d < TILE; ++d) _mm512_store_si512(to + i * TILE_BYTES + d * 64, tile.dword(d));
  }
  return to;
}

template <class E>
void unit_of_groups(
    const Linear& layer, const E* x, int64_t ldx, int64_t rows, void* y, int64_t ldy, Into into, int64_t first_group,
    int64_t last_group) {
  const int64_t elements = GROUP * padded_dwords<E>(layer.k) * PER_DWORD<E>;
  auto compute = [&](int64_t first, int64_t last, auto weight) {
#if BATON_LEVEL >= 3
    if constexpr (sizeof(E) == 2) return amx_unit(layer, x, ldx, rows, y, ldy, into, first, last, weight);
#endif
    for (int64_t row = 0; row < rows; row += 48)
      for (int64_t group = first; group < last; ++group)
        vector_group<E, StoredTile<E>>(
            layer, weight(group), x, ldx, row, std::min(row + 48, rows), y, ldy, group, into);
  };
  if constexpr (sizeof(E) == 2) {
    if (in_blocks(Kind(layer.kind))) {
      const int64_t tiles = 2 * layer.k / BLOCK_WEIGHTS;
      by_kind(Kind(layer.kind), [&](auto* tile) {
        using Tile = std::remove_pointer_t<decltype(tile)>;
        const char* weights = static_cast<const char*>(layer.weight);
        const int64_t bytes = tiles * Tile::BYTES;
        if (BATON_LEVEL == 2 && rows <= FEW_ROWS) {
          for (int64_t group = first_group; group < last_group; ++group)
            vector_group<E, Tile>(layer, weights + group * bytes, x, ldx, 0, rows, y, ldy, group, into);
          return;
        }
        const int64_t step = rows <= 32 ? 1 : last_group - first_group;
        for (int64_t first = first_group; first < last_group; first += step) {
          const char* wide = decode<Tile>(weights + first * bytes, step * tiles);
          compute(first, first + step, [&](int64_t group) { return wide + (group - first) * tiles * TILE_BYTES; });
        }
      });
      return;
    }
  }
  if (Kind(layer.kind) != Kind::INT8) {
    compute(first_group, last_group, [&](int64_t group) {
      return static_cast<const char*>(layer.weight) + group * elements * sizeof(E);
    });
    return;
  }
  // int8 weights are widened once: for few rows group by group, for many rows all groups of the unit together.
  const int64_t step = rows <= 32 ? 1 : last_group - first_group;
  for (int64_t first = first_group; first < last_group; first += step) {
    const char* wide = widen<E>(static_cast<const int8_t*>(layer.weight) + first * elements, step * elements);
    compute(first, first + step, [&](int64_t group) { return wide + (group - first) * elements * sizeof(E); });
  }
}

}  // namespace

template <class E>
void linear(const Linear& layer, const E* x, int64_t ldx, int64_t rows, void* y, int64_t ldy, Into into, int threads) {
#if BATON_LEVEL == 2
  if constexpr (sizeof(E) == 2)
    if (layer.int8_activations) return int8_linear(layer, x, ldx, rows, y, ldy, into, threads);
#endif
  const auto compute = [](const Product& of, const void* x, void* y, int64_t ldy, Into into, int64_t first, int64_t last) {
    unit_of_groups<E>(of.layer, static_cast<const E*>(x), of.ldx, of.rows, y, ldy, into, first, last);
  };
  in_units<E>(layer, x, ldx, rows, y, ldy, into, threads, GROUPS_PER_UNIT, compute);
}

template <class E, class W>
void pack(const W* weight, int64_t n, int64_t k, W* packed) {
  const int64_t groups = round_up(n, GROUP) / GROUP, tiles = padded_dwords<E>(k) / TILE;
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t tile = 0; tile < tiles; ++tile)
      for (int64_t half = 0; half < 2; ++half)
        for (int64_t d = 0; d < TILE; ++d)
          for (int64_t column = 0; column < TILE; ++column)
            for (int64_t e = 0; e < PER_DWORD<E>; ++e) {
              const int64_t row = group * GROUP + half * TILE + column;
              const int64_t at = (tile * TILE + d) * PER_DWORD<E> + e;
              *packed++ = row < n && at < k ? weight[row * k + at] : W(0);
            }
}

int64_t int8_linears() {
#if BATON_LEVEL == 2
  return int8_count.load(std::memory_order_relaxed);
#else
  return -1;
#endif
}

int64_t block_bytes(Kind kind, int64_t n, int64_t k) {
  const int64_t tiles = round_up(n, GROUP) / TILE * (k / BLOCK_WEIGHTS);
  return by_kind(kind, [&](auto* tile) { return tiles * std::remove_pointer_t<decltype(tile)>::BYTES; });
}

void pack_blocks(
    Kind kind, const uint8_t* codes, const float* scales, const float* minima, int64_t n, int64_t k, char* packed) {
  const int64_t blocks = k / BLOCK_WEIGHTS;
  auto put = [&](const float* values, int64_t first, int64_t block) {
    float sixteen[TILE] = {};
    for (int64_t column = 0; column < std::min(TILE, n - first); ++column)
      sixteen[column] = values[(first + column) * blocks + block];
    const __m512 stored = _mm512_loadu_ps(sixteen);
    if (kind == Kind::BLOCKS4_WIDE) {
      _mm512_storeu_ps(packed, stored);
      packed += 64;
    } else {
      const __m256i halves = _mm512_cvtps_ph(stored, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed), halves);
      packed += 32;
    }
  };
  for (int64_t group = 0; group < n; group += GROUP)
    for (int64_t block = 0; block < blocks; ++block) {
      const auto code = [&](int64_t output, int64_t k) -> uint8_t {
        return output < n ? codes[(output * blocks + block) * BLOCK_WEIGHTS + k] : 0;
      };
      if (kind == Kind::BLOCKS8) {
        put(scales, group, block);
        put(scales, group + TILE, block);
        for (int64_t k = 0; k < BLOCK_WEIGHTS; k += 4)
          for (int64_t output = group; output < group + GROUP; ++output)
            for (int64_t e = 0; e < 4; ++e) *packed++ = char(code(output, k + e) ^ 128);
        continue;
      }
      for (int64_t first = group; first < group + GROUP; first += TILE) {
        put(scales, first, block);
        put(minima, first, block);
        for (int64_t d = 0; d < TILE; ++d)
          for (int64_t i = 0; i < TILE; ++i)
            *packed++ = char(code(first + i / 2, 2 * d + i % 2) | code(first + 8 + i / 2, 2 * d + i % 2) << 4);
      }
    }
}

#define BATON_INSTANTIATE(E) \
  template void linear<E>(const Linear&, const E*, int64_t, int64_t, void*, int64_t, Into, int); \
  template void pack<E, E>(const E*, int64_t, int64_t, E*); \
  template void pack<E, int8_t>(const int8_t*, int64_t, int64_t, int8_t*);
BATON_INSTANTIATE(float)
BATON_INSTANTIATE(bf16)

}  // namespace baton

#endif
