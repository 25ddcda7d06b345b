// The 16 lanes of lanes.h in two registers of AVX2. Results equal those of lanes_avx512.h, except that sums over the
// lanes use another order, and that subnormal bf16 are kept where avx512_bf16 flushes them to zero.
#pragma once

namespace baton {

struct Floats {
  __m256 low, high;
};
struct Ints {
  __m256i low, high;
};
struct Doubles {
  __m256d low, high;
};
using Mask = uint16_t;

BATON_LANES Mask first_lanes(int64_t count) {
  return count >= 16 ? Mask(0xffff) : count <= 0 ? Mask(0) : Mask((1u << count) - 1);
}

// Sets all bits of each lane whose bit is set.
BATON_LANES __m256i spread(unsigned bits) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int32_t(bits)), each), each);
}
BATON_LANES __m256d spread_doubles(unsigned bits) {
  const __m256i each = _mm256_setr_epi64x(1, 2, 4, 8);
  return _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(bits), each), each));
}
BATON_LANES Mask gather(__m256 low, __m256 high) { return Mask(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8); }
BATON_LANES Floats choose(Mask lanes, Floats where, Floats elsewhere) {
  return {_mm256_blendv_ps(elsewhere.low, where.low, _mm256_castsi256_ps(spread(lanes & 0xff))),
          _mm256_blendv_ps(elsewhere.high, where.high, _mm256_castsi256_ps(spread(lanes >> 8)))};
}

BATON_LANES Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
BATON_LANES Floats floats(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
BATON_LANES Ints ints(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
BATON_LANES Doubles doubles(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }

// Memory. Aligned means to 64 bytes.
BATON_LANES Floats load_aligned(const float* from) { return {_mm256_load_ps(from), _mm256_load_ps(from + 8)}; }
BATON_LANES Ints load_aligned(const int32_t* from) {
  return {_mm256_load_si256(integers(from)), _mm256_load_si256(integers(from + 8))};
}
BATON_LANES void store_aligned(float* to, Floats x) {
  _mm256_store_ps(to, x.low);
  _mm256_store_ps(to + 8, x.high);
}
BATON_LANES Floats load_whole(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
BATON_LANES Ints load_whole(const int32_t* from) {
  return {_mm256_loadu_si256(integers(from)), _mm256_loadu_si256(integers(from + 8))};
}
BATON_LANES Doubles load_whole(const double* from) { return {_mm256_loadu_pd(from), _mm256_loadu_pd(from + 4)}; }
BATON_LANES void store_whole(float* to, Floats x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}
BATON_LANES void store_whole(double* to, Doubles x) {
  _mm256_storeu_pd(to, x.low);
  _mm256_storeu_pd(to + 4, x.high);
}
BATON_LANES void store_aligned(void* to, Ints x) {
  _mm256_store_si256(integers(to), x.low);
  _mm256_store_si256(integers(to) + 1, x.high);
}
BATON_LANES void store_where(Mask lanes, float* to, Floats x) {
  _mm256_maskstore_ps(to, spread(lanes & 0xff), x.low);
  _mm256_maskstore_ps(to + 8, spread(lanes >> 8), x.high);
}

BATON_LANES __m256i first_of_eight(const void* from, int64_t count) {
  return _mm256_maskload_epi32(static_cast<const int*>(from), spread(first_lanes(count)));
}
BATON_LANES Floats load(const float* from, Mask lanes = 0xffff) {
  if (lanes == 0xffff) return load_whole(from);
  return {_mm256_maskload_ps(from, spread(lanes & 0xff)), _mm256_maskload_ps(from + 8, spread(lanes >> 8))};
}
BATON_LANES Floats load_or(Floats other, Mask lanes, const float* from) {
  return lanes == 0xffff ? load_whole(from) : choose(lanes, load(from, lanes), other);
}
BATON_LANES Doubles load(const double* from, uint8_t lanes) {
  return {_mm256_maskload_pd(from, _mm256_castpd_si256(spread_doubles(lanes & 0xf))),
          _mm256_maskload_pd(from + 4, _mm256_castpd_si256(spread_doubles(lanes >> 4)))};
}
BATON_LANES __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
BATON_LANES Floats load(const bf16* from, Mask lanes = 0xffff) {
  alignas(32) bf16 some[16] = {};
  if (lanes != 0xffff) {
    for (int i = 0; i < 16; ++i)
      if (lanes >> i & 1) some[i] = from[i];
    from = some;
  }
  const __m256i x = _mm256_loadu_si256(integers(from));
  return {widen(_mm256_castsi256_si128(x)), widen(_mm256_extracti128_si256(x, 1))};
}
BATON_LANES void store(float* to, Floats x, Mask lanes = 0xffff) {
  if (lanes == 0xffff) return store_whole(to, x);
  store_where(lanes, to, x);
}

// Rounds to nearest, ties to even; a NaN becomes a quiet NaN.
BATON_LANES __m256i round_to_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), above = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(above, _mm256_set1_epi32(1));
  const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(above, _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(near, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
BATON_LANES void store(bf16* to, Floats x, Mask lanes = 0xffff) {
  const __m256i by_turns = _mm256_packus_epi32(round_to_bf16(x.low), round_to_bf16(x.high));
  const __m256i all = _mm256_permute4x64_epi64(by_turns, 0xd8);
  if (lanes == 0xffff) return _mm256_storeu_si256(integers(to), all);
  alignas(32) bf16 some[16];
  _mm256_store_si256(integers(some), all);
  for (int i = 0; i < 16; ++i)
    if (lanes >> i & 1) to[i] = some[i];
}

#define BATON_BOTH(name, type, instruction) \
  BATON_LANES type name(type a, type b) { return {instruction(a.low, b.low), instruction(a.high, b.high)}; }
#define BATON_FUSED(name, type, instruction) \
  BATON_LANES type name(type a, type b, type c) { \
    return {instruction(a.low, b.low, c.low), instruction(a.high, b.high, c.high)}; \
  }

// Arithmetic. If an operand of max is NaN, the result is the second operand.
BATON_BOTH(operator+, Floats, _mm256_add_ps)
BATON_BOTH(operator-, Floats, _mm256_sub_ps)
BATON_BOTH(operator*, Floats, _mm256_mul_ps)
BATON_BOTH(operator/, Floats, _mm256_div_ps)
BATON_BOTH(add, Floats, _mm256_add_ps)
BATON_BOTH(multiply, Floats, _mm256_mul_ps)
BATON_BOTH(max, Floats, _mm256_max_ps)
BATON_BOTH(min, Floats, _mm256_min_ps)
BATON_FUSED(fma, Floats, _mm256_fmadd_ps)
BATON_FUSED(fms, Floats, _mm256_fmsub_ps)
BATON_FUSED(fnma, Floats, _mm256_fnmadd_ps)

BATON_LANES Floats absolute(Floats x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
BATON_LANES Floats nearest(Floats x) {
  constexpr int HOW = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, HOW), _mm256_round_ps(x.high, HOW)};
}
// x * 2^whole for whole from -252 to 0, in two steps of which only the second can round.
BATON_LANES __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
BATON_LANES __m256 times_power(__m256 x, __m256 whole) {
  const __m256i n = _mm256_cvtps_epi32(whole), some = _mm256_srai_epi32(n, 1);
  return _mm256_mul_ps(_mm256_mul_ps(x, power_of_two(some)), power_of_two(_mm256_sub_epi32(n, some)));
}
BATON_LANES Floats times_power(Floats x, Floats whole) {
  return {times_power(x.low, whole.low), times_power(x.high, whole.high)};
}
BATON_LANES Floats multiply_where(Mask lanes, Floats a, Floats b) { return choose(lanes, a * b, a); }
BATON_LANES Floats min_where(Mask lanes, Floats a, Floats b) { return choose(lanes, min(a, b), a); }
BATON_LANES Floats max_where(Mask lanes, Floats a, Floats b) { return choose(lanes, max(a, b), a); }

template <class Combine>
BATON_LANES float reduce(__m256 x, Combine combine) {
  __m128 four = combine(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = combine(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(combine(four, _mm_movehdup_ps(four)));
}
BATON_LANES float sum(Floats x) {
  return reduce(_mm256_add_ps(x.low, x.high), [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
BATON_LANES float first(Floats x) { return _mm256_cvtss_f32(x.low); }
BATON_LANES float least(Floats x) {
  return reduce(_mm256_min_ps(x.low, x.high), [](__m128 a, __m128 b) { return _mm_min_ps(a, b); });
}
BATON_LANES float most(Floats x) {
  return reduce(_mm256_max_ps(x.low, x.high), [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}
BATON_LANES __m256 low_half(Floats x) { return x.low; }
BATON_LANES __m256 high_half(Floats x) { return x.high; }
// a0 b0 a1 b1 ...
BATON_LANES Floats by_turns(__m256 a, __m256 b) {
  const __m256 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
BATON_LANES Floats as_floats(Ints x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
BATON_LANES Ints as_ints(Floats x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }

BATON_BOTH(operator+, Doubles, _mm256_add_pd)
BATON_BOTH(operator-, Doubles, _mm256_sub_pd)
BATON_BOTH(operator*, Doubles, _mm256_mul_pd)
BATON_BOTH(operator/, Doubles, _mm256_div_pd)
BATON_BOTH(max, Doubles, _mm256_max_pd)
BATON_FUSED(fma, Doubles, _mm256_fmadd_pd)
BATON_FUSED(fnma, Doubles, _mm256_fnmadd_pd)

BATON_LANES Doubles nearest(Doubles x) {
  constexpr int HOW = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_pd(x.low, HOW), _mm256_round_pd(x.high, HOW)};
}
// x * 2^whole for whole from -2,044 to 0, likewise.
BATON_LANES __m256d power_of_two(__m128i n) {
  return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_add_epi64(_mm256_cvtepi32_epi64(n), _mm256_set1_epi64x(1023)), 52));
}
BATON_LANES __m256d times_power(__m256d x, __m256d whole) {
  const __m128i n = _mm256_cvtpd_epi32(whole), some = _mm_srai_epi32(n, 1);
  return _mm256_mul_pd(_mm256_mul_pd(x, power_of_two(some)), power_of_two(_mm_sub_epi32(n, some)));
}
BATON_LANES Doubles times_power(Doubles x, Doubles whole) {
  return {times_power(x.low, whole.low), times_power(x.high, whole.high)};
}
BATON_LANES Doubles only(uint8_t lanes, Doubles x) {
  return {_mm256_and_pd(x.low, spread_doubles(lanes & 0xf)), _mm256_and_pd(x.high, spread_doubles(lanes >> 4))};
}
BATON_LANES double sum(Doubles x) {
  const __m256d four = _mm256_add_pd(x.low, x.high);
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
BATON_LANES Doubles to_doubles(__m256 x) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
}
BATON_LANES Doubles lower_doubles(Floats x) { return to_doubles(x.low); }
BATON_LANES Doubles upper_doubles(Floats x) { return to_doubles(x.high); }

BATON_BOTH(add, Ints, _mm256_add_epi32)
BATON_BOTH(subtract, Ints, _mm256_sub_epi32)
BATON_BOTH(either, Ints, _mm256_xor_si256)

BATON_LANES __m256 from_unsigned(__m256i x) {
  const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 16));
  return _mm256_fmadd_ps(
      high, _mm256_set1_ps(65536.0f), _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff))));
}
BATON_LANES Floats from_unsigned(Ints x) { return {from_unsigned(x.low), from_unsigned(x.high)}; }

// The 64-bit products of unsigned lanes, as high and low halves.
BATON_LANES void multiply(__m256i a, uint32_t by, __m256i* high, __m256i* low) {
  const __m256i factor = _mm256_set1_epi32(int32_t(by));
  const __m256i even = _mm256_mul_epu32(a, factor), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
  *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
BATON_LANES void multiply(Ints a, uint32_t by, Ints* high, Ints* low) {
  multiply(a.low, by, &high->low, &low->low);
  multiply(a.high, by, &high->high, &low->high);
}

// Comparisons return the lanes of the mask in which they hold; for NaN only `differ` and `is_nan` hold.
template <int HOW>
BATON_LANES Mask compare(Floats a, Floats b) {
  return gather(_mm256_cmp_ps(a.low, b.low, HOW), _mm256_cmp_ps(a.high, b.high, HOW));
}
BATON_LANES Mask negative(Floats x) { return compare<_CMP_LT_OQ>(x, zero()); }
BATON_LANES Mask differ(Floats a, Floats b) { return compare<_CMP_NEQ_UQ>(a, b); }
BATON_LANES Mask is_nan(Floats x) { return compare<_CMP_UNORD_Q>(x, x); }
BATON_LANES Mask above(Mask lanes, Floats a, Floats b) { return lanes & compare<_CMP_GT_OQ>(a, b); }
BATON_LANES Mask equal(Mask lanes, Floats a, Floats b) { return lanes & compare<_CMP_EQ_OQ>(a, b); }
BATON_LANES Mask up_to(Mask lanes, Floats a, Floats b) { return lanes & compare<_CMP_LE_OQ>(a, b); }
BATON_LANES Mask above(Ints a, Ints b) {
  return gather(
      _mm256_castsi256_ps(_mm256_cmpgt_epi32(a.low, b.low)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(a.high, b.high)));
}
BATON_LANES Mask up_to(Ints a, Ints b) { return Mask(~above(a, b)); }
BATON_LANES uint8_t above(Doubles a, Doubles b) {
  return uint8_t(
      _mm256_movemask_pd(_mm256_cmp_pd(a.low, b.low, _CMP_GT_OQ)) |
      _mm256_movemask_pd(_mm256_cmp_pd(a.high, b.high, _CMP_GT_OQ)) << 4);
}

// For each mask of 8 lanes: the indices of its lanes, contiguous.
struct Orders {
  alignas(8) uint8_t lane[256][8] = {};
  constexpr Orders() {
    for (int mask = 0; mask < 256; ++mask)
      for (int i = 0, to = 0; i < 8; ++i)
        if (mask >> i & 1) lane[mask][to++] = uint8_t(i);
  }
};
inline constexpr Orders ORDERS;

BATON_LANES __m256i compress(unsigned lanes, __m256i x) {
  const __m128i order = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(ORDERS.lane[lanes]));
  return _mm256_permutevar8x32_epi32(x, _mm256_cvtepu8_epi32(order));
}
// Writes the lanes of the mask contiguously; the memory after them, up to 16 lanes (8), gets arbitrary values.
BATON_LANES void compress(int32_t* to, Mask lanes, Ints x) {
  _mm256_storeu_si256(integers(to), compress(lanes & 0xff, x.low));
  _mm256_storeu_si256(integers(to + __builtin_popcount(lanes & 0xff)), compress(lanes >> 8, x.high));
}
BATON_LANES void compress(float* to, Mask lanes, Floats x) {
  compress(reinterpret_cast<int32_t*>(to), lanes, as_ints(x));
}
BATON_LANES void compress(double* to, uint8_t lanes, Doubles x) {
  constexpr uint8_t TWICE[16] = {0x00, 0x03, 0x0c, 0x0f, 0x30, 0x33, 0x3c, 0x3f,
                                 0xc0, 0xc3, 0xcc, 0xcf, 0xf0, 0xf3, 0xfc, 0xff};  // a double is two lanes of 32 bits
  _mm256_storeu_si256(integers(to), compress(TWICE[lanes & 0xf], _mm256_castpd_si256(x.low)));
  _mm256_storeu_si256(
      integers(to + __builtin_popcount(lanes & 0xf)), compress(TWICE[lanes >> 4], _mm256_castpd_si256(x.high)));
}

// In each quarter of four lanes: a0 b0 a1 b1, or a2 b2 a3 b3; then the same with pairs of lanes.
BATON_BOTH(zip_low, Ints, _mm256_unpacklo_epi32)
BATON_BOTH(zip_high, Ints, _mm256_unpackhi_epi32)
BATON_BOTH(zip_low_pairs, Ints, _mm256_unpacklo_epi64)
BATON_BOTH(zip_high_pairs, Ints, _mm256_unpackhi_epi64)
#undef BATON_BOTH
#undef BATON_FUSED

// rows[i] lane j <-> rows[j] lane i, by quarters.
inline void transpose(Ints rows[16]) {
  __m256i a[8], b[8], c[8], d[8];
  for (int i = 0; i < 8; ++i) {
    a[i] = rows[i].low;
    b[i] = rows[i].high;
    c[i] = rows[i + 8].low;
    d[i] = rows[i + 8].high;
  }
  transpose(a);
  transpose(b);
  transpose(c);
  transpose(d);
  for (int i = 0; i < 8; ++i) {
    rows[i] = {a[i], c[i]};
    rows[i + 8] = {b[i], d[i]};
  }
}

}  // namespace baton
