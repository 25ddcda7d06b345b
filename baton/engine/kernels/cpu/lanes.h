// Vectors of 16 lanes, in one register of AVX-512 or two of AVX2, under the same names: kernels that need no more than
// these are written once.
//
//   Floats, Ints   16 lanes of 32 bits        Doubles   8 lanes        Mask   a bit for each of 16 lanes
//
// Loads with a mask read nothing outside it and give zeros there; stores write nothing outside it. Floats and Doubles
// have + - * /. What rounds otherwise at one level than at the other is said where it is declared (lanes_avx2.h).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace baton {

using bf16 = uint16_t;

}  // namespace baton

#if BATON_LEVEL >= 1
#include "lanes_avx512.h"
#else
#include "lanes_avx2.h"
#endif
