// The token of one draw (sampler.py says what it is), found without noise for tokens that cannot win.
//
// sampler.py decides in float64 by numpy's functions; here others are used, so a comparison that is closer than any of
// them could err is left to it: choose() then answers with several ids, or with none. Everything else is decided here,
// and is what numpy would have said.
#include <cmath>
#include <vector>

#include "common.h"
#include "sampling.h"

namespace baton {

namespace {

constexpr double CLOSE = 1e-9;  // relative; float64 sums and functions err by less than 1e-11
constexpr int64_t UNDECIDED = -1;
alignas(64) constexpr int32_t LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
alignas(64) constexpr int32_t BY_FOURS[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

// Tokens that survive: logit above `logit`, or equal to it and an id up to `id`.
struct Cut {
  float logit = -__builtin_inff();
  int64_t id = -1;
};

// e^x for x <= 0, relative error below 1e-14.
inline Doubles exp_negative(Doubles x) {
  x = max(x, doubles(-1000.0));
  const Doubles whole = nearest(x * doubles(1.4426950408889634));
  Doubles rest = fnma(whole, doubles(0.6931471803691238), x);
  rest = fnma(whole, doubles(1.9082149292705877e-10), rest);
  Doubles y = doubles(1.0 / 6227020800.0);
  for (double factor : {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0,
                        1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0})
    y = fma(y, rest, doubles(factor));
  return times_power(y, whole);
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
    Floats lowest = floats(__builtin_inff()), highest = floats(-__builtin_inff());
    for (int64_t i = 0; i < count; i += 16) {
      const Mask lanes = first_lanes(count - i);
      const Floats l = load_whole(&logit[i]);
      lowest = min_where(lanes, lowest, l);
      highest = max_where(lanes, highest, l);
    }
    *low = least(lowest);
    *high = most(highest);
  }

  // The sum of weights over logits above `pivot`, and how many they are.
  double weight_above(float pivot, int64_t* number) const {
    const Floats p = floats(pivot);
    Doubles low = doubles(0.0), high = doubles(0.0);
    *number = 0;
    for (int64_t i = 0; i < count; i += 16) {
      const Mask lanes = first_lanes(count - i);
      const Mask over = above(lanes, load_whole(&logit[i]), p);
      *number += __builtin_popcount(over);
      low = low + load(&weight[i], uint8_t(over));
      high = high + load(&weight[i + 8], uint8_t(over >> 8));
    }
    return sum(low + high);
  }

  // Keeps logits above `pivot` (or the others).
  void keep(float pivot, bool over) {
    int64_t to = 0;
    const Floats p = floats(pivot);
    for (int64_t i = 0; i < count; i += 16) {
      const Mask lanes = first_lanes(count - i);
      const Floats l = load_whole(&logit[i]);
      const Ints ids = load_whole(&id[i]);
      const Doubles first = load_whole(&weight[i]), second = load_whole(&weight[i + 8]);
      Mask kept = above(lanes, l, p);
      if (!over) kept = Mask(lanes & ~kept);
      compress(&logit[to], kept, l);
      compress(&id[to], kept, ids);
      compress(&weight[to], uint8_t(kept), first);
      compress(&weight[to + __builtin_popcount(kept & 0xff)], uint8_t(kept >> 8), second);
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
    const double over = from.weight_above(pivot, &number);
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
  const Doubles highest = doubles(largest), t = doubles(temperature), one = doubles(1.0);
  Doubles total = doubles(0.0);
  const Ints lane = load_aligned(LANES);
  for (int64_t i = 0; i < vocab; i += 16) {
    const Floats l = load_or(floats(-__builtin_inff()), first_lanes(vocab - i), logits + i);
    store_whole(&items.logit[i], l);
    store_whole(&items.id[i], add(lane, ints(int32_t(i))));
    const Doubles halves[2] = {lower_doubles(l), upper_doubles(l)};
    for (int h = 0; h < 2; ++h) {
      const Doubles x = halves[h];
      const Doubles weight = ones ? one : exp_negative((x - highest) / t);
      const uint8_t real = above(x, doubles(-__builtin_inf()));
      store_whole(&items.weight[i + 8 * h], only(real, weight));
      total = add_where(real, total, weight);
    }
  }
  items.count = vocab;
  return sum(total);
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

// words[j] lane i: the 32 random bits of token first + 16 * j + i; `first` is a multiple of 64.
void philox(int64_t first, const Draw& draw, Ints words[4]) {
  Ints c0 = add(load_aligned(BY_FOURS), ints(int32_t(first / 4)));
  Ints c1 = ints(int32_t(draw.output_index)), c2 = ints(int32_t(draw.choice)), c3 = ints(0);
  uint32_t k0 = draw.key_low, k1 = draw.key_high;
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    Ints high0, low0, high1, low1;
    multiply(c0, 0xD2511F53u, &high0, &low0);
    multiply(c2, 0xCD9E8D57u, &high1, &low1);
    c0 = either(either(high1, c1), ints(int32_t(k0)));
    c2 = either(either(high0, c3), ints(int32_t(k1)));
    c1 = low1;
    c3 = low0;
  }
  const Ints a = zip_low(c0, c1), b = zip_high(c0, c1), c = zip_low(c2, c3), d = zip_high(c2, c3);
  words[0] = zip_low_pairs(a, c);
  words[1] = zip_high_pairs(a, c);
  words[2] = zip_low_pairs(b, d);
  words[3] = zip_high_pairs(b, d);
}

double noised(float logit, uint32_t word, double temperature) {
  const double v = (double(word) + 0.5) * 0x1p-32;
  return double(logit) + temperature * -std::log(-std::log1p(-v));
}

}  // namespace
}  // namespace baton

using namespace baton;

// Ids that may be the draw's token, at most `room`; their number, nearly always 1. Negative: undecided.
extern "C" int64_t baton_choose(const float* logits, int64_t vocab, const Draw* from, int64_t* ids, int64_t room) {
  const Draw& draw = *from;
  Floats largest_16 = floats(-__builtin_inff());
  Mask unordered = 0;
  for (int64_t i = 0; i < vocab; i += 16) {
    const Floats l = load_or(largest_16, first_lanes(vocab - i), logits + i);
    unordered |= is_nan(l);
    largest_16 = max(largest_16, l);
  }
  const float largest = most(largest_16);
  if (unordered || !std::isfinite(largest) || draw.temperature < 1e-6) return UNDECIDED;
  Cut cut;
  if (!find_cut(logits, vocab, largest, draw, &cut)) return UNDECIDED;

  // A token of logit l beats a value B only if its noise is at least (B - l) / T, which needs v <= e^((l - B) / T).
  const Floats cut_logit = floats(cut.logit), steep = floats(float(1.4426950408889634 / draw.temperature));
  const Ints lane = load_aligned(LANES);
  struct Found {
    int64_t id;
    double value;
  };
  std::vector<Found> found;
  double best = -__builtin_inf();
  float bar = -__builtin_inff();
  auto slack = [&] { return CLOSE * (1.0 + std::abs(best)); };
  for (int64_t first = 0; first < vocab; first += 64) {
    Floats l[4];
    Mask alive[4];
    unsigned any = 0;
    for (int j = 0; j < 4; ++j) {
      const Mask lanes = first_lanes(vocab - first - 16 * j);
      l[j] = load(logits + first + 16 * j, lanes);
      const Ints id = add(lane, ints(int32_t(first + 16 * j)));
      alive[j] = above(lanes, l[j], cut_logit);
      if (cut.id >= 0) alive[j] |= equal(lanes, l[j], cut_logit) & up_to(id, ints(int32_t(cut.id)));
      any |= alive[j];
    }
    if (!any) continue;
    Ints words[4];
    philox(first, draw, words);
    for (int j = 0; j < 4; ++j) {
      const Floats behind = (l[j] - floats(bar)) * steep;
      const Floats bound = exp2_negative<float>(min(behind, zero()));
      const Floats v = from_unsigned(words[j]) * floats(0x1p-32f);
      Mask open = up_to(alive[j], v, bound * floats(1.001f));
      if (!open) continue;
      alignas(64) uint32_t bits[16];
      store_aligned(bits, words[j]);
      for (; open; open &= Mask(open - 1)) {
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
    if (count == room) return UNDECIDED;
    ids[count++] = f.id;
  }
  return count;
}
