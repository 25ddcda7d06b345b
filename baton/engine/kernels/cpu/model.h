// A decoder and one step of it, filled in by native.py (model.cpp).
#pragma once

#include "adapters.h"
#include "attention.h"
#include "gemm.h"

namespace baton {

struct Layer {
  const void* attention_norm;
  Linear qkv;
  const void *q_norm, *k_norm;  // of a head, or null
  Linear attention_out;
  const void* mlp_norm;
  Linear gate_up, down;  // gate and up alternate every 16 outputs
  void *keys, *values;   // the pool's [blocks, block_size, kv_heads, head_dim], in the type of x or in FP8
  int64_t window;
};

struct Model {
  int64_t hidden, heads, kv_heads, head_dim, block_size, num_layers;
  const float *cos, *sin;  // [positions, head_dim / 2]
  const void* embedding;   // [vocabulary, hidden]
  const void* final_norm;
  const Layer* layers;
  Linear head;
  float eps;
  int32_t is_bf16, threads, is_fp8;  // of x; of the pool
};

// Mirrored by ctypes (native.py). Heads [tokens, count, size], with strides between tokens and between heads.
struct Heads {
  const void* first;
  int64_t token, head, count;
};

// The layers of a module of attention that transformers implements; norms of heads are float32, or null.
struct AttentionLayers {
  Linear q, k, v, out;
  const float *q_norm, *k_norm;
  float q_eps, k_eps;
};

// T packed tokens in rows; x [T, hidden] is the residual stream. Logits [num_sampled, head.n] are computed at the packed
// indexes `sampled`. `adapters` are those of the rows that have one. With `keeps_x` x holds all tokens after the last layer;
// otherwise that layer is computed for sampled tokens only (SampledRows), unless there are adapters.
struct Step {
  int64_t num_tokens, num_rows, num_sampled;
  const int64_t *tokens, *sampled;
  const Row* rows;
  void* x;
  float* logits;
  const AdapterRows* adapters;
  int64_t num_adapters, keeps_x;
};

}  // namespace baton

// Computes layers [first, last) of a step's rows and their KV and, after the model's last layer, the requested logits.
// A step passes through all layers in order, in any number of calls; between them its x must not change. Returns the
// number of tokens of which layer last - 1 was computed whole.
extern "C" int64_t baton_forward(const baton::Model* model, const baton::Step* step, int64_t first, int64_t last);
