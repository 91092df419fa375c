// Names that the files of the stand-in share. The stand-in is a CUDA runtime for LD_PRELOAD: memory of a device is memory of
// the host, streams are threads, events are real, kernels do nothing. Everything above is PyTorch's own.
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
  int capability;    // 80 for sm_80
  size_t memory;     // bytes of each device
  long delay_us;     // longest delay before an entry of a side stream; 0 for none
  unsigned seed;     // of the delays
  size_t skip;       // copies between memories of devices from so many bytes on carry nothing; 0 carries all
  bool races;        // accesses are checked from the start
  bool one_queue;    // all streams of a device share one hardware queue
};
const Settings& settings();

struct Counts {
  std::atomic<long> launches{0}, host_waits{0}, to_host{0}, to_device{0}, allocations{0};
};
extern Counts counts;
extern thread_local int current_device;

template <class Value>
cudaError_t give(Value* out, Value value) {
  *out = value;
  return cudaSuccess;
}
cudaError_t fail(cudaError_t error);        // remembers it for cudaGetLastError
void host_waits(const char* call);          // counts a call that makes the host wait, and tells the hook

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

// A thread that runs entries in order.
class Stream {
 public:
  Stream(int device, int priority, bool side, int id) : device(device), priority(priority), side(side), id(id) {}
  const int device;
  const int priority;
  const bool side;  // not a device's default stream: entries are delayed
  const int id;     // from 1, index in clocks

  void issue(std::function<void()> work, std::shared_ptr<Ticket> after = nullptr);  // waits for `after` first
  void issue(std::function<void()> work, std::shared_ptr<Ticket> after, bool holds);
  bool idle();
  void finish();                   // returns when all that was issued has ended
  void reach();                    // returns when a kernel that is issued now would begin
  void run_behind(uint64_t last);  // returns when the first `last` entries have ended
  void push(std::function<void()> work);

 private:
  void serve();
  std::mutex lock_;
  std::condition_variable filled_, ended_;
  std::deque<std::function<void()>> entries_;
  std::atomic<uint64_t> issued_{0};
  uint64_t finished_ = 0;
  bool started_ = false;
};
Stream& stream_of(cudaStream_t stream);        // the current device's default stream for null
Stream& default_stream(int device);
std::vector<Stream*> streams_of(int device);

struct Block {
  uintptr_t begin;
  size_t bytes;
  int device;
};
bool device_block(const void* address, Block* block = nullptr);
bool pinned(const void* address);

// Order of work, and accesses that have none (races.cpp).
namespace order {
Clock record(int stream);                          // an event is recorded on it
void wait(int stream, const Clock& event);         // it waits for an event
void host_saw(const Clock& event);                 // the host waited for it
void host_saw(int stream);                         // the host waited for all of it
void polled(const Clock& event);                   // PyTorch found it completed
void access(int stream, const void* address, size_t bytes, bool write, const char* name);
void forget(const void* address, size_t bytes);    // the memory is another's from now on, in order with everything
}  // namespace order

}  // namespace stand_in
