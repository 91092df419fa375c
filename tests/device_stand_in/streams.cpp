// Streams, events and callbacks. Usually each stream is a queue of its own. With CUDA_DEVICE_MAX_CONNECTIONS=1 all
// streams of a device are dispatched by one thread in the order of issue: an entry whose stream is busy, or whose event
// is not reached, holds all entries behind it; an entry that runs holds those of its own stream alone. A record of an
// event belongs to the entry before it, and holds nothing.
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <thread>

#include "runtime.h"

namespace stand_in {
namespace {

std::mutex all_lock;

std::vector<Stream*>& all_streams() {
  static auto* all = new std::vector<Stream*>;  // never destroyed: threads use them until the process has gone
  return *all;
}

Stream& add_stream(int priority, int device, bool side) {
  int id = static_cast<int>(all_streams().size()) + 1;
  unsigned seed = side && settings().delay_us ? settings().seed * 7919 + id : 0;
  all_streams().push_back(new Stream(device, priority, id, seed));
  return *all_streams().back();
}

// Dispatches what is issued on the one hardware queue of a device.
Worker& front_of(int device) {
  static std::mutex lock;
  static auto* fronts = new std::map<int, Worker>;
  std::lock_guard<std::mutex> guard(lock);
  return fronts->try_emplace(device, device, 0).first->second;
}

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

void Worker::push(std::function<void()> work) {
  std::lock_guard<std::mutex> guard(lock_);
  if (!pushed_++) std::thread([this] { serve(); }).detach();
  work_.push_back(std::move(work));
  filled_.notify_one();
}

void Worker::serve() {
  current_device = device_;
  std::unique_lock<std::mutex> guard(lock_);
  for (;;) {
    filled_.wait(guard, [&] { return !work_.empty(); });
    auto work = std::move(work_.front());
    work_.pop_front();
    guard.unlock();
    if (seed_) usleep(rand_r(&seed_) % settings().delay_us);
    work();
    guard.lock();
    ++finished_;
    done_.notify_all();
  }
}

void Worker::wait_for(uint64_t count) {
  std::unique_lock<std::mutex> guard(lock_);
  done_.wait(guard, [&] { return finished_ >= count; });
}

bool Worker::done(uint64_t count) {
  std::lock_guard<std::mutex> guard(lock_);
  return finished_ >= count;
}

void Stream::issue(std::function<void()> work, std::shared_ptr<Ticket> after, bool holds) {
  std::lock_guard<std::mutex> guard(issues_);
  uint64_t before = issued_++;
  if (settings().one_queue) {
    front_of(device).push([=] {
      if (holds) worker_.wait_for(before);
      if (after) after->wait();
      worker_.push(work);
    });
  } else {
    worker_.push([=] {
      if (after) after->wait();
      work();
    });
  }
}

void Stream::reach() {
  if (settings().one_queue) front_of(device).wait();
  finish();
}

Stream& default_stream(int device) {
  static Stream* defaults[64] = {};
  std::lock_guard<std::mutex> guard(all_lock);
  if (!defaults[device]) defaults[device] = &add_stream(0, device, false);
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

// Returns when a kernel that is issued now would begin, for who computes in its place. No wait of the program's.
API void stand_in_reach(void* stream, int device) {
  (stream ? stream_of(static_cast<cudaStream_t>(stream)) : default_stream(device)).reach();
}

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  std::lock_guard<std::mutex> guard(all_lock);
  *stream = reinterpret_cast<cudaStream_t>(&add_stream(priority, current_device, true));
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return give(priority, stream_of(stream).priority);
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return stream_of(stream).idle() ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream_of(stream).finish();
  order::host_saw(stream_of(stream).id);
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
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

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return give(event, reinterpret_cast<cudaEvent_t>(new Event{nullptr, flags, current_device}));
}
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
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return give(status, cudaStreamCaptureStatusNone);
}
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
