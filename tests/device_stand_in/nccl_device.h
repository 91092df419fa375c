// Waits, marks and sums of the NCCL stand-in on a real device.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

void check(int result, const char* what) {
  if (!result) return;
  fprintf(stderr, "nccl stand-in: %s failed with %d\n", what, result);
  abort();
}

bool share_with_device(void* memory, size_t bytes) {
  const cudaError_t error = cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error) fprintf(stderr, "nccl stand-in: cudaHostRegister failed with %d\n", error);
  return !error;
}

void leave_device(void* memory) { cudaHostUnregister(memory); }

CUdeviceptr address(std::atomic<uint32_t>* flag) {
  void* pointer = nullptr;
  check(cudaHostGetDevicePointer(&pointer, flag, 0), "cudaHostGetDevicePointer");
  return reinterpret_cast<CUdeviceptr>(pointer);
}

template <class Function>
Function driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), name);
  check(result, name);
  return reinterpret_cast<Function>(found);
}

// The stream goes on when the flag has come to the value.
void wait_for(cudaStream_t stream, std::atomic<uint32_t>* flag, uint32_t value) {
  static const auto wait = driver<CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned)>("cuStreamWaitValue32");
  check(wait(stream, address(flag), value, CU_STREAM_WAIT_VALUE_GEQ), "cuStreamWaitValue32");
}

void mark(cudaStream_t stream, std::atomic<uint32_t>* flag, uint32_t value) {
  static const auto write = driver<CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned)>("cuStreamWriteValue32");
  check(write(stream, address(flag), value, CU_STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue32");
}

// Memory of each rank that is folded: the device's own, or the shared host memory.
struct Operands {
  const char* from[16];
  int size;
};

template <class T>
__device__ T folded(T a, T b, int op) {
  return op == 1 ? a * b : op == 2 ? (a > b ? a : b) : op == 3 ? (a < b ? a : b) : a + b;
}

template <class T, class Wide>
__global__ void fold_kernel(Operands operands, T* into, size_t count, int op) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    Wide sum = static_cast<Wide>(__ldcv(reinterpret_cast<const T*>(operands.from[0]) + i));
    for (int rank = 1; rank < operands.size; ++rank)
      sum = folded(sum, static_cast<Wide>(__ldcv(reinterpret_cast<const T*>(operands.from[rank]) + i)), op);
    into[i] = static_cast<T>(op == 4 ? sum / static_cast<Wide>(operands.size) : sum);
  }
}

template <class T, class Wide = T>
void fold_as(cudaStream_t stream, const Operands& operands, char* into, size_t count, int op) {
  const unsigned blocks = static_cast<unsigned>(count / 256 + 1 < 256 ? count / 256 + 1 : 256);
  fold_kernel<T, Wide><<<blocks, 256, 0, stream>>>(operands, reinterpret_cast<T*>(into), count, op);
  check(cudaPeekAtLastError(), "fold_kernel");
}

void fold(cudaStream_t stream, const Operands& operands, char* into, size_t, size_t count, int type, int op) {
  switch (type) {
    case 0: return fold_as<int8_t>(stream, operands, into, count, op);
    case 1: return fold_as<uint8_t>(stream, operands, into, count, op);
    case 2: return fold_as<int32_t>(stream, operands, into, count, op);
    case 3: return fold_as<uint32_t>(stream, operands, into, count, op);
    case 4: return fold_as<long long>(stream, operands, into, count, op);
    case 5: return fold_as<unsigned long long>(stream, operands, into, count, op);
    case 6: return fold_as<__half, float>(stream, operands, into, count, op);
    case 7: return fold_as<float>(stream, operands, into, count, op);
    case 8: return fold_as<double>(stream, operands, into, count, op);
    case 9: return fold_as<__nv_bfloat16, float>(stream, operands, into, count, op);
    default: check(type, "fold: this type of number");
  }
}

}  // namespace
