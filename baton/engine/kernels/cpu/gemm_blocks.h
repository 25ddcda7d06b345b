// Tiles of packed weights as a product reads them: 16 registers of two values of k by 16 outputs, stored or in blocks. A
// tile is made from the address of both tiles of a group, and which of them it is.
#pragma once

#include "gemm.h"

namespace baton {
namespace {

constexpr int64_t GROUPS_PER_UNIT = 8;  // their weights stay in L2 while all rows are computed
constexpr int64_t AHEAD = BATON_LEVEL == 2 ? 16384 : 8192;  // bytes by which weights are prefetched ahead
// Rows up to which weights are read front to back, as AMD's processors prefetch by themselves; with more, reading waits for
// arithmetic, and what is prefetched by instructions arrives meanwhile.
constexpr int IN_ORDER = BATON_LEVEL == 2 ? 4 : 0;

// 16 dwords of k by 16 outputs, as stored.
template <class E>
struct StoredTile {
  static constexpr int64_t BYTES = TILE_BYTES;
  const char* from;
  StoredTile(const char* both, int64_t half) : from(both + half * BYTES) {}
  __m512i dword(int64_t d) const { return _mm512_loadu_si512(from + 64 * d); }
};

BATON_LANES __m512 sixteen(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
BATON_LANES __m512 sixteen(const float* from) { return _mm512_loadu_ps(from); }

// Rounds two values of k of 16 outputs to bf16, next to each other for each output.
BATON_LANES __m512i pairs(__m512 even, __m512 odd) {
  const __m512i order = _mm512_set_epi16(
      31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

// A block of 4-bit codes: 16 scales, 16 minima, and for each two values of k 16 bytes with those of outputs 0 to 7 in the
// low bits and of outputs 8 to 15 in the high bits, both values of an output side by side.
template <class Scale>
struct Tile4 {
  static constexpr int64_t SCALES = 32 * sizeof(Scale), BYTES = SCALES + 256;
  const char* codes;
  __m512 scale[2], minimum[2];  // of the outputs in the low and in the high bits, each twice
  Tile4(const char* both, int64_t half) : codes(both + half * BYTES + SCALES) {
    const Scale* from = reinterpret_cast<const Scale*>(codes - SCALES);
    spread(sixteen(from), scale);
    spread(sixteen(from + 16), minimum);
  }
  BATON_LANES static void spread(__m512 of_outputs, __m512* twice) {
    const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    twice[0] = _mm512_permutexvar_ps(low, of_outputs);
    twice[1] = _mm512_permutexvar_ps(_mm512_or_si512(low, _mm512_set1_epi32(8)), of_outputs);
  }
  __m512i dword(int64_t d) const {
    // A lookup by the lowest four bits is one instruction, where a mask and a conversion are two.
    const __m512 numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * d)));
    const __m512 low = _mm512_permutexvar_ps(both, numbers);
    const __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), numbers);
    return (__m512i)_mm512_cvtne2ps_pbh(
        _mm512_fmadd_ps(high, scale[1], minimum[1]), _mm512_fmadd_ps(low, scale[0], minimum[0]));
  }
};

// A block of 8-bit codes, plus 128, of the 32 outputs of both tiles: their scales, and for each four values of k those of
// an output side by side.
struct Tile8 {
  static constexpr int64_t SCALES = 32, BYTES = SCALES + 512;
  const char* codes;
  __m512 scale, minimum;
  Tile8(const char* both, int64_t half) : codes(both + 2 * SCALES + half * 64) {
    scale = sixteen(reinterpret_cast<const uint16_t*>(both + half * SCALES));
    minimum = _mm512_mul_ps(scale, _mm512_set1_ps(-128.0f));
  }
  __m512i dword(int64_t d) const {
    const __m512i four = _mm512_load_si512(codes + d / 2 * 128), byte = _mm512_set1_epi32(255);
    const __m512i two = _mm512_srl_epi32(four, _mm_cvtsi32_si128(int(d % 2 * 16)));
    const __m512 even = _mm512_cvtepi32_ps(_mm512_and_si512(two, byte));
    const __m512 odd = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(two, 8), byte));
    // Exact, and so the product of the code itself and the scale.
    return pairs(_mm512_fmadd_ps(even, scale, minimum), _mm512_fmadd_ps(odd, scale, minimum));
  }
};

// Calls `work` with a null pointer to the tile of a kind in blocks.
template <class Work>
auto by_kind(Kind kind, Work work) {
  switch (kind) {
    case Kind::BLOCKS4:
      return work(static_cast<Tile4<uint16_t>*>(nullptr));
    case Kind::BLOCKS4_WIDE:
      return work(static_cast<Tile4<float>*>(nullptr));
    default:
      return work(static_cast<Tile8*>(nullptr));
  }
}

}  // namespace
}  // namespace baton
