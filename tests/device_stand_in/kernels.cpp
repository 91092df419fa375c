// Kernels: their registration, and launches that check the configuration and run nothing.
#include <cstring>

#include "runtime.h"

namespace stand_in {
namespace {

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local Configuration pushed;

cudaError_t launch(dim3 grid, dim3 block, cudaStream_t stream) {
  bool empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
  size_t threads = static_cast<size_t>(block.x) * block.y * block.z;
  if (empty || threads > 1024 || grid.y > 65535 || grid.z > 65535) return fail(cudaErrorInvalidConfiguration);
  if (stream_of(stream).device != current_device) return fail(cudaErrorInvalidResourceHandle);
  return cudaSuccess;
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;

API void** __cudaRegisterFatBinary(void*) {
  static void* handle[2];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return give(kernel, static_cast<cudaKernel_t>(const_cast<void*>(function)));
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch(grid, block, stream);
}
API cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch(grid, block, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  return launch(config->gridDim, config->blockDim, config->stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->binaryVersion = out->ptxVersion = settings().capability;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                       unsigned) { return give(blocks, 4); }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return give(blocks, 4);
}
