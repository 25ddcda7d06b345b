// Draws from processed logits (sampling.cpp).
#pragma once

#include <cstdint>

namespace baton {

// Packed by sampler.py.
struct Draw {
  double temperature, top_p, min_p;
  int64_t top_k;
  uint32_t key_low, key_high, output_index, choice;
};

constexpr int64_t UNDECIDED = -1;

// The draw's token from logits [vocab]; UNDECIDED if it is too close to decide, a logit is NaN, or, unless the draw is
// greedy, the largest logit is infinite or the temperature below 1e-6.
int64_t choose_token(const float* logits, int64_t vocab, const Draw& draw);

}  // namespace baton

// tokens[i] is the token of draws[i] from row i of logits; rows are `stride` floats apart.
extern "C" void baton_choose(
    const float* logits, int64_t stride, int64_t vocab, const baton::Draw* draws, int64_t count, int threads,
    int64_t* tokens);

// Sets the logits [vocab] of tokens whose bit is 0 to -inf; a byte has the bits of 8 tokens, lowest first.
extern "C" void baton_mask(float* logits, const uint8_t* bits, int64_t vocab);
