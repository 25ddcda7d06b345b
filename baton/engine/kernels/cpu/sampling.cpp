// The token of one draw (defined in sampler.py), found without computing noise for tokens that cannot win.
//
// sampler.py decides in float64 with numpy's functions; this file uses other ones, so a comparison that is closer than
// their possible error is left to sampler.py: the draw is undecided. All other draws are decided here, with the same
// result as numpy's.
#include "sampling.h"

#include <cmath>
#include <vector>

#include "common.h"
#include "survivors.h"

namespace baton {

namespace {

constexpr int64_t SPARSE = 4;  // if at most 1 / SPARSE of the tokens survive, noise for them alone is cheaper
alignas(64) constexpr int32_t BY_FOURS[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

thread_local Items items;

// words[w] lane i: word w of the four of counter block[i], 32 random bits each.
void philox(Ints block, const Draw& draw, Ints words[4]) {
  Ints c0 = block, c1 = ints(int32_t(draw.output_index)), c2 = ints(int32_t(draw.choice)), c3 = ints(0);
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
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// words[j] lane i: the bits of token first + 16 * j + i; `first` is a multiple of 64.
void noise_of_64(int64_t first, const Draw& draw, Ints words[4]) {
  Ints w[4];
  philox(add(load_aligned(BY_FOURS), ints(int32_t(first / 4))), draw, w);
  const Ints a = zip_low(w[0], w[1]), b = zip_high(w[0], w[1]), c = zip_low(w[2], w[3]), d = zip_high(w[2], w[3]);
  words[0] = zip_low_pairs(a, c);
  words[1] = zip_high_pairs(a, c);
  words[2] = zip_low_pairs(b, d);
  words[3] = zip_high_pairs(b, d);
}

// The random bits of any 16 tokens.
Ints noise_of(const int32_t* ids, const Draw& draw) {
  alignas(64) int32_t blocks[16], bits[16], words[4][16];
  for (int i = 0; i < 16; ++i) blocks[i] = ids[i] >> 2;
  Ints w[4];
  philox(load_aligned(blocks), draw, w);
  for (int j = 0; j < 4; ++j) store_aligned(words[j], w[j]);
  for (int i = 0; i < 16; ++i) bits[i] = words[ids[i] & 3][i];
  return load_aligned(bits);
}

double noised(float logit, uint32_t word, double temperature) {
  const double v = (double(word) + 0.5) * 0x1p-32;
  return double(logit) + temperature * -std::log(-std::log1p(-v));
}

// Tracks the largest noised logit so far, and how many are too close to it to decide.
class Race {
 public:
  explicit Race(double temperature)
      : temperature_(temperature), steep_(floats(float(1.4426950408889634 / temperature))) {}

  void enter(Mask alive, Floats l, Ints ids, Ints words) {
    const Floats v = from_unsigned(words) * floats(0x1p-32f);
    Mask open = may_win(alive, l, v);
    if (!open) return;
    alignas(64) float logit[16];
    alignas(64) uint32_t id[16], bits[16];
    store_aligned(logit, l);
    store_aligned(id, ids);
    store_aligned(bits, words);
    while (open) {
      const int i = __builtin_ctz(open);
      open &= Mask(open - 1);
      const double value = noised(logit[i], bits[i], temperature_);
      if (value < best_ - slack()) continue;
      if (value > best_ + slack()) close_ = 0;  // none of the earlier ones is close to this one
      ++close_;
      if (value <= best_) continue;
      best_ = value;
      winner_ = id[i];
      bar_ = std::nextafterf(float(best_), -__builtin_inff());
      open = may_win(open, l, v);
    }
  }

  int64_t winner() const { return close_ == 1 ? winner_ : UNDECIDED; }

 private:
  double slack() const { return CLOSE * (1.0 + std::abs(best_)); }

  // A token of logit l beats a value B only if its noise is at least (B - l) / T, which needs v <= e^((l - B) / T).
  Mask may_win(Mask alive, Floats l, Floats v) const {
    const Floats behind = (l - floats(bar_)) * steep_;
    return up_to(alive, v, exp2_negative<float>(min(behind, zero())) * floats(1.001f));
  }

  const double temperature_;
  const Floats steep_;
  double best_ = -__builtin_inf();
  float bar_ = -__builtin_inff();
  int64_t winner_ = UNDECIDED;
  int close_ = 0;
};

// The largest logit, or NaN if any logit is NaN.
float largest_of(const float* logits, int64_t vocab) {
  Floats largest = floats(-__builtin_inff());
  Mask unordered = 0;
  for (int64_t i = 0; i < vocab; i += 16) {
    const Floats l = load_or(largest, first_lanes(vocab - i), logits + i);
    unordered |= is_nan(l);
    largest = max(largest, l);
  }
  return unordered ? __builtin_nanf("") : most(largest);
}

int64_t first_of(float wanted, const float* logits, int64_t vocab) {
  for (int64_t i = 0; i < vocab; i += 16) {
    const Mask lanes = first_lanes(vocab - i);
    const Mask found = equal(lanes, load(logits + i, lanes), floats(wanted));
    if (found) return i + __builtin_ctz(found);
  }
  return UNDECIDED;
}

// Collects the survivors as items without weights.
void gather(const float* logits, int64_t vocab, const Cut& cut) {
  const Ints lane = load_aligned(LANES);
  items.count = 0;
  for (int64_t i = 0; i < vocab; i += 16) {
    const Mask lanes = first_lanes(vocab - i);
    const Floats l = load(logits + i, lanes);
    const Ints ids = add(lane, ints(int32_t(i)));
    const Mask alive = cut.survivors(lanes, l, ids);
    if (alive) items.add(alive, l, ids);
  }
}

}  // namespace

int64_t choose_token(const float* logits, int64_t vocab, const Draw& draw) {
  const float largest = largest_of(logits, vocab);
  if (draw.temperature == 0.0) return first_of(largest, logits, vocab);
  Cut cut;
  if (!std::isfinite(largest) || draw.temperature < 1e-6) return UNDECIDED;
  if (!find_cut(items, logits, vocab, largest, draw, &cut)) return UNDECIDED;
  Race race(draw.temperature);
  if (cut.cuts()) gather(logits, vocab, cut);
  if (cut.cuts() && items.count <= vocab / SPARSE) {
    for (int64_t i = 0; i < items.count; i += 16) {
      const Ints words = noise_of(&items.id[i], draw);
      race.enter(first_lanes(items.count - i), load_whole(&items.logit[i]), load_whole(&items.id[i]), words);
    }
    return race.winner();
  }
  const Ints lane = load_aligned(LANES);
  for (int64_t first = 0; first < vocab; first += 64) {
    Ints words[4];
    noise_of_64(first, draw, words);
    for (int j = 0; j < 4; ++j) {
      const Mask lanes = first_lanes(vocab - first - 16 * j);
      const Floats l = load(logits + first + 16 * j, lanes);
      const Ints ids = add(lane, ints(int32_t(first + 16 * j)));
      race.enter(cut.survivors(lanes, l, ids), l, ids, words[j]);
    }
  }
  return race.winner();
}

}  // namespace baton

using namespace baton;

extern "C" void baton_choose(
    const float* logits, int64_t stride, int64_t vocab, const Draw* draws, int64_t count, int threads,
    int64_t* tokens) {
  parallel(count, threads, [&](int64_t i) { tokens[i] = choose_token(logits + i * stride, vocab, draws[i]); });
}

extern "C" void baton_mask(float* logits, const uint8_t* bits, int64_t vocab) {
  const Floats out = floats(-INFINITY);
  for (int64_t first = 0; first < vocab; first += 16) {
    const uint8_t* eight = bits + first / 8;
    const int allowed = eight[0] | (vocab - first > 8 ? eight[1] << 8 : 0);
    store(logits + first, out, Mask(first_lanes(vocab - first) & ~allowed));
  }
}
