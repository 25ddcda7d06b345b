// What all kernels share: element types, vectors of 16 floats, loops over threads, scratch memory.
//
// A "dword" is what one lane of a packed operand holds: one float32, or two neighbouring bf16. Written in dwords, the
// products of both types have the same shape. Baton compiles these files for one of three levels: BATON_LEVEL 0 has
// AVX-512 (float32 only), 1 adds avx512_bf16, 2 adds AMX tiles for bf16.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace baton {

using bf16 = uint16_t;

constexpr int64_t TILE = 16;  // rows of a tile, and dwords in one of its rows
constexpr int64_t TILE_BYTES = TILE * TILE * 4;

template <class E>
constexpr int64_t PER_DWORD = 4 / sizeof(E);

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// A row of E, padded so that it is whole tiles wide: its dwords.
template <class E>
int64_t padded_dwords(int64_t elements) {
  return round_up(elements, TILE * PER_DWORD<E>) / PER_DWORD<E>;
}

inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

// Up to 16 elements as floats; lanes that are not in the mask are zero and not read.
inline __m512 load(const float* from, __mmask16 lanes = 0xffff) { return _mm512_maskz_loadu_ps(lanes, from); }

inline __m512 load(const bf16* from, __mmask16 lanes = 0xffff) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from)), 16));
}

inline void store(float* to, __m512 x, __mmask16 lanes = 0xffff) { _mm512_mask_storeu_ps(to, lanes, x); }

#if BATON_LEVEL >= 1
inline void store(bf16* to, __m512 x, __mmask16 lanes = 0xffff) {
  _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(x));
}
#endif

// sum + the products of a lane's elements, for each lane.
template <class E>
inline __m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
#if BATON_LEVEL >= 1
  if constexpr (sizeof(E) == 2) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

inline __m512i broadcast_dword(const char* from) {
  int32_t value;
  std::memcpy(&value, from, 4);
  return _mm512_set1_epi32(value);
}

// 2^x for x <= 0 and for -inf, exactly 1 at 0. Error below 1e-7 (degree 6) or 3e-6, far inside bf16 (degree 4); a NaN
// stays one.
template <class E>
inline __m512 exp2_negative(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);
  __m512 y;
  if constexpr (sizeof(E) == 2) {
    y = _mm512_set1_ps(9.6181291e-3f);
  } else {
    y = _mm512_set1_ps(1.5403530e-4f);
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.3333558e-3f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(9.6181291e-3f));
  }
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(5.5504109e-2f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(2.4022651e-1f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(6.9314718e-1f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, whole);
}

// x / (1 + e^-x), by the same exponential for every lane.
template <class E>
inline __m512 silu(__m512 x) {
  const __m512 power = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-1.4426950408889634f));
  const __m512 small = exp2_negative<E>(power);  // e^-|x|
  const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), small);
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  return _mm512_div_ps(_mm512_mask_mul_ps(x, negative, x, small), below);
}

// rows[i] lane j <-> rows[j] lane i.
inline void transpose(__m512i rows[16]) {
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

// Memory of one thread (or of one step) that grows and is kept. Contents are lost when it grows.
class Scratch {
 public:
  ~Scratch() { std::free(bytes_); }

  char* get(size_t size) {
    if (size > size_) {
      std::free(bytes_);
      size_ = (size + size / 4 + 4095) / 4096 * 4096;
      bytes_ = static_cast<char*>(std::aligned_alloc(4096, size_));
      if (bytes_ == nullptr) std::abort();
    }
    return bytes_;
  }

 private:
  char* bytes_ = nullptr;
  size_t size_ = 0;
};

// Calls work(unit) for each of `units`, divided over `threads`. What a unit computes does not depend on who does it.
template <class Work>
void parallel(int64_t units, int threads, Work work) {
  if (threads <= 1 || units <= 1) {
    for (int64_t unit = 0; unit < units; ++unit) work(unit);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(std::min<int64_t>(threads, units)))
  for (int64_t unit = 0; unit < units; ++unit) work(unit);
}

}  // namespace baton
