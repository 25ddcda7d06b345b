// Products of 16 x 16 tiles, by AMX or by vectors.
#pragma once

#include "common.h"

namespace baton {

#if BATON_LEVEL >= 2
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t columns[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums, 4 and 5 left operands of `upper` and `lower` rows (as are the sums 0, 1 and 2, 3), 6 and 7 right
// operands. Configuring clears all tiles.
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
