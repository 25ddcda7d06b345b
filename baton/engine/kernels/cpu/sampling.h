// One draw from processed logits (sampling.cpp).
#pragma once

#include <cstdint>

namespace baton {

// Mirrored by ctypes (native.py).
struct Draw {
  double temperature, top_p, min_p;
  int64_t top_k;
  uint32_t key_low, key_high, output_index, choice;
};

}  // namespace baton

// Ids that may be the draw's token, at most `most`; their number, nearly always 1. Negative: undecided.
extern "C" int64_t baton_choose(
    const float* logits, int64_t vocab, const baton::Draw* draw, int64_t* ids, int64_t most);
