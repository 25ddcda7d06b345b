// A decoder's step: norms, rotary embedding, KV store, order of operations; the C interface that native.py calls.
//
// Structs are mirrored by ctypes field by field. The caller owns all pointers, which outlive the call. Functions that
// may fail return 0 for success. Input is not checked here: native.py and batch.py do that.
#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "borrow.h"
#include "fp8.h"
#include "model.h"
#include "sampled_rows.h"

namespace baton {

namespace {

constexpr int64_t ADAPTED_TOGETHER = 96;  // tokens with adapters whose sums of gate and up stay in L2

thread_local Scratch step_memory;

// to = from / rms(from) * weight, then zeros up to `padded`.
template <class E, class W>
void rms_norm(const E* from, const W* weight, int64_t size, float eps, E* to, int64_t padded) {
  Floats squares[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0; i < size; i += 16) {
    const Floats x = load(from + i, first_lanes(size - i));
    squares[i / 16 % 4] = fma(x, x, squares[i / 16 % 4]);
  }
  const float total = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
  const Floats factor = floats(1.0f / __builtin_sqrtf(total / float(size) + eps));
  for (int64_t i = 0; i < padded; i += 16) {
    const Mask lanes = first_lanes(size - i);
    const Floats x = multiply(multiply(load(from + i, lanes), factor), load(weight + i, lanes));
    store(to + i, x, first_lanes(padded - i));
  }
}

// The same for rows [rows, size], `y` likewise.
template <class E>
void rms_norms(const E* x, const float* weight, int64_t rows, int64_t size, float eps, E* y, int threads) {
  constexpr int64_t CHUNK = 32;
  parallel((rows + CHUNK - 1) / CHUNK, threads, [&](int64_t unit) {
    for (int64_t row = unit * CHUNK; row < std::min(rows, (unit + 1) * CHUNK); ++row)
      rms_norm(x + row * size, weight, size, eps, y + row * size, size);
  });
}

// Rotates a head of `size` elements by the angles of a position, in "rotate half" order.
template <class E>
void rotate(const E* from, E* to, const float* cos, const float* sin, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const Mask lanes = first_lanes(half - i);
    const Floats low = load(from + i, lanes), high = load(from + half + i, lanes);
    const Floats c = load(cos + i, lanes), s = load(sin + i, lanes);
    store(to + i, fnma(high, s, low * c), lanes);
    store(to + half + i, fma(low, s, high * c), lanes);
  }
}

template <class E>
struct Computation {
  const Model& m;
  const Step& s;
  int64_t width, hidden_width, heads_width;  // elements of a row: qkv; hidden and heads * head_dim, padded to tiles

  Computation(const Model& model, const Step& step) : m(model), s(step) {
    width = (m.heads + 2 * m.kv_heads) * m.head_dim;
    hidden_width = padded(m.hidden);
    heads_width = padded(m.heads * m.head_dim);
  }

  static int64_t padded(int64_t elements) { return padded_dwords<E>(elements) * PER_DWORD<E>; }

  // Calls work(token) for tokens [first, last), on several threads if there are many.
  template <class Work>
  void each_token(int64_t first, int64_t last, Work work) const {
    const int64_t chunk = 32;
    parallel((last - first + chunk - 1) / chunk, m.threads, [&](int64_t unit) {
      for (int64_t t = first + unit * chunk; t < std::min(last, first + (unit + 1) * chunk); ++t) work(t);
    });
  }

  template <class Work>
  void each_token(Work work) const {
    each_token(0, s.num_tokens, work);
  }

  void embed() const {
    const E* table = static_cast<const E*>(m.embedding);
    for (int64_t t = 0; t < s.num_tokens; ++t)
      std::memcpy(static_cast<E*>(s.x) + t * m.hidden, table + s.tokens[t] * m.hidden, m.hidden * sizeof(E));
  }

  // x += attention(norm(x)); with `partial` [T, hidden], writes the summand there and leaves x unchanged.
  void attention(const Layer& layer, E* partial) const { attend_projected(layer, project(layer), partial); }

  // Returns queries, keys and values [T, width], rotated, in memory that holds [T, heads_width] more behind them; keys and
  // values are in the pool.
  E* project(const Layer& layer) const {
    const int64_t tokens = s.num_tokens;
    E* normed = reinterpret_cast<E*>(step_memory.get((hidden_width + width + heads_width) * tokens * sizeof(E)));
    E* qkv = normed + hidden_width * tokens;
    norm_all(layer.attention_norm, normed);
    linear<E>(layer.qkv, normed, hidden_width, tokens, qkv, width, Into::STORE, m.threads);
    if (s.num_adapters)
      add_adapters<E>(of_tokens(layer, &AdapterLayer::qkv), normed, hidden_width, hidden_width, qkv, width, m.threads);
    rotate_and_store(layer, qkv);
    return qkv;
  }

  void attend_projected(const Layer& layer, E* qkv, E* partial) const {
    E* attended = qkv + width * s.num_tokens;
    clear_padding(attended, m.heads * m.head_dim, heads_width);
    const AttentionShape shape{m.heads, m.kv_heads, m.head_dim, m.block_size, layer.window};
    const Pool pool{layer.keys, layer.values, m.is_fp8 != 0};
    attend<E>(shape, s.rows, s.num_rows, qkv, width, pool, attended, heads_width, m.threads);
    put(layer, &AdapterLayer::attention_out, layer.attention_out, attended, heads_width, partial);
  }

  void mlp(const Layer& layer, E* partial) const {
    const int64_t tokens = s.num_tokens, inner = layer.gate_up.n / 2, inner_width = padded(inner);
    const int64_t together = adapted(layer, &AdapterLayer::gate_up) ? std::min(tokens, ADAPTED_TOGETHER) : 0;
    const int64_t sums = together * layer.gate_up.n * sizeof(float);
    char* memory = step_memory.get(sums + (hidden_width + inner_width) * tokens * sizeof(E));
    E* normed = reinterpret_cast<E*>(memory + sums);
    E* active = normed + hidden_width * tokens;
    norm_all(layer.mlp_norm, normed);
    clear_padding(active, inner, inner_width);
    if (together) {
      for (int64_t first = 0; first < tokens; first += together)
        adapted_swiglu(layer, first, std::min(first + together, tokens), normed, active, reinterpret_cast<float*>(memory));
    } else {
      linear<E>(layer.gate_up, normed, hidden_width, tokens, active, inner_width, Into::SWIGLU, m.threads);
    }
    put(layer, &AdapterLayer::down, layer.down, active, inner_width, partial);
  }

  void head() const {
    E* normed = reinterpret_cast<E*>(step_memory.get(hidden_width * s.num_sampled * sizeof(E)));
    for (int64_t i = 0; i < s.num_sampled; ++i) {
      const E* x = static_cast<const E*>(s.x) + s.sampled[i] * m.hidden;
      rms_norm(x, static_cast<const E*>(m.final_norm), m.hidden, m.eps, normed + i * hidden_width, hidden_width);
    }
    linear<E>(m.head, normed, hidden_width, s.num_sampled, s.logits, m.head.n, Into::FLOAT, m.threads);
  }

 private:
  // SwiGLU of tokens [first, last), some with an adapter, in two passes over `sums` [last - first, gate_up.n].
  void adapted_swiglu(
      const Layer& layer, int64_t first, int64_t last, const E* normed, E* active, float* sums) const {
    const int64_t width = layer.gate_up.n, inner_width = padded(width / 2);
    normed += first * hidden_width;
    linear<E>(layer.gate_up, normed, hidden_width, last - first, sums, width, Into::FLOAT, m.threads);
    add_adapters<E>(
        of_tokens(layer, &AdapterLayer::gate_up, first, last), normed, hidden_width, hidden_width, sums, width, m.threads);
    each_token(first, last, [&](int64_t t) {  // the operations of Into::SWIGLU
      const float* from = sums + (t - first) * width;
      for (int64_t i = 0; i < width / 2; i += 16)
        store(active + t * inner_width + i, silu<E>(load(from + 2 * i)) * load(from + 2 * i + 16));
    });
  }

  void norm_all(const void* weight, E* to) const {
    each_token([&](int64_t t) {
      const E* x = static_cast<const E*>(s.x) + t * m.hidden;
      rms_norm(x, static_cast<const E*>(weight), m.hidden, m.eps, to + t * hidden_width, hidden_width);
    });
  }

  void clear_padding(E* rows, int64_t used, int64_t all) const {
    if (used == all) return;
    for (int64_t t = 0; t < s.num_tokens; ++t) std::memset(rows + t * all + used, 0, (all - used) * sizeof(E));
  }

  void put(
      const Layer& layer, AdapterLinear AdapterLayer::*which, const Linear& part, const E* from, int64_t from_width,
      E* partial) const {
    E* to = partial ? partial : static_cast<E*>(s.x);
    linear<E>(part, from, from_width, s.num_tokens, to, m.hidden, partial ? Into::STORE : Into::ADD, m.threads);
    if (s.num_adapters)
      add_adapters<E>(of_tokens(layer, which), from, from_width, from_width, to, m.hidden, m.threads);
  }

  AdapterTokens of_tokens(const Layer& layer, AdapterLinear AdapterLayer::*which) const {
    return of_tokens(layer, which, 0, s.num_tokens);
  }

  AdapterTokens of_tokens(
      const Layer& layer, AdapterLinear AdapterLayer::*which, int64_t first, int64_t last) const {
    return AdapterTokens{s.adapters, s.num_adapters, &layer - m.layers, which, first, last};
  }

  bool adapted(const Layer& layer, AdapterLinear AdapterLayer::*which) const {
    for (int64_t i = 0; i < s.num_adapters; ++i)
      if ((s.adapters[i].layers[&layer - m.layers].*which).ranks) return true;
    return false;
  }

  // Norms (if the model has norms) and rotates queries in place and keys into the pool; copies values to the pool.
  void rotate_and_store(const Layer& layer, E* qkv) const {
    static thread_local std::vector<int64_t> positions, slots;
    positions.resize(s.num_tokens);
    slots.resize(s.num_tokens);
    for (int64_t r = 0; r < s.num_rows; ++r)
      for (int64_t i = 0; i < s.rows[r].length; ++i) {
        const int64_t position = s.rows[r].start + i;
        positions[s.rows[r].first + i] = position;
        slots[s.rows[r].first + i] = s.rows[r].blocks[position / m.block_size] * m.block_size + position % m.block_size;
      }
    const int64_t size = m.head_dim, stored = m.kv_heads * size;
    const int64_t *position = positions.data(), *slot = slots.data();
    each_token([&](int64_t t) {
      E* heads = qkv + t * width;
      const float *cos = m.cos + position[t] * (size / 2), *sin = m.sin + position[t] * (size / 2);
      for (int64_t h = 0; h < m.heads + m.kv_heads; ++h) {
        E* head = heads + h * size;
        const void* weight = h < m.heads ? layer.q_norm : layer.k_norm;
        if (weight) norm_head(head, static_cast<const E*>(weight));
        rotate(head, head, cos, sin, size);
      }
      const E* keys = heads + m.heads * size;
      put_in_pool(layer.keys, slot[t] * stored, keys, stored);
      put_in_pool(layer.values, slot[t] * stored, keys + stored, stored);
    });
  }

  void put_in_pool(void* pool, int64_t at, const E* from, int64_t count) const {
    if (m.is_fp8)
      narrow(from, count, static_cast<fp8*>(pool) + at);
    else
      std::memcpy(static_cast<E*>(pool) + at, from, count * sizeof(E));
  }

  void norm_head(E* head, const E* weight) const {
    alignas(64) E normed[1024];
    rms_norm(head, weight, m.head_dim, m.eps, normed, round_up(m.head_dim, 16));
    std::memcpy(head, normed, m.head_dim * sizeof(E));
  }
};

// to [tokens, heads, size] = heads * cos + (-upper half, lower half) * sin, for cos and sin [tokens, size].
template <class E>
void rotate_all(const Heads& heads, const void* cosines, const void* sines, int64_t tokens, int64_t size, void* rotated) {
  const E *cos = static_cast<const E*>(cosines), *sin = static_cast<const E*>(sines);
  E* to = static_cast<E*>(rotated);
  const int64_t half = size / 2;
  for (int64_t t = 0; t < tokens; ++t, cos += size, sin += size)
    for (int64_t h = 0; h < heads.count; ++h, to += size) {
      const E* from = static_cast<const E*>(heads.first) + t * heads.token + h * heads.head;
      for (int64_t i = 0; i < half; i += 16) {
        const Mask lanes = first_lanes(half - i);
        const Floats low = load(from + i, lanes), high = load(from + half + i, lanes);
        store(to + i, fnma(high, load(sin + i, lanes), low * load(cos + i, lanes)), lanes);
        store(to + half + i, fma(low, load(sin + half + i, lanes), high * load(cos + half + i, lanes)), lanes);
      }
    }
}

// Writes heads [tokens, heads, size] into slots [tokens] of a pool [slots, heads * size].
template <class E>
void store_all(const Heads& heads, const int64_t* slots, int64_t tokens, int64_t size, void* pool, bool is_fp8) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads.count; ++h) {
      const E* from = static_cast<const E*>(heads.first) + t * heads.token + h * heads.head;
      const int64_t at = (slots[t] * heads.count + h) * size;
      if (is_fp8)
        narrow(from, size, static_cast<fp8*>(pool) + at);
      else
        std::memcpy(static_cast<E*>(pool) + at, from, size * sizeof(E));
    }
}

// y [tokens, out.n] = out(attention(rotated q(x), pool)), after keys and values of the first `stored` tokens are in their
// slots; x [tokens, ldx] as in linear(), cos and sin as in rotate_all.
template <class E>
void attention_layer(
    const AttentionLayers& layers, const AttentionShape& shape, const Row* rows, int64_t num_rows, const E* x, int64_t ldx,
    int64_t tokens, const void* cos, const void* sin, const int64_t* slots, int64_t stored, void* keys, void* values,
    bool is_fp8, E* y, int threads) {
  const int64_t size = shape.head_dim, width = shape.heads * size, kv_width = shape.kv_heads * size;
  const int64_t padded = padded_dwords<E>(width) * PER_DWORD<E>;
  E* q = reinterpret_cast<E*>(step_memory.get((width + 2 * kv_width + padded) * tokens * sizeof(E)));
  E *k = q + width * tokens, *v = k + kv_width * tokens, *attended = v + kv_width * tokens;
  linear<E>(layers.q, x, ldx, tokens, q, width, Into::STORE, threads);
  linear<E>(layers.k, x, ldx, tokens, k, kv_width, Into::STORE, threads);
  linear<E>(layers.v, x, ldx, tokens, v, kv_width, Into::STORE, threads);
  if (layers.q_norm) rms_norms(q, layers.q_norm, tokens * shape.heads, size, layers.q_eps, q, threads);
  if (layers.k_norm) rms_norms(k, layers.k_norm, tokens * shape.kv_heads, size, layers.k_eps, k, threads);
  rotate_all<E>(Heads{q, width, size, shape.heads}, cos, sin, tokens, size, q);
  rotate_all<E>(Heads{k, kv_width, size, shape.kv_heads}, cos, sin, tokens, size, k);
  store_all<E>(Heads{k, kv_width, size, shape.kv_heads}, slots, stored, size, keys, is_fp8);
  store_all<E>(Heads{v, kv_width, size, shape.kv_heads}, slots, stored, size, values, is_fp8);
  if (padded != width)
    for (int64_t t = 0; t < tokens; ++t) std::memset(attended + t * padded + width, 0, (padded - width) * sizeof(E));
  attend<E>(shape, rows, num_rows, q, width, Pool{keys, values, is_fp8}, attended, padded, threads);
  linear<E>(layers.out, attended, padded, tokens, y, layers.out.n, Into::STORE, threads);
}

// The last layer, of which only rows from their first sampled token on are computed once all have keys and values; x then
// begins with these. Returns how many tokens these are.
template <class E>
int64_t last_layer(const Model& model, const Step& step) {
  const Layer& layer = model.layers[model.num_layers - 1];
  const Computation<E> whole(model, step);
  E* qkv = whole.project(layer);
  const SampledRows kept(step);
  const Step sampled = kept.of(step);
  if (sampled.num_tokens == 0) return 0;
  kept.move_to_front(static_cast<E*>(step.x), model.hidden);
  kept.move_to_front(qkv, whole.width);
  const Computation<E> compute(model, sampled);
  compute.attend_projected(layer, qkv, nullptr);
  compute.mlp(layer, nullptr);
  compute.head();
  return sampled.num_tokens;
}

// Returns the number of tokens of which layer last - 1 was computed whole.
template <class E>
int64_t forward(const Model& model, const Step& step, int64_t first, int64_t last) {
  const Borrowing borrowing;
  const Computation<E> compute(model, step);
  const bool shortened = last == model.num_layers && first < last && !step.keeps_x && !step.num_adapters;
  if (first == 0) compute.embed();
  for (int64_t i = first; i < last - shortened; ++i) {
    compute.attention(model.layers[i], nullptr);
    compute.mlp(model.layers[i], nullptr);
  }
  if (shortened) return last_layer<E>(model, step);
  if (last == model.num_layers && step.num_sampled > 0) compute.head();
  return step.num_tokens;
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

int baton_level() { return BATON_LEVEL; }

// Requests AMX tiles from the system, which a process has to do once.
int baton_init() {
#if BATON_LEVEL >= 3
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return int(syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA));
#else
  return 0;
#endif
}

int baton_few_rows_match() { return few_rows_match(); }

void baton_pack(int is_bf16, int is_int8, const void* weight, int64_t n, int64_t k, void* packed) {
  BATON_BY_TYPE(
      is_bf16, is_int8 ? pack<E>(static_cast<const int8_t*>(weight), n, k, static_cast<int8_t*>(packed))
                       : pack<E>(static_cast<const E*>(weight), n, k, static_cast<E*>(packed)));
}

// Returns the bytes of weights in blocks (gemm.h), or -1 if this level does not compute them.
int64_t baton_block_bytes(int kind, int64_t n, int64_t k) {
#if BATON_LEVEL >= 2
  return Kind(kind) == Kind::MXFP4 ? -1 : block_bytes(Kind(kind), n, k);
#else
  return Kind(kind) == Kind::MXFP4 ? round_up(n, GROUP) / GROUP * (k / BLOCK_WEIGHTS) * MXFP4_BYTES : -1;
#endif
}

int64_t baton_int8_linears() { return int8_linears(); }

void baton_pack_mxfp4(const uint8_t* blocks, const uint8_t* scales, int64_t n, int64_t k, void* packed) {
#if BATON_LEVEL <= 1
  pack_mxfp4(blocks, scales, n, k, static_cast<uint8_t*>(packed));
#endif
}

void baton_pack_blocks(
    int kind, const uint8_t* codes, const float* scales, const float* minima, int64_t n, int64_t k, void* packed) {
#if BATON_LEVEL >= 2
  pack_blocks(Kind(kind), codes, scales, minima, n, k, static_cast<char*>(packed));
#endif
}

int64_t baton_forward(const Model* model, const Step* step, int64_t first, int64_t last) {
  BATON_BY_TYPE(model->is_bf16, return forward<E>(*model, *step, first, last));
}

// One half of layer `index` on one of several ranks: partial [T, hidden] is this rank's summand of the update of x.
void baton_attention(const Model* model, int64_t index, const Step* step, void* partial) {
  BATON_BY_TYPE(
      model->is_bf16, Computation<E>(*model, *step).attention(model->layers[index], static_cast<E*>(partial)));
}

void baton_mlp(const Model* model, int64_t index, const Step* step, void* partial) {
  BATON_BY_TYPE(model->is_bf16, Computation<E>(*model, *step).mlp(model->layers[index], static_cast<E*>(partial)));
}

void baton_head(const Model* model, const Step* step) {
  BATON_BY_TYPE(model->is_bf16, Computation<E>(*model, *step).head());
}

// Single operations, for models that this file does not compute, and for tests.
void baton_attend(
    int is_bf16, int is_fp8, const AttentionShape* shape, const Row* rows, int64_t num_rows, const void* queries, int64_t stride,
    const void* keys, const void* values, void* output, int64_t output_stride, int threads) {
  const Pool pool{keys, values, is_fp8 != 0};
  BATON_BY_TYPE(
      is_bf16, attend<E>(
                   *shape, rows, num_rows, static_cast<const E*>(queries), stride, pool, static_cast<E*>(output),
                   output_stride, threads));
}

void baton_fp8(int is_bf16, const void* numbers, int64_t count, void* codes, void* widened) {
  fp8* to = static_cast<fp8*>(codes);
  BATON_BY_TYPE(is_bf16, narrow(static_cast<const E*>(numbers), count, to); widen(to, count, static_cast<E*>(widened)));
}

// x and y [rows, size]; `weight` is float32 for both types of x.
void baton_rms_norm(
    int is_bf16, const void* x, const float* weight, int64_t rows, int64_t size, float eps, void* y, int threads) {
  BATON_BY_TYPE(
      is_bf16, rms_norms(static_cast<const E*>(x), weight, rows, size, eps, static_cast<E*>(y), threads));
}

// Queries and keys of the same tokens.
void baton_rotate(
    int is_bf16, const Heads* queries, const Heads* keys, const void* cos, const void* sin, int64_t tokens, int64_t size,
    void* rotated_queries, void* rotated_keys) {
  BATON_BY_TYPE(is_bf16, rotate_all<E>(*queries, cos, sin, tokens, size, rotated_queries));
  BATON_BY_TYPE(is_bf16, rotate_all<E>(*keys, cos, sin, tokens, size, rotated_keys));
}

// Keys and values of the same tokens.
void baton_store(
    int is_bf16, int is_fp8, const Heads* keys, const Heads* values, const int64_t* slots, int64_t tokens, int64_t key_size,
    int64_t value_size, void* key_pool, void* value_pool) {
  BATON_BY_TYPE(is_bf16, store_all<E>(*keys, slots, tokens, key_size, key_pool, is_fp8));
  BATON_BY_TYPE(is_bf16, store_all<E>(*values, slots, tokens, value_size, value_pool, is_fp8));
}

void baton_attention_layer(
    int is_bf16, int is_fp8, const AttentionLayers* layers, const AttentionShape* shape, const Row* rows, int64_t num_rows,
    const void* x, int64_t width, int64_t tokens, const void* cos, const void* sin, const int64_t* slots, int64_t stored,
    void* keys, void* values, void* y, int threads) {
  const Borrowing borrowing;
  BATON_BY_TYPE(
      is_bf16, attention_layer<E>(
                   *layers, *shape, rows, num_rows, static_cast<const E*>(x), width, tokens, cos, sin, slots, stored,
                   keys, values, is_fp8 != 0, static_cast<E*>(y), threads));
}

void baton_linear(
    int is_bf16, const Linear* layer, const void* x, int64_t width, int64_t rows, void* y, int64_t y_width, int into,
    int threads) {
  const Borrowing borrowing;
  BATON_BY_TYPE(is_bf16, linear<E>(*layer, static_cast<const E*>(x), width, rows, y, y_width, Into(into), threads));
}

}  // extern "C"
