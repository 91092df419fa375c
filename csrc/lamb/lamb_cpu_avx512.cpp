// The kernels for processors with AVX-512 (foundation).
#include "lamb_cpu.h"

#ifdef LAMB_X86
#include <immintrin.h>

#include <algorithm>
#include <cfloat>
#include <cstring>

#include "lamb_cpu_target.h"

LAMB_TARGET_BEGIN("avx512f,avx2,f16c")

namespace lamb {
namespace avx512 {

constexpr int WIDTH = 16;

using Vector = __m512;

inline Vector zero() { return _mm512_setzero_ps(); }
inline Vector all(float a) { return _mm512_set1_ps(a); }
inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Vector a) { _mm512_storeu_ps(to, a); }
inline void prefetch(uintptr_t address) { _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T1); }
inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector div(Vector a, Vector b) { return _mm512_div_ps(a, b); }
inline Vector sqrt(Vector a) { return _mm512_sqrt_ps(a); }
inline Vector min(Vector a, Vector b) { return _mm512_min_ps(a, b); }
inline void accumulate(double* sums, Vector a) {
  const __m256 low = _mm512_castps512_ps256(a);
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
  _mm512_storeu_pd(sums, _mm512_add_pd(_mm512_loadu_pd(sums), _mm512_cvtps_pd(low)));
  _mm512_storeu_pd(sums + 8, _mm512_add_pd(_mm512_loadu_pd(sums + 8), _mm512_cvtps_pd(high)));
}

template <int64_t TYPE>
inline Vector load_half(const uint16_t* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  if (TYPE == FLOAT16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

template <int64_t TYPE>
inline void store_half(uint16_t* to, Vector a) {
  __m256i halves;
  if (TYPE == FLOAT16) {
    halves = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i upper = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    halves = _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}

#include "lamb_cpu_kernels.h"

}  // namespace avx512
}  // namespace lamb

LAMB_TARGET_END

namespace lamb {

const Kernels avx512_kernels = {avx512::widen,   avx512::narrow,     avx512::square_sum,
                                avx512::moments, avx512::apply_kept, avx512::apply};

}  // namespace lamb
#endif
