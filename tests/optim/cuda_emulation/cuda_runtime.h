// Stands in for the CUDA runtime's header, so that a .cu file that launches with cudaLaunchKernelEx compiles with a C++ compiler
// and runs on the host: as far as the kernels of csrc/lamb/lamb_cuda.cu go. fibers.cpp runs the threads and checks them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// The threads of a block are fibers of one host thread, so they alone share its thread-local variables.
#define __shared__ static thread_local

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulation {
unsigned thread_index();
unsigned block_index();
unsigned block_count();
// `place` tells one call from another: all threads of the block, or of the warp, must meet at the same one.
void block_barrier(int place);
double shuffle_down(double value, int distance, int place);
void fence();
void begin_atomic();
void end_atomic(const void* address);
// Runs `body` once for each thread of each block; returns when all have ended.
void run(unsigned blocks, unsigned threads, const std::function<void()>& body);
}  // namespace emulation

struct EmulatedIndex {
  struct {
    unsigned (*read)();
    operator unsigned() const { return read(); }
  } x;
};
inline constexpr EmulatedIndex threadIdx{{emulation::thread_index}};
inline constexpr EmulatedIndex blockIdx{{emulation::block_index}};
inline constexpr EmulatedIndex gridDim{{emulation::block_count}};

#define __syncthreads() emulation::block_barrier(__LINE__)
#define __shfl_down_sync(mask, value, distance) emulation::shuffle_down(value, distance, __LINE__)
#define __threadfence() emulation::fence()

// Relaxed, as on the device: alone, it orders nothing around it.
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  emulation::begin_atomic();
  const unsigned old = __atomic_load_n(address, __ATOMIC_RELAXED);
  __atomic_store_n(address, old >= limit ? 0 : old + 1, __ATOMIC_RELAXED);
  emulation::end_atomic(address);
  return old;
}

inline double __ldcg(const double* address) { return *address; }

// The emulation is compiled with -ffp-contract=off: each of these rounds once.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }

inline int min(int a, int b) { return a < b ? a : b; }

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0;
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToDevice };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};

template <typename... Formal, typename... Actual>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Formal...), Actual&&... actual) {
  const std::tuple<Formal...> arguments(actual...);
  emulation::run(config->gridDim.x, config->blockDim.x, [&] { std::apply(kernel, arguments); });
  return cudaSuccess;
}

inline const char* cudaGetErrorString(cudaError_t) { return "error"; }

// One device of two processors, each of which has room for two blocks.
inline cudaError_t answer(int* to, int value) {
  *to = value;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) { return answer(device, 0); }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return answer(value, 2); }
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) { return answer(blocks, 2); }

// Streams are nothing here: all is done in order.
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
constexpr unsigned cudaStreamNonBlocking = 1;
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                                     cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; ++row) {
    std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}
