// Linear layers with packed weights: y = x · Wᵀ.
//
// Packing: W [n, k] becomes column groups of 32 outputs; in a group, for each 16 dwords of k, two consecutive tiles of
// 16 rows (dwords of k) by 16 outputs, 1 KiB each. So a group is one stream that is read front to back, and AMX or a
// vector product uses a tile as it is. Missing outputs and missing k are zeros.
//
// Weights in blocks (bf16 only): 32 values of k of an output have a scale and, with 4 bits, a minimum, and a weight is
// bf16(code * scale + minimum), rounded once to float32 and once to bf16. A tile of 4 bits is then 16 outputs' scales,
// minima and codes for one block; with 8 bits both tiles of a group are 32 scales, and for each four values of k the codes
// of 32 outputs, 128 more than they are. The products are those of the same weights in bf16, bit for bit; with
// `int8_activations` those of gemm_int8.h.
//
// Weights in MXFP4 (AVX2 and AVX-512): for each 32 of k a group has the exponents of 32 scales, one for each output, then
// for each k 16 bytes with the codes of outputs 0 to 15 in their lower halves and 16 to 31 in the upper ones. They are
// widened to float32, exactly, a few KiB at a time.
//
// Every output is summed over k in one order, for any number of rows: the bits of a row do not depend on the others.
#pragma once

#include "common.h"

namespace baton {

constexpr int64_t GROUP = 32;  // outputs

enum class Kind : int32_t {
  FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2,
  BLOCKS4 = 3,        // codes 0 to 15, scales and minima in float16
  BLOCKS4_WIDE = 4,   // the same with both in float32
  BLOCKS8 = 5,        // codes -128 to 127, scales in float16
  MXFP4 = 6,
};
constexpr int64_t BLOCK_WEIGHTS = 32;

inline bool in_blocks(Kind kind) { return kind == Kind::BLOCKS4 || kind == Kind::BLOCKS4_WIDE || kind == Kind::BLOCKS8; }

// Mirrored by ctypes (native.py). `weight` is packed; with INT8 each output has a `scale`.
struct Linear {
  const void* weight;
  const float* bias;   // [n] in the order of the packed outputs, or null
  const float* scale;  // likewise
  int64_t n, k;
  int32_t kind;
  int32_t int8_activations;  // rows are quantised, too (BLOCKS8, avx512_bf16 only)
};

enum class Into { STORE, ADD, SWIGLU, FLOAT };

// x [rows, ldx] (E, padded to whole tiles with any finite values); y depends on `Into`:
//   STORE   y [rows, ldy] = product          ADD    y += product
//   SWIGLU  outputs alternate 16 of gate, 16 of up; y [rows, n / 2] = silu(gate) * up
//   FLOAT   y is float32 for every E
template <class E>
void linear(const Linear& layer, const E* x, int64_t ldx, int64_t rows, void* y, int64_t ldy, Into into, int threads);

// How many linear layers were computed with `int8_activations`; -1: this level does not.
int64_t int8_linears();

// Packs weight [n, k] of W into [n_padded * k_padded] for rows of E; W is E, or int8 with the scales in the layer.
template <class E, class W>
void pack(const W* weight, int64_t n, int64_t k, W* packed);

// The bytes of one group's weights in MXFP4 for 32 of k.
constexpr int64_t MXFP4_BYTES = GROUP + BLOCK_WEIGHTS * GROUP / 2;

#if BATON_LEVEL <= 1
// Packs blocks [n, k / 32, 16], two codes a byte, the lower half first, and exponents of scales [n, k / 32].
void pack_mxfp4(const uint8_t* blocks, const uint8_t* scales, int64_t n, int64_t k, uint8_t* packed);
#else
// The bytes of packed weights in blocks; k is a whole number of blocks.
int64_t block_bytes(Kind kind, int64_t n, int64_t k);

// Packs codes [n, k], one a byte, and scales and minima [n, k / 32] for rows of bf16.
void pack_blocks(
    Kind kind, const uint8_t* codes, const float* scales, const float* minima, int64_t n, int64_t k, char* packed);
#endif

}  // namespace baton
