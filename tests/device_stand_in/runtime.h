// Names that the files of the stand-in share. It is a CUDA runtime for LD_PRELOAD: memory of a device is memory of the
// host, streams are threads, events are real, kernels do nothing. Everything above is PyTorch's own.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace stand_in {

// Read once from the environment: STAND_IN_DEVICES, STAND_IN_CC, STAND_IN_GB, STAND_IN_DELAY_US, STAND_IN_SEED,
// STAND_IN_SKIP, STAND_IN_RACES, CUDA_DEVICE_MAX_CONNECTIONS.
struct Settings {
  int devices;
  int capability;     // 80 for sm_80
  size_t memory;      // bytes of each device
  long delay_us;      // longest delay before an entry of a side stream; 0 for none
  unsigned seed;      // of the delays
  size_t skip;        // copies within devices, and memsets, from so many bytes on do nothing; 0 does all
  const char* races;  // 1, or a file that races are appended to: accesses are checked
  bool one_queue;     // all streams of a device share one hardware queue
};
const Settings& settings();

extern thread_local int current_device;

template <class Value>
cudaError_t give(Value* out, Value value) {
  *out = value;
  return cudaSuccess;
}
cudaError_t fail(cudaError_t error);        // remembers it for cudaGetLastError

// What is known to have happened: of each stream (0 is the host), how many of its accesses and events.
struct Clock : std::vector<uint64_t> {
  void join(const Clock& other);
  uint64_t of(size_t stream) const { return stream < size() ? (*this)[stream] : 0; }
};

// An event's place on a stream: reached when the stream comes to it.
struct Ticket {
  Clock clock;
  std::chrono::steady_clock::time_point at;
  std::atomic<bool> done{false};

  void finish();
  void wait();

 private:
  std::mutex lock_;
  std::condition_variable finished_;
};

// A thread that does work in order. It starts with the first, and never ends.
class Worker {
 public:
  Worker(int device, unsigned seed) : device_(device), seed_(seed) {}
  void push(std::function<void()> work);
  void wait_for(uint64_t count);  // returns when so much work is done
  void wait() { wait_for(pushed_); }
  bool done(uint64_t count);

 private:
  void serve();
  const int device_;
  unsigned seed_;  // of delays, 0 for none
  std::mutex lock_;
  std::condition_variable filled_, done_;
  std::deque<std::function<void()>> work_;
  std::atomic<uint64_t> pushed_{0};
  uint64_t finished_ = 0;
};

// Entries that run one behind the other.
class Stream {
 public:
  Stream(int device, int priority, int id, unsigned seed)
      : device(device), priority(priority), id(id), worker_(device, seed) {}
  const int device;
  const int priority;
  const int id;  // from 1, index in clocks

  // `after` is waited for first. An entry holds all that is issued behind it on one hardware queue, until it can start.
  void issue(std::function<void()> work, std::shared_ptr<Ticket> after = nullptr, bool holds = true);
  void finish() { worker_.wait_for(issued_); }  // returns when all that was issued has ended
  bool idle() { return worker_.done(issued_); }
  void reach();  // returns when a kernel that is issued now would begin

 private:
  Worker worker_;
  std::mutex issues_;  // numbers follow the order of issue, whichever thread issues
  std::atomic<uint64_t> issued_{0};
};
Stream& stream_of(cudaStream_t stream);        // the current device's default stream for null
Stream& default_stream(int device);
std::vector<Stream*> streams_of(int device);

constexpr int kPinned = -1, kRegistered = -2;
struct Block {
  uintptr_t begin;
  size_t bytes;
  int device;  // or kPinned for the runtime's memory of the host, kRegistered for memory of somebody else
};
bool block_of(const void* address, Block* block);  // false for pageable memory
inline bool on_device(const void* address) {
  Block block;
  return block_of(address, &block) && block.device >= 0;
}

// Order of work, and accesses that have none (races.cpp).
namespace order {
Clock record(int stream);                          // an event is recorded on it
void wait(int stream, const Clock& event);         // it waits for an event
void host_saw(const Clock& event);                 // the host waited for it
void host_saw(int stream);                         // the host waited for all of it
void polled(const Clock& event);                   // PyTorch found it completed
// Memory that is registered has an order that is not known here, such as another process's, and is not checked.
void access(int stream, const void* address, size_t bytes, bool write, const char* name);
void forget(const void* address, size_t bytes);    // the memory is another's from now on, in order with everything
}  // namespace order

}  // namespace stand_in
