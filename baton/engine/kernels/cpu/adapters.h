// LoRA adapters: y += B · (A · x) for the rows of each adapter, after the linear layer has computed its own y.
//
// A is [rank, k], and a rank's product is summed over k by 16 lanes, front to back. B is stored as chunks of 16 outputs
// [chunk][rank][16], and an output is summed over the rank, front to back. Both sums are in float32. So the bits of a
// row do not depend on the others.
#pragma once

#include <vector>

#include "common.h"

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

// The packed tokens of the rows of one adapter.
struct AdapterRows {
  const AdapterLayer* layers;
  const int64_t* tokens;
  int64_t num_tokens;
};

namespace adapters {

constexpr int64_t AT_ONCE = 4;      // tokens, and ranks, computed together
constexpr int64_t PER_UNIT = 32;  // tokens of one thread

// sums[t * ranks + r] = A[r] · x[t]
template <class E, int RANKS, int TOKENS>
void shrink(const E* a, const E* const* x, int64_t k, int64_t ranks, float* sums) {
  Floats total[RANKS][TOKENS];
  for (int r = 0; r < RANKS; ++r)
    for (int t = 0; t < TOKENS; ++t) total[r][t] = zero();
  for (int64_t i = 0; i < k; i += 16) {
    const Mask lanes = first_lanes(k - i);
    Floats values[TOKENS];
    for (int t = 0; t < TOKENS; ++t) values[t] = load(x[t] + i, lanes);
    for (int r = 0; r < RANKS; ++r) {
      const Floats weights = load(a + r * k + i, lanes);
      for (int t = 0; t < TOKENS; ++t) total[r][t] = fma(weights, values[t], total[r][t]);
    }
  }
  for (int r = 0; r < RANKS; ++r)
    for (int t = 0; t < TOKENS; ++t) sums[t * ranks + r] = sum(total[r][t]);
}

template <class E, class Y, int TOKENS>
void add_product(const AdapterLinear& linear, const E* const* x, int64_t k, Y* const* y, float* sums) {
  const E* a = static_cast<const E*>(linear.a);
  int64_t done = 0;
  for (; done + AT_ONCE <= linear.ranks; done += AT_ONCE)
    shrink<E, AT_ONCE, TOKENS>(a + done * k, x, k, linear.ranks, sums + done);
  for (; done < linear.ranks; ++done) shrink<E, 1, TOKENS>(a + done * k, x, k, linear.ranks, sums + done);
  const float* of_part = sums;
  for (const AdapterPart* part = linear.parts; part < linear.parts + linear.num_parts; ++part) {
    const E* b = static_cast<const E*>(part->b);
    for (int64_t i = 0; i < part->outputs; i += 16, b += part->rank * 16) {
      Floats total[TOKENS];
      for (int t = 0; t < TOKENS; ++t) total[t] = zero();
      for (int64_t r = 0; r < part->rank; ++r) {
        const Floats weights = load(b + r * 16);
        for (int t = 0; t < TOKENS; ++t) total[t] = fma(weights, floats(of_part[t * linear.ranks + r]), total[t]);
      }
      const Mask lanes = first_lanes(part->outputs - i);
      const int64_t at = part->first + i / 16 * part->step;
      for (int t = 0; t < TOKENS; ++t) store(y[t] + at, add(load(y[t] + at, lanes), total[t]), lanes);
    }
    of_part += part->rank;
  }
}

}  // namespace adapters

// y [tokens, ldy] += what the adapters add to one linear layer (`which`, of layer `index`), for x [tokens, ldx].
template <class E, class Y>
void add_adapters(
    const AdapterRows* rows, int64_t number, int64_t index, AdapterLinear AdapterLayer::*which, const E* x, int64_t ldx,
    int64_t k, Y* y, int64_t ldy, int threads) {
  struct Unit {
    const AdapterLinear* linear;
    const int64_t *tokens, *end;
  };
  static thread_local std::vector<Unit> units;
  units.clear();
  for (const AdapterRows* of = rows; of < rows + number; ++of) {
    const AdapterLinear& linear = of->layers[index].*which;
    const int64_t* end = of->tokens + of->num_tokens;
    if (linear.ranks)
      for (const int64_t* at = of->tokens; at < end; at += adapters::PER_UNIT)
        units.push_back(Unit{&linear, at, std::min(at + adapters::PER_UNIT, end)});
  }
  const Unit* all = units.data();
  parallel(int64_t(units.size()), threads, [&](int64_t i) {
    static thread_local std::vector<float> sums;
    const Unit unit = all[i];
    sums.resize(adapters::AT_ONCE * unit.linear->ranks);
    const E* from[adapters::AT_ONCE];
    Y* to[adapters::AT_ONCE];
    for (const int64_t* at = unit.tokens; at < unit.end; at += adapters::AT_ONCE) {
      const int64_t count = std::min(unit.end - at, adapters::AT_ONCE);
      for (int64_t t = 0; t < count; ++t) {
        from[t] = x + at[t] * ldx;
        to[t] = y + at[t] * ldy;
      }
      switch (count) {
        case 1:
          adapters::add_product<E, Y, 1>(*unit.linear, from, k, to, sums.data());
          break;
        case 2:
          adapters::add_product<E, Y, 2>(*unit.linear, from, k, to, sums.data());
          break;
        case 3:
          adapters::add_product<E, Y, 3>(*unit.linear, from, k, to, sums.data());
          break;
        default:
          adapters::add_product<E, Y, 4>(*unit.linear, from, k, to, sums.data());
      }
    }
  });
}

}  // namespace baton
