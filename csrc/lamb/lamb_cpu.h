// The CPU back end: the four functions of a back end over the tables of segment.h.
//
// Every result, to the last bit, is the same for any number of threads and for every instruction set: what is fused is written as
// fma and fused everywhere, division and square root are true ones, and sums are made in one order: sixteen lanes, then chunks, then
// layers.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "rules.h"
#include "segment.h"

namespace lamb {

// Elements whose sums of squares are stored as one number, and that a kernel works on at once; a thread owns a run of chunks.
constexpr int64_t CHUNK = 8192;
// The same where numbers have to be converted: their fp32 copies stay in the first-level cache.
constexpr int64_t BLOCK = CHUNK / 4;

struct Control {
  double grad_scale;
  double max_grad_norm;      // 0 for no clipping
  double square_sum;         // of the counted gradients, not scaled
  double found_inf;          // 0 or 1
};

// The tables of one call. Addresses point to live arrays of the stated lengths; check_tables says what else must hold.
struct Tables {
  const Segment* segments;
  int64_t segment_count;
  const Rule* rules;
  int64_t rule_count;
  int64_t layer_count;
};

// The functions that exist once for each instruction set. Pointers need no alignment; lengths may be zero.
struct Kernels {
  void (*widen)(const void* from, int64_t type, float* to, int64_t n);
  void (*narrow)(const float* from, void* to, int64_t type, int64_t n);
  double (*square_sum)(const float* x, int64_t n);
  // Updates m and v, writes u unless it is null, adds the sums of squares of p and u to sums[0] and sums[1].
  void (*moments)(const Coefficients&, const float* p, const float* g, float* m, float* v, float* u, int64_t n, double* sums);
  // to = p - size * u; `to` may be p.
  void (*apply_kept)(float size, const float* p, const float* u, float* to, int64_t n);
  // The same with u made again, bit for bit, from the updated moments.
  void (*apply)(const Coefficients&, float size, const float* p, const float* m, const float* v, float* to, int64_t n);
};

extern const Kernels scalar_kernels;
#if defined(__x86_64__)
#define LAMB_X86 1
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

// "avx512", "avx2" or "scalar": what the environment variable DS_TERAPIPE_LAMB_ISA asks for, else the best that this processor has.
// Throws std::invalid_argument for an unknown name and for one that this processor cannot run.
const char* instruction_set();
const Kernels& kernels_of(const char* name);

// Throws std::invalid_argument, with the row, for what would read or write outside the tables: an unknown type, a rule or layer out
// of range, a null address, layers out of order.
void check_tables(const Tables& tables);

// Memory for fp32 numbers, in large pages if the system gives them: far fewer of its addresses have to be looked up.
class Area {
 public:
  Area() = default;
  Area(Area&& other) noexcept : first_(other.first_), size_(other.size_) { other.first_ = nullptr; }
  Area(const Area&) = delete;
  Area& operator=(const Area&) = delete;
  ~Area();
  // At least `size` numbers, of no particular value. Throws std::bad_alloc.
  float* at_least(int64_t size);
  float* data() const { return first_; }

 private:
  float* first_ = nullptr;
  int64_t size_ = 0;
};

// What is kept from step to step to spare its allocation: u of the elements whose phase 2 finds it in the cache, one area a thread.
struct Workspace {
  std::mutex busy;
  std::vector<Area> updates;
};

void square_sum(const Tables& tables, Control& control, int threads, const Kernels& kernels);
void moments(const Tables& tables, const Control& control, double* norms, int threads, const Kernels& kernels);
void apply(const Tables& tables, const Control& control, const double* norms, double* ratios, int threads, const Kernels& kernels);
void step(const Tables& tables, const Control& control, double* norms, double* ratios, int threads, const Kernels& kernels,
          Workspace& workspace);

}  // namespace lamb
