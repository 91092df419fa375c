// Devices: settings, properties, errors, counters.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace stand_in {

thread_local int current_device = 0;

namespace {

thread_local cudaError_t last_error = cudaSuccess;

long number(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value ? atol(value) : otherwise;
}

bool hopper() { return settings().capability >= 90; }

int attribute(cudaDeviceAttr which) {
  switch (which) {
    case cudaDevAttrMultiProcessorCount: return hopper() ? 132 : 108;
    case cudaDevAttrComputeCapabilityMajor: return settings().capability / 10;
    case cudaDevAttrComputeCapabilityMinor: return settings().capability % 10;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return hopper() ? 232448 : 166912;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: return 65535;
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrL2CacheSize: return 40 << 20;
    default: return 0;
  }
}

}  // namespace

const Settings& settings() {
  static const Settings read = {
      static_cast<int>(number("STAND_IN_DEVICES", 8)),
      static_cast<int>(number("STAND_IN_CC", 80)),
      static_cast<size_t>(number("STAND_IN_GB", 80)) << 30,
      number("STAND_IN_DELAY_US", 0),
      static_cast<unsigned>(number("STAND_IN_SEED", 1)),
      static_cast<size_t>(number("STAND_IN_SKIP", 0)),
      getenv("STAND_IN_RACES"),
      number("CUDA_DEVICE_MAX_CONNECTIONS", 8) == 1,
  };
  return read;
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

}  // namespace stand_in

using namespace stand_in;

API cudaError_t cudaGetDeviceCount(int* count) { return give(count, settings().devices); }
API cudaError_t cudaGetDevice(int* device) { return give(device, current_device); }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= settings().devices) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) { return give(version, 13000); }
API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

// An A100 or, from sm_90 on, an H100.
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Stand-in sm_%d", settings().capability);
  for (int i = 0; i < 16; ++i) p->uuid.bytes[i] = static_cast<char>(device + i);
  p->totalGlobalMem = settings().memory;
  p->major = attribute(cudaDevAttrComputeCapabilityMajor);
  p->minor = attribute(cudaDevAttrComputeCapabilityMinor);
  p->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->sharedMemPerMultiprocessor = hopper() ? 233472 : 167936;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  p->pciBusID = device + 1;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->cooperativeLaunch = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) { return give(value, attribute(which)); }
API cudaError_t cudaDeviceGetPCIBusId(char* out, int length, int device) {
  snprintf(out, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return give(can, 1); }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

API const char* cudaGetErrorString(cudaError_t error) {
  static thread_local char text[64];
  snprintf(text, sizeof text, "error %d of the stand-in", error);
  return text;
}
API const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
