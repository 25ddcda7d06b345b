// KV in FP8 (E4M3, without infinities, scale 1): rounded when it is stored, widened block by block when it is read.
//
// Every number of E4M3 is one of bf16, so widening is exact, and attention has the bits that it would have over a pool of
// the rounded numbers in E. Loops over elements have no branches: compilers make vectors of them.
#pragma once

#include "attention_plan.h"

namespace baton {
namespace {

constexpr uint32_t FP8_MAX = 0x43e00000, FP8_NORMAL = 0x3c800000;  // 448 and 2^-6, the least normal number, as floats

template <class To, class From>
BATON_LANES To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// To the nearest, ties to even; beyond 448, which infinity is, too, to 448. A NaN stays NaN.
BATON_LANES uint8_t to_fp8(float x) {
  const uint32_t bits = bits_of<uint32_t>(x), size = bits & 0x7fffffff, capped = std::min(size, FP8_MAX);
  const uint32_t normal = ((capped + 0x7ffff + (capped >> 20 & 1)) >> 20) - (120 << 3);
  // Beside 2^14 a float has steps of 2^-9, as subnormal numbers have.
  const uint32_t small = bits_of<uint32_t>(bits_of<float>(capped) + 0x1p14f) - 0x46800000;
  const uint32_t code = size > 0x7f800000 ? 0x7f : capped < FP8_NORMAL ? small : normal;
  return uint8_t(code | (bits >> 24 & 0x80));
}

// The number as bf16.
BATON_LANES uint16_t from_fp8(fp8 x) {
  const uint16_t size = x.code & 0x7f;
  uint16_t bits = uint16_t(0x3c00 + (size << 4));
  // Subnormal numbers: `size` steps of 2^-9.
  const uint16_t pair = uint16_t(0x3b80 + ((size - 2) << 6)), four = uint16_t(0x3c00 + ((size - 4) << 5));
  const uint16_t small = size >= 4 ? four : size >= 2 ? pair : uint16_t(size * 0x3b00);
  bits = size < 8 ? small : size == 0x7f ? uint16_t(0x7fc0) : bits;
  return uint16_t(bits | (x.code & 0x80) << 8);
}

#if BATON_LEVEL >= 1
// The same for 32 numbers. The shift to the right repeats the sign in the bits above the number.
BATON_LANES __m512i from_fp8(__m256i codes) {
  alignas(64) static const uint16_t SMALL[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const __m256i size = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f));
  const __m512i words = _mm512_cvtepu8_epi16(codes), shifted = _mm512_srai_epi16(_mm512_slli_epi16(words, 8), 4);
  const __m512i sign = _mm512_set1_epi16(int16_t(0x8000));
  __m512i bits = _mm512_and_si512(shifted, _mm512_set1_epi16(0x07f0));
  bits = _mm512_add_epi16(bits, _mm512_set1_epi16(0x3c00));
  const __mmask32 small = _mm256_cmplt_epu8_mask(size, _mm256_set1_epi8(8));
  bits = _mm512_mask_permutexvar_epi16(bits, small, words, _mm512_load_si512(SMALL));
  bits = _mm512_mask_mov_epi16(bits, _mm256_cmpeq_epi8_mask(size, _mm256_set1_epi8(0x7f)), _mm512_set1_epi16(0x7fc0));
  return _mm512_ternarylogic_epi32(sign, shifted, bits, 0xca);  // the sign of one, the other bits of the other
}
#endif

inline void narrow(const float* from, int64_t count, fp8* to) {
  for (int64_t i = 0; i < count; ++i) to[i].code = to_fp8(from[i]);
}
inline void narrow(const bf16* from, int64_t count, fp8* to) {
  for (int64_t i = 0; i < count; ++i) to[i].code = to_fp8(bits_of<float>(uint32_t(from[i]) << 16));
}
inline void widen(const fp8* from, int64_t count, bf16* to) {
  int64_t i = 0;
#if BATON_LEVEL >= 1
  for (; i + 32 <= count; i += 32) _mm512_storeu_si512(to + i, from_fp8(_mm256_loadu_si256(integers(from + i))));
#endif
  for (; i < count; ++i) to[i] = from_fp8(from[i]);
}
inline void widen(const fp8* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = bits_of<float>(uint32_t(from_fp8(from[i])) << 16);
}

thread_local Scratch widened_memory;

// A block's positions in E, of `heads` KV heads from `head` on: where they are in the pool, or widened in a copy.
template <class E>
struct Opened {
  const E *keys, *values;  // of the first of these heads
  int64_t at[KEYS];        // if they are widened: as in Places
  const int64_t* places;

  Opened(const AttentionShape& s, const Pool& pool, const Places& in_pool, int64_t head, int64_t heads) : places(in_pool.at) {
    const int64_t first = head * s.head_dim, apart = heads * s.head_dim;
    if (!pool.is_fp8) {
      keys = static_cast<const E*>(pool.keys) + first;
      values = static_cast<const E*>(pool.values) + first;
      return;
    }
    E* to = reinterpret_cast<E*>(widened_memory.get(2 * KEYS * apart * sizeof(E)));
    keys = to;
    values = to + KEYS * apart;
    places = at;
    for (int64_t key = 0; key < KEYS; ++key) {
      at[key] = std::min(key, in_pool.count - 1) * apart;
      if (key >= in_pool.count) continue;
      widen(static_cast<const fp8*>(pool.keys) + in_pool.at[key] + first, apart, to + key * apart);
      widen(static_cast<const fp8*>(pool.values) + in_pool.at[key] + first, apart, to + (KEYS + key) * apart);
    }
  }
};

}  // namespace
}  // namespace baton
