// A stand-in for NCCL: ranks on one machine, on any devices or all on one, whose messages go through shared host memory.
//
// Preloaded in front of PyTorch's CUDA build, under its own ProcessGroupNCCL. Everything is ordered by streams, as in NCCL: a message
// is copies between the device and the shared memory, with waits of the stream and marks by it between them; the host waits
// only while a communicator is made. A send is over when its peer has taken all of it (NCCL: at the latest then).
// A real device (nvcc) waits and marks by stream memory operations; the runtime's stand-in (STAND_IN_RUNTIME) by host functions.
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

constexpr size_t kChunk = 256 << 10;
constexpr uint32_t kSlots = 4;
constexpr uint32_t kAborted = 0x7fffffff;
constexpr int kMostRanks = 16;
constexpr int kNoColor = -1;
constexpr auto kJoin = std::chrono::seconds(300);

enum Result { kSuccess = 0, kSystemError = 2, kInvalidArgument = 4 };

// One direction between two ranks: chunks go round in slots.
struct Channel {
  alignas(64) std::atomic<uint32_t> full;   // chunks that the sender has put
  alignas(64) std::atomic<uint32_t> taken;  // chunks that the receiver has taken
  alignas(256) char slots[kSlots][kChunk];
};

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

size_t chunks_of(size_t bytes) { return (bytes + kChunk - 1) / kChunk; }

size_t length_of(size_t bytes, size_t chunk) { return std::min(kChunk, bytes - chunk * kChunk); }

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

// ---- messages, chunk by chunk

void put(Comm* comm, int to, const void* from, size_t bytes, cudaStream_t stream) {
  Channel& channel = comm->channel(comm->rank, to);
  const uint32_t number = comm->sent[to]++;
  if (number >= kSlots) wait_for(stream, &channel.taken, number + 1 - kSlots);
  cudaMemcpyAsync(channel.slots[number % kSlots], from, bytes, cudaMemcpyDeviceToHost, stream);
  mark(stream, &channel.full, number + 1);
}

// The slot with the next chunk, once it is there.
char* arrived(Comm* comm, int from, cudaStream_t stream) {
  Channel& channel = comm->channel(from, comm->rank);
  const uint32_t number = comm->received[from]++;
  wait_for(stream, &channel.full, number + 1);
  return channel.slots[number % kSlots];
}

void release(Comm* comm, int from, cudaStream_t stream) {
  mark(stream, &comm->channel(from, comm->rank).taken, comm->received[from]);
}

void take(Comm* comm, int from, void* to, size_t bytes, cudaStream_t stream) {
  char* slot = arrived(comm, from, stream);
  cudaMemcpyAsync(to, slot, bytes, cudaMemcpyHostToDevice, stream);
  release(comm, from, stream);
}

void until_taken(Comm* comm, int to, cudaStream_t stream) {
  wait_for(stream, &comm->channel(comm->rank, to).taken, comm->sent[to]);
}

// A part of memory per rank that goes to that rank, and one that comes from it.
struct Parts {
  const char* out[kMostRanks] = {};
  char* in[kMostRanks] = {};
  size_t bytes = 0;
};

void exchange(Comm* comm, const Parts& parts, cudaStream_t stream) {
  for (size_t chunk = 0; chunk < chunks_of(parts.bytes); ++chunk) {
    const size_t at = chunk * kChunk, bytes = length_of(parts.bytes, chunk);
    for (int peer = 0; peer < comm->size; ++peer)
      if (peer != comm->rank && parts.out[peer]) put(comm, peer, parts.out[peer] + at, bytes, stream);
    for (int peer = 0; peer < comm->size; ++peer)
      if (peer != comm->rank && parts.in[peer]) take(comm, peer, parts.in[peer] + at, bytes, stream);
  }
}

// Each rank sends parts.out; those in `into` fold what comes from all with their own part.
void fold_all(Comm* comm, const Parts& parts, const char* own, char* into, int type, int op, cudaStream_t stream) {
  for (size_t chunk = 0; chunk < chunks_of(parts.bytes); ++chunk) {
    const size_t at = chunk * kChunk, bytes = length_of(parts.bytes, chunk);
    for (int peer = 0; peer < comm->size; ++peer)
      if (peer != comm->rank && parts.out[peer]) put(comm, peer, parts.out[peer] + at, bytes, stream);
    if (!into) continue;
    Operands operands{};
    operands.size = comm->size;
    for (int peer = 0; peer < comm->size; ++peer)
      operands.from[peer] = peer == comm->rank ? own + at : arrived(comm, peer, stream);
    fold(stream, operands, into + at, bytes, bytes / size_of(type), type, op);
    for (int peer = 0; peer < comm->size; ++peer)
      if (peer != comm->rank) release(comm, peer, stream);
  }
}

struct Message {
  bool is_send;
  char* memory;
  size_t bytes;
  int peer;
  Comm* comm;
};

void run(const std::vector<Message>& messages, cudaStream_t stream) {
  size_t most = 0;
  for (const Message& each : messages) most = std::max(most, chunks_of(each.bytes));
  for (size_t chunk = 0; chunk < most; ++chunk) {
    const size_t at = chunk * kChunk;
    for (const bool sends : {true, false})
      for (const Message& each : messages) {
        if (each.is_send != sends || chunk >= chunks_of(each.bytes)) continue;
        const size_t bytes = length_of(each.bytes, chunk);
        if (sends)
          put(each.comm, each.peer, each.memory + at, bytes, stream);
        else
          take(each.comm, each.peer, each.memory + at, bytes, stream);
      }
  }
  for (const Message& each : messages)
    if (each.is_send) until_taken(each.comm, each.peer, stream);
}

thread_local int depth = 0;
thread_local std::vector<std::pair<cudaStream_t, Message>> grouped;

int issue(const Message& message, cudaStream_t stream) {
  if (depth)
    grouped.push_back({stream, message});
  else
    run({message}, stream);
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
  std::map<cudaStream_t, std::vector<Message>> streams;
  for (const auto& [stream, message] : grouped) streams[stream].push_back(message);
  grouped.clear();
  for (const auto& [stream, messages] : streams) run(messages, stream);
  return kSuccess;
}
API int ncclSend(const void* from, size_t count, int type, int peer, Comm* comm, cudaStream_t stream) {
  char* memory = const_cast<char*>(static_cast<const char*>(from));
  return issue({true, memory, count * size_of(type), peer, comm}, stream);
}
API int ncclRecv(void* to, size_t count, int type, int peer, Comm* comm, cudaStream_t stream) {
  return issue({false, static_cast<char*>(to), count * size_of(type), peer, comm}, stream);
}
API int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, Comm* comm, cudaStream_t stream) {
  const char* own = static_cast<const char*>(in);
  Parts parts;
  parts.bytes = count * size_of(type);
  std::fill(parts.out, parts.out + comm->size, own);
  fold_all(comm, parts, own, static_cast<char*>(out), type, op, stream);
  return kSuccess;
}
API int ncclReduce(const void* in, void* out, size_t count, int type, int op, int root, Comm* comm, cudaStream_t stream) {
  const char* own = static_cast<const char*>(in);
  Parts parts;
  parts.bytes = count * size_of(type);
  if (root != comm->rank) parts.out[root] = own;
  fold_all(comm, parts, own, root == comm->rank ? static_cast<char*>(out) : nullptr, type, op, stream);
  return kSuccess;
}
API int ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, Comm* comm, cudaStream_t stream) {
  Parts parts;
  parts.bytes = count * size_of(type);
  for (int peer = 0; peer < comm->size; ++peer) parts.out[peer] = static_cast<const char*>(in) + peer * parts.bytes;
  fold_all(comm, parts, parts.out[comm->rank], static_cast<char*>(out), type, op, stream);
  return kSuccess;
}
API int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, Comm* comm, cudaStream_t stream) {
  Parts parts;
  parts.bytes = count * size_of(type);
  if (root == comm->rank) {
    std::fill(parts.out, parts.out + comm->size, static_cast<const char*>(in));
    if (in != out) cudaMemcpyAsync(out, in, parts.bytes, cudaMemcpyDeviceToDevice, stream);
  } else {
    parts.in[root] = static_cast<char*>(out);
  }
  exchange(comm, parts, stream);
  return kSuccess;
}
API int ncclBcast(void* memory, size_t count, int type, int root, Comm* comm, cudaStream_t stream) {
  return ncclBroadcast(memory, memory, count, type, root, comm, stream);
}
API int ncclAllGather(const void* in, void* out, size_t count, int type, Comm* comm, cudaStream_t stream) {
  Parts parts;
  parts.bytes = count * size_of(type);
  for (int peer = 0; peer < comm->size; ++peer) {
    parts.out[peer] = static_cast<const char*>(in);
    parts.in[peer] = static_cast<char*>(out) + peer * parts.bytes;
  }
  char* mine = parts.in[comm->rank];
  if (in != mine) cudaMemcpyAsync(mine, in, parts.bytes, cudaMemcpyDeviceToDevice, stream);
  exchange(comm, parts, stream);
  return kSuccess;
}
