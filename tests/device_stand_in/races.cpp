// Accesses that no order holds apart. Each stream has a vector clock, as in a race detector: recording an event copies it,
// waiting for an event joins it, and what the host has seen is joined into a stream with whatever is issued on it. An
// access must come after the last write of its bytes and, if it writes, after the reads since. Timing decides nothing.
#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "runtime.h"

namespace stand_in {

void Clock::join(const Clock& other) {
  if (size() < other.size()) resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) (*this)[i] = std::max((*this)[i], other[i]);
}

namespace {

constexpr int kHost = 0;

struct Use {
  int stream = 0;
  uint64_t at = 0;  // on the stream's own clock; 0: never
  const char* name = "";
  bool pinned = false;
  bool former = false;  // by the owner before the one of now
};

struct Range {
  uintptr_t end;
  Use write;
  std::vector<Use> reads;  // since the write, the last of each stream
};

// Everything that is known, under one lock.
struct Order {
  std::mutex lock;
  std::vector<Clock> clocks;  // of the host, then of streams
  // What PyTorch's allocators and watchdogs found completed. They free memory for it, yet the program goes on the same
  // where they find it later: it counts for reuse alone, and for pinned memory, whose owners are not known.
  Clock polled;
  std::map<uintptr_t, Range> ranges;  // by begin
  std::set<uintptr_t> owned;  // where the allocator's blocks begin that have an owner
  std::set<std::string> names;
  std::map<std::string, long> races;
  const bool checks = settings().races;

  Clock& clock(size_t stream) {
    if (clocks.size() <= stream) clocks.resize(stream + 1);
    if (clocks[stream].size() <= stream) clocks[stream].resize(stream + 1);
    return clocks[stream];
  }
  Clock& advance(size_t stream) {
    Clock host = clock(kHost);
    Clock& own = clock(stream);
    own.join(host);
    ++own[stream];
    return own;
  }
  // Cuts the range that `at` lies in.
  void split(uintptr_t at) {
    auto next = ranges.upper_bound(at);
    if (next == ranges.begin()) return;
    auto found = std::prev(next);
    if (found->first == at || found->second.end <= at) return;
    ranges[at] = found->second;
    found->second.end = at;
  }
  bool before(const Use& earlier, const Clock& now) const {
    uint64_t seen = now.of(earlier.stream);
    if (earlier.former || earlier.pinned) seen = std::max(seen, polled.of(earlier.stream));
    return earlier.at <= seen;
  }
  void compare(const Use& earlier, const char* did, const Use& now, const char* does, const Clock& clock) {
    if (before(earlier, clock)) return;
    auto on = [](const Use& use) { return use.stream ? " on stream " + std::to_string(use.stream) : " on the host"; };
    std::string owner = earlier.former ? " by the memory's former owner" : "";
    ++races[now.name + on(now) + " " + does + " without waiting for " + earlier.name + on(earlier) + ", which " + did + owner];
  }
  void read(uintptr_t begin, uintptr_t end, const Use& use, const Clock& clock);
  void write(uintptr_t begin, uintptr_t end, const Use& use, const Clock& clock);
};

Order& known() {
  static auto* order = new Order;
  return *order;
}

void Order::read(uintptr_t begin, uintptr_t end, const Use& use, const Clock& clock) {
  uintptr_t at = begin;
  for (auto it = ranges.lower_bound(begin); at < end; ++it) {
    if (it == ranges.end() || it->first > at) {  // nothing is known of these bytes
      uintptr_t until = it == ranges.end() ? end : std::min(end, it->first);
      it = ranges.emplace(at, Range{until, {}, {}}).first;
    }
    Range& range = it->second;
    compare(range.write, "writes", use, "reads", clock);
    auto covered = [&](const Use& read) { return before(read, clock); };
    range.reads.erase(std::remove_if(range.reads.begin(), range.reads.end(), covered), range.reads.end());
    range.reads.push_back(use);
    at = range.end;
  }
}

void Order::write(uintptr_t begin, uintptr_t end, const Use& use, const Clock& clock) {
  auto first = ranges.lower_bound(begin), last = ranges.lower_bound(end);
  for (auto it = first; it != last; ++it) {
    compare(it->second.write, "writes", use, "writes", clock);
    for (const Use& read : it->second.reads) compare(read, "reads", use, "writes", clock);
  }
  ranges.erase(first, last);
  ranges[begin] = {end, use, {}};
}

}  // namespace

namespace order {

Clock record(int stream) {
  std::lock_guard<std::mutex> guard(known().lock);
  return known().advance(stream);
}

void wait(int stream, const Clock& event) {
  std::lock_guard<std::mutex> guard(known().lock);
  known().clock(stream).join(event);
}

void host_saw(const Clock& event) {
  std::lock_guard<std::mutex> guard(known().lock);
  known().clock(kHost).join(event);
}

void host_saw(int stream) { host_saw(record(stream)); }

void polled(const Clock& event) {
  std::lock_guard<std::mutex> guard(known().lock);
  known().polled.join(event);
}

void access(int stream, const void* address, size_t bytes, bool write, const char* name) {
  Order& all = known();
  if (!all.checks || !bytes) return;
  bool on_host = pinned(address);
  if (!on_host && !device_block(address)) return;
  std::lock_guard<std::mutex> guard(all.lock);
  const Clock& clock = all.advance(stream);
  Use use{stream, clock[stream], all.names.insert(name).first->c_str(), on_host, false};
  auto begin = reinterpret_cast<uintptr_t>(address), end = begin + bytes;
  all.split(begin);
  all.split(end);
  write ? all.write(begin, end, use, clock) : all.read(begin, end, use, clock);
}

void forget(const void* address, size_t bytes) {
  Order& all = known();
  std::lock_guard<std::mutex> guard(all.lock);
  auto begin = reinterpret_cast<uintptr_t>(address), end = begin + bytes;
  all.split(begin);
  all.split(end);
  all.ranges.erase(all.ranges.lower_bound(begin), all.ranges.lower_bound(end));
}

}  // namespace order
}  // namespace stand_in

using namespace stand_in;

// An access by a kernel, or by the host where `stream` is -1; null is the default stream of the memory's device.
API void stand_in_access(void* stream, const void* address, size_t bytes, int write, const char* name) {
  Block block;
  if (reinterpret_cast<intptr_t>(stream) == -1) return order::access(kHost, address, bytes, write, name);
  bool named = stream || !device_block(address, &block);
  Stream& on = named ? stream_of(static_cast<cudaStream_t>(stream)) : default_stream(block.device);
  order::access(on.id, address, bytes, write, name);
}
API int stand_in_checks_races() { return known().checks; }
// PyTorch's allocator gave a block away: what is known of its memory was done by former owners.
API void stand_in_allocated(const void* address) {
  Order& all = known();
  Block block;
  if (!device_block(address, &block)) return;
  std::lock_guard<std::mutex> guard(all.lock);
  auto begin = reinterpret_cast<uintptr_t>(address), end = block.begin + block.bytes;
  auto next = all.owned.upper_bound(begin);
  if (next != all.owned.end()) end = std::min(end, *next);
  all.owned.insert(begin);
  all.split(begin);
  all.split(end);
  for (auto it = all.ranges.lower_bound(begin); it != all.ranges.end() && it->first < end; ++it) {
    it->second.write.former = true;
    for (Use& read : it->second.reads) read.former = true;
  }
}
API void stand_in_freed(const void* address) {
  std::lock_guard<std::mutex> guard(known().lock);
  known().owned.erase(reinterpret_cast<uintptr_t>(address));
}
// Gives all that was found to `each`, with how often, and forgets it.
API void stand_in_take_races(void (*each)(const char* race, long count)) {
  std::map<std::string, long> taken;
  {
    std::lock_guard<std::mutex> guard(known().lock);
    taken.swap(known().races);
  }
  for (auto& [race, count] : taken) each(race.c_str(), count);
}
