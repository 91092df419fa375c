// The kernels without intrinsics, for any processor; the compiler may use the vectors that every processor of its target has.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "lamb_cpu.h"

namespace lamb {
namespace scalar {

constexpr int WIDTH = 16;

struct Vector {
  float x[WIDTH];
};

template <typename F>
inline Vector each(F f) {
  Vector result;
  for (int i = 0; i < WIDTH; ++i) result.x[i] = f(i);
  return result;
}

inline Vector zero() { return Vector{}; }
inline Vector all(float a) { return each([&](int) { return a; }); }
inline Vector load(const float* from) {
  Vector result;
  std::memcpy(result.x, from, sizeof(result.x));
  return result;
}
inline void store(float* to, Vector a) { std::memcpy(to, a.x, sizeof(a.x)); }
inline void prefetch(uintptr_t) {}
inline Vector add(Vector a, Vector b) { return each([&](int i) { return a.x[i] + b.x[i]; }); }
inline Vector mul(Vector a, Vector b) { return each([&](int i) { return a.x[i] * b.x[i]; }); }
// One rounding, on every processor: a call into the library where there is no instruction for it, and slow there.
inline Vector fma(Vector a, Vector b, Vector c) { return each([&](int i) { return std::fma(a.x[i], b.x[i], c.x[i]); }); }
inline Vector div(Vector a, Vector b) { return each([&](int i) { return a.x[i] / b.x[i]; }); }
inline Vector sqrt(Vector a) { return each([&](int i) { return std::sqrt(a.x[i]); }); }
// As the instructions do: the second where either is a NaN.
inline Vector min(Vector a, Vector b) { return each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; }); }
inline void accumulate(double* sums, Vector a) {
  for (int i = 0; i < WIDTH; ++i) sums[i] += static_cast<double>(a.x[i]);
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// bf16 is the upper half of an fp32 number. Rounding to nearest even may carry into the exponent, which is right, up to infinity;
// a NaN must not take part, a carry would make it an infinity or zero.
inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// 5 bits of exponent (bias 15), 10 of fraction.
inline uint16_t to_float16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t size = bits & 0x7fffffff;
  if (size > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | ((size >> 13) & 0x3ff));
  if (size >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and more round to infinity
  if (size < 0x38800000) {
    // Below 2^-14 an fp16 number is a multiple of 2^-24, the spacing of fp32 numbers around 0.5: the addition rounds.
    const uint32_t shifted = bits_of(float_of(size) + 0.5f);
    return static_cast<uint16_t>(sign | (shifted - 0x3f000000));
  }
  const uint32_t rounded = size + 0xfff + ((size >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

inline float from_float16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 0x1f;
  const uint32_t fraction = half & 0x3ff;
  if (exponent == 0) {
    const float size = static_cast<float>(fraction) * 0x1p-24f;
    return float_of(sign | bits_of(size));
  }
  if (exponent == 0x1f) return float_of(sign | 0x7f800000 | (fraction << 13) | (fraction ? 0x400000 : 0));
  return float_of(sign | ((exponent + 112) << 23) | (fraction << 13));
}

template <int64_t TYPE>
inline Vector load_half(const uint16_t* from) {
  return each([&](int i) { return TYPE == FLOAT16 ? from_float16(from[i]) : float_of(static_cast<uint32_t>(from[i]) << 16); });
}

template <int64_t TYPE>
inline void store_half(uint16_t* to, Vector a) {
  for (int i = 0; i < WIDTH; ++i) to[i] = TYPE == FLOAT16 ? to_float16(a.x[i]) : to_bfloat16(a.x[i]);
}

#include "lamb_cpu_kernels.h"

}  // namespace scalar

const Kernels scalar_kernels = {scalar::widen,   scalar::narrow,     scalar::square_sum,
                                scalar::moments, scalar::apply_kept, scalar::apply};

}  // namespace lamb
