// Linear layers that multiply in float32 for every storage type, by AVX2 or AVX-512: the guarantees of gemm.h with a
// different packing.
//
// In a group of 32 outputs the weights are ordered by k: a group is one stream that is read front to back. In bf16 the
// outputs of a register are interleaved (0, 8, 1, 9, ... or 0, 16, 1, 17, ...), so a shift gives the lower half as
// floats and a mask the upper half. bf16 rows of x are widened once for all groups; so bf16 costs no more instructions
// than float32, and half the memory.
//
// MXFP4 is widened in pieces of k, whose products are added to the sums like those of the piece before.
//
// Many rows are processed in blocks, and their k in pieces, so that reused data stays in L2: the piece of the rows, the
// weights of a group for it, and the sums of a few groups, to which the next piece adds (Goto and van de Geijn, Anatomy
// of high-performance matrix multiplication, 2008, section 4). Every output is still one chain of additions over k,
// front to back, so a row has the same bits as alone.
#if BATON_LEVEL <= 1

#include <array>
#include <type_traits>
#include <utility>

#include "gemm.h"

#include "gemm_put.h"

namespace baton {
namespace {

constexpr int64_t GROUPS_PER_UNIT = 8;
constexpr int64_t AHEAD = 4096;  // bytes by which weights are prefetched ahead, if they are used once
constexpr int MOST_ROWS = BATON_LEVEL == 0 ? 6 : 12;  // of a product: all registers except 4 or 8 for the factors
constexpr int64_t FEW = 24;      // rows up to which k is not cut
constexpr int64_t BLOCK = 96;    // rows
constexpr int64_t PIECE = 640;   // of k, at most
constexpr int64_t MXFP4_PIECE = 128;  // of k, widened: 16 KiB, which stay in L1
constexpr int64_t SUMS = 2 * MOST_ROWS * 16;  // of a product's rows and one group

thread_local Scratch wide_rows;  // of the calling thread; its worker threads read them
thread_local Scratch kept_sums;  // of a block of rows and one unit's groups
thread_local Scratch widened;    // of a piece of a group in MXFP4

// Index of output i of a group in the packed weights of one k.
template <class W>
int64_t place(int64_t i) {
  constexpr int64_t LANES = BATON_LEVEL == 0 ? 8 : 16;
  return sizeof(W) == 2 ? i / (2 * LANES) * 2 * LANES + i % LANES * 2 + i / LANES % 2 : i;
}

// Half `h` of the weights of one k of a group, as floats.
BATON_LANES Floats weights(const float* from, int h) { return load_aligned(from + 16 * h); }

#if BATON_LEVEL == 0
BATON_LANES Floats weights(const bf16* from, int h) {
  const __m256i pairs = _mm256_load_si256(integers(from + 16 * h));
  const __m256i upper = _mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xffff0000)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)), _mm256_castsi256_ps(upper)};
}

BATON_LANES Floats weights(const int8_t* from, int h) {
  const __m128i lower = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 16 * h));
  const __m128i upper = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 16 * h + 8));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(lower)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(upper))};
}
#else
BATON_LANES Floats weights(const bf16* from, int h) {
  const __m512i pairs = _mm512_load_si512(from);
  if (h == 0) return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int32_t(0xffff0000))));
}

BATON_LANES Floats weights(const int8_t* from, int h) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(from + 16 * h))));
}
#endif

struct Mxfp4 {};  // what a weight is stored as (gemm.h)

// 2^(i - 128): codes count in halves.
constexpr std::array<float, 256> powers() {
  std::array<float, 256> all{};
  float power = 0x1p-128f;
  for (int i = 0; i < 255; ++i, power *= 2) all[i] = power;
  return all;
}
constexpr std::array<float, 256> POWERS = powers();

// 16 integers of 8 bits as floats.
BATON_LANES Floats floats_of(__m128i bytes) {
#if BATON_LEVEL == 0
  const __m256i low = _mm256_cvtepi8_epi32(bytes), high = _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes));
  return {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)};
#else
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#endif
}

// Widens a group's weights of `k` inputs to [k, 32], and prefetches what follows.
void widen(const uint8_t* packed, int64_t k, float* to) {
  const __m128i halves = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  const __m128i four = _mm_set1_epi8(15);
  for (int64_t block = 0; block < k; block += BLOCK_WEIGHTS, packed += MXFP4_BYTES) {
    alignas(64) float scales[GROUP];
    for (int64_t i = 0; i < GROUP; ++i) scales[i] = POWERS[packed[i]];
    const Floats left = load_aligned(scales), right = load_aligned(scales + 16);
    for (int64_t line = 0; line < MXFP4_BYTES; line += 64) _mm_prefetch(packed + AHEAD + line, _MM_HINT_T0);
    for (int64_t i = 0; i < BLOCK_WEIGHTS; ++i, to += GROUP) {
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + GROUP + 16 * i));
      const __m128i upper = _mm_and_si128(_mm_srli_epi16(codes, 4), four);
      store_aligned(to, floats_of(_mm_shuffle_epi8(halves, _mm_and_si128(codes, four))) * left);
      store_aligned(to + 16, floats_of(_mm_shuffle_epi8(halves, upper)) * right);
    }
  }
}

// What a product prefetches: from `next` on, `step` bytes for each k.
struct Fetch {
  const char* next;
  int64_t step;
};

// Computes sums [2][MOST_ROWS][16] of ROWS rows of x and HALVES halves of a group, over k front to back, from zero or,
// with `go_on`, from the sums that are there.
template <int ROWS, int HALVES, class W>
void product(const W* weight, const float* x, int64_t stride, int64_t k, float* sums, bool go_on, Fetch fetch) {
  Floats sum[HALVES][ROWS];
  for (int h = 0; h < HALVES; ++h)
    for (int r = 0; r < ROWS; ++r) sum[h][r] = go_on ? load_aligned(sums + (h * MOST_ROWS + r) * 16) : zero();
  for (int64_t i = 0; i < k; ++i, weight += GROUP, fetch.next += fetch.step) {
    for (int64_t line = 0; line < HALVES * 16 * int64_t(sizeof(W)); line += 64)
      _mm_prefetch(fetch.next + line, _MM_HINT_T0);
#if BATON_LEVEL == 0
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h) {
      const Floats w = weights(weight, h);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; ++r) sum[h][r] = fma(floats(x[r * stride + i]), w, sum[h][r]);
      // Three rows of both halves fill the registers: the factors are loaded again for the second half; otherwise the
      // compiler keeps them and spills sums to memory.
      if constexpr (ROWS == 3 && HALVES == 2) asm volatile("" ::: "memory");
    }
#else
    static_assert(HALVES == 2);  // a register of bf16 is a whole group
    const Floats left = weights(weight, 0), right = weights(weight, 1);
    // Hides from the compiler how three addresses are computed: it would keep twelve, more than there are registers.
    const float* of_four[3] = {x + i, x + (ROWS > 4 ? 4 : 0) * stride + i, x + (ROWS > 8 ? 8 : 0) * stride + i};
    asm("" : "+r"(of_four[0]), "+r"(of_four[1]), "+r"(of_four[2]));
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      const Floats factor = floats(of_four[r / 4][r % 4 * stride]);
      sum[0][r] = fma(factor, left, sum[0][r]);
      sum[1][r] = fma(factor, right, sum[1][r]);
    }
#endif
  }
  for (int h = 0; h < HALVES; ++h)
    for (int r = 0; r < ROWS; ++r) store_aligned(sums + (h * MOST_ROWS + r) * 16, sum[h][r]);
}

// Rows up to which a whole group is computed at a time; for more, one half and then the other. (With AVX2 three rows
// one half at a time would wait for their six sums: a multiplication takes four cycles, and two start in each.)
constexpr int AT_ONCE = BATON_LEVEL == 0 ? 3 : MOST_ROWS;

template <int ROWS, class W>
void both_halves(const W* weight, const float* x, int64_t stride, int64_t k, float* sums, bool go_on, Fetch fetch) {
  if constexpr (ROWS <= AT_ONCE) {
    product<ROWS, 2>(weight, x, stride, k, sums, go_on, fetch);
  } else {
    fetch.step = (fetch.step + 1) / 2;
    product<ROWS, 1>(weight, x, stride, k, sums, go_on, fetch);
    fetch.next += k * fetch.step;
    product<ROWS, 1>(weight + 16, x, stride, k, sums + MOST_ROWS * 16, go_on, fetch);
  }
}

template <class W, int... LESS>
constexpr auto by_rows(std::integer_sequence<int, LESS...>) {
  return std::array{&both_halves<LESS + 1, W>...};
}
template <class W>
constexpr auto BY_ROWS = by_rows<W>(std::make_integer_sequence<int, MOST_ROWS>());

// How many of the `left` rows the next product computes.
int64_t next_rows(int64_t left) {
  const int64_t turns = (left + MOST_ROWS - 1) / MOST_ROWS;
  return (left + turns - 1) / turns;
}

template <class E, class W>
const W* weights_of(const Linear& layer, int64_t group) {
  return static_cast<const W*>(layer.weight) + group * GROUP * padded_dwords<E>(layer.k) * PER_DWORD<E>;
}

// Computes sums [turns][2][MOST_ROWS][16] of rows of x and one group, whose weights of k are at `weight`, those of the
// next group at `next`. While a group is used several times the next one is prefetched, evenly spread: otherwise memory
// would be idle while weights come from the cache, and arithmetic while they do not.
template <class W>
void all_rows(
    const W* weight, const W* next, const float* x, int64_t stride, int64_t rows, int64_t k, float* sums, bool go_on) {
  const int64_t turns = (rows + MOST_ROWS - 1) / MOST_ROWS, bytes = GROUP * sizeof(W);
  Fetch fetch{reinterpret_cast<const char*>(next), (bytes + turns - 1) / turns};
  if (rows <= AT_ONCE) fetch = {reinterpret_cast<const char*>(weight) + AHEAD, bytes};
  for (int64_t row = 0, count; row < rows; row += count, sums += SUMS, fetch.next += k * fetch.step) {
    count = next_rows(rows - row);
    BY_ROWS<W>[count - 1](weight, x + row * stride, stride, k, sums, go_on, fetch);
  }
}

template <class E>
void put_rows(
    Into into, const Linear& layer, const float* sums, int64_t rows, void* y, int64_t ldy, int64_t first,
    int64_t group) {
  for (int64_t row = 0, count; row < rows; row += count, sums += SUMS) {
    count = next_rows(rows - row);
    put_tiles<E>(into, layer, sums, sums + MOST_ROWS * 16, count, y, ldy, first + row, group);
  }
}

// Computes the outputs of groups [first, end), in blocks of rows and pieces of k. Few rows are one block and one piece.
template <class E, class W>
void compute(
    const Linear& layer, const float* x, int64_t stride, int64_t rows, void* y, int64_t ldy, Into into, int64_t first,
    int64_t end) {
  constexpr bool IS_MXFP4 = std::is_same_v<W, Mxfp4>;
  const int64_t of_a_group = (std::min(rows, BLOCK) + MOST_ROWS - 1) / MOST_ROWS * SUMS;
  const int64_t pieces = rows <= FEW ? 1 : (layer.k + PIECE - 1) / PIECE;
  const int64_t piece = IS_MXFP4 ? MXFP4_PIECE : round_up((layer.k + pieces - 1) / pieces, 16);
  float* kept = reinterpret_cast<float*>(kept_sums.get((end - first) * of_a_group * sizeof(float)));
  for (int64_t block = 0; block < rows; block += BLOCK) {
    const int64_t count = std::min(BLOCK, rows - block);
    for (int64_t from = 0; from < layer.k; from += piece) {
      const int64_t k = std::min(piece, layer.k - from);
      for (int64_t group = first; group < end; ++group) {
        const float* inputs = x + block * stride + from;
        float* sums = kept + (group - first) * of_a_group;
        if constexpr (IS_MXFP4) {
          const int64_t at = (group * layer.k + from) / BLOCK_WEIGHTS * MXFP4_BYTES;
          float* wide = reinterpret_cast<float*>(widened.get(MXFP4_PIECE * GROUP * sizeof(float)));
          widen(static_cast<const uint8_t*>(layer.weight) + at, k, wide);
          all_rows(wide, wide, inputs, stride, count, k, sums, from > 0);
        } else {
          const W* weight = weights_of<E, W>(layer, group) + from * GROUP;
          const W* next = weights_of<E, W>(layer, group + 1) + from * GROUP;
          all_rows(weight, next, inputs, stride, count, k, sums, from > 0);
        }
        if (from + k == layer.k) put_rows<E>(into, layer, sums, count, y, ldy, block, group);
      }
    }
  }
}

template <class E>
auto compute_of(Kind kind) {
  switch (kind) {
    case Kind::INT8:
      return compute<E, int8_t>;
    case Kind::MXFP4:
      return compute<E, Mxfp4>;
    default:
      return compute<E, E>;
  }
}

// Returns the rows as floats, `stride` apart.
const float* widen(const float* x, int64_t ldx, int64_t, int64_t, int, int64_t* stride) {
  *stride = ldx;
  return x;
}

const float* widen(const bf16* x, int64_t ldx, int64_t rows, int64_t k, int threads, int64_t* stride) {
  *stride = round_up(k, 16);
  float* to = reinterpret_cast<float*>(wide_rows.get(rows * *stride * sizeof(float)));
  parallel(rows, rows < 32 ? 1 : threads, [&](int64_t row) {
    for (int64_t i = 0; i < k; i += 16) store_aligned(to + row * *stride + i, load(x + row * ldx + i));
  });
  return to;
}

}  // namespace

template <class E>
void linear(const Linear& layer, const E* x, int64_t ldx, int64_t rows, void* y, int64_t ldy, Into into, int threads) {
  int64_t stride;
  const float* wide = widen(x, ldx, rows, layer.k, threads, &stride);
  const auto some = [](const Product& of, const void* x, void* y, int64_t ldy, Into into, int64_t first, int64_t last) {
    compute_of<E>(Kind(of.layer.kind))(
        of.layer, static_cast<const float*>(x), of.ldx, of.rows, y, ldy, into, first, last);
  };
  in_units<E>(layer, wide, stride, rows, y, ldy, into, threads, GROUPS_PER_UNIT, some);
}

template <class E, class W>
void pack(const W* weight, int64_t n, int64_t k, W* packed) {
  const int64_t groups = round_up(n, GROUP) / GROUP, k_padded = padded_dwords<E>(k) * PER_DWORD<E>;
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t at = 0; at < k_padded; ++at, packed += GROUP)
      for (int64_t i = 0; i < GROUP; ++i) {
        const int64_t row = group * GROUP + i;
        packed[place<W>(i)] = row < n && at < k ? weight[row * k + at] : W(0);
      }
}

int64_t int8_linears() { return -1; }

void pack_mxfp4(const uint8_t* blocks, const uint8_t* scales, int64_t n, int64_t k, uint8_t* packed) {
  const int64_t each = k / BLOCK_WEIGHTS;
  const auto code = [&](int64_t output, int64_t block, int64_t i) {
    return output < n ? blocks[(output * each + block) * 16 + i / 2] >> 4 * (i % 2) & 15 : 0;
  };
  for (int64_t group = 0; group < round_up(n, GROUP); group += GROUP)
    for (int64_t block = 0; block < each; ++block, packed += MXFP4_BYTES) {
      for (int64_t i = 0; i < GROUP; ++i) packed[i] = group + i < n ? scales[(group + i) * each + block] : 0;
      for (int64_t i = 0; i < BLOCK_WEIGHTS; ++i)
        for (int64_t o = 0; o < 16; ++o)
          packed[GROUP + 16 * i + o] = uint8_t(code(group + o, block, i) | code(group + 16 + o, block, i) << 4);
    }
}

#define BATON_INSTANTIATE(E) \
  template void linear<E>(const Linear&, const E*, int64_t, int64_t, void*, int64_t, Into, int); \
  template void pack<E, E>(const E*, int64_t, int64_t, E*); \
  template void pack<E, int8_t>(const int8_t*, int64_t, int64_t, int8_t*);
BATON_INSTANTIATE(float)
BATON_INSTANTIATE(bf16)

}  // namespace baton

#endif
