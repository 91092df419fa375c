// What happens to an element: types, loads and stores, and the formula of segment.h in fp32. What is fused is written as fma,
// whatever the compiler would like to fuse or approximate, and the order is the CPU back end's: m, v and u come out the same to the
// last bit on both.
#pragma once

#include <cfloat>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "rules.h"
#include "segment.h"

namespace lamb::cuda {

// A load or store of WIDTH fp32 values is 16 bytes, the widest there is.
constexpr int WIDTH = 4;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void round_to(float x, float& to) { to = x; }
__device__ __forceinline__ void round_to(float x, __half& to) { to = __float2half_rn(x); }
__device__ __forceinline__ void round_to(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

// N elements that one instruction moves.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T value[N];
};

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <int N, typename T>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }

__device__ __forceinline__ float new_m(const Coefficients& c, float m, float g) {
  return fma(c.beta3, g, fma(c.beta1_less_one, m, m));
}

// Held at the largest fp32 number: an infinite v would never come back. A share of g^2 fits where g^2 itself does not.
__device__ __forceinline__ float new_v(const Coefficients& c, float v, float g) {
  return fminf(FLT_MAX, fma(mul(c.one_minus_beta2, g), g, fma(c.beta2_less_one, v, v)));
}

__device__ __forceinline__ float update_of(const Coefficients& c, float p, float m, float v) {
  const float root = __fsqrt_rn(__fadd_rn(v, c.eps_inside));
  return fma(c.weight_decay, p, __fdiv_rn(m, fma(c.root_factor, root, c.eps_outside)));
}

// fp64 holds the square of every fp32 number, and a product costs less than the eight bytes or more that an element moves.
__device__ __forceinline__ double square(float x) { return static_cast<double>(x) * static_cast<double>(x); }

// Phase 1 for W elements at each of N places.
template <typename P, typename G>
struct MomentsOf {
  const P* p;
  const G* g;
  float* m;
  float* v;
  Coefficients c;
  double p_sum = 0.0;
  double u_sum = 0.0;

  template <int W, int N>
  __device__ __forceinline__ void run(int at, int stride) {
    Pack<P, W> weight[N];
    Pack<G, W> grad[N];
    Pack<float, W> first[N];
    Pack<float, W> second[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      weight[n] = load<W>(p + at + n * stride);
      grad[n] = load<W>(g + at + n * stride);
      first[n] = load<W>(m + at + n * stride);
      second[n] = load<W>(v + at + n * stride);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const float x = to_float(weight[n].value[i]);
        const float scaled = mul(to_float(grad[n].value[i]), c.grad_scale);
        const float m_new = new_m(c, first[n].value[i], scaled);
        const float v_new = new_v(c, second[n].value[i], scaled);
        first[n].value[i] = m_new;
        second[n].value[i] = v_new;
        p_sum += square(x);
        u_sum += square(update_of(c, x, m_new, v_new));
      }
      store<W>(m + at + n * stride, first[n]);
      store<W>(v + at + n * stride, second[n]);
    }
  }
};

// Phase 2 for W elements at each of N places; `size` is the learning rate times the ratio. The copy is rounded from the new value in
// fp32, not from a 16-bit parameter.
template <typename P>
struct ApplyOf {
  P* p;
  const float* m;
  const float* v;
  int64_t copy;
  int64_t copy_type;
  float size;
  Coefficients c;

  template <int W, int N>
  __device__ __forceinline__ void run(int at, int stride) {
    Pack<P, W> weight[N];
    Pack<float, W> first[N];
    Pack<float, W> second[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      weight[n] = load<W>(p + at + n * stride);
      first[n] = load<W>(m + at + n * stride);
      second[n] = load<W>(v + at + n * stride);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      Pack<float, W> moved;
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const float x = to_float(weight[n].value[i]);
        moved.value[i] = fma(-size, update_of(c, x, first[n].value[i], second[n].value[i]), x);
        round_to(moved.value[i], weight[n].value[i]);
      }
      store<W>(p + at + n * stride, weight[n]);
      if (copy != 0) store_copy<W>(moved, at + n * stride);
    }
  }

 private:
  template <int W, typename T>
  __device__ __forceinline__ void store_as(const Pack<float, W>& moved, int at) {
    Pack<T, W> rounded;
#pragma unroll
    for (int i = 0; i < W; ++i) round_to(moved.value[i], rounded.value[i]);
    store<W>(reinterpret_cast<T*>(copy) + at, rounded);
  }

  template <int W>
  __device__ __forceinline__ void store_copy(const Pack<float, W>& moved, int at) {
    if (copy_type == FLOAT16) {
      store_as<W, __half>(moved, at);
    } else if (copy_type == BFLOAT16) {
      store_as<W, __nv_bfloat16>(moved, at);
    } else {
      store_as<W, float>(moved, at);
    }
  }
};

// The gradient's share of the global norm, for W elements at each of N places.
template <typename G>
struct SquareSumOf {
  const G* g;
  double sum = 0.0;
  bool bad = false;

  template <int W, int N>
  __device__ __forceinline__ void run(int at, int stride) {
    Pack<G, W> grad[N];
#pragma unroll
    for (int n = 0; n < N; ++n) grad[n] = load<W>(g + at + n * stride);
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const float x = to_float(grad[n].value[i]);
        bad = bad || !(fabsf(x) <= FLT_MAX);
        sum += square(x);
      }
    }
  }
};

// Where, counted in elements and modulo WIDTH, an array stands between two places that a wide load can start from.
__device__ __forceinline__ int phase_of(int64_t address, int element_bytes) {
  return static_cast<int>((address / element_bytes) % WIDTH);
}

// Hands all of a chunk's `length` elements to the body, WIDTH at a time where its arrays allow it. `phase` is what phase_of says of
// every one of them, or -1 when they differ: then elements go one at a time.
template <int THREADS, typename Body>
__device__ __forceinline__ void traverse(Body& body, int length, int phase, int thread) {
  const int head = phase < 0 ? length : min(length, (WIDTH - phase) % WIDTH);
  const int packs = (length - head) / WIDTH;
  int i = thread;
  for (; i + THREADS < head; i += 2 * THREADS) body.template run<1, 2>(i, THREADS);
  if (i < head) body.template run<1, 1>(i, 0);
  int pack = thread;
  for (; pack + THREADS < packs; pack += 2 * THREADS) body.template run<WIDTH, 2>(head + WIDTH * pack, WIDTH * THREADS);
  if (pack < packs) body.template run<WIDTH, 1>(head + WIDTH * pack, 0);
  const int tail = head + WIDTH * packs + thread;
  if (tail < length) body.template run<1, 1>(tail, 0);
}

}  // namespace lamb::cuda
