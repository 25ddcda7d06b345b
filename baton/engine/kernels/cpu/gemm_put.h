// Processing of the sums of a linear layer: scale, bias, and then the operation of Into.
#pragma once

#include "gemm.h"

namespace baton {
namespace {

// Processes a row's 32 sums of one group; `whole`: all 32 are outputs of the layer.
template <class E, Into INTO>
inline void put(const Linear& layer, bool whole, Floats left, Floats right, void* y, int64_t at, int64_t column) {
  const Mask lanes = whole ? Mask(0xffff) : first_lanes(layer.n - column);
  const Mask more = whole ? Mask(0xffff) : first_lanes(layer.n - column - 16);
  if (layer.scale) {
    left = left * load(layer.scale + column, lanes);
    right = right * load(layer.scale + column + 16, more);
  }
  if (layer.bias) {
    left = add(left, load(layer.bias + column, lanes));
    right = add(right, load(layer.bias + column + 16, more));
  }
  if constexpr (INTO == Into::SWIGLU) {
    store(static_cast<E*>(y) + at + column / 2, silu<E>(left) * right);
  } else if constexpr (INTO == Into::FLOAT) {
    store(static_cast<float*>(y) + at + column, left, lanes);
    store(static_cast<float*>(y) + at + column + 16, right, more);
  } else {
    E* to = static_cast<E*>(y) + at + column;
    if constexpr (INTO == Into::ADD) {
      left = add(left, load(to, lanes));
      right = add(right, load(to + 16, more));
    }
    store(to, left, lanes);
    store(to + 16, right, more);
  }
}

// The same for `rows` rows from `row` on, whose sums are in two tiles of 16 by 16.
template <class E, Into INTO>
void put_tiles(
    Linear layer, const float* left, const float* right, int64_t rows, void* y, int64_t ldy, int64_t row,
    int64_t group) {
  const bool whole = (group + 1) * GROUP <= layer.n;
  for (int64_t r = 0; r < rows; ++r)
    put<E, INTO>(
        layer, whole, load_aligned(left + r * 16), load_aligned(right + r * 16), y, (row + r) * ldy, group * GROUP);
}

template <class E, class... Arguments>
void put_tiles(Into into, Arguments... arguments) {
  switch (into) {
    case Into::STORE:
      return put_tiles<E, Into::STORE>(arguments...);
    case Into::ADD:
      return put_tiles<E, Into::ADD>(arguments...);
    case Into::SWIGLU:
      return put_tiles<E, Into::SWIGLU>(arguments...);
    case Into::FLOAT:
      return put_tiles<E, Into::FLOAT>(arguments...);
  }
}

}  // namespace
}  // namespace baton
