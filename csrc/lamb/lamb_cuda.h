// The CUDA back end: the functions of a back end over the tables of segment.h, all of them in device memory.
//
// Three kernels make a step, for any number of tensors, layers and rules:
//   square_sum   reads every gradient: their sum of squares, and whether one is nan or infinite
//   moments      reads p, g, m, v and writes m, v: the sums of squares of p and u of every layer are complete when it ends
//   apply        reads p, m, v and writes p and its copy
// Nothing is allocated, no host thread waits, and nothing but stream order ties the kernels together, so that a collective may stand
// between two of them and a CUDA graph may hold all of them.
#pragma once

#include <cstdint>

#include "segment.h"

namespace lamb::cuda {

// What one block works on at a time: a run of elements of one segment, CHUNK of them or fewer, at least one. Chunks are sorted by layer.
struct Chunk {
  int64_t offset;          // from the start of the segment
  int32_t segment;
  int32_t length;
};

struct Control {
  double grad_scale;
  double max_grad_norm;    // 0 for no clipping
  double square_sum;       // of the counted gradients, not scaled
  double found_inf;        // 0 or 1
};

// Device addresses. Pointed to by every kernel, changed by none but `rules` (the step), `partials` and `arrived`.
struct Tables {
  const Segment* segments;
  const Chunk* chunks;
  const int64_t* first_chunk;  // of each layer, and the number of chunks at the end
  Rule* rules;
  double* partials;            // 2 x max(chunk_count, blocks of square_sum)
  uint32_t* arrived;           // layer_count + 2 counters: zero before the first kernel, and again whenever a kernel has ended
  int64_t chunk_count;
  int64_t layer_count;
  int64_t rule_count;
};

// Blocks that fill the current device, one number for each kernel. They are sized once: a block takes chunk after chunk.
struct Blocks {
  int square_sum;
  int moments;
  int apply;
};

// Each function returns null, or what the CUDA runtime says went wrong. `stream` is a cudaStream_t.
const char* blocks_of_device(Blocks* blocks);
const char* square_sum(const Tables& tables, double* control, int blocks, void* stream);
const char* moments(const Tables& tables, double* norms, const double* control, int blocks, void* stream);
// With `advance`, adds one to the step of all rules when every block has done its part, unless found_inf.
const char* apply(const Tables& tables, const double* norms, const double* control, double* ratios, bool advance, int blocks,
                  void* stream);
// Copies every column of `rows` rules but the step, from device to device, without a kernel.
const char* copy_rules(Rule* to, const Rule* from, int64_t rows, void* stream);
// Copies from host memory at once and waits, beside a capture that may be going on: the copy is no part of the graph.
const char* upload_now(void* device, const void* host, int64_t bytes);

int64_t chunk_elements();

}  // namespace lamb::cuda
