// Products of 16 x 16 tiles, by AMX or by vectors of AVX-512.
#pragma once

#include "common.h"

namespace baton {

// sum + the products of a lane's elements, for each lane.
template <class E>
inline __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
  if constexpr (sizeof(E) == 2) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

inline __m512i broadcast_dword(const char* from) {
  int32_t value;
  std::memcpy(&value, from, 4);
  return _mm512_set1_epi32(value);
}

#if BATON_LEVEL >= 3
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t columns[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums, 4 and 5 left operands with `upper` and `lower` rows (as have the sums 0, 1 and 2, 3), 6 and 7
// right operands. Configuring clears all tiles.
inline void configure_tiles(int upper, int lower) {
  TileConfig config;
  const int rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
  for (int tile = 0; tile < 8; ++tile) {
    if (rows[tile] == 0) continue;
    config.columns[tile] = 64;
    config.rows[tile] = uint8_t(rows[tile]);
  }
  _tile_loadconfig(&config);
}

struct Tiles {
  Tiles(int upper = 16, int lower = 16) { configure_tiles(upper, lower); }
  ~Tiles() { _tile_release(); }
};
#endif

}  // namespace baton
