// The few functions of the driver that PyTorch asks the runtime for by name.
#include <map>
#include <string>

#include "runtime.h"

namespace stand_in {
namespace {

int not_supported() { return cudaErrorNotSupported; }
int accepted() { return 0; }

int context_state(int, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return 0;
}

int current_context(void** context) {
  static int one;
  *context = &one;
  return 0;
}

int error_text(int, const char** text) {
  *text = "error of the stand-in's driver";
  return 0;
}

int range_of(uintptr_t* begin, size_t* bytes, uintptr_t address) {
  Block block;
  if (!device_block(reinterpret_cast<void*>(address), &block)) return cudaErrorInvalidValue;
  if (begin) *begin = block.begin;
  if (bytes) *bytes = block.bytes;
  return 0;
}

template <class Function>
void* pointer(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  static const auto* known = new std::map<std::string, void*>{
      {"cuDevicePrimaryCtxGetState", pointer(context_state)}, {"cuCtxGetCurrent", pointer(current_context)},
      {"cuCtxSetCurrent", pointer(accepted)},                 {"cuGetErrorString", pointer(error_text)},
      {"cuMemGetAddressRange", pointer(range_of)},
  };
  auto found = known->find(name);
  *function = found == known->end() ? pointer(not_supported) : found->second;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
