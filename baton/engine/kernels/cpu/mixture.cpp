// MLPs with a SiLU gate, and mixtures of them: what routers choose, and the experts of a layer.
#include <cmath>
#include <vector>

#include "borrow.h"
#include "gemm.h"

namespace baton {
namespace {

thread_local Scratch mixture_memory;

// to [rows, width] = silu(gate) * up, `size` elements of each row, then zeros; rows of gate and of up are `apart` elements
// apart. `to` may be `gate`.
template <class E>
void activate(
    const E* gate, const E* up, int64_t apart, int64_t size, int64_t rows, E* to, int64_t width, int threads) {
  constexpr int64_t CHUNK = 32;  // rows of one thread
  parallel((rows + CHUNK - 1) / CHUNK, threads, [&](int64_t unit) {
    for (int64_t row = unit * CHUNK; row < std::min(rows, (unit + 1) * CHUNK); ++row)
      for (int64_t i = 0; i < width; i += 16) {
        const Mask lanes = first_lanes(size - i);
        const Floats x = silu<E>(load(gate + row * apart + i, lanes)) * load(up + row * apart + i, lanes);
        store(to + row * width + i, x, first_lanes(width - i));
      }
  });
}

constexpr int64_t TOGETHER = 256;  // rows of MLPs whose results are in memory at once

// y [rows, down.n] = down(silu(gate(x)) * up(x)), for x [rows, ldx] as in linear().
template <class E>
void gated(
    const Linear& gate, const Linear& up, const Linear& down, const E* x, int64_t ldx, int64_t rows, E* y, int threads) {
  const int64_t width = padded_dwords<E>(gate.n) * PER_DWORD<E>, most = std::min(rows, TOGETHER);
  E* active = reinterpret_cast<E*>(mixture_memory.get(2 * most * width * sizeof(E)));
  E* raised = active + most * width;
  for (int64_t first = 0; first < rows; first += TOGETHER) {
    const int64_t count = std::min(rows - first, TOGETHER);
    linear<E>(gate, x + first * ldx, ldx, count, active, width, Into::STORE, threads);
    linear<E>(up, x + first * ldx, ldx, count, raised, width, Into::STORE, threads);
    activate(active, raised, width, gate.n, count, active, width, threads);
    linear<E>(down, active, width, count, y + first * down.n, down.n, Into::STORE, threads);
  }
}

// y [tokens, n] = the sum over a token's experts, in their order, of its weight for one times down(silu(gate) * up),
// where the first half of an expert's gate_up is the gate. index and weights [tokens, chosen]: `chosen` different experts
// of each token; those from `count` on are of other ranks. Returns how many experts were computed.
template <class E>
int64_t experts(
    const Linear* gate_up, const Linear* down, int64_t count, const int64_t* index, const float* weights, int64_t chosen,
    const E* x, int64_t ldx, int64_t tokens, E* y, int threads) {
  static thread_local std::vector<int64_t> ends, order;  // choices by expert
  ends.assign(count + 1, 0);
  for (int64_t i = 0; i < tokens * chosen; ++i)
    if (index[i] < count) ++ends[index[i] + 1];
  for (int64_t e = 0; e < count; ++e) ends[e + 1] += ends[e];
  order.resize(ends[count]);
  for (int64_t i = 0; i < tokens * chosen; ++i)
    if (index[i] < count) order[ends[index[i]]++] = i;

  const int64_t inner = down->k, n = down->n, width = padded_dwords<E>(inner) * PER_DWORD<E>;
  const int64_t most = std::min(int64_t(order.size()), TOGETHER), results_width = round_up(n, 16);
  const int64_t of_sums = tokens * results_width * sizeof(float);
  float* sums = reinterpret_cast<float*>(
      mixture_memory.get(of_sums + most * (ldx + 2 * round_up(inner, 16) + width + results_width) * sizeof(E)));
  E* rows = reinterpret_cast<E*>(sums + tokens * results_width);
  E *active = rows + most * ldx, *results = active + most * width, *both = results + most * results_width;
  std::memset(sums, 0, of_sums);
  int64_t computed = 0;
  for (int64_t e = 0, first = 0; e < count; first = ends[e++]) {
    computed += ends[e] > first;
    for (int64_t at = first; at < ends[e]; at += TOGETHER) {
      const int64_t number = std::min(ends[e] - at, TOGETHER);
      const int64_t* choices = order.data() + at;
      for (int64_t r = 0; r < number; ++r) std::memcpy(rows + r * ldx, x + choices[r] / chosen * ldx, ldx * sizeof(E));
      linear<E>(gate_up[e], rows, ldx, number, both, 2 * inner, Into::STORE, threads);
      activate(both, both + inner, 2 * inner, inner, number, active, width, threads);
      linear<E>(down[e], active, width, number, results, results_width, Into::STORE, threads);
      for (int64_t r = 0; r < number; ++r) {
        float* sum = sums + choices[r] / chosen * results_width;
        const Floats weight = floats(weights[choices[r]]);
        for (int64_t i = 0; i < n; i += 16)
          store(sum + i, add(load(sum + i), multiply(load(results + r * results_width + i, first_lanes(n - i)), weight)));
      }
    }
  }
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < n; i += 16) store(y + t * n + i, load(sums + t * results_width + i), first_lanes(n - i));
  return computed;
}

// What a router computes from its logits: the experts with the largest `chosen` of them, the largest first and of equal
// ones the first, and as their weights the softmax over these, or with `over_all` over all experts; with `rounded` they
// are rounded to the element type.
struct Routing {
  int64_t chosen;
  int32_t over_all, rounded;
};

// NaN is the largest number, as torch sorts.
inline bool larger(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// Writes e^(x - largest) for up to 16 numbers from `x` on.
template <class X>
void exponentials(const X* x, int64_t count, float largest, float* to) {
  const Floats less = load(x, first_lanes(count)) - floats(largest);
  store_aligned(to, exp2_negative<float>(less * floats(1.4426950408889634f)));
}

template <class E>
void choose(const E* logits, int64_t count, const Routing& routing, float* weights, int64_t* index) {
  const int64_t chosen = routing.chosen;
  int64_t number = 0;
  for (int64_t e = 0; e < count; ++e) {
    const float logit = first(load(logits + e, first_lanes(1)));
    if (number == chosen && !larger(logit, weights[number - 1])) continue;
    int64_t at = number < chosen ? number++ : number - 1;
    for (; at > 0 && larger(logit, weights[at - 1]); --at) weights[at] = weights[at - 1], index[at] = index[at - 1];
    weights[at] = logit, index[at] = e;
  }
  const float largest = weights[0];
  alignas(64) float each[16];
  float total = 0;
  if (routing.over_all)
    for (int64_t e = 0; e < count; e += 16) {
      exponentials(logits + e, count - e, largest, each);
      for (int64_t i = 0; i < std::min<int64_t>(16, count - e); ++i) total += each[i];
    }
  for (int64_t c = 0; c < chosen; c += 16) {
    exponentials(weights + c, chosen - c, largest, each);
    for (int64_t i = c; i < std::min(chosen, c + 16); ++i) {
      weights[i] = each[i - c];
      if (!routing.over_all) total += weights[i];
    }
  }
  for (int64_t c = 0; c < chosen; ++c) weights[c] /= total;
  if (routing.rounded)
    for (int64_t c = 0; c < chosen; ++c) {
      alignas(64) E rounded[16];
      store(rounded, floats(weights[c]), first_lanes(1));
      weights[c] = first(load(rounded, first_lanes(1)));
    }
}

// logits [tokens, router.n] of x [tokens, ldx], and what they choose: weights and index [tokens, chosen].
template <class E>
void route(
    const Linear& router, const Routing& routing, const E* x, int64_t ldx, int64_t tokens, E* logits, float* weights,
    int64_t* index, int threads) {
  linear<E>(router, x, ldx, tokens, logits, router.n, Into::STORE, threads);
  for (int64_t t = 0; t < tokens; ++t)
    choose(logits + t * router.n, router.n, routing, weights + t * routing.chosen, index + t * routing.chosen);
}

// A whole layer of a mixture: `route`, and `experts` of its choices.
template <class E>
int64_t mixture(
    const Linear& router, const Routing& routing, const Linear* gate_up, const Linear* down, const E* x, int64_t ldx,
    int64_t tokens, E* y, int threads) {
  static thread_local std::vector<E> logits;
  static thread_local std::vector<float> weights;
  static thread_local std::vector<int64_t> index;
  logits.resize(tokens * router.n);
  weights.resize(tokens * routing.chosen);
  index.resize(tokens * routing.chosen);
  route(router, routing, x, ldx, tokens, logits.data(), weights.data(), index.data(), threads);
  return experts(
      gate_up, down, router.n, index.data(), weights.data(), routing.chosen, x, ldx, tokens, y, threads);
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

void baton_gated(
    int is_bf16, const Linear* gate, const Linear* up, const Linear* down, const void* x, int64_t width, int64_t rows,
    void* y, int threads) {
  const Borrowing borrowing;
  BATON_BY_TYPE(
      is_bf16, gated<E>(*gate, *up, *down, static_cast<const E*>(x), width, rows, static_cast<E*>(y), threads));
}

int64_t baton_experts(
    int is_bf16, const Linear* gate_up, const Linear* down, int64_t count, const int64_t* index, const float* weights,
    int64_t chosen, const void* x, int64_t width, int64_t tokens, void* y, int threads) {
  const Borrowing borrowing;
  BATON_BY_TYPE(
      is_bf16, return experts<E>(
                   gate_up, down, count, index, weights, chosen, static_cast<const E*>(x), width, tokens,
                   static_cast<E*>(y), threads));
}

void baton_route(
    int is_bf16, const Linear* router, const Routing* routing, const void* x, int64_t width, int64_t tokens, void* logits,
    float* weights, int64_t* index, int threads) {
  const Borrowing borrowing;
  BATON_BY_TYPE(
      is_bf16, route<E>(
                   *router, *routing, static_cast<const E*>(x), width, tokens, static_cast<E*>(logits), weights, index,
                   threads));
}

int64_t baton_mixture(
    int is_bf16, const Linear* router, const Routing* routing, const Linear* gate_up, const Linear* down, const void* x,
    int64_t width, int64_t tokens, void* y, int threads) {
  const Borrowing borrowing;
  BATON_BY_TYPE(
      is_bf16, return mixture<E>(
                   *router, *routing, gate_up, down, static_cast<const E*>(x), width, tokens, static_cast<E*>(y),
                   threads));
}

// Products of one of several layers of the same sizes each, from packed rows of x: `runs` are pairs of a layer and a
// number of rows. A run is read once; the threads share the units of each.
void baton_linears(
    int is_bf16, const Linear* layers, const int64_t* runs, int64_t num_runs, const void* x, int64_t width, void* y,
    int64_t y_width, int threads) {
  const Borrowing borrowing;
  BATON_BY_TYPE(is_bf16, for (int64_t run = 0, row = 0; run < num_runs; row += runs[2 * run + 1], ++run) {
    const E* from = static_cast<const E*>(x) + row * width;
    E* to = static_cast<E*>(y) + row * y_width;
    linear<E>(layers[runs[2 * run]], from, width, runs[2 * run + 1], to, y_width, Into::STORE, threads);
  });
}

}  // extern "C"
