// Runs every kernel over a table with layers of many chunks, of one and of none, on more blocks than host threads: for a sanitizer to
// watch. Prints the results' bits, which must not depend on the order in which blocks and threads ran. The exit status is the
// sanitizer's; 3 if a counter was not left at zero.
#include <cstdio>
#include <vector>

#include "lamb_cuda.h"

namespace {

struct Model {
  std::vector<float> p, g, m, v;
  std::vector<uint16_t> copy;

  explicit Model(int64_t n) : p(n), g(n), m(n), v(n), copy(n) {
    for (int64_t i = 0; i < n; ++i) {
      p[i] = static_cast<float>((i * 37) % 101 - 50) / 50.0f;
      g[i] = static_cast<float>((i * 53) % 97 - 48) / 500.0f;
    }
  }
};

template <typename T>
int64_t address(std::vector<T>& values, int64_t offset) {
  return reinterpret_cast<int64_t>(values.data() + offset);
}

int64_t add_chunks(std::vector<lamb::cuda::Chunk>& chunks, int32_t segment, int64_t length) {
  const int64_t most = lamb::cuda::chunk_elements();
  for (int64_t offset = 0; offset < length; offset += most) {
    chunks.push_back({offset, segment, static_cast<int32_t>(length - offset < most ? length - offset : most)});
  }
  return static_cast<int64_t>(chunks.size());
}

}  // namespace

int main() {
  const int64_t most = lamb::cuda::chunk_elements();
  // The segments' lengths; the second and third make up one layer, the last but one layer has none.
  const std::vector<int64_t> lengths = {5 * most + 3, 3 * most, 1, most - 1, 2 * most + 1};
  const std::vector<int64_t> layers = {0, 1, 1, 2, 4};
  int64_t elements = 1;
  for (const int64_t length : lengths) elements += length;
  Model model(elements);
  std::vector<lamb::Segment> segments;
  std::vector<lamb::cuda::Chunk> chunks;
  std::vector<int64_t> first_chunk(6, 0);
  // An odd offset: some arrays can be read four elements at a time and some cannot.
  int64_t offset = 1;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t types = (i % 2) | (int64_t{lamb::BFLOAT16} << 24) | (int64_t{1} << 28);
    segments.push_back({address(model.p, offset), address(model.g, offset), address(model.m, offset), address(model.v, offset),
                        i < 3 ? address(model.copy, offset) : 0, lengths[i], layers[i], types});
    const int64_t count = add_chunks(chunks, static_cast<int32_t>(i), lengths[i]);
    for (int64_t layer = layers[i] + 1; layer < 6; ++layer) first_chunk[layer] = count;
    offset += lengths[i];
  }
  lamb::Rule rule = {1e-2, 0.9, 0.999, 0.1, 1e-6, 0.01, 1, 0, 10, 0, 10, lamb::ADAPT | lamb::CORRECT_MOMENTS};
  std::vector<lamb::Rule> rules = {rule, rule};
  std::vector<double> partials(2 * chunks.size() + 64), norms(10), ratios(5);
  std::vector<uint32_t> arrived(7, 0);
  const lamb::cuda::Tables tables = {segments.data(),  chunks.data(),  first_chunk.data(), rules.data(),
                                     partials.data(),  arrived.data(), static_cast<int64_t>(chunks.size()),
                                     5,                2};
  for (int step = 0; step < 2; ++step) {
    std::vector<double> control = {0.5, 1.0, 0.0, 0.0};
    lamb::cuda::square_sum(tables, control.data(), 5, nullptr);
    lamb::cuda::moments(tables, norms.data(), control.data(), 6, nullptr);
    lamb::cuda::apply(tables, norms.data(), control.data(), ratios.data(), true, 4, nullptr);
    std::printf("%a", control[2]);
    for (const double value : norms) std::printf(" %a", value);
    for (const double value : ratios) std::printf(" %a", value);
  }
  double total = 0.0;
  for (int64_t i = 0; i < elements; ++i) total += static_cast<double>(i % 7 + 1) * model.p[i] + model.copy[i];
  std::printf(" %a %g\n", total, rules[0].step);
  for (const uint32_t count : arrived) {
    if (count != 0) return 3;
  }
  return 0;
}
