// AMX tiles in plain C++, as Intel's manual defines LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TILERELEASE and
// TDPBF16PS (Software Developer's Manual, volume 2), for processors without them. Included before everything else, it
// replaces the intrinsics, and the system call by which a process requests tiles. A use that the processor would reject
// aborts the process.
//
// With TILES_OTHER_ORDER in the environment when the library is loaded, even and odd elements are summed in one chain,
// which no known processor does.
#pragma once

#include <immintrin.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated {

struct Tile {
  int rows = 0, bytes = 0;  // configured; bytes of a row
  alignas(64) uint8_t at[16][64] = {};
};

// Hidden, so that each library has its own copy.
[[gnu::visibility("hidden")]] inline thread_local Tile tiles[8];
[[gnu::visibility("hidden")]] inline thread_local int64_t products = 0;
[[gnu::visibility("hidden")]] inline const bool other_order = std::getenv("TILES_OTHER_ORDER") != nullptr;

inline void want(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "tiles: %s\n", what);
  std::abort();
}

inline Tile& configured(int tile) {
  want(tiles[tile].rows > 0 && tiles[tile].bytes > 0, "used without being configured");
  return tiles[tile];
}

inline void release() {
  for (Tile& tile : tiles) tile = Tile();
}

inline void load_config(const void* from) {
  const uint8_t* config = static_cast<const uint8_t*>(from);
  want(config[0] == 1 && config[1] == 0, "neither palette 1 from row 0");
  release();
  for (int i = 0; i < 8; ++i) {
    uint16_t bytes;
    std::memcpy(&bytes, config + 16 + 2 * i, 2);
    const int rows = config[48 + i];
    want(bytes <= 64 && rows <= 16 && (bytes == 0) == (rows == 0), "configured with a size that there is not");
    tiles[i].bytes = bytes, tiles[i].rows = rows;
  }
}

inline void clear(int tile) { std::memset(configured(tile).at, 0, sizeof(Tile::at)); }

inline void load(int tile, const void* from, int64_t stride) {
  clear(tile);
  for (int row = 0; row < tiles[tile].rows; ++row)
    std::memcpy(tiles[tile].at[row], static_cast<const char*>(from) + row * stride, tiles[tile].bytes);
}

inline void store(int tile, void* to, int64_t stride) {
  for (int row = 0; row < configured(tile).rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile].at[row], tiles[tile].bytes);
}

inline float widened(const uint8_t* from) {
  uint16_t half;
  std::memcpy(&half, from, 2);
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

[[gnu::noinline]] inline void multiply(Tile& sum, const Tile& left, const Tile& right) {
  for (int row = 0; row < sum.rows; ++row) {
    float pairs[2][16] = {}, before[16];
    float* const chains[2] = {pairs[0], pairs[other_order ? 0 : 1]};
    for (int k = 0; k < left.bytes / 4; ++k)
      for (int parity = 0; parity < 2; ++parity)
        for (int column = 0; column < 16; ++column) {
          float& chain = chains[parity][column];
          chain = std::fma(
              widened(left.at[row] + 4 * k + 2 * parity), widened(right.at[k] + 4 * column + 2 * parity), chain);
        }
    std::memcpy(before, sum.at[row], 64);
    for (int column = 0; column < 16; ++column) before[column] += pairs[0][column] + pairs[1][column];
    std::memcpy(sum.at[row], before, sum.bytes);
  }
}

// "DAZ=FTZ=1, RNE rounding. MXCSR neither consulted nor updated."
inline void dot_product(int sum, int left, int right) {
  const Tile &a = configured(left), &b = configured(right);
  want(sum != left && sum != right && left != right, "multiplied with itself");
  want(configured(sum).rows == a.rows && tiles[sum].bytes == b.bytes && a.bytes == 4 * b.rows, "of sizes that do not meet");
  ++products;
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(0x9fc0);
  multiply(tiles[sum], a, b);
  _mm_setcsr(mode);
}

}  // namespace emulated

// Products computed so far by this thread: shows what is computed in tiles.
extern "C" [[gnu::used]] inline int64_t tiles_products() { return emulated::products; }

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) emulated::load_config(from)
#define _tile_release() emulated::release()
#define _tile_zero(tile) emulated::clear(tile)
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_dpbf16ps(sum, left, right) emulated::dot_product(sum, left, right)
#define syscall(...) 0
