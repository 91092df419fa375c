// Stands in for the header of CUDA: the type and the two conversions that the kernels use, rounding to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &wide, sizeof(result));
  return result;
}

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  if (x != x) return __nv_bfloat16{0x7fff};
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof(wide));
  wide += 0x7fff + ((wide >> 16) & 1);
  return __nv_bfloat16{static_cast<uint16_t>(wide >> 16)};
}
