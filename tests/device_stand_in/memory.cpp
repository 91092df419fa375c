// Memory of devices and pinned memory of the host, and copies between them.
#include <sys/mman.h>

#include <cstring>
#include <map>

#include "runtime.h"

namespace stand_in {
namespace {

constexpr size_t kStaged = 65536;  // bytes of pageable memory that a copy takes away at once, so that the host goes on

std::mutex lock;
size_t used[64] = {};

std::map<uintptr_t, Block>& blocks() {
  static auto* all = new std::map<uintptr_t, Block>;
  return *all;
}

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

cudaError_t allocate(void** out, size_t bytes, int device) {
  bytes = bytes ? bytes : 1;
  std::lock_guard<std::mutex> guard(lock);
  if (device >= 0 && used[device] + bytes > settings().memory) return fail(cudaErrorMemoryAllocation);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (address == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  if (device >= 0) used[device] += bytes;
  blocks()[number(address)] = {number(address), bytes, device};
  *out = address;
  return cudaSuccess;
}

cudaError_t release(void* address) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = blocks().find(number(address));
  if (found == blocks().end()) return fail(cudaErrorInvalidValue);
  order::forget(address, found->second.bytes);
  if (found->second.device >= 0) used[found->second.device] -= found->second.bytes;
  munmap(address, found->second.bytes);
  blocks().erase(found);
  return cudaSuccess;
}

bool pageable(const void* address) {
  Block block;
  return !block_of(address, &block);
}

// A copy of `rows` runs of `bytes` each, in the order of the stream.
cudaError_t copy(char* to, size_t to_pitch, const char* from, size_t from_pitch, size_t bytes, size_t rows,
                 Stream& on) {
  bool to_device = on_device(to), from_device = on_device(from);
  size_t total = bytes * rows;
  if (!total || (settings().skip && total >= settings().skip && to_device && from_device)) return cudaSuccess;
  auto run = [=](const char* source) {
    for (size_t row = 0; row < rows; ++row) memcpy(to + row * to_pitch, source + row * from_pitch, bytes);
  };
  order::access(on.id, from, (rows - 1) * from_pitch + bytes, false, "copy");
  order::access(on.id, to, (rows - 1) * to_pitch + bytes, true, "copy");
  if (pageable(from) && !pageable(to) && total <= kStaged && rows == 1) {
    auto staged = std::make_shared<std::vector<char>>(from, from + bytes);
    on.issue([=] { run(staged->data()); });
    return cudaSuccess;
  }
  on.issue([=] { run(from); });
  if (pageable(from) || pageable(to)) {
    on.finish();
    order::host_saw(on.id);
  }
  return cudaSuccess;
}

}  // namespace

bool block_of(const void* address, Block* block) {
  std::lock_guard<std::mutex> guard(lock);
  auto next = blocks().upper_bound(number(address));
  if (next == blocks().begin()) return false;
  *block = std::prev(next)->second;
  return number(address) < block->begin + block->bytes;
}

}  // namespace stand_in

using namespace stand_in;

API cudaError_t cudaMalloc(void** out, size_t bytes) { return allocate(out, bytes, current_device); }
API cudaError_t cudaFree(void* address) {
  if (!address) return cudaSuccess;
  cudaDeviceSynchronize();
  return release(address);
}
API cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) { return allocate(out, bytes, kPinned); }
API cudaError_t cudaFreeHost(void* address) { return address ? release(address) : cudaSuccess; }
API cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> guard(lock);
  blocks()[number(address)] = {number(address), bytes, kRegistered};
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* address) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = blocks().find(number(address));
  if (found == blocks().end()) return fail(cudaErrorHostMemoryNotRegistered);
  order::forget(address, found->second.bytes);
  blocks().erase(found);
  return cudaSuccess;
}
API cudaError_t cudaHostGetDevicePointer(void** out, void* address, unsigned) { return give(out, address); }
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = settings().memory;
  std::lock_guard<std::mutex> guard(lock);
  *free = settings().memory - used[current_device];
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* address) {
  memset(out, 0, sizeof *out);
  Block found;
  bool known = block_of(address, &found), device = known && found.device >= 0;
  auto* pointer = const_cast<void*>(address);
  out->type = !known ? cudaMemoryTypeUnregistered : device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  out->device = !known ? -1 : device ? found.device : current_device;
  out->devicePointer = known ? pointer : nullptr;
  out->hostPointer = device ? nullptr : pointer;
  return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(static_cast<char*>(to), 0, static_cast<const char*>(from), 0, bytes, 1, stream_of(stream));
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}
API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                  size_t height, cudaMemcpyKind, cudaStream_t stream) {
  auto* source = static_cast<const char*>(from);
  return copy(static_cast<char*>(to), to_pitch, source, from_pitch, width, height, stream_of(stream));
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return cudaStreamSynchronize(nullptr);
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (settings().skip && bytes >= settings().skip) return cudaSuccess;
  order::access(stream_of(stream).id, to, bytes, true, "memset");
  stream_of(stream).issue([=] { memset(to, value, bytes); });
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  cudaMemsetAsync(to, value, bytes, nullptr);
  return cudaStreamSynchronize(nullptr);
}
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaError_t cudaGetSymbolAddress(void** out, const void* symbol) { return give(out, const_cast<void*>(symbol)); }
