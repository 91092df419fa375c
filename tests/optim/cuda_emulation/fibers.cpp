// Runs the threads of a block as fibers of one host thread, and every block on a host thread of its own, several at a time.
//
// A fiber runs until it comes to a barrier or a shuffle; then another one runs, drawn at random each time. So a barrier
// that is missing lets a thread read what no other has written yet. To ThreadSanitizer (compile with -DEMULATION_TSAN) each fiber is
// a thread that only the barriers, the shuffles and the fences tie to others: it reports every access that they do not order,
// in whatever order the fibers happened to run. This file itself is compiled without the sanitizer.
//
// EMULATION_SEED draws the orders, EMULATION_WORKERS is the number of blocks at a time.
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

#ifdef EMULATION_TSAN
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#else
static void* __tsan_create_fiber(unsigned) { return nullptr; }
static void __tsan_destroy_fiber(void*) {}
static void __tsan_switch_to_fiber(void*, unsigned) {}
static void* __tsan_get_current_fiber() { return nullptr; }
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
#endif

namespace emulation {
namespace {

constexpr unsigned WARP = 32;
constexpr unsigned NO_SYNC = 1;  // a switch to another fiber orders nothing
constexpr size_t STACK = 64 * 1024;

enum class State { READY, AT_BLOCK_BARRIER, AT_SHUFFLE, DONE };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  State state = State::READY;
  int place = 0;
  int distance = 0;  // of a shuffle, and what it gives and gets
  double given = 0.0, got = 0.0;
  void* shadow = nullptr;
  int published = -1;      // the tag of its last fence
  unsigned seen_count = 0;
  int seen[64] = {};       // tags of others' fences, before atomics that it has met since its last fence
};

// What had been published by those who changed a counter. Fixed arrays, because ThreadSanitizer sees every allocation and mutex.
struct Counter {
  const void* address;
  unsigned count;
  int tags[64];
};

struct Block {
  unsigned index;
  unsigned count;
  std::vector<Fiber> fibers;
  const std::function<void()>& body;
  std::mt19937 random;
  ucontext_t scheduler = {};
  void* scheduler_shadow = nullptr;
  unsigned current = 0;
  unsigned barriers = 0;
  char tags[2] = {};  // of barriers, in turns: who leaves late must not see what happened after it
};

thread_local Block* block = nullptr;
char ends;
std::atomic_flag busy = ATOMIC_FLAG_INIT;
unsigned counter_count;
[[maybe_unused]] Counter counters[64];
[[maybe_unused]] int tag_count;
[[maybe_unused]] char tags[4096];

[[noreturn]] void refuse(const char* what, unsigned thread) {
  std::fprintf(stderr, "emulation: %s (block %u, thread %u, line %d)\n", what, block->index, thread, block->fibers[thread].place);
  std::abort();
}

Fiber& running() { return block->fibers[block->current]; }

void wait_at(State state, int place) {
  Fiber& fiber = running();
  fiber.state = state;
  fiber.place = place;
  __tsan_switch_to_fiber(block->scheduler_shadow, NO_SYNC);
  swapcontext(&fiber.context, &block->scheduler);
}

void enter() {
  block->body();
  __tsan_release(&ends);
  wait_at(State::DONE, running().place);
}

// Lets fibers [first, last) go on if all of them have come to the same place.
bool meet(unsigned first, unsigned last, State state) {
  for (unsigned i = first; i < last; ++i) {
    if (block->fibers[i].state != state) return false;
  }
  for (unsigned i = first; i < last; ++i) {
    Fiber& fiber = block->fibers[i];
    if (fiber.place != block->fibers[first].place) refuse("threads met at different places", i);
    const unsigned from = i + static_cast<unsigned>(fiber.distance);
    fiber.got = block->fibers[from < last ? from : i].given;
    fiber.state = State::READY;
  }
  block->barriers += state == State::AT_BLOCK_BARRIER;
  return true;
}

void run_block() {
  const auto threads = static_cast<unsigned>(block->fibers.size());
  std::vector<unsigned> order(threads);
  for (unsigned i = 0; i < threads; ++i) order[i] = i;
  block->scheduler_shadow = __tsan_get_current_fiber();
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = block->fibers[i];
    fiber.shadow = __tsan_create_fiber(0);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    makecontext(&fiber.context, enter, 0);
  }
  for (unsigned done = 0; done < threads;) {
    std::shuffle(order.begin(), order.end(), block->random);
    bool moved = false;
    for (const unsigned i : order) {
      Fiber& fiber = block->fibers[i];
      if (fiber.state != State::READY) continue;
      moved = true;
      block->current = i;
      __tsan_switch_to_fiber(fiber.shadow, NO_SYNC);
      swapcontext(&block->scheduler, &fiber.context);
      done += fiber.state == State::DONE;
    }
    for (unsigned i = 0; i < threads; i += WARP) moved = meet(i, i + WARP, State::AT_SHUFFLE) || moved;
    moved = meet(0, threads, State::AT_BLOCK_BARRIER) || moved;
    if (!moved && done < threads) {
      const auto waits = [](const Fiber& fiber) { return fiber.state != State::DONE; };
      const auto first = std::find_if(block->fibers.begin(), block->fibers.end(), waits);
      refuse("a thread waits for one that never comes", static_cast<unsigned>(first - block->fibers.begin()));
    }
  }
  for (Fiber& fiber : block->fibers) __tsan_destroy_fiber(fiber.shadow);
}

unsigned setting(const char* name, unsigned otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<unsigned>(std::stoul(text));
}

}  // namespace

unsigned thread_index() { return block->current; }
unsigned block_index() { return block->index; }
unsigned block_count() { return block->count; }

void block_barrier(int place) {
  char* tag = &block->tags[block->barriers % 2];
  __tsan_release(tag);
  wait_at(State::AT_BLOCK_BARRIER, place);
  __tsan_acquire(tag);
}

double shuffle_down(double value, int distance, int place) {
  running().given = value;
  running().distance = distance;
  wait_at(State::AT_SHUFFLE, place);
  return running().got;
}

void begin_atomic() {
  while (busy.test_and_set(std::memory_order_acquire)) {
  }
}

void end_atomic(const void* address) {
#ifdef EMULATION_TSAN
  Fiber& fiber = running();
  unsigned i = 0;
  while (i < counter_count && counters[i].address != address) ++i;
  if (i == counter_count) counters[counter_count++] = Counter{address, 0, {}};
  Counter& counter = counters[i];
  if (counter_count == 64 || counter.count == 64 || fiber.seen_count + counter.count > 64) refuse("too many atomics", block->current);
  for (unsigned j = 0; j < counter.count; ++j) fiber.seen[fiber.seen_count++] = counter.tags[j];
  if (fiber.published >= 0) counter.tags[counter.count++] = fiber.published;
#else
  (void)address;
#endif
  busy.clear(std::memory_order_release);
}

// A fence orders what comes before it with what follows another thread's fence, if an atomic after the one was met by an atomic
// before the other. Every fence publishes a state of its own, so that no fiber learns of events after the fence that it has met.
void fence() {
  begin_atomic();
#ifdef EMULATION_TSAN
  Fiber& fiber = running();
  for (unsigned i = 0; i < fiber.seen_count; ++i) __tsan_acquire(&tags[fiber.seen[i]]);
  fiber.seen_count = 0;
  if (tag_count == sizeof(tags)) refuse("too many fences", block->current);
  fiber.published = tag_count++;
  __tsan_release(&tags[fiber.published]);
#endif
  busy.clear(std::memory_order_release);
}

void run(unsigned blocks, unsigned threads, const std::function<void()>& body) {
  if (threads == 0 || threads % WARP != 0) std::abort();
  const unsigned seed = setting("EMULATION_SEED", 0);
  const unsigned workers = std::max(1u, setting("EMULATION_WORKERS", 2));
  std::vector<unsigned> order(blocks);
  for (unsigned i = 0; i < blocks; ++i) order[i] = i;
  std::mt19937 random(seed);
  std::shuffle(order.begin(), order.end(), random);
  // Nothing that a block did is known to a later one: this thread learns of threads that have ended, not of their fibers.
  for (unsigned begin = 0; begin < blocks; begin += workers) {
    std::vector<std::thread> pool;
    for (unsigned i = begin; i < std::min(blocks, begin + workers); ++i) {
      pool.emplace_back([&, i] {
        Block here{order[i], blocks, std::vector<Fiber>(threads), body, std::mt19937(seed + order[i])};
        block = &here;
        run_block();
      });
    }
    for (std::thread& thread : pool) thread.join();
  }
  counter_count = 0;
  __tsan_acquire(&ends);
}

}  // namespace emulation
