// LoRA adapters: y += B · (A · x) for the rows of each adapter, after the linear layer has computed its own y.
//
// A [ranks, k], padded with zeros to whole tiles of k, is stored as groups of four ranks [group][k / step][4][step] and
// then the remaining ranks one by one, where a step is what a register holds (with bf16 products 32 of bf16, else 16). A
// rank's product is summed over k by 16 lanes, front to back, and then over the lanes. B follows it, as chunks of 16
// outputs [chunk][rank][16], and an output is summed over the rank, front to back, in float32. How many tokens are
// computed together makes no difference to a sum. So the bits of a row do not depend on the others.
#pragma once

#include <vector>

#include "common.h"
#if BATON_LEVEL >= 2
#include "tiles.h"
#endif

namespace baton {

// Structs are mirrored by ctypes (native.py). B of one module, whose chunk i is added to the layer's outputs from
// `first + i * step` on; it multiplies its own `rank` rows of A, which follow those of the part before.
struct AdapterPart {
  const void* b;
  int64_t rank, first, outputs, step;
};

// What an adapter adds to one linear layer; with `ranks` 0, nothing.
struct AdapterLinear {
  const void* a;
  const AdapterPart* parts;
  int64_t ranks, num_parts;
};

struct AdapterLayer {
  AdapterLinear qkv, attention_out, gate_up, down;
};

// The packed tokens of the rows of one adapter, in order.
struct AdapterRows {
  const AdapterLayer* layers;
  const int64_t* tokens;
  int64_t num_tokens;
};

namespace adapters {

constexpr int RANKS = 4;          // of a group
constexpr int64_t PER_UNIT = 32;  // tokens of one thread
constexpr int64_t AHEAD = 4096;  // bytes by which weights are prefetched ahead

#if BATON_LEVEL >= 2
template <class E>
constexpr int64_t STEP = 16 * PER_DWORD<E>;
template <class E>
BATON_LANES __m512i elements(const E* from) { return _mm512_loadu_si512(from); }
template <class E>
BATON_LANES Floats add_products(__m512i a, __m512i b, Floats total) { return multiply_add<E>(total, a, b); }
#else
template <class E>
constexpr int64_t STEP = 16;
template <class E>
BATON_LANES Floats elements(const E* from) { return load(from); }
template <class E>
BATON_LANES Floats add_products(Floats a, Floats b, Floats total) { return fma(a, b, total); }
#endif

// Writes the sums over the lanes of four registers.
BATON_LANES void put_sums(Floats a, Floats b, Floats c, Floats d, float* to) {
#if BATON_LEVEL >= 1
  const __m512 halves_ab = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
  const __m512 halves_cd = _mm512_shuffle_f32x4(c, d, 0x44) + _mm512_shuffle_f32x4(c, d, 0xee);
  __m512 quarters = _mm512_shuffle_f32x4(halves_ab, halves_cd, 0x88) + _mm512_shuffle_f32x4(halves_ab, halves_cd, 0xdd);
  quarters = quarters + _mm512_permute_ps(quarters, 0x4e);
  quarters = quarters + _mm512_permute_ps(quarters, 0xb1);
  _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, quarters)));
#else
  to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
#endif
}

// sums[t * ranks + r] = A[r] · x[t] for all ranks.
template <class E, int TOKENS>
void shrink(const E* a, const E* const* x, int64_t width, int64_t ranks, float* sums) {
  constexpr int64_t LINES = STEP<E> * sizeof(E);
  int64_t done = 0;
  for (; done + RANKS <= ranks; done += RANKS, sums += RANKS) {
    Floats total[RANKS][TOKENS];
    for (int r = 0; r < RANKS; ++r)
      for (int t = 0; t < TOKENS; ++t) total[r][t] = zero();
    for (int64_t i = 0; i < width; i += STEP<E>, a += RANKS * STEP<E>) {
      for (int64_t line = 0; line < RANKS * LINES; line += 64) prefetch(reinterpret_cast<const char*>(a) + AHEAD + line);
      decltype(elements(a)) values[TOKENS];
      for (int t = 0; t < TOKENS; ++t) values[t] = elements(x[t] + i);
      for (int r = 0; r < RANKS; ++r) {
        const auto weights = elements(a + r * STEP<E>);
        for (int t = 0; t < TOKENS; ++t) total[r][t] = add_products<E>(weights, values[t], total[r][t]);
      }
    }
    for (int t = 0; t < TOKENS; ++t) put_sums(total[0][t], total[1][t], total[2][t], total[3][t], sums + t * ranks);
  }
  for (; done < ranks; ++done, ++sums) {
    Floats total[TOKENS];
    for (int t = 0; t < TOKENS; ++t) total[t] = zero();
    for (int64_t i = 0; i < width; i += STEP<E>, a += STEP<E>) {
      const auto weights = elements(a);
      for (int t = 0; t < TOKENS; ++t) total[t] = add_products<E>(weights, elements(x[t] + i), total[t]);
    }
    for (int t = 0; t < TOKENS; ++t) sums[t * ranks] = sum(total[t]);
  }
}

template <class E, class Y, int TOKENS>
void expand(const AdapterPart& part, const float* sums, int64_t ranks, Y* const* y) {
  const E* b = static_cast<const E*>(part.b);
  for (int64_t i = 0; i < part.outputs; i += 16, b += part.rank * 16) {
    Floats total[TOKENS];
    for (int t = 0; t < TOKENS; ++t) total[t] = zero();
    for (int64_t r = 0; r < part.rank; ++r) {
      if (r * 16 * sizeof(E) % 64 == 0) prefetch(reinterpret_cast<const char*>(b + r * 16) + AHEAD);
      const Floats weights = load(b + r * 16);
      for (int t = 0; t < TOKENS; ++t) total[t] = fma(weights, floats(sums[t * ranks + r]), total[t]);
    }
    const Mask lanes = first_lanes(part.outputs - i);
    const int64_t at = part.first + i / 16 * part.step;
    for (int t = 0; t < TOKENS; ++t) store(y[t] + at, add(load(y[t] + at, lanes), total[t]), lanes);
  }
}

// Adds the products of `TOKENS` tokens; `sums` has room for TOKENS * ranks.
template <class E, class Y, int TOKENS>
void add_product(
    const AdapterLinear& linear, const int64_t* tokens, const E* x, int64_t ldx, int64_t width, Y* y, int64_t ldy,
    float* sums) {
  constexpr int AT_ONCE = TOKENS < 4 ? TOKENS : 4;  // sums of a group of ranks fit in registers
  const E* from[TOKENS];
  Y* to[TOKENS];
  for (int t = 0; t < TOKENS; ++t) {
    from[t] = x + tokens[t] * ldx;
    to[t] = y + tokens[t] * ldy;
  }
  const E* a = static_cast<const E*>(linear.a);
  for (int t = 0; t < TOKENS; t += AT_ONCE) shrink<E, AT_ONCE>(a, from + t, width, linear.ranks, sums + t * linear.ranks);
  for (const AdapterPart* part = linear.parts; part < linear.parts + linear.num_parts; sums += part->rank, ++part)
    expand<E, Y, TOKENS>(*part, sums, linear.ranks, to);
}

}  // namespace adapters

// The adapters of packed tokens [first, last) in one linear layer, `which` of layer `index`.
struct AdapterTokens {
  const AdapterRows* rows;
  int64_t number, index;
  AdapterLinear AdapterLayer::*which;
  int64_t first, last;
};

// y [last - first, ldy] += what the adapters add, for x [last - first, ldx], of which `width` are read: k, padded to whole
// tiles.
template <class E, class Y>
void add_adapters(
    const AdapterTokens& of_tokens, const E* x, int64_t ldx, int64_t width, Y* y, int64_t ldy, int threads) {
  struct Unit {
    const AdapterLinear* linear;
    const int64_t *tokens, *end;
  };
  static thread_local std::vector<Unit> units;
  units.clear();
  for (const AdapterRows* of = of_tokens.rows; of < of_tokens.rows + of_tokens.number; ++of) {
    const AdapterLinear& linear = of->layers[of_tokens.index].*of_tokens.which;
    const int64_t* begin = std::lower_bound(of->tokens, of->tokens + of->num_tokens, of_tokens.first);
    const int64_t* end = std::lower_bound(begin, of->tokens + of->num_tokens, of_tokens.last);
    if (linear.ranks)
      for (const int64_t* at = begin; at < end; at += adapters::PER_UNIT)
        units.push_back(Unit{&linear, at, std::min(at + adapters::PER_UNIT, end)});
  }
  x -= of_tokens.first * ldx;
  y -= of_tokens.first * ldy;
  const Unit* all = units.data();
  parallel(int64_t(units.size()), threads, [&](int64_t i) {
    static thread_local std::vector<float> sums;
    const Unit unit = all[i];
    sums.resize(8 * unit.linear->ranks);
    for (const int64_t* at = unit.tokens; at < unit.end;) {
      const int64_t left = unit.end - at;
      const auto add = [&](auto count) {
        constexpr int TOKENS = decltype(count)::value;
        adapters::add_product<E, Y, TOKENS>(*unit.linear, at, x, ldx, width, y, ldy, sums.data());
        at += TOKENS;
      };
      if (left >= 8)
        add(std::integral_constant<int, 8>());
      else if (left >= 4)
        add(std::integral_constant<int, 4>());
      else if (left >= 2)
        add(std::integral_constant<int, 2>());
      else
        add(std::integral_constant<int, 1>());
    }
  });
}

}  // namespace baton
