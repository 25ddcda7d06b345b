// Products of weights in blocks of 8 bits with rows that are quantised to 8 bits, too, by avx512_vnni.
//
// 32 values of a row become codes from -127 to 127 and a scale in float32, the largest magnitude / 127; a value is nearly
// code * scale. For each block of an output, front to back, the products of codes are added up as integers, exactly, and
//
//     sum += float(integer) * (scale of the weights * scale of the row)
//
// where each operation is rounded on its own. So the bits of a row do not depend on the others.
//
// The instruction multiplies unsigned bytes by signed ones: the weights' codes plus 128 by the row's codes. So an integer
// starts from -128 times the sum of the row's codes.
#pragma once

#include <array>
#include <atomic>
#include <utility>

#include "gemm_blocks.h"
#include "gemm_put.h"
#include "tiles.h"

namespace baton {
namespace {

constexpr int64_t PANEL = 8;      // rows of a product
constexpr int64_t TOGETHER = 6;   // panels that are computed with a group of weights while these are in a cache
constexpr int64_t BLOCK_BYTES = GROUP * (2 + BLOCK_WEIGHTS);  // of a group's weights

std::atomic<int64_t> int8_count{0};

struct RowBlock {
  int8_t codes[BLOCK_WEIGHTS];
  float scale;
  int32_t start;  // of an integer
};

thread_local Scratch row_blocks;  // of the calling thread; its worker threads read them

// A block of NaN or infinite values gets a scale that is no number either, and so do the outputs.
BATON_LANES void quantize(const bf16* from, RowBlock* to) {
  const __m512 low = load(from), high = load(from + 16);
  const __m512i sign = _mm512_set1_epi32(INT32_MIN);
  const auto magnitude = [&](__m512 x) { return _mm512_andnot_si512(sign, _mm512_castps_si512(x)); };
  const uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(magnitude(low), magnitude(high)));
  float largest;
  std::memcpy(&largest, &bits, 4);
  const __m512 steps = _mm512_set1_ps(largest >= 0x1p-100f ? 127.0f / largest : 0.0f);
  const __m512i left = _mm512_cvtps_epi32(_mm512_mul_ps(low, steps)), right = _mm512_cvtps_epi32(_mm512_mul_ps(high, steps));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to->codes), _mm512_cvtepi32_epi8(left));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to->codes + 16), _mm512_cvtepi32_epi8(right));
  to->scale = largest / 127.0f;
  to->start = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(left, right));
}

// Computes the sums [2][ROWS][16] of a panel [blocks][ROWS] and one group.
template <int ROWS>
void int8_rows(const char* weight, const RowBlock* x, int64_t blocks, float* sums) {
  __m512 left[ROWS], right[ROWS];
  for (int r = 0; r < ROWS; ++r) left[r] = right[r] = _mm512_setzero_ps();
#pragma GCC unroll 1
  for (int64_t block = 0; block < blocks; ++block, weight += BLOCK_BYTES, x += ROWS) {
    __m512i a[ROWS], b[ROWS];
    for (int r = 0; r < ROWS; ++r) a[r] = b[r] = _mm512_set1_epi32(x[r].start);
#pragma GCC unroll 8
    for (int64_t d = 0; d < BLOCK_WEIGHTS / 4; ++d) {
      const char* codes = weight + 2 * GROUP + d * 4 * GROUP;
      if (ROWS > IN_ORDER) {
        prefetch(codes + AHEAD);
        prefetch(codes + AHEAD + 64);
      }
      const __m512i upper = _mm512_load_si512(codes), lower = _mm512_load_si512(codes + 64);
      for (int r = 0; r < ROWS; ++r) {
        const __m512i four = broadcast_dword(reinterpret_cast<const char*>(x[r].codes + 4 * d));
        a[r] = _mm512_dpbusd_epi32(a[r], upper, four);
        b[r] = _mm512_dpbusd_epi32(b[r], lower, four);
      }
    }
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(weight);
    const __m512 upper = sixteen(scales), lower = sixteen(scales + 16);
    for (int r = 0; r < ROWS; ++r) {
      const __m512 scale = _mm512_set1_ps(x[r].scale);
      left[r] = _mm512_add_ps(left[r], _mm512_mul_ps(_mm512_cvtepi32_ps(a[r]), _mm512_mul_ps(upper, scale)));
      right[r] = _mm512_add_ps(right[r], _mm512_mul_ps(_mm512_cvtepi32_ps(b[r]), _mm512_mul_ps(lower, scale)));
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    _mm512_store_ps(sums + r * 16, left[r]);
    _mm512_store_ps(sums + (ROWS + r) * 16, right[r]);
  }
}

template <int... LESS>
constexpr auto int8_by_rows(std::integer_sequence<int, LESS...>) {
  return std::array{&int8_rows<LESS + 1>...};
}
constexpr auto INT8_BY_ROWS = int8_by_rows(std::make_integer_sequence<int, PANEL>());

// Rows lie in panels of nearly equal numbers of rows, since few rows would wait for their sums.
struct Panels {
  int64_t rows, count = (rows + PANEL - 1) / PANEL;
  explicit Panels(int64_t all) : rows(all) {}
  int64_t first(int64_t panel) const { return rows * panel / count; }
};

void int8_unit(
    const Linear& layer, const RowBlock* x, int64_t rows, void* y, int64_t ldy, Into into, int64_t first_group,
    int64_t last_group) {
  const int64_t blocks = layer.k / BLOCK_WEIGHTS;
  const Panels panels(rows);
  alignas(64) float sums[2 * PANEL * 16];
  for (int64_t from = 0; from < panels.count; from += TOGETHER)
    for (int64_t group = first_group; group < last_group; ++group)
      for (int64_t panel = from; panel < std::min(from + TOGETHER, panels.count); ++panel) {
        const int64_t row = panels.first(panel), number = panels.first(panel + 1) - row;
        const char* weight = static_cast<const char*>(layer.weight) + group * blocks * BLOCK_BYTES;
        INT8_BY_ROWS[number - 1](weight, x + row * blocks, blocks, sums);
        put_tiles<bf16>(into, layer, sums, sums + number * 16, number, y, ldy, row, group);
      }
}

// linear() with `int8_activations`.
void int8_linear(
    const Linear& layer, const bf16* x, int64_t ldx, int64_t rows, void* y, int64_t ldy, Into into, int threads) {
  const int64_t blocks = layer.k / BLOCK_WEIGHTS;
  const Panels panels(rows);
  RowBlock* quantized = reinterpret_cast<RowBlock*>(row_blocks.get(rows * blocks * sizeof(RowBlock)));
  parallel(panels.count, rows < 32 ? 1 : threads, [&](int64_t panel) {
    const int64_t first = panels.first(panel), number = panels.first(panel + 1) - first;
    for (int64_t r = 0; r < number; ++r)
      for (int64_t block = 0; block < blocks; ++block)
        quantize(x + (first + r) * ldx + block * BLOCK_WEIGHTS, quantized + first * blocks + block * number + r);
  });
  const auto compute = [](const Product& of, const void* x, void* y, int64_t ldy, Into into, int64_t first, int64_t last) {
    int8_unit(of.layer, static_cast<const RowBlock*>(x), of.rows, y, ldy, into, first, last);
  };
  in_units<bf16>(layer, quantized, blocks, rows, y, ldy, into, threads, GROUPS_PER_UNIT, compute);
  int8_count.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace
}  // namespace baton
