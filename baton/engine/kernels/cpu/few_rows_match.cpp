// Checks whether attention of few queries, by vectors in the order of Intel's manual, has the bits of this CPU's tiles.
//
// The inputs are chosen so that another order changes nearly all results: sums cancel, so that only rounding errors
// remain. Some are subnormal, which tiles treat as zero.
#include "attention.h"

#include <algorithm>
#include <vector>

namespace baton {

bool few_rows_in_tiles = false;

#if BATON_LEVEL >= 3
namespace {

constexpr int64_t HEADS = 3, SIZE = 80, KNOWN = 150, BLOCK = 16, BLOCKS = 10;

// Random numbers of either sign, from 2^low to 2^(high + 1); 2^-127 stands for subnormal ones.
struct Random {
  uint64_t state = 1;

  uint32_t bits() { return uint32_t((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); }
  bf16 operator()(int low, int high) {
    const uint32_t exponent = uint32_t(127 + low) + bits() % uint32_t(high - low + 1);
    return bf16((bits() & 1) << 15 | exponent << 7 | (bits() & 127));
  }
};

bf16 minus(bf16 x) { return x ^ 0x8000; }

// Whether both paths give the same results, with random queries or with queries of 0 (so that all keys weigh the same),
// and with values from 2^low to 2^high.
bool agree(bool with_queries, int low, int high) {
  const AttentionShape shape = {HEADS, 1, SIZE, BLOCK, 0};
  const int64_t blocks[BLOCKS] = {3, 1, 4, 0, 5, 9, 2, 6, 8, 7};
  const Row rows[] = {{0, KNOWN - 2, 2, blocks}, {2, 70, 1, blocks}};
  const auto place = [&](int64_t position) { return (blocks[position / BLOCK] * BLOCK + position % BLOCK) * SIZE; };
  std::vector<bf16> queries(3 * HEADS * SIZE), keys(BLOCKS * BLOCK * SIZE), values(keys.size());
  Random random;
  for (size_t head = 0; with_queries && head < queries.size(); head += SIZE)
    for (int64_t e = 0; e < SIZE / 2; ++e) queries[head + e] = queries[head + SIZE - 1 - e] = random(-11, 11);
  for (int64_t position = 0; position < KNOWN; ++position)
    for (int64_t e = 0; e < SIZE / 2; ++e)
      keys[place(position) + SIZE - 1 - e] = minus(keys[place(position) + e] = random(-11, 11));
  for (int64_t position = 0; position < KNOWN / 2; ++position)
    for (int64_t e = 0; e < SIZE; ++e)
      values[place(KNOWN - 1 - position) + e] = minus(values[place(position) + e] = random(low, high));
  std::vector<bf16> found[2];
  for (const bool in_tiles : {false, true}) {
    found[in_tiles].resize(queries.size());
    few_rows_in_tiles = in_tiles;
    attend<bf16>(
        shape, rows, 2, queries.data(), HEADS * SIZE, {keys.data(), values.data(), false}, found[in_tiles].data(), HEADS * SIZE, 1);
  }
  // By value: the sign of a result that is flushed to zero may differ.
  for (auto& results : found) std::replace(results.begin(), results.end(), bf16(0x8000), bf16(0));
  return found[0] == found[1];
}

}  // namespace

bool few_rows_match() {
  const bool same = agree(true, -11, 11) && agree(false, -11, 11) && agree(true, -127, -120);
  few_rows_in_tiles = !same;
  return same;
}
#else
bool few_rows_match() { return true; }
#endif

}  // namespace baton
