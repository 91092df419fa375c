// Stands in for the header of CUDA: the type and the two conversions that the kernels use, rounding to nearest, ties to even.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

struct __half {
  uint16_t bits;
};

inline float __half2float(__half x) {
  const int exponent = (x.bits >> 10) & 31;
  const int fraction = x.bits & 1023;
  float size;
  if (exponent == 31) {
    size = fraction != 0 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  } else {
    size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24) : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  }
  return (x.bits & 0x8000) != 0 ? -size : size;
}

inline __half __float2half_rn(float x) {
  const auto sign = static_cast<uint16_t>(std::signbit(x) ? 0x8000 : 0);
  const float size = std::fabs(x);
  if (size != size) return __half{static_cast<uint16_t>(sign | 0x7fff)};
  if (size >= 65520.0f) return __half{static_cast<uint16_t>(sign | 0x7c00)};
  // Counted in steps of the smallest subnormal, a number below 2^-14 is its own bit pattern; above, nearbyint rounds the fraction.
  int exponent = 0;
  std::frexp(size, &exponent);
  exponent = exponent < -13 ? -13 : exponent;
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(size, 11 - exponent)));
  return __half{static_cast<uint16_t>(sign | (steps + ((exponent + 13) << 10)))};
}
