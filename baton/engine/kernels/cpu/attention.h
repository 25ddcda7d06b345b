// Attention over the paged KV cache, for rows of any length.
//
// The query heads that share a KV head are columns of one matrix: 16 columns (token, head) make a query tile. Keys are
// processed in blocks of 64, aligned to absolute positions; for each block the scores [64 keys, 16 columns] are
// computed, then the running maximum, sum and output of each column are updated (online softmax: Milakov, Gimelshein
// 2018; Dao et al. 2022). Scores are stored keys by columns, so that maximum and sum need no shuffles.
//
// A column processes its blocks in one order, and a block in which it sees no key changes nothing (it multiplies by 1
// and adds 0). So its bits do not depend on the other columns of its tile, nor on the row it is computed in.
#pragma once

#include "common.h"

namespace baton {

constexpr int64_t KEYS = 64;  // in a block

// One row of a step, filled in by model_native.py: positions [start, start + length) of one sequence, packed tokens
// [first, first + length), and the ids of the sequence's KV blocks.
struct Row {
  int64_t first, start, length;
  const int64_t* blocks;
};

struct AttentionShape {
  int64_t heads, kv_heads, head_dim, block_size;
  int64_t window;  // 0: none
  float scale;     // of the scores; 0: head_dim ** -0.5
};

// Keys and values [blocks, block_size, kv_heads, head_dim], of the type of queries or in FP8.
struct Pool {
  const void *keys, *values;
  bool is_fp8;
};

// Whether, at level amx in bf16, rows with few queries are computed in tiles like longer ones, not by their own kernel.
extern bool few_rows_in_tiles;

// Computes some rows both ways and returns whether the bits are the same; if not, sets `few_rows_in_tiles`. Call it
// once, before the first step. True at other levels.
bool few_rows_match();

// queries: token t, head h at queries + t * query_stride + h * head_dim. The heads of token t are written contiguously to output + t * output_stride.
template <class E>
void attend(
    const AttentionShape& shape, const Row* rows, int64_t num_rows, const E* queries, int64_t query_stride,
    const Pool& pool, E* output, int64_t output_stride, int threads);

}  // namespace baton
