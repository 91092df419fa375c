// Streams, events and callbacks. Usually each stream is a queue of its own. With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams
// of a device are dispatched by one thread in the order of issue: an entry whose stream is busy, or whose event is not
// reached, holds all entries behind it; an entry that runs holds those of its own stream alone. A record of an event
// belongs to the entry before it, and holds nothing.
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "runtime.h"

namespace stand_in {
namespace {

std::mutex all_lock;

std::vector<Stream*>& all_streams() {
  static auto* all = new std::vector<Stream*>;  // never destroyed: threads use them until the process has gone
  return *all;
}

Stream& add_stream(int device, int priority, bool side) {
  all_streams().push_back(new Stream(device, priority, side, static_cast<int>(all_streams().size()) + 1));
  return *all_streams().back();
}

// The one hardware queue of a device.
class Front {
 public:
  struct Entry {
    Stream* stream;
    std::function<void()> work;
    std::shared_ptr<Ticket> after;
    uint64_t behind;  // so many entries of the stream come first
  };
  void push(Entry entry) {
    std::lock_guard<std::mutex> guard(lock_);
    if (!issued_++) std::thread([this] { serve(); }).detach();
    entries_.push_back(std::move(entry));
    changed_.notify_all();
  }
  void reach() {
    std::unique_lock<std::mutex> guard(lock_);
    uint64_t until = issued_;
    changed_.wait(guard, [&] { return dispatched_ >= until; });
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
      changed_.wait(guard, [&] { return !entries_.empty(); });
      Entry entry = std::move(entries_.front());
      entries_.pop_front();
      guard.unlock();
      entry.stream->run_behind(entry.behind);
      if (entry.after) entry.after->wait();
      entry.stream->push(std::move(entry.work));
      guard.lock();
      ++dispatched_;
      changed_.notify_all();
    }
  }
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Entry> entries_;
  uint64_t issued_ = 0, dispatched_ = 0;
};

Front& front_of(int device) {
  static auto* fronts = new std::deque<Front>(settings().devices);
  return (*fronts)[device];
}

// Whether this thread issues the parts of one entry, and has issued the first.
thread_local bool entry_open = false, entry_begun = false;

struct Event {
  std::shared_ptr<Ticket> ticket;  // of its last record; another thread may query it meanwhile
  unsigned flags;
  int device;
};

std::shared_ptr<Ticket> ticket_of(cudaEvent_t event) {
  return std::atomic_load(&reinterpret_cast<Event*>(event)->ticket);
}

}  // namespace

void Ticket::finish() {
  std::lock_guard<std::mutex> guard(lock_);
  at = std::chrono::steady_clock::now();
  done = true;
  finished_.notify_all();
}

void Ticket::wait() {
  std::unique_lock<std::mutex> guard(lock_);
  finished_.wait(guard, [&] { return done.load(); });
}

void Stream::issue(std::function<void()> work, std::shared_ptr<Ticket> after) { issue(work, after, !entry_begun); }

void Stream::issue(std::function<void()> work, std::shared_ptr<Ticket> after, bool holds) {
  uint64_t behind = issued_++;
  if (entry_open) entry_begun = true;
  if (settings().one_queue) return front_of(device).push({this, std::move(work), std::move(after), holds ? behind : 0});
  push([work = std::move(work), after = std::move(after)] {
    if (after) after->wait();
    work();
  });
}

void Stream::push(std::function<void()> work) {
  std::lock_guard<std::mutex> guard(lock_);
  if (!started_) std::thread([this] { serve(); }).detach();
  started_ = true;
  entries_.push_back(std::move(work));
  filled_.notify_one();
}

void Stream::serve() {
  current_device = device;
  unsigned seed = settings().seed * 7919 + id;
  std::unique_lock<std::mutex> guard(lock_);
  for (;;) {
    filled_.wait(guard, [&] { return !entries_.empty(); });
    auto work = std::move(entries_.front());
    entries_.pop_front();
    guard.unlock();
    if (side && settings().delay_us) usleep(rand_r(&seed) % settings().delay_us);
    work();
    guard.lock();
    ++finished_;
    ended_.notify_all();
  }
}

void Stream::run_behind(uint64_t last) {
  std::unique_lock<std::mutex> guard(lock_);
  ended_.wait(guard, [&] { return finished_ >= last; });
}

void Stream::finish() { run_behind(issued_); }

void Stream::reach() {
  if (settings().one_queue) front_of(device).reach();
  finish();
}

bool Stream::idle() {
  std::lock_guard<std::mutex> guard(lock_);
  return finished_ >= issued_;
}

Stream& default_stream(int device) {
  static Stream* defaults[64] = {};
  std::lock_guard<std::mutex> guard(all_lock);
  if (!defaults[device]) defaults[device] = &add_stream(device, 0, false);
  return *defaults[device];
}

// 1 and 2 are the legacy and the per-thread default stream.
Stream& stream_of(cudaStream_t stream) {
  bool named = reinterpret_cast<uintptr_t>(stream) > 2;
  return named ? *reinterpret_cast<Stream*>(stream) : default_stream(current_device);
}

std::vector<Stream*> streams_of(int device) {
  std::lock_guard<std::mutex> guard(all_lock);
  std::vector<Stream*> found;
  for (auto* stream : all_streams())
    if (stream->device == device) found.push_back(stream);
  return found;
}

}  // namespace stand_in

using namespace stand_in;

// Returns when a kernel that is issued now would begin, for those who compute in its place. Not a wait of the program's.
API void stand_in_reach(void* stream, int device) {
  (stream ? stream_of(static_cast<cudaStream_t>(stream)) : default_stream(device)).reach();
}

// What this thread issues between 1 and 0 is one entry, as a kernel of NCCL is: its parts hold nothing on their own.
API void stand_in_one_entry(int open) {
  entry_open = open;
  entry_begun = false;
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  std::lock_guard<std::mutex> guard(all_lock);
  *stream = reinterpret_cast<cudaStream_t>(&add_stream(current_device, priority, true));
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) { return give(priority, stream_of(stream).priority); }
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return stream_of(stream).idle() ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  host_waits("cudaStreamSynchronize");
  stream_of(stream).finish();
  order::host_saw(stream_of(stream).id);
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  host_waits("cudaDeviceSynchronize");
  for (auto* stream : streams_of(current_device)) {
    stream->finish();
    order::host_saw(stream->id);
  }
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  auto ticket = ticket_of(event);
  if (!ticket) return cudaSuccess;  // never recorded
  order::wait(stream_of(stream).id, ticket->clock);
  if (!ticket->done) stream_of(stream).issue([] {}, ticket);
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  stream_of(stream).issue([=] { call(stream, cudaSuccess, data); });
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  stream_of(stream).issue([=] { call(data); });
  return cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) { return give(event, reinterpret_cast<cudaEvent_t>(new Event{nullptr, flags, current_device})); }
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t on) {
  auto* recorded = reinterpret_cast<Event*>(event);
  Stream& stream = stream_of(on);
  if (recorded->device != stream.device) return fail(cudaErrorInvalidResourceHandle);
  auto ticket = std::make_shared<Ticket>();
  ticket->clock = order::record(stream.id);
  std::atomic_store(&recorded->ticket, ticket);
  stream.issue([ticket] { ticket->finish(); }, nullptr, false);
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto ticket = ticket_of(event);
  if (ticket && !ticket->done) return cudaErrorNotReady;
  if (ticket) order::polled(ticket->clock);
  return cudaSuccess;
}
// The program itself asked for the event, was told that it is completed, and relies on it.
API void stand_in_saw(cudaEvent_t event) {
  if (auto ticket = ticket_of(event)) order::host_saw(ticket->clock);
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  host_waits("cudaEventSynchronize");
  if (auto ticket = ticket_of(event)) {
    ticket->wait();
    order::host_saw(ticket->clock);
  }
  return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  auto begin = ticket_of(from), end = ticket_of(to);
  unsigned flags = reinterpret_cast<Event*>(from)->flags | reinterpret_cast<Event*>(to)->flags;
  if (flags & cudaEventDisableTiming || !begin || !end) return fail(cudaErrorInvalidResourceHandle);
  if (!begin->done || !end->done) return fail(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
  return cudaSuccess;
}

// Nothing is ever captured into a graph.
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) { return give(status, cudaStreamCaptureStatusNone); }
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode now = cudaStreamCaptureModeGlobal;
  std::swap(*mode, now);
  return cudaSuccess;
}
