// Runs every function of the CPU back end over odd lengths and offsets, all types and several threads, on heap buffers of the exact
// size: built with AddressSanitizer and UndefinedBehaviorSanitizer, it ends with status 0 only if neither objects.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "lamb_cpu.h"

namespace {

constexpr int64_t LENGTHS[] = {0, 1, 2, 3, 15, 16, 17, 31, 33, 255, 257, 2047, 2049, 8193, 40001};

// Exactly `count` elements behind `offset` others, so that the next byte is the sanitizer's.
struct Array {
  std::unique_ptr<char[]> bytes;
  char* first;

  Array(int64_t type, int64_t count, int64_t offset, unsigned seed) {
    const int64_t size = type == lamb::FLOAT32 ? 4 : 2;
    bytes.reset(new char[(count + offset) * size]);
    first = bytes.get() + offset * size;
    for (int64_t i = 0; i < count; ++i) {
      seed = seed * 1664525u + 1013904223u;
      const float x = static_cast<float>(seed >> 8) * 0x1p-25f;
      const uint16_t half = type == lamb::FLOAT16 ? 0x2c00 + (seed >> 24) : 0x3d00 + (seed >> 25);
      std::memcpy(first + i * size, size == 4 ? static_cast<const void*>(&x) : &half, size);
    }
  }
  int64_t address() const { return reinterpret_cast<int64_t>(first); }
};

struct Model {
  std::vector<Array> arrays;
  std::vector<lamb::Segment> segments;
  int64_t layers = 0;

  void add(int64_t length, int64_t offset, int64_t p_type, int64_t g_type, int64_t copy_type) {
    int64_t addresses[5] = {};
    const int64_t types[5] = {p_type, g_type, lamb::FLOAT32, lamb::FLOAT32, copy_type};
    for (int i = 0; i < 5; ++i) {
      if (types[i] < 0) continue;
      arrays.emplace_back(types[i], length, offset, static_cast<unsigned>(length + i));
      addresses[i] = arrays.back().address();
    }
    const int64_t packed = p_type << 16 | g_type << 20 | (copy_type < 0 ? 0 : copy_type) << 24 | int64_t{1} << 28;
    segments.push_back({addresses[0], addresses[1], addresses[2], addresses[3], addresses[4], length, layers++, packed});
  }
};

Model odd_shapes() {
  Model model;
  for (const int64_t offset : {0, 1, 3}) {
    for (const int64_t length : LENGTHS) model.add(length, offset, lamb::FLOAT32, lamb::FLOAT32, -1);
  }
  for (int64_t p = 0; p < 3; ++p) {
    for (int64_t g = 0; g < 3; ++g) {
      for (int64_t copy = -1; copy < 3; ++copy) model.add(2049 + p, 1, p, g, copy);
    }
  }
  return model;
}

// Long enough for stores past the cache and for phase 2 to compute u again.
Model long_layer() {
  Model model;
  model.add(2900001, 1, lamb::FLOAT32, lamb::FLOAT32, -1);
  model.add(70001, 0, lamb::FLOAT32, lamb::FLOAT32, -1);
  return model;
}

void run(Model& model, int threads, const lamb::Kernels& kernels) {
  const double none = std::numeric_limits<double>::infinity();
  const lamb::Rule rule = {0.01, 0.9, 0.999, 0.1, 1e-6, 0.01, 1, 0, none, 0, none, lamb::ADAPT | lamb::CORRECT_MOMENTS};
  const lamb::Tables tables = {model.segments.data(), static_cast<int64_t>(model.segments.size()), &rule, 1, model.layers};
  lamb::check_tables(tables);
  lamb::Control control = {1, 1, 0, 0};
  std::vector<double> norms(2 * model.layers);
  std::vector<double> ratios(model.layers);
  lamb::Workspace workspace;
  lamb::square_sum(tables, control, threads, kernels);
  lamb::step(tables, control, norms.data(), ratios.data(), threads, kernels, workspace);
  lamb::moments(tables, control, norms.data(), threads, kernels);
  lamb::apply(tables, control, norms.data(), ratios.data(), threads, kernels);
  if (control.found_inf != 0) std::abort();
}

}  // namespace

int main() {
  const lamb::Kernels& kernels = lamb::kernels_of(lamb::instruction_set());
  for (const int threads : {1, 3}) {
    Model small = odd_shapes();
    run(small, threads, kernels);
    Model large = long_layer();
    run(large, threads, kernels);
  }
  std::puts(lamb::instruction_set());
  return 0;
}
