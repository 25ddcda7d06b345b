// Vectors of 16 lanes, in one register of AVX-512 or two of AVX2, under the same names: kernels that use only these are
// written once.
//
//   Floats, Ints   16 lanes of 32 bits        Doubles   8 lanes        Mask   a bit for each of 16 lanes
//
// Masked loads read nothing outside the mask and return zeros there; masked stores write nothing outside it. Floats and
// Doubles have + - * /. Differences in rounding between the levels are documented in lanes_avx2.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define BATON_LANES [[gnu::always_inline]] inline

namespace baton {

using bf16 = uint16_t;
struct fp8 {
  uint8_t code;  // E4M3, without infinities
};

BATON_LANES __m256i* integers(void* at) { return static_cast<__m256i*>(at); }
BATON_LANES const __m256i* integers(const void* at) { return static_cast<const __m256i*>(at); }

// rows[i] lane j <-> rows[j] lane i, for 8 of each.
inline void transpose(__m256i rows[8]) {
  __m256i t[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    rows[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    rows[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2x128_si256(rows[i], rows[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(rows[i], rows[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) rows[i] = t[i];
}

}  // namespace baton

#if BATON_LEVEL >= 1
#include "lanes_avx512.h"
#else
#include "lanes_avx2.h"
#endif
