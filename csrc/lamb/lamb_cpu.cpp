// The driver of the CPU back end: cuts segments into chunks, chunks into waves, gives them to threads and combines their sums.
// What runs on the elements is in lamb_cpu_kernels.h; nothing here depends on the instruction set.
#include "lamb_cpu.h"

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>

namespace lamb {
namespace {

// Elements of p and of u, 8 bytes a pair, that a last-level cache may be trusted to keep from phase 1 to phase 2.
constexpr int64_t CACHED = int64_t{5} << 19;
// A wave's least elements for each thread: enough to make the barrier after it cheap, and u and p still in the second-level cache.
constexpr int64_t WAVE = int64_t{1} << 16;
// A thread is not worth waking for less.
constexpr int64_t LEAST = int64_t{1} << 15;

// Chunks that are taken forwards where the order is backwards: a processor fetches ahead in ascending order only.
constexpr int64_t STRETCH = 32;
constexpr size_t LARGE_PAGE = size_t{1} << 21;

struct Chunk {
  int64_t segment;
  int64_t start;     // elements from the segment's first
  int64_t length;
};

// What is made of the tables before the threads start.
struct Plan {
  std::vector<Chunk> chunks;
  std::vector<int64_t> before;          // elements before each chunk, and the total
  std::vector<int64_t> first;           // first chunk of each layer, and the number of chunks
  std::vector<Coefficients> rules;
  std::vector<double> step_factors;     // lr, and what CORRECT_STEP multiplies it by
  int64_t elements() const { return before.back(); }
};

Plan plan_of(const Tables& tables, const Control& control) {
  Plan plan;
  plan.first.assign(tables.layer_count + 1, 0);
  int64_t elements = 0;
  int64_t layer = 0;
  for (int64_t i = 0; i < tables.segment_count; ++i) {
    const Segment& segment = tables.segments[i];
    for (; layer < segment.layer; ++layer) plan.first[layer + 1] = static_cast<int64_t>(plan.chunks.size());
    for (int64_t start = 0; start < segment.length; start += CHUNK) {
      const int64_t length = std::min(CHUNK, segment.length - start);
      plan.chunks.push_back({i, start, length});
      plan.before.push_back(elements);
      elements += length;
    }
  }
  for (; layer < tables.layer_count; ++layer) plan.first[layer + 1] = static_cast<int64_t>(plan.chunks.size());
  plan.before.push_back(elements);
  const double factor = gradient_factor(control.grad_scale, control.max_grad_norm, control.square_sum);
  for (int64_t i = 0; i < tables.rule_count; ++i) {
    plan.rules.push_back(coefficients_of(tables.rules[i], factor));
    plan.step_factors.push_back(step_factor(tables.rules[i]));
  }
  return plan;
}

// The chunk at which the part of [begin, end) that belongs to thread `index` of `threads` begins: parts of equal elements.
int64_t part(const Plan& plan, int64_t begin, int64_t end, int index, int threads) {
  if (index == 0) return begin;
  if (index == threads) return end;
  const int64_t base = plan.before[begin];
  const int64_t target = base + (plan.before[end] - base) * index / threads;
  return std::lower_bound(plan.before.begin() + begin, plan.before.begin() + end, target) - plan.before.begin();
}

int team_size(int64_t elements, int threads) {
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, elements / LEAST)));
}

// Calls visit(i) for the chunks of [begin, end), the last stretch first: what was used last is what the cache still has.
template <typename Visit>
void backwards(int64_t begin, int64_t end, Visit visit) {
  for (int64_t stop = end; stop > begin; stop -= STRETCH) {
    for (int64_t i = std::max(begin, stop - STRETCH); i < stop; ++i) visit(i);
  }
}

// One thread's scratch: the fp32 copies of a block.
struct Buffers {
  alignas(64) float parameter[BLOCK];
  alignas(64) float gradient[BLOCK];
};

int64_t bytes_of(int64_t type) { return type == FLOAT32 ? 4 : 2; }

char* at(int64_t address, int64_t type, int64_t index) { return reinterpret_cast<char*>(address) + index * bytes_of(type); }

// The block's values in fp32: where they are if they are fp32 there, else converted into `buffer`.
const float* in_fp32(const Kernels& kernels, int64_t address, int64_t type, int64_t index, int64_t n, float* buffer) {
  const char* from = at(address, type, index);
  if (type == FLOAT32) return reinterpret_cast<const float*>(from);
  kernels.widen(from, type, buffer, n);
  return buffer;
}

// Phase 1 of a chunk. `kept`, of the chunk's length, receives u; null if it is not wanted.
void moments_of_chunk(const Tables& tables, const Plan& plan, const Chunk& chunk, const Kernels& kernels, float* kept,
                      Buffers& buffers, double* sums) {
  const Segment& s = tables.segments[chunk.segment];
  const Coefficients& c = plan.rules[rule_of(s)];
  const int64_t piece = parameter_type(s) == FLOAT32 && gradient_type(s) == FLOAT32 ? CHUNK : BLOCK;
  sums[0] = sums[1] = 0;
  for (int64_t done = 0; done < chunk.length; done += piece) {
    const int64_t n = std::min(piece, chunk.length - done);
    const int64_t index = chunk.start + done;
    const float* p = in_fp32(kernels, s.parameter, parameter_type(s), index, n, buffers.parameter);
    const float* g = in_fp32(kernels, s.gradient, gradient_type(s), index, n, buffers.gradient);
    float* m = reinterpret_cast<float*>(s.exp_avg) + index;
    float* v = reinterpret_cast<float*>(s.exp_avg_sq) + index;
    kernels.moments(c, p, g, m, v, kept ? kept + done : nullptr, n, sums);
  }
}

// Phase 2 of a chunk. `kept` is what phase 1 left there, null if u must be made again. The copy is rounded from the new value in fp32,
// not from a 16-bit parameter.
void apply_to_chunk(const Tables& tables, const Plan& plan, const Chunk& chunk, const Kernels& kernels, double ratio,
                    const float* kept, Buffers& buffers) {
  const Segment& s = tables.segments[chunk.segment];
  const auto size = static_cast<float>(plan.step_factors[rule_of(s)] * ratio);
  const int64_t type = parameter_type(s);
  const int64_t piece = type == FLOAT32 ? CHUNK : BLOCK;
  for (int64_t done = 0; done < chunk.length; done += piece) {
    const int64_t n = std::min(piece, chunk.length - done);
    const int64_t index = chunk.start + done;
    const float* p = in_fp32(kernels, s.parameter, type, index, n, buffers.parameter);
    char* target = at(s.parameter, type, index);
    float* to = type == FLOAT32 ? reinterpret_cast<float*>(target) : buffers.parameter;
    if (kept) {
      kernels.apply_kept(size, p, kept + done, to, n);
    } else {
      const float* m = reinterpret_cast<const float*>(s.exp_avg) + index;
      const float* v = reinterpret_cast<const float*>(s.exp_avg_sq) + index;
      kernels.apply(plan.rules[rule_of(s)], size, p, m, v, to, n);
    }
    if (type != FLOAT32) kernels.narrow(to, target, type, n);
    if (s.copy) kernels.narrow(to, at(s.copy, copy_type(s), index), copy_type(s), n);
  }
}

// Sums of a layer's chunks, in their order.
void layer_norms(const Plan& plan, const std::vector<double>& sums, int64_t layer, double* norms) {
  norms[0] = norms[1] = 0;
  for (int64_t i = plan.first[layer]; i < plan.first[layer + 1]; ++i) {
    norms[0] += sums[2 * i];
    norms[1] += sums[2 * i + 1];
  }
}

const Rule& rule_of_layer(const Tables& tables, const Plan& plan, int64_t layer) {
  return tables.rules[rule_of(tables.segments[plan.chunks[plan.first[layer]].segment])];
}

// Where the waves begin, and the number of chunks: whole layers, as few as make WAVE elements a thread. Phase 2 of a wave follows its
// phase 1, so small waves find their elements in the cache.
std::vector<int64_t> waves_of(const Plan& plan, int threads) {
  std::vector<int64_t> begins = {0};
  const auto layers = static_cast<int64_t>(plan.first.size()) - 1;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const int64_t end = plan.first[layer + 1];
    if (plan.before[end] - plan.before[begins.back()] >= WAVE * threads) begins.push_back(end);
  }
  const auto chunks = static_cast<int64_t>(plan.chunks.size());
  if (begins.back() != chunks) begins.push_back(chunks);
  return begins;
}

}  // namespace

Area::~Area() { std::free(first_); }

float* Area::at_least(int64_t size) {
  if (size <= size_) return first_;
  std::free(first_);
  size_ = 0;
  const size_t bytes = (size * sizeof(float) + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
  first_ = static_cast<float*>(std::aligned_alloc(LARGE_PAGE, bytes));
  if (!first_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(first_, bytes, MADV_HUGEPAGE);
#endif
  size_ = size;
  return first_;
}

void square_sum(const Tables& tables, Control& control, int threads, const Kernels& kernels) {
  const Plan plan = plan_of(tables, control);
  const auto chunks = static_cast<int64_t>(plan.chunks.size());
  std::vector<double> sums(chunks);
#pragma omp parallel num_threads(team_size(plan.elements(), threads))
  {
    Buffers buffers;
    const int64_t begin = part(plan, 0, chunks, omp_get_thread_num(), omp_get_num_threads());
    const int64_t end = part(plan, 0, chunks, omp_get_thread_num() + 1, omp_get_num_threads());
    // What is read last, and may stay in the cache, is what phase 1 begins with.
    backwards(begin, end, [&](int64_t i) {
      const Chunk& chunk = plan.chunks[i];
      const Segment& s = tables.segments[chunk.segment];
      sums[i] = 0;
      const int64_t piece = gradient_type(s) == FLOAT32 ? CHUNK : BLOCK;
      for (int64_t done = 0; done < chunk.length; done += piece) {
        const int64_t n = std::min(piece, chunk.length - done);
        const float* g = in_fp32(kernels, s.gradient, gradient_type(s), chunk.start + done, n, buffers.gradient);
        sums[i] += kernels.square_sum(g, n);
      }
    });
  }
  // The square of an fp32 number cannot overflow in fp64: a sum that is not finite has a NaN or an infinity in it.
  bool finite = true;
  for (int64_t i = 0; i < chunks; ++i) {
    finite = finite && std::isfinite(sums[i]);
    if (counted(tables.segments[plan.chunks[i].segment])) control.square_sum += sums[i];
  }
  if (!finite) control.found_inf = 1;
}

void moments(const Tables& tables, const Control& control, double* norms, int threads, const Kernels& kernels) {
  if (control.found_inf != 0) return;
  const Plan plan = plan_of(tables, control);
  const auto chunks = static_cast<int64_t>(plan.chunks.size());
  std::vector<double> sums(2 * chunks);
#pragma omp parallel num_threads(team_size(plan.elements(), threads))
  {
    Buffers buffers;
    const int64_t begin = part(plan, 0, chunks, omp_get_thread_num(), omp_get_num_threads());
    const int64_t end = part(plan, 0, chunks, omp_get_thread_num() + 1, omp_get_num_threads());
    for (int64_t i = begin; i < end; ++i) {
      moments_of_chunk(tables, plan, plan.chunks[i], kernels, nullptr, buffers, &sums[2 * i]);
    }
  }
  for (int64_t layer = 0; layer < tables.layer_count; ++layer) layer_norms(plan, sums, layer, norms + 2 * layer);
}

void apply(const Tables& tables, const Control& control, const double* norms, double* ratios, int threads, const Kernels& kernels) {
  if (control.found_inf != 0) return;
  const Plan plan = plan_of(tables, control);
  const auto chunks = static_cast<int64_t>(plan.chunks.size());
  for (int64_t layer = 0; layer < tables.layer_count; ++layer) {
    const bool here = plan.first[layer] != plan.first[layer + 1];
    ratios[layer] = here ? trust_ratio(rule_of_layer(tables, plan, layer), norms[2 * layer], norms[2 * layer + 1]) : 1;
  }
#pragma omp parallel num_threads(team_size(plan.elements(), threads))
  {
    Buffers buffers;
    const int64_t begin = part(plan, 0, chunks, omp_get_thread_num(), omp_get_num_threads());
    const int64_t end = part(plan, 0, chunks, omp_get_thread_num() + 1, omp_get_num_threads());
    backwards(begin, end, [&](int64_t i) {
      const double ratio = ratios[tables.segments[plan.chunks[i].segment].layer];
      apply_to_chunk(tables, plan, plan.chunks[i], kernels, ratio, nullptr, buffers);
    });
  }
}

void step(const Tables& tables, const Control& control, double* norms, double* ratios, int threads, const Kernels& kernels,
          Workspace& workspace) {
  if (control.found_inf != 0) return;
  const std::lock_guard<std::mutex> lock(workspace.busy);
  const Plan plan = plan_of(tables, control);
  const int team = team_size(plan.elements(), threads);
  const std::vector<int64_t> waves = waves_of(plan, team);
  std::vector<double> sums(2 * plan.chunks.size());
  for (int64_t layer = 0; layer < tables.layer_count; ++layer) {
    norms[2 * layer] = norms[2 * layer + 1] = 0;
    ratios[layer] = 1;
  }
  const int64_t kept_elements = std::min(CACHED / team, plan.elements());
  workspace.updates.resize(std::max<size_t>(workspace.updates.size(), team));
  for (int i = 0; i < team; ++i) workspace.updates[i].at_least(kept_elements);
#pragma omp parallel num_threads(team)
  {
    Buffers buffers;
    float* area = workspace.updates[omp_get_thread_num()].data();
    for (size_t wave = 0; wave + 1 < waves.size(); ++wave) {
      const int64_t begin = part(plan, waves[wave], waves[wave + 1], omp_get_thread_num(), omp_get_num_threads());
      const int64_t end = part(plan, waves[wave], waves[wave + 1], omp_get_thread_num() + 1, omp_get_num_threads());
      // u is kept for the last chunks of the part: phase 2 goes backwards and finds them in the cache.
      const auto kept = [&](int64_t i) -> float* {
        const int64_t position = plan.before[end] - plan.before[i];
        return position <= kept_elements ? area + (kept_elements - position) : nullptr;
      };
      for (int64_t i = begin; i < end; ++i) {
        moments_of_chunk(tables, plan, plan.chunks[i], kernels, kept(i), buffers, &sums[2 * i]);
      }
#pragma omp barrier
      int64_t current = -1;
      double ratio = 1;
      backwards(begin, end, [&](int64_t i) {
        const Chunk& chunk = plan.chunks[i];
        const int64_t layer = tables.segments[chunk.segment].layer;
        if (layer != current) {
          double own[2];
          layer_norms(plan, sums, layer, own);
          ratio = trust_ratio(rule_of_layer(tables, plan, layer), own[0], own[1]);
          current = layer;
          if (begin <= plan.first[layer]) {
            norms[2 * layer] = own[0];
            norms[2 * layer + 1] = own[1];
            ratios[layer] = ratio;
          }
        }
        apply_to_chunk(tables, plan, chunk, kernels, ratio, kept(i), buffers);
      });
    }
  }
}

}  // namespace lamb
