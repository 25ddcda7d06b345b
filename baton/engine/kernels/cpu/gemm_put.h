// Processing of the sums of a linear layer: scale, bias, and then the operation of Into.
#pragma once

#include "borrow.h"
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

// Product::take.
template <class E>
void take(const Product& product, const char* from, void* y, int64_t ldy, int64_t first, int64_t last) {
  const int64_t share = product.into == Into::SWIGLU ? 2 : 1, begin = first * GROUP / share;
  const int64_t count = std::min(last * GROUP, product.layer.n) / share - begin, width = product.per_unit * GROUP / share;
  for (int64_t r = 0; r < product.rows; ++r) {
    if (product.into == Into::ADD) {
      const float* sums = reinterpret_cast<const float*>(from) + r * width;
      E* to = static_cast<E*>(y) + r * ldy + begin;
      for (int64_t i = 0; i < count; i += 16) {
        const Mask lanes = first_lanes(count - i);
        store(to + i, add(load(sums + i, lanes), load(to + i, lanes)), lanes);
      }
    } else {
      const int64_t size = product.into == Into::FLOAT ? 4 : sizeof(E);
      std::memcpy(static_cast<char*>(y) + (r * ldy + begin) * size, from + r * width * size, count * size);
    }
  }
}

// Computes a linear layer in units of up to `most` groups, and helps itself to idle cores (borrow.h). `compute` is
// Product::compute.
template <class E, class X>
void in_units(
    const Linear& layer, const X* x, int64_t ldx, int64_t rows, void* y, int64_t ldy, Into into, int threads, int64_t most,
    decltype(Product::compute) compute) {
  const int64_t groups = round_up(layer.n, GROUP) / GROUP;
  const int64_t all = threads + helpers();
  const int64_t per_unit = all == 1 ? most : std::clamp<int64_t>(groups / (4 * all), 1, most);
  const Product product{layer, ldx, rows, groups, per_unit, into, ldx * int64_t(sizeof(X)), sizeof(E), compute, take<E>};
  if (compute_with_helpers(product, x, y, ldy, threads)) return;
  parallel(product.units(), threads, [&](int64_t unit) {
    compute(product, x, y, ldy, into, unit * per_unit, std::min((unit + 1) * per_unit, groups));
  });
}

}  // namespace
}  // namespace baton
