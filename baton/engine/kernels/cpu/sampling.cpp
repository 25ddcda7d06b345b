// The token of one draw (sampler.py says what it is), found without noise for tokens that cannot win.
//
// sampler.py decides in float64 by numpy's functions; here others are used, so a comparison that is closer than any of
// them could err is left to it: choose() then answers with several ids, or with none. Everything else is decided here,
// and is what numpy would have said.
#include <cmath>
#include <vector>

#include "common.h"

namespace baton {

// Mirrored by ctypes (native.py).
struct Draw {
  double temperature, top_p, min_p;
  int64_t top_k;
  uint32_t key_low, key_high, output_index, choice;
};

namespace {

constexpr double CLOSE = 1e-9;  // relative; float64 sums and functions err by less than 1e-11
constexpr int64_t UNDECIDED = -1;

// Tokens that survive: logit above `logit`, or equal to it and an id up to `id`.
struct Cut {
  float logit = -__builtin_inff();
  int64_t id = -1;
};

// e^x for x <= 0, relative error below 1e-14.
inline __m512d exp_negative(__m512d x) {
  x = _mm512_max_pd(x, _mm512_set1_pd(-1000.0));
  const __m512d whole = _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(1.4426950408889634)), _MM_FROUND_TO_NEAREST_INT);
  __m512d rest = _mm512_fnmadd_pd(whole, _mm512_set1_pd(0.6931471803691238), x);
  rest = _mm512_fnmadd_pd(whole, _mm512_set1_pd(1.9082149292705877e-10), rest);
  __m512d y = _mm512_set1_pd(1.0 / 6227020800.0);
  for (double factor : {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0,
                        1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0})
    y = _mm512_fmadd_pd(y, rest, _mm512_set1_pd(factor));
  return _mm512_scalef_pd(y, whole);
}

// Tokens with their weights, in rising order of ids.
struct Items {
  std::vector<float> logit;
  std::vector<int32_t> id;
  std::vector<double> weight;
  int64_t count = 0;

  void reserve(int64_t size) {
    if (int64_t(logit.size()) >= size + 16) return;
    logit.resize(size + 16);
    id.resize(size + 16);
    weight.resize(size + 16);
  }

  void range(float* low, float* high) const {
    __m512 least = _mm512_set1_ps(__builtin_inff()), most = _mm512_set1_ps(-__builtin_inff());
    for (int64_t i = 0; i < count; i += 16) {
      const __mmask16 lanes = first_lanes(count - i);
      const __m512 l = _mm512_loadu_ps(&logit[i]);
      least = _mm512_mask_min_ps(least, lanes, least, l);
      most = _mm512_mask_max_ps(most, lanes, most, l);
    }
    *low = _mm512_reduce_min_ps(least);
    *high = _mm512_reduce_max_ps(most);
  }

  // The sum of weights over logits above `pivot`, and how many they are.
  double above(float pivot, int64_t* number) const {
    const __m512 p = _mm512_set1_ps(pivot);
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    *number = 0;
    for (int64_t i = 0; i < count; i += 16) {
      const __mmask16 lanes = first_lanes(count - i);
      const __mmask16 over = _mm512_mask_cmp_ps_mask(lanes, _mm512_loadu_ps(&logit[i]), p, _CMP_GT_OQ);
      *number += __builtin_popcount(over);
      low = _mm512_add_pd(low, _mm512_maskz_loadu_pd(__mmask8(over), &weight[i]));
      high = _mm512_add_pd(high, _mm512_maskz_loadu_pd(__mmask8(over >> 8), &weight[i + 8]));
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(low, high));
  }

  // Keeps logits above `pivot` (or the others).
  void keep(float pivot, bool over) {
    int64_t to = 0;
    const __m512 p = _mm512_set1_ps(pivot);
    for (int64_t i = 0; i < count; i += 16) {
      const __mmask16 lanes = first_lanes(count - i);
      const __m512 l = _mm512_loadu_ps(&logit[i]);
      const __m512i ids = _mm512_loadu_si512(&id[i]);
      const __m512d first = _mm512_loadu_pd(&weight[i]), second = _mm512_loadu_pd(&weight[i + 8]);
      __mmask16 kept = _mm512_mask_cmp_ps_mask(lanes, l, p, _CMP_GT_OQ);
      if (!over) kept = __mmask16(lanes & ~kept);
      _mm512_storeu_ps(&logit[to], _mm512_maskz_compress_ps(kept, l));
      _mm512_storeu_si512(&id[to], _mm512_maskz_compress_epi32(kept, ids));
      const int64_t half = __builtin_popcount(kept & 0xff);
      const __m512d later = _mm512_maskz_compress_pd(__mmask8(kept >> 8), second);
      _mm512_storeu_pd(&weight[to], _mm512_maskz_compress_pd(__mmask8(kept), first));
      _mm512_storeu_pd(&weight[to + half], later);
      to += __builtin_popcount(kept);
    }
    count = to;
  }
};

thread_local Items items;

// The last token of the shortest prefix, largest logit first, lowest id first among equals, whose weights reach `target`.
// False if that is too close to say. Consumes `from`.
bool reach(Items& from, double target, double total, Cut* cut) {
  double before = 0.0;
  while (from.count > 64) {
    float low, high;
    from.range(&low, &high);
    if (low == high) break;
    float pivot = low + (high - low) / 2;
    if (!(pivot < high)) pivot = low;
    int64_t number = 0;
    const double over = from.above(pivot, &number);
    const bool inside = before + over >= target;
    if (!inside) before += over;
    from.keep(pivot, inside);
  }
  std::vector<int32_t> order(from.count);
  for (int64_t i = 0; i < from.count; ++i) order[i] = int32_t(i);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return from.logit[a] > from.logit[b]; });
  for (int32_t i : order) {
    if (std::abs(before - target) <= CLOSE * total && before > 0.0) return false;
    before += from.weight[i];
    if (before >= target) {
      *cut = Cut{from.logit[i], from.id[i]};
      return before - target > CLOSE * total;
    }
  }
  return false;
}

// All tokens above -inf with weight e^((logit - largest) / temperature), or 1 each.
double fill(const float* logits, int64_t vocab, float largest, double temperature, bool ones) {
  items.reserve(vocab);
  const __m512d most = _mm512_set1_pd(largest), t = _mm512_set1_pd(temperature), one = _mm512_set1_pd(1.0);
  __m512d sum = _mm512_setzero_pd();
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t i = 0; i < vocab; i += 16) {
    const __m512 l = _mm512_mask_loadu_ps(_mm512_set1_ps(-__builtin_inff()), first_lanes(vocab - i), logits + i);
    _mm512_storeu_ps(&items.logit[i], l);
    _mm512_storeu_si512(&items.id[i], _mm512_add_epi32(lane, _mm512_set1_epi32(int32_t(i))));
    const __m512d halves[2] = {
        _mm512_cvtps_pd(_mm512_castps512_ps256(l)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(l, 1))};
    for (int h = 0; h < 2; ++h) {
      const __m512d x = halves[h];
      const __m512d weight = ones ? one : exp_negative(_mm512_div_pd(_mm512_sub_pd(x, most), t));
      const __mmask8 real = _mm512_cmp_pd_mask(x, _mm512_set1_pd(-__builtin_inf()), _CMP_GT_OQ);
      _mm512_storeu_pd(&items.weight[i + 8 * h], _mm512_maskz_mov_pd(real, weight));
      sum = _mm512_mask_add_pd(sum, real, sum, weight);
    }
  }
  items.count = vocab;
  return _mm512_reduce_add_pd(sum);
}

// False if it is too close to say.
bool find_cut(const float* logits, int64_t vocab, float largest, const Draw& draw, Cut* cut) {
  const bool by_count = draw.top_k > 0 && draw.top_k < vocab;
  if (by_count) {
    const double number = fill(logits, vocab, largest, draw.temperature, true);
    if (double(draw.top_k) < number) {
      if (!reach(items, double(draw.top_k) - 0.5, 0.0, cut)) return false;  // counts are exact: never close
    }
  }
  if (draw.top_p < 1.0) {
    double total = fill(logits, vocab, largest, draw.temperature, false);
    if (cut->id >= 0) {
      int64_t to = 0;
      total = 0.0;
      for (int64_t i = 0; i < items.count; ++i) {
        const bool stays = items.logit[i] > cut->logit || (items.logit[i] == cut->logit && items.id[i] <= cut->id);
        if (!stays) continue;
        items.logit[to] = items.logit[i];
        items.id[to] = items.id[i];
        total += items.weight[to++] = items.weight[i];
      }
      items.count = to;
    }
    if (!reach(items, draw.top_p * total, total, cut)) return false;
  }
  if (draw.min_p > 0.0) {
    auto weight = [&](float l) { return std::exp((double(l) - double(largest)) / draw.temperature); };
    float least = float(double(largest) + draw.temperature * std::log(draw.min_p));
    least = std::nextafterf(std::nextafterf(least, -__builtin_inff()), -__builtin_inff());
    while (weight(least) < draw.min_p) least = std::nextafterf(least, __builtin_inff());
    const float below = std::nextafterf(least, -__builtin_inff());
    const bool exact = least == largest;  // whose weight is 1 in every arithmetic
    if (!exact && weight(least) - draw.min_p < CLOSE * draw.min_p) return false;
    if (draw.min_p - weight(below) < CLOSE * draw.min_p) return false;
    if (cut->logit <= below) *cut = Cut{below, -1};
  }
  return true;
}

inline void multiply(__m512i a, uint32_t by, __m512i* high, __m512i* low) {
  const __m512i factor = _mm512_set1_epi32(int32_t(by));
  const __m512i even = _mm512_mul_epu32(a, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor);
  *low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  *high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}

// words[j] lane i: the 32 random bits of token first + 16 * j + i; `first` is a multiple of 64.
void philox(int64_t first, const Draw& draw, __m512i words[4]) {
  const __m512i spread = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  __m512i c0 = _mm512_add_epi32(spread, _mm512_set1_epi32(int32_t(first / 4)));
  __m512i c1 = _mm512_set1_epi32(int32_t(draw.output_index)), c2 = _mm512_set1_epi32(int32_t(draw.choice));
  __m512i c3 = _mm512_setzero_si512();
  uint32_t k0 = draw.key_low, k1 = draw.key_high;
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    __m512i high0, low0, high1, low1;
    multiply(c0, 0xD2511F53u, &high0, &low0);
    multiply(c2, 0xCD9E8D57u, &high1, &low1);
    c0 = _mm512_xor_si512(_mm512_xor_si512(high1, c1), _mm512_set1_epi32(int32_t(k0)));
    c2 = _mm512_xor_si512(_mm512_xor_si512(high0, c3), _mm512_set1_epi32(int32_t(k1)));
    c1 = low1;
    c3 = low0;
  }
  const __m512i a = _mm512_unpacklo_epi32(c0, c1), b = _mm512_unpackhi_epi32(c0, c1);
  const __m512i c = _mm512_unpacklo_epi32(c2, c3), d = _mm512_unpackhi_epi32(c2, c3);
  words[0] = _mm512_unpacklo_epi64(a, c);
  words[1] = _mm512_unpackhi_epi64(a, c);
  words[2] = _mm512_unpacklo_epi64(b, d);
  words[3] = _mm512_unpackhi_epi64(b, d);
}

double noised(float logit, uint32_t word, double temperature) {
  const double v = (double(word) + 0.5) * 0x1p-32;
  return double(logit) + temperature * -std::log(-std::log1p(-v));
}

}  // namespace
}  // namespace baton

using namespace baton;

// Ids that may be the draw's token, at most `most`; their number, nearly always 1. Negative: undecided.
extern "C" int64_t baton_choose(const float* logits, int64_t vocab, const Draw* from, int64_t* ids, int64_t most) {
  const Draw& draw = *from;
  __m512 largest_16 = _mm512_set1_ps(-__builtin_inff());
  __mmask16 unordered = 0;
  for (int64_t i = 0; i < vocab; i += 16) {
    const __m512 l = _mm512_mask_loadu_ps(largest_16, first_lanes(vocab - i), logits + i);
    unordered |= _mm512_cmp_ps_mask(l, l, _CMP_UNORD_Q);
    largest_16 = _mm512_max_ps(largest_16, l);
  }
  const float largest = _mm512_reduce_max_ps(largest_16);
  if (unordered || !std::isfinite(largest) || draw.temperature < 1e-6) return UNDECIDED;
  Cut cut;
  if (!find_cut(logits, vocab, largest, draw, &cut)) return UNDECIDED;

  // A token of logit l beats a value B only if its noise is at least (B - l) / T, which needs v <= e^((l - B) / T).
  const __m512 cut_logit = _mm512_set1_ps(cut.logit), steep = _mm512_set1_ps(float(1.4426950408889634 / draw.temperature));
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  struct Found {
    int64_t id;
    double value;
  };
  std::vector<Found> found;
  double best = -__builtin_inf();
  float bar = -__builtin_inff();
  auto slack = [&] { return CLOSE * (1.0 + std::abs(best)); };
  for (int64_t first = 0; first < vocab; first += 64) {
    __m512 l[4];
    __mmask16 alive[4];
    unsigned any = 0;
    for (int j = 0; j < 4; ++j) {
      const __mmask16 lanes = first_lanes(vocab - first - 16 * j);
      l[j] = _mm512_maskz_loadu_ps(lanes, logits + first + 16 * j);
      const __m512i id = _mm512_add_epi32(lane, _mm512_set1_epi32(int32_t(first + 16 * j)));
      alive[j] = _mm512_mask_cmp_ps_mask(lanes, l[j], cut_logit, _CMP_GT_OQ);
      if (cut.id >= 0)
        alive[j] |= _mm512_mask_cmp_ps_mask(lanes, l[j], cut_logit, _CMP_EQ_OQ) &
                    _mm512_cmple_epi32_mask(id, _mm512_set1_epi32(int32_t(cut.id)));
      any |= alive[j];
    }
    if (!any) continue;
    __m512i words[4];
    philox(first, draw, words);
    for (int j = 0; j < 4; ++j) {
      const __m512 behind = _mm512_mul_ps(_mm512_sub_ps(l[j], _mm512_set1_ps(bar)), steep);
      const __m512 bound = exp2_negative<float>(_mm512_min_ps(behind, _mm512_setzero_ps()));
      const __m512 v = _mm512_mul_ps(_mm512_cvtepu32_ps(words[j]), _mm512_set1_ps(0x1p-32f));
      __mmask16 open = _mm512_mask_cmp_ps_mask(alive[j], v, _mm512_mul_ps(bound, _mm512_set1_ps(1.001f)), _CMP_LE_OQ);
      if (!open) continue;
      alignas(64) uint32_t bits[16];
      _mm512_store_si512(bits, words[j]);
      for (; open; open &= __mmask16(open - 1)) {
        const int i = __builtin_ctz(open);
        const int64_t id = first + 16 * j + i;
        const double value = noised(logits[id], bits[i], draw.temperature);
        if (value < best - slack()) continue;
        found.push_back({id, value});
        if (value > best) {
          best = value;
          bar = float(best);
        }
      }
    }
  }
  int64_t count = 0;
  for (const Found& f : found) {
    if (f.value < best - slack()) continue;
    if (count == most) return UNDECIDED;
    ids[count++] = f.id;
  }
  return count;
}
