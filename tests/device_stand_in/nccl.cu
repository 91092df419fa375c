// A stand-in for NCCL: ranks on one machine, on any devices or all on one, whose messages go through shared host memory.
//
// Preloaded in front of PyTorch's CUDA build, under its own ProcessGroupNCCL. As in NCCL, an operation, or a group of messages, is one
// kernel of its stream: it waits for its peers while it runs, and the host does not. A send is over when its peer has taken
// all of it (NCCL's ends at the latest then). The host waits only while a communicator is made.
// On a device (nvcc) that is a kernel; on the stand-in runtime (STAND_IN_RUNTIME) a host function.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#ifdef STAND_IN_RUNTIME
#include "nccl_host.h"
#else
#include "nccl_device.h"
#endif

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr uint32_t kAborted = 0x7fffffff;
constexpr int kNoColor = -1;
constexpr auto kJoin = std::chrono::seconds(300);

enum Result { kSuccess = 0, kSystemError = 2, kInvalidArgument = 4 };

struct Split {
  std::atomic<uint32_t> number;
  int color, key;
};

struct Shared {
  std::atomic<int> joined;
  alignas(64) Split splits[2][kMostRanks];
  alignas(4096) Channel channels[1];  // [from][to]
};

struct Comm {
  std::string name;
  int size, rank, device;
  size_t bytes;
  Shared* shared;
  uint32_t sent[kMostRanks], received[kMostRanks];
  uint32_t splits = 0;
  std::atomic<bool> aborted{false};

  Channel& channel(int from, int to) { return shared->channels[from * size + to]; }
};

size_t size_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}

template <class Done>
bool spin(Done done) {
  const auto until = std::chrono::steady_clock::now() + kJoin;
  while (!done()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

Comm* join(const std::string& name, int size, int rank) {
  if (size > kMostRanks) return nullptr;
  const size_t bytes = sizeof(Shared) + sizeof(Channel) * (size * size - 1);
  const int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, bytes)) return nullptr;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return nullptr;
  auto* comm = new Comm{name, size, rank, 0, bytes, static_cast<Shared*>(memory), {}, {}};
  cudaGetDevice(&comm->device);
  if (!share_with_device(memory, bytes)) return nullptr;
  comm->shared->joined++;
  if (!spin([&] { return comm->shared->joined >= size; })) {
    fprintf(stderr, "nccl stand-in: %s has %d of %d ranks\n", name.c_str(), comm->shared->joined.load(), size);
    return nullptr;
  }
  if (rank == 0) shm_unlink(name.c_str());
  return comm;
}

// ---- operations: each is one entry of its stream, as a kernel of NCCL is

void put(Comm* comm, Work& work, int to, const void* from, size_t bytes, bool until_taken) {
  work.add({Piece::kPut, until_taken, const_cast<void*>(from), bytes, &comm->channel(comm->rank, to), comm->sent[to]});
  comm->sent[to] += chunks_of(bytes);
}

void take(Comm* comm, Work& work, int from, void* to, size_t bytes) {
  work.add({Piece::kTake, false, to, bytes, &comm->channel(from, comm->rank), comm->received[from]});
  comm->received[from] += chunks_of(bytes);
}

// Puts together what comes from all ranks, in the order of ranks, and this rank's own part.
void fold(Comm* comm, Work& work, const void* own, void* into, size_t count, int type, int op) {
  work.fold = {own, into, count, size_of(type), type, op, comm->size, comm->rank, {}, {}};
  for (int peer = 0; peer < comm->size; ++peer) {
    work.fold.channels[peer] = &comm->channel(peer, comm->rank);
    work.fold.numbers[peer] = comm->received[peer];
    if (peer != comm->rank) comm->received[peer] += chunks_of(count * size_of(type));
  }
}

thread_local int depth = 0;
thread_local std::map<cudaStream_t, Work> grouped;

template <class Fill>
int issue(cudaStream_t stream, Fill fill) {
  if (depth) return fill(grouped[stream]), kSuccess;
  Work work;
  fill(work);
  run(stream, work);
  return kSuccess;
}

struct Id {
  char text[128];
};

}  // namespace

// ---- communicators

API int ncclGetVersion(int* version) { return *version = 22809, kSuccess; }
API const char* ncclGetErrorString(int result) { return result ? "error of the NCCL stand-in" : "no error"; }
API const char* ncclGetLastError(Comm*) { return ""; }
API int ncclGetUniqueId(Id* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->text, sizeof id->text, "/nccl_stand_in_%08x%08x", random(), random());
  return kSuccess;
}
API int ncclCommInitRankConfig(Comm** comm, int size, Id id, int rank, void*) {
  *comm = join(id.text, size, rank);
  return *comm ? kSuccess : kSystemError;
}
API int ncclCommInitRank(Comm** comm, int size, Id id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}
API int ncclCommInitRankScalable(Comm** comm, int size, int rank, int, Id* ids, void*) {
  return ncclCommInitRankConfig(comm, size, ids[0], rank, nullptr);
}
API int ncclCommSplit(Comm* comm, int color, int key, Comm** out, void*) {
  const uint32_t number = ++comm->splits;
  Split* splits = comm->shared->splits[number % 2];  // a rank is at most one split ahead of another
  splits[comm->rank].color = color;
  splits[comm->rank].key = key;
  splits[comm->rank].number.store(number);
  std::vector<std::pair<int, int>> members;
  for (int peer = 0; peer < comm->size; ++peer) {
    if (!spin([&] { return splits[peer].number.load() == number; })) return kSystemError;
    if (splits[peer].color == color) members.push_back({splits[peer].key, peer});
  }
  *out = nullptr;
  if (color == kNoColor) return kSuccess;
  std::stable_sort(members.begin(), members.end());
  int rank = 0;
  while (members[rank].second != comm->rank) ++rank;
  const std::string name = comm->name + "_" + std::to_string(number) + "." + std::to_string(color);
  *out = join(name, static_cast<int>(members.size()), rank);
  return *out ? kSuccess : kSystemError;
}
API int ncclCommGetAsyncError(Comm*, int* error) { return *error = kSuccess, kSuccess; }
API int ncclCommCount(Comm* comm, int* count) { return *count = comm->size, kSuccess; }
API int ncclCommUserRank(Comm* comm, int* rank) { return *rank = comm->rank, kSuccess; }
API int ncclCommCuDevice(Comm* comm, int* device) { return *device = comm->device, kSuccess; }
API int ncclCommFinalize(Comm*) { return kSuccess; }
API int ncclCommDestroy(Comm* comm) {
  cudaDeviceSynchronize();
  leave_device(comm->shared);
  munmap(comm->shared, comm->bytes);
  delete comm;
  return kSuccess;
}
API int ncclCommAbort(Comm* comm) {
  for (int peer = 0; peer < comm->size; ++peer) {
    comm->channel(peer, comm->rank).full.store(kAborted);
    comm->channel(comm->rank, peer).taken.store(kAborted);
  }
  return kSuccess;
}
API int ncclCommRegister(Comm*, void*, size_t, void** handle) { return *handle = nullptr, kSuccess; }
API int ncclCommDeregister(Comm*, void*) { return kSuccess; }
API int ncclCommMemStats(Comm*, int, uint64_t* bytes) { return *bytes = 0, kSuccess; }

// ---- operations

API int ncclGroupStart() { return ++depth, kSuccess; }
API int ncclGroupEnd() {
  if (--depth) return kSuccess;
  for (const auto& [stream, work] : grouped) run(stream, work);
  grouped.clear();
  return kSuccess;
}
API int ncclSend(const void* from, size_t count, int type, int peer, Comm* comm, cudaStream_t stream) {
  return issue(stream, [&](Work& work) { put(comm, work, peer, from, count * size_of(type), true); });
}
API int ncclRecv(void* to, size_t count, int type, int peer, Comm* comm, cudaStream_t stream) {
  return issue(stream, [&](Work& work) { take(comm, work, peer, to, count * size_of(type)); });
}
API int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, Comm* comm, cudaStream_t stream) {
  Work work;
  for (int peer = 0; peer < comm->size; ++peer)
    if (peer != comm->rank) put(comm, work, peer, in, count * size_of(type), true);
  fold(comm, work, in, out, count, type, op);
  return run(stream, work), kSuccess;
}
API int ncclReduce(const void* in, void* out, size_t count, int type, int op, int root, Comm* comm, cudaStream_t stream) {
  Work work;
  if (root == comm->rank)
    fold(comm, work, in, out, count, type, op);
  else
    put(comm, work, root, in, count * size_of(type), true);
  return run(stream, work), kSuccess;
}
API int ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, Comm* comm, cudaStream_t stream) {
  const char* parts = static_cast<const char*>(in);
  const size_t bytes = count * size_of(type);
  Work work;
  for (int peer = 0; peer < comm->size; ++peer)
    if (peer != comm->rank) put(comm, work, peer, parts + peer * bytes, bytes, true);
  fold(comm, work, parts + comm->rank * bytes, out, count, type, op);
  return run(stream, work), kSuccess;
}
API int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm* comm, cudaStream_t stream) {
  const size_t bytes = count * size_of(type);
  Work work;
  if (root != comm->rank) return take(comm, work, root, out, bytes), run(stream, work), kSuccess;
  if (in != out) cudaMemcpyAsync(out, in, bytes, cudaMemcpyDeviceToDevice, stream);
  for (int peer = 0; peer < comm->size; ++peer)
    if (peer != comm->rank) put(comm, work, peer, in, bytes, true);
  return run(stream, work), kSuccess;
}
API int ncclBcast(void* memory, size_t count, int type, int root, Comm* comm, cudaStream_t stream) {
  return ncclBroadcast(memory, memory, count, type, root, comm, stream);
}
API int ncclAllGather(const void* in, void* out, size_t count, int type, Comm* comm, cudaStream_t stream) {
  char* parts = static_cast<char*>(out);
  const size_t bytes = count * size_of(type);
  char* mine = parts + comm->rank * bytes;
  if (in != mine) cudaMemcpyAsync(mine, in, bytes, cudaMemcpyDeviceToDevice, stream);
  Work work;
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer == comm->rank) continue;
    put(comm, work, peer, in, bytes, true);
    take(comm, work, peer, parts + peer * bytes, bytes);
  }
  return run(stream, work), kSuccess;
}
