#include "gemm.h"

#include "tiles.h"

namespace baton {
namespace {

constexpr int64_t GROUPS_PER_UNIT = 8;  // their weights stay in L2 while all rows pass by
constexpr int64_t AHEAD = 8192;         // bytes that weights are fetched ahead of their use

thread_local Scratch unpacked;

// What is done with 16 sums of one row: outputs [column, column + 16) of the layer.
template <class E>
inline void put(const Linear& layer, __m512 sum, void* y, int64_t at, int64_t column, Into into) {
  const __mmask16 lanes = first_lanes(layer.n - column);
  if (layer.scale) sum = _mm512_mul_ps(sum, load(layer.scale + column, lanes));
  if (layer.bias) sum = _mm512_add_ps(sum, load(layer.bias + column, lanes));
  if (into == Into::FLOAT) {
    store(static_cast<float*>(y) + at + column, sum, lanes);
    return;
  }
  E* to = static_cast<E*>(y) + at + column;
  if (into == Into::ADD) sum = _mm512_add_ps(sum, load(to, lanes));
  store(to, sum, lanes);
}

// The same for a row's 32 sums of one group.
template <class E>
inline void put_group(const Linear& layer, __m512 left, __m512 right, void* y, int64_t at, int64_t group, Into into) {
  const int64_t column = group * GROUP;
  if (into == Into::SWIGLU) {
    if (layer.scale) {
      left = _mm512_mul_ps(left, load(layer.scale + column));
      right = _mm512_mul_ps(right, load(layer.scale + column + 16));
    }
    if (layer.bias) {
      left = _mm512_add_ps(left, load(layer.bias + column));
      right = _mm512_add_ps(right, load(layer.bias + column + 16));
    }
    store(static_cast<E*>(y) + at + group * 16, _mm512_mul_ps(silu(left), right));
    return;
  }
  put<E>(layer, left, y, at, column, into);
  if (column + 16 < layer.n) put<E>(layer, right, y, at, column + 16, into);
}

template <class E, int ROWS>
void vector_rows(
    const Linear& layer, const char* weight, const E* x, int64_t ldx, int64_t tiles, void* y, int64_t ldy, int64_t row,
    int64_t group, Into into) {
  __m512 left[ROWS], right[ROWS];
  for (int r = 0; r < ROWS; ++r) left[r] = right[r] = _mm512_setzero_ps();
  const char* from = reinterpret_cast<const char*>(x + row * ldx);
  const int64_t stride = ldx * sizeof(E);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    for (int64_t d = 0; d < TILE; ++d) {
      const __m512i a = _mm512_loadu_si512(weight), b = _mm512_loadu_si512(weight + TILE_BYTES);
      _mm_prefetch(weight + AHEAD, _MM_HINT_T0);
      _mm_prefetch(weight + AHEAD + TILE_BYTES, _MM_HINT_T0);
      for (int r = 0; r < ROWS; ++r) {
        const __m512i value = broadcast_dword(from + r * stride);
        left[r] = multiply_add<E>(left[r], value, a);
        right[r] = multiply_add<E>(right[r], value, b);
      }
      weight += 64;
      from += 4;
    }
    weight += TILE_BYTES;
  }
  for (int r = 0; r < ROWS; ++r) put_group<E>(layer, left[r], right[r], y, (row + r) * ldy, group, into);
}

template <class E>
void vector_group(
    const Linear& layer, const char* weight, const E* x, int64_t ldx, int64_t first, int64_t last, void* y, int64_t ldy,
    int64_t group, Into into) {
  const int64_t tiles = padded_dwords<E>(layer.k) / TILE;
  while (last - first >= 12) {
    vector_rows<E, 12>(layer, weight, x, ldx, tiles, y, ldy, first, group, into);
    first += 12;
  }
  switch (last - first) {
#define BATON_ROWS(n) \
  case n: \
    vector_rows<E, n>(layer, weight, x, ldx, tiles, y, ldy, first, group, into); \
    break;
    BATON_ROWS(1) BATON_ROWS(2) BATON_ROWS(3) BATON_ROWS(4) BATON_ROWS(5) BATON_ROWS(6)
    BATON_ROWS(7) BATON_ROWS(8) BATON_ROWS(9) BATON_ROWS(10) BATON_ROWS(11)
#undef BATON_ROWS
  }
}

#if BATON_LEVEL >= 2
// Up to 32 rows of one group; the tiles are configured for `upper` and `lower` of them.
template <bool TWO>
void amx_group(
    const Linear& layer, const char* weight, const bf16* x, int64_t ldx, int upper, int lower, void* y, int64_t ldy,
    int64_t row, int64_t group, Into into) {
  const int64_t tiles = padded_dwords<bf16>(layer.k) / TILE, stride = ldx * 2;
  const char* from = reinterpret_cast<const char*>(x + row * ldx);
  const char* below = from + 16 * stride;
  _tile_zero(0);
  _tile_zero(1);
  if (TWO) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t tile = 0; tile < tiles; ++tile) {
    if (!TWO)
      for (int64_t line = 0; line < 2 * TILE_BYTES; line += 64) _mm_prefetch(weight + AHEAD + line, _MM_HINT_T0);
    _tile_loadd(6, weight, 64);
    _tile_loadd(7, weight + TILE_BYTES, 64);
    _tile_loadd(4, from, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (TWO) {
      _tile_loadd(5, below, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    weight += 2 * TILE_BYTES;
    from += 64;
    below += 64;
  }
  alignas(64) float sums[4][16][16];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  if (TWO) {
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
  }
  for (int r = 0; r < upper; ++r)
    put_group<bf16>(layer, load(sums[0][r]), load(sums[1][r]), y, (row + r) * ldy, group, into);
  if (TWO)
    for (int r = 0; r < lower; ++r)
      put_group<bf16>(layer, load(sums[2][r]), load(sums[3][r]), y, (row + 16 + r) * ldy, group, into);
}
#endif

// int8 -> E: integers up to 127 are exact in both.
template <class E>
const char* widen(const int8_t* from, int64_t count) {
  E* to = reinterpret_cast<E*>(unpacked.get(count * sizeof(E)));
  for (int64_t i = 0; i < count; i += 16) {
    _mm_prefetch(reinterpret_cast<const char*>(from) + i + AHEAD, _MM_HINT_T0);
    store(to + i, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(from + i)))));
  }
  return reinterpret_cast<const char*>(to);
}

template <class E>
void unit_of_groups(
    const Linear& layer, const E* x, int64_t ldx, int64_t rows, void* y, int64_t ldy, Into into, int64_t first_group,
    int64_t last_group) {
  const int64_t elements = GROUP * padded_dwords<E>(layer.k) * PER_DWORD<E>;
  const bool narrow = Kind(layer.kind) == Kind::INT8;
  auto weight = [&](int64_t group) -> const char* {
    if (narrow) return widen<E>(static_cast<const int8_t*>(layer.weight) + group * elements, elements);
    return static_cast<const char*>(layer.weight) + group * elements * sizeof(E);
  };
  // Narrow weights are widened once per group and all rows computed with it; others stay in L2 for all rows.
#if BATON_LEVEL >= 2
  if constexpr (sizeof(E) == 2) {
    const int64_t step = narrow ? rows : 32;
    int upper = -1, lower = -1;
    for (int64_t first = 0; first < rows; first += step)
      for (int64_t group = first_group; group < last_group; ++group) {
        const char* packed = weight(group);
        for (int64_t row = first; row < std::min(first + step, rows); row += 32) {
          const int u = int(std::min<int64_t>(16, rows - row)), l = int(std::clamp<int64_t>(rows - row - 16, 0, 16));
          if (u != upper || l != lower) configure_tiles(upper = u, lower = l);
          if (l > 0)
            amx_group<true>(layer, packed, x, ldx, u, l, y, ldy, row, group, into);
          else
            amx_group<false>(layer, packed, x, ldx, u, l, y, ldy, row, group, into);
        }
      }
    _tile_release();
    return;
  }
#endif
  const int64_t vector_step = narrow ? rows : 48;
  for (int64_t first = 0; first < rows; first += vector_step)
    for (int64_t group = first_group; group < last_group; ++group)
      vector_group<E>(
          layer, weight(group), x, ldx, first, std::min(first + vector_step, rows), y, ldy, group, into);
}

}  // namespace

template <class E>
void linear(const Linear& layer, const E* x, int64_t ldx, int64_t rows, void* y, int64_t ldy, Into into, int threads) {
  const int64_t groups = round_up(layer.n, GROUP) / GROUP;
  const int64_t per_unit = threads == 1 ? GROUPS_PER_UNIT : std::clamp<int64_t>(groups / (4 * threads), 1, GROUPS_PER_UNIT);
  const int64_t units = (groups + per_unit - 1) / per_unit;
  parallel(units, threads, [&](int64_t unit) {
    unit_of_groups<E>(
        layer, x, ldx, rows, y, ldy, into, unit * per_unit, std::min((unit + 1) * per_unit, groups));
  });
}

template <class E>
void pack(const E* weight, int64_t n, int64_t k, char* packed) {
  const int64_t groups = round_up(n, GROUP) / GROUP, tiles = padded_dwords<E>(k) / TILE;
  E* to = reinterpret_cast<E*>(packed);
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t tile = 0; tile < tiles; ++tile)
      for (int64_t half = 0; half < 2; ++half)
        for (int64_t d = 0; d < TILE; ++d)
          for (int64_t column = 0; column < TILE; ++column)
            for (int64_t e = 0; e < PER_DWORD<E>; ++e) {
              const int64_t row = group * GROUP + half * TILE + column;
              const int64_t at = (tile * TILE + d) * PER_DWORD<E> + e;
              *to++ = row < n && at < k ? weight[row * k + at] : E(0);
            }
}

template <class E>
void pack_int8(const E* weight, int64_t n, int64_t k, int8_t* packed, float* scale) {
  const int64_t padded_n = round_up(n, GROUP), padded_k = padded_dwords<E>(k) * PER_DWORD<E>;
  auto value = [&](int64_t row, int64_t at) {
    if constexpr (sizeof(E) == 4) return float(weight[row * k + at]);
    const uint32_t bits = uint32_t(weight[row * k + at]) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  };
  for (int64_t row = 0; row < n; ++row) {
    float largest = 0.0f;
    for (int64_t at = 0; at < k; ++at) largest = std::max(largest, std::abs(value(row, at)));
    scale[row] = largest > 0.0f ? largest / 127.0f : 1.0f;
  }
  for (int64_t row = 0; row < padded_n; ++row)
    for (int64_t at = 0; at < padded_k; ++at) {
      const int64_t dword = at / PER_DWORD<E>, e = at % PER_DWORD<E>;
      const int64_t group = row / GROUP, half = row % GROUP / TILE, column = row % TILE;
      int8_t* to = packed + group * GROUP * padded_k +
                   ((dword / TILE * 2 + half) * TILE * TILE + dword % TILE * TILE + column) * PER_DWORD<E> + e;
      const bool inside = row < n && at < k;
      *to = inside ? int8_t(std::clamp(__builtin_nearbyintf(value(row, at) / scale[row]), -127.0f, 127.0f)) : int8_t(0);
    }
}

#define BATON_INSTANTIATE(E) \
  template void linear<E>(const Linear&, const E*, int64_t, int64_t, void*, int64_t, Into, int); \
  template void pack<E>(const E*, int64_t, int64_t, char*); \
  template void pack_int8<E>(const E*, int64_t, int64_t, int8_t*, float*);
BATON_INSTANTIATE(float)
#if BATON_LEVEL >= 1
BATON_INSTANTIATE(bf16)
#endif

}  // namespace baton
