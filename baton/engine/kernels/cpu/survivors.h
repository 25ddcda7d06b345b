// The tokens that survive top_k, top_p and min_p (defined in sampler.py), found without sorting the vocabulary.
#pragma once

#include <cmath>
#include <vector>

#include "common.h"
#include "sampling.h"

namespace baton {

constexpr double CLOSE = 1e-9;  // relative; float64 sums and functions err by less than 1e-11
constexpr double CLOSE_32 = 1e-4;  // relative; float32 sums and functions err by less than 3e-5
alignas(64) constexpr int32_t LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Tokens that survive: logit above `logit`, or equal to it and an id up to `id`.
struct Cut {
  float logit = -__builtin_inff();
  int64_t id = -1;

  bool cuts() const { return id >= 0 || logit > -__builtin_inff(); }

  Mask survivors(Mask lanes, Floats l, Ints ids) const {
    Mask alive = above(lanes, l, floats(logit));
    if (id >= 0) alive |= equal(lanes, l, floats(logit)) & up_to(ids, ints(int32_t(id)));
    return alive;
  }
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

// Tokens with their weights, in ascending order of ids.
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

  void add(Mask lanes, Floats l, Ints ids) {
    compress(&logit[count], lanes, l);
    compress(&id[count], lanes, ids);
    count += __builtin_popcount(lanes);
  }

  // Sets each weight to e^((logit - largest) / temperature) and returns their sum.
  double weigh(float largest, double temperature) {
    const Doubles highest = doubles(largest), t = doubles(temperature);
    Doubles total = doubles(0.0);
    for (int64_t i = 0; i < count; i += 16) {
      const Floats l = load_whole(&logit[i]);
      const Mask lanes = first_lanes(count - i);
      const Doubles halves[2] = {lower_doubles(l), upper_doubles(l)};
      for (int h = 0; h < 2; ++h) {
        const uint8_t real = uint8_t(lanes >> 8 * h);
        const Doubles each = only(real, exp_negative((halves[h] - highest) / t));
        store_whole(&weight[i + 8 * h], each);
        total = total + each;
      }
    }
    return sum(total);
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

  // The sum of the weights of logits above `pivot`.
  double weight_above(float pivot) const {
    const Floats p = floats(pivot);
    Doubles low = doubles(0.0), high = doubles(0.0);
    for (int64_t i = 0; i < count; i += 16) {
      const Mask over = above(first_lanes(count - i), load_whole(&logit[i]), p);
      low = low + load(&weight[i], uint8_t(over));
      high = high + load(&weight[i + 8], uint8_t(over >> 8));
    }
    return sum(low + high);
  }

  // Keeps the items with logits above `pivot` (or the others).
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

  // Sorts by logit, largest first; equal ones keep their order, lowest id first.
  void sort() {
    for (int64_t i = 1; i < count; ++i) {
      const float l = logit[i];
      const int32_t token = id[i];
      const double w = weight[i];
      int64_t to = i;
      for (; to > 0 && logit[to - 1] < l; --to) {
        logit[to] = logit[to - 1];
        id[to] = id[to - 1];
        weight[to] = weight[to - 1];
      }
      logit[to] = l;
      id[to] = token;
      weight[to] = w;
    }
  }
};

// Sets `cut` to the last token of the shortest prefix, largest logit first, lowest id first among equals, whose weights
// reach `target`. Returns false if that cut is decided by `close` or less, or no prefix reaches it. Consumes `from`.
inline bool reach(Items& from, double target, double close, Cut* cut) {
  double before = 0.0;
  while (from.count > 16) {
    float low, high;
    from.range(&low, &high);
    if (low == high) break;
    float pivot = low + (high - low) / 2;
    if (!(pivot < high)) pivot = low;
    const double over = from.weight_above(pivot);
    const bool inside = before + over >= target;
    if (!inside) before += over;
    from.keep(pivot, inside);
  }
  from.sort();
  for (int64_t i = 0; i < from.count; ++i) {
    if (std::abs(before - target) <= close && before > 0.0) return false;
    before += from.weight[i];
    if (before >= target) {
      *cut = Cut{from.logit[i], from.id[i]};
      return before - target > close;
    }
  }
  return false;
}

// Collects all tokens above -inf, with weight e^((logit - largest) / temperature) or 1 each; returns the weights' sum.
inline double fill(Items& items, const float* logits, int64_t vocab, float largest, double temperature, bool ones) {
  items.count = 0;
  const Ints lane = load_aligned(LANES);
  for (int64_t i = 0; i < vocab; i += 16) {
    const Floats l = load_or(floats(-__builtin_inff()), first_lanes(vocab - i), logits + i);
    items.add(above(0xffff, l, floats(-__builtin_inff())), l, add(lane, ints(int32_t(i))));
  }
  if (!ones) return items.weigh(largest, temperature);
  std::fill_n(items.weight.begin(), items.count, 1.0);
  return double(items.count);
}

// Finds the cut of top_p where top_k does not cut. Only tokens above `floor` get weights in float64: a whole vocabulary
// of tokens below it would have less than the share that top_p leaves out, so the cut is not among them. Their weights
// are summed in float32. Returns false if that is not precise enough.
inline bool cut_likeliest(Items& items, const float* logits, int64_t vocab, float largest, const Draw& draw, Cut* cut) {
  const Floats highest = floats(largest), steep = floats(float(1.4426950408889634 / draw.temperature));
  const Floats floor = floats(float(double(largest) + draw.temperature * std::log((1.0 - draw.top_p) / double(vocab))));
  const Ints lane = load_aligned(LANES);
  items.count = 0;
  double others = 0.0;
  for (int64_t from = 0; from < vocab; from += 1024) {
    Floats sums = zero();
    for (int64_t i = from; i < std::min(from + 1024, vocab); i += 16) {
      const Mask lanes = first_lanes(vocab - i);
      const Floats l = load_or(floats(-__builtin_inff()), lanes, logits + i);
      const Floats weights = exp2_negative<float>((l - highest) * steep);
      const Mask near = above(lanes, l, floor);
      sums = sums + (near ? multiply_where(near, weights, zero()) : weights);
      if (near) items.add(near, l, add(lane, ints(int32_t(i))));
    }
    others += sum(sums);
  }
  const double total = items.weigh(largest, draw.temperature) + others;
  Cut found;
  if (!reach(items, draw.top_p * total, CLOSE * total + CLOSE_32 * others, &found)) return false;
  *cut = found;
  return true;
}

// Returns false if the cut is too close to decide. Uses `items`.
inline bool find_cut(Items& items, const float* logits, int64_t vocab, float largest, const Draw& draw, Cut* cut) {
  items.reserve(vocab);
  const bool by_count = draw.top_k > 0 && draw.top_k < vocab;
  if (by_count) {
    const double number = fill(items, logits, vocab, largest, draw.temperature, true);
    if (double(draw.top_k) < number) {
      if (!reach(items, double(draw.top_k) - 0.5, 0.0, cut)) return false;  // counts are exact: never close
    }
  }
  if (draw.top_p < 1.0 && (cut->id >= 0 || !cut_likeliest(items, logits, vocab, largest, draw, cut))) {
    double total = fill(items, logits, vocab, largest, draw.temperature, false);
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
    if (!reach(items, draw.top_p * total, CLOSE * total, cut)) return false;
  }
  if (draw.min_p > 0.0) {
    auto weight = [&](float l) { return std::exp((double(l) - double(largest)) / draw.temperature); };
    float least = float(double(largest) + draw.temperature * std::log(draw.min_p));
    least = std::nextafterf(std::nextafterf(least, -__builtin_inff()), -__builtin_inff());
    while (weight(least) < draw.min_p) least = std::nextafterf(least, __builtin_inff());
    const float below = std::nextafterf(least, -__builtin_inff());
    const bool exact = least == largest;  // its weight is 1 in every arithmetic
    if (!exact && weight(least) - draw.min_p < CLOSE * draw.min_p) return false;
    if (draw.min_p - weight(below) < CLOSE * draw.min_p) return false;
    if (cut->logit <= below) *cut = Cut{below, -1};
  }
  return true;
}

}  // namespace baton
