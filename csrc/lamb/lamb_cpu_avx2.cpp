// The kernels for processors with AVX2, FMA and F16C: a Vector is two registers of eight.
#include "lamb_cpu.h"

#ifdef LAMB_X86
#include <immintrin.h>

#include <algorithm>
#include <cfloat>
#include <cstring>

#include "lamb_cpu_target.h"

LAMB_TARGET_BEGIN("avx2,fma,f16c")

namespace lamb {
namespace avx2 {

constexpr int WIDTH = 16;

struct Vector {
  __m256 low, high;
};

inline Vector zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vector all(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
inline Vector load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, Vector a) {
  _mm256_storeu_ps(to, a.low);
  _mm256_storeu_ps(to + 8, a.high);
}
inline void prefetch(uintptr_t address) { _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T1); }
inline Vector add(Vector a, Vector b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Vector mul(Vector a, Vector b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Vector fma(Vector a, Vector b, Vector c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Vector div(Vector a, Vector b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Vector sqrt(Vector a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }
inline Vector min(Vector a, Vector b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }

inline void accumulate_four(double* sums, __m128 a) {
  _mm256_storeu_pd(sums, _mm256_add_pd(_mm256_loadu_pd(sums), _mm256_cvtps_pd(a)));
}
inline void accumulate(double* sums, Vector a) {
  accumulate_four(sums, _mm256_castps256_ps128(a.low));
  accumulate_four(sums + 4, _mm256_extractf128_ps(a.low, 1));
  accumulate_four(sums + 8, _mm256_castps256_ps128(a.high));
  accumulate_four(sums + 12, _mm256_extractf128_ps(a.high, 1));
}

template <int64_t TYPE>
inline __m256 load_eight(const uint16_t* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if (TYPE == FLOAT16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

template <int64_t TYPE>
inline void store_eight(uint16_t* to, __m256 a) {
  __m128i halves;
  if (TYPE == FLOAT16) {
    halves = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i upper = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, nan);
    halves = _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}

template <int64_t TYPE>
inline Vector load_half(const uint16_t* from) {
  return {load_eight<TYPE>(from), load_eight<TYPE>(from + 8)};
}

template <int64_t TYPE>
inline void store_half(uint16_t* to, Vector a) {
  store_eight<TYPE>(to, a.low);
  store_eight<TYPE>(to + 8, a.high);
}

#include "lamb_cpu_kernels.h"

}  // namespace avx2
}  // namespace lamb

LAMB_TARGET_END

namespace lamb {

const Kernels avx2_kernels = {avx2::widen,   avx2::narrow,     avx2::square_sum,
                              avx2::moments, avx2::apply_kept, avx2::apply};

}  // namespace lamb
#endif
