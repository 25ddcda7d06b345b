// The 16 lanes of lanes.h in one register: each function is one instruction, or the compiler's code for one intrinsic.
#pragma once

namespace baton {

using Floats = __m512;
using Ints = __m512i;
using Doubles = __m512d;
using Mask = __mmask16;

inline Mask first_lanes(int64_t count) {
  return count >= 16 ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

BATON_LANES Floats zero() { return _mm512_setzero_ps(); }
BATON_LANES Floats floats(float x) { return _mm512_set1_ps(x); }
BATON_LANES Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
BATON_LANES Doubles doubles(double x) { return _mm512_set1_pd(x); }

// Memory. Aligned means to 64 bytes.
BATON_LANES Floats load_aligned(const float* from) { return _mm512_load_ps(from); }
BATON_LANES void store_aligned(float* to, Floats x) { _mm512_store_ps(to, x); }
BATON_LANES Ints load_aligned(const int32_t* from) { return _mm512_load_si512(from); }
BATON_LANES void store_aligned(void* to, Ints x) { _mm512_store_si512(to, x); }
BATON_LANES void store_where(Mask lanes, float* to, Floats x) { _mm512_mask_store_ps(to, lanes, x); }
BATON_LANES Floats load_whole(const float* from) { return _mm512_loadu_ps(from); }
BATON_LANES Ints load_whole(const int32_t* from) { return _mm512_loadu_si512(from); }
BATON_LANES Doubles load_whole(const double* from) { return _mm512_loadu_pd(from); }
BATON_LANES void store_whole(double* to, Doubles x) { _mm512_storeu_pd(to, x); }

BATON_LANES __m256i first_of_eight(const void* from, int64_t count) {
  return _mm256_maskz_loadu_epi32(__mmask8(first_lanes(count)), from);
}
BATON_LANES Floats load_or(Floats other, Mask lanes, const float* from) { return _mm512_mask_loadu_ps(other, lanes, from); }
BATON_LANES Doubles load(const double* from, __mmask8 lanes) { return _mm512_maskz_loadu_pd(lanes, from); }
inline Floats load(const float* from, Mask lanes = 0xffff) { return _mm512_maskz_loadu_ps(lanes, from); }
inline Floats load(const bf16* from, Mask lanes = 0xffff) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from)), 16));
}
inline void store(float* to, Floats x, Mask lanes = 0xffff) { _mm512_mask_storeu_ps(to, lanes, x); }
#if BATON_LEVEL >= 2
inline void store(bf16* to, Floats x, Mask lanes = 0xffff) {
  _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(x));
}
#else
// Rounds to nearest, ties to even; a NaN becomes a quiet NaN. Subnormal results are kept.
BATON_LANES void store(bf16* to, Floats x, Mask lanes = 0xffff) {
  const __m512i bits = _mm512_castps_si512(x), above = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(above, _mm512_set1_epi32(1));
  const __m512i near = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_or_epi32(near, nan, above, _mm512_set1_epi32(0x40));
  _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtepi32_epi16(rounded));
}
#endif

// Arithmetic. If an operand of max is NaN, the result is the second operand.
BATON_LANES Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
BATON_LANES Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
BATON_LANES Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
BATON_LANES Floats fms(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
BATON_LANES Floats fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
BATON_LANES Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
BATON_LANES Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
BATON_LANES Floats absolute(Floats x) { return _mm512_abs_ps(x); }
BATON_LANES Floats nearest(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
BATON_LANES Floats times_power(Floats x, Floats whole) { return _mm512_scalef_ps(x, whole); }  // x * 2^whole
BATON_LANES Floats multiply_where(Mask lanes, Floats a, Floats b) { return _mm512_mask_mul_ps(a, lanes, a, b); }
BATON_LANES Floats min_where(Mask lanes, Floats a, Floats b) { return _mm512_mask_min_ps(a, lanes, a, b); }
BATON_LANES Floats max_where(Mask lanes, Floats a, Floats b) { return _mm512_mask_max_ps(a, lanes, a, b); }
BATON_LANES float sum(Floats x) { return _mm512_reduce_add_ps(x); }
BATON_LANES float first(Floats x) { return _mm512_cvtss_f32(x); }
BATON_LANES float least(Floats x) { return _mm512_reduce_min_ps(x); }
BATON_LANES float most(Floats x) { return _mm512_reduce_max_ps(x); }
BATON_LANES __m256 low_half(Floats x) { return _mm512_castps512_ps256(x); }
BATON_LANES __m256 high_half(Floats x) { return _mm512_extractf32x8_ps(x, 1); }
// a0 b0 a1 b1 ...
BATON_LANES Floats by_turns(__m256 a, __m256 b) {
  const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return _mm512_permutex2var_ps(_mm512_castps256_ps512(a), order, _mm512_castps256_ps512(b));
}
// a0 a1 a2 a3 b0 b1 b2 b3 a4 ...
BATON_LANES Floats by_fours(__m256 a, __m256 b) {
  const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  return _mm512_permutex2var_ps(_mm512_castps256_ps512(a), order, _mm512_castps256_ps512(b));
}
BATON_LANES Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
BATON_LANES Ints as_ints(Floats x) { return _mm512_castps_si512(x); }

BATON_LANES Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
BATON_LANES Doubles fnma(Doubles a, Doubles b, Doubles c) { return _mm512_fnmadd_pd(a, b, c); }
BATON_LANES Doubles max(Doubles a, Doubles b) { return _mm512_max_pd(a, b); }
BATON_LANES Doubles nearest(Doubles x) { return _mm512_roundscale_pd(x, _MM_FROUND_TO_NEAREST_INT); }
BATON_LANES Doubles times_power(Doubles x, Doubles whole) { return _mm512_scalef_pd(x, whole); }
BATON_LANES Doubles only(__mmask8 lanes, Doubles x) { return _mm512_maskz_mov_pd(lanes, x); }
BATON_LANES double sum(Doubles x) { return _mm512_reduce_add_pd(x); }
BATON_LANES Doubles lower_doubles(Floats x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
BATON_LANES Doubles upper_doubles(Floats x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }

BATON_LANES Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
BATON_LANES Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
BATON_LANES Ints either(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
BATON_LANES Floats from_unsigned(Ints x) { return _mm512_cvtepu32_ps(x); }

// The 64-bit products of unsigned lanes, as high and low halves.
BATON_LANES void multiply(Ints a, uint32_t by, Ints* high, Ints* low) {
  const __m512i factor = _mm512_set1_epi32(int32_t(by));
  const __m512i even = _mm512_mul_epu32(a, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor);
  *low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  *high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}

// Comparisons return the lanes of the mask in which they hold; for NaN only `differ` and `is_nan` hold.
BATON_LANES Mask negative(Floats x) { return _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ); }
BATON_LANES Mask differ(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
BATON_LANES Mask is_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
BATON_LANES Mask above(Mask lanes, Floats a, Floats b) { return _mm512_mask_cmp_ps_mask(lanes, a, b, _CMP_GT_OQ); }
BATON_LANES Mask equal(Mask lanes, Floats a, Floats b) { return _mm512_mask_cmp_ps_mask(lanes, a, b, _CMP_EQ_OQ); }
BATON_LANES Mask up_to(Mask lanes, Floats a, Floats b) { return _mm512_mask_cmp_ps_mask(lanes, a, b, _CMP_LE_OQ); }
BATON_LANES Mask above(Ints a, Ints b) { return _mm512_cmpgt_epi32_mask(a, b); }
BATON_LANES Mask up_to(Ints a, Ints b) { return _mm512_cmple_epi32_mask(a, b); }
BATON_LANES __mmask8 above(Doubles a, Doubles b) { return _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ); }

// Writes the lanes of the mask contiguously; the memory after them, up to 16 lanes (8), gets arbitrary values.
BATON_LANES void compress(float* to, Mask lanes, Floats x) { _mm512_storeu_ps(to, _mm512_maskz_compress_ps(lanes, x)); }
BATON_LANES void compress(int32_t* to, Mask lanes, Ints x) {
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(lanes, x));
}
BATON_LANES void compress(double* to, __mmask8 lanes, Doubles x) {
  _mm512_storeu_pd(to, _mm512_maskz_compress_pd(lanes, x));
}

// In each quarter of four lanes: a0 b0 a1 b1, or a2 b2 a3 b3; then the same with pairs of lanes.
BATON_LANES Ints zip_low(Ints a, Ints b) { return _mm512_unpacklo_epi32(a, b); }
BATON_LANES Ints zip_high(Ints a, Ints b) { return _mm512_unpackhi_epi32(a, b); }
BATON_LANES Ints zip_low_pairs(Ints a, Ints b) { return _mm512_unpacklo_epi64(a, b); }
BATON_LANES Ints zip_high_pairs(Ints a, Ints b) { return _mm512_unpackhi_epi64(a, b); }

// rows[i] lane j <-> rows[j] lane i.
inline void transpose(Ints rows[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    rows[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    rows[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    rows[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    rows[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    rows[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

}  // namespace baton
