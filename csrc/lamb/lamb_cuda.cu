// The kernels of lamb_cuda.h. Sums are made in fp64 and in one order: the elements of a chunk in the order of its threads, the
// chunks of a layer in the order of the list. Which block takes which chunk, and which ends last, changes nothing.
#include <cstddef>

#include "lamb_cuda.h"
#include "lamb_cuda_elements.cuh"

#ifndef LAMB_CUDA_THREADS
#define LAMB_CUDA_THREADS 256
#endif
#ifndef LAMB_CUDA_CHUNK
#define LAMB_CUDA_CHUNK 16384
#endif

namespace lamb::cuda {
namespace {

constexpr int THREADS = LAMB_CUDA_THREADS;
constexpr int WARP = 32;
constexpr int WARPS = THREADS / WARP;
// A multiple of WIDTH, so that a chunk starts where its segment would let a wide load start.
constexpr int CHUNK = LAMB_CUDA_CHUNK;
static_assert(THREADS % WARP == 0 && WARPS <= WARP && CHUNK % WIDTH == 0);

struct Pair {
  double a;
  double b;
};

__device__ __forceinline__ Pair warp_sum(Pair sum) {
  for (int distance = WARP / 2; distance > 0; distance /= 2) {
    sum.a += __shfl_down_sync(0xffffffffu, sum.a, distance);
    sum.b += __shfl_down_sync(0xffffffffu, sum.b, distance);
  }
  return sum;
}

// The sum over the threads of a block, in thread 0. All threads call it; a barrier must stand between two calls.
__device__ __forceinline__ Pair block_sum(Pair sum) {
  __shared__ Pair of_warp[WARPS];
  const int lane = threadIdx.x % WARP;
  const int warp = threadIdx.x / WARP;
  sum = warp_sum(sum);
  if (lane == 0) of_warp[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    sum = lane < WARPS ? of_warp[lane] : Pair{0.0, 0.0};
    sum = warp_sum(sum);
  }
  return sum;
}

// Thread 0 says what its block has stored; returns, in every thread, whether the block is the last of `all` to do so. The last one
// sees what the others stored; its atomicInc wraps the counter back to zero.
__device__ __forceinline__ bool last_to_arrive(uint32_t* counter, uint32_t all) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(counter, all - 1) == all - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Partial sums from `first` to `end`, in the same order for every caller. Other blocks stored them: the first-level cache may not be asked.
__device__ __forceinline__ Pair sum_of_partials(const double* partials, int64_t first, int64_t end) {
  Pair sum{0.0, 0.0};
  for (int64_t i = first + threadIdx.x; i < end; i += THREADS) {
    sum.a += __ldcg(partials + 2 * i);
    sum.b += __ldcg(partials + 2 * i + 1);
  }
  return block_sum(sum);
}

// The columns of Segment::types, as segment.h unpacks them for the host.
__device__ __forceinline__ int64_t rule_row(const Segment& s) { return s.types & 0xffff; }
__device__ __forceinline__ int64_t type_of_parameter(const Segment& s) { return (s.types >> 16) & 0xf; }
__device__ __forceinline__ int64_t type_of_gradient(const Segment& s) { return (s.types >> 20) & 0xf; }
__device__ __forceinline__ int64_t type_of_copy(const Segment& s) { return (s.types >> 24) & 0xf; }
__device__ __forceinline__ bool adds_to_norm(const Segment& s) { return ((s.types >> 28) & 1) != 0; }

// A block's work, found by its thread 0. The powers are computed again only where the rule changes.
struct Work {
  Chunk chunk;
  Segment segment;
  int64_t rule;
  Coefficients coefficients;
  double step_factor;
  double ratio;
};

__device__ void find_work(Work& work, const Tables& tables, int64_t index, const double* control) {
  work.chunk = tables.chunks[index];
  work.segment = tables.segments[work.chunk.segment];
  const int64_t rule = rule_row(work.segment);
  if (rule != work.rule) {
    work.rule = rule;
    work.coefficients = coefficients_of(tables.rules[rule], gradient_factor(control[0], control[1], control[2]));
    work.step_factor = step_factor(tables.rules[rule]);
  }
}

__device__ __forceinline__ int element_bytes(int64_t type) { return type == FLOAT32 ? 4 : 2; }

__device__ __forceinline__ int common_phase(int one, int other) { return one == other ? one : -1; }

// Every array starts at the chunk's offset from here on.
__device__ __forceinline__ int64_t moved_by(int64_t address, int64_t offset, int64_t type) {
  return address + offset * element_bytes(type);
}

template <typename T>
__device__ __forceinline__ T* at_chunk(int64_t address, const Work& work) {
  return reinterpret_cast<T*>(address) + work.chunk.offset;
}

template <typename G>
__device__ void add_squares(const Work& work, bool& bad, double& sum) {
  SquareSumOf<G> body{at_chunk<const G>(work.segment.gradient, work)};
  traverse<THREADS>(body, work.chunk.length, phase_of(work.segment.gradient, sizeof(G)), threadIdx.x);
  bad = bad || body.bad;
  if (adds_to_norm(work.segment)) sum += body.sum;
}

template <typename P, typename G>
__device__ Pair moments_of_chunk(const Work& work) {
  const Segment& s = work.segment;
  MomentsOf<P, G> body{at_chunk<const P>(s.parameter, work), at_chunk<const G>(s.gradient, work), at_chunk<float>(s.exp_avg, work),
                       at_chunk<float>(s.exp_avg_sq, work), work.coefficients};
  int phase = phase_of(s.parameter, sizeof(P));
  phase = common_phase(phase, phase_of(s.gradient, sizeof(G)));
  phase = common_phase(phase, phase_of(s.exp_avg, sizeof(float)));
  phase = common_phase(phase, phase_of(s.exp_avg_sq, sizeof(float)));
  traverse<THREADS>(body, work.chunk.length, phase, threadIdx.x);
  return Pair{body.p_sum, body.u_sum};
}

template <typename P>
__device__ Pair moments_of_chunk(const Work& work) {
  switch (type_of_gradient(work.segment)) {
    case FLOAT16:
      return moments_of_chunk<P, __half>(work);
    case BFLOAT16:
      return moments_of_chunk<P, __nv_bfloat16>(work);
    default:
      return moments_of_chunk<P, float>(work);
  }
}

template <typename P>
__device__ void apply_to_chunk(const Work& work) {
  const Segment& s = work.segment;
  const int64_t copied = type_of_copy(s);
  ApplyOf<P> body{at_chunk<P>(s.parameter, work),
                  at_chunk<const float>(s.exp_avg, work),
                  at_chunk<const float>(s.exp_avg_sq, work),
                  s.copy == 0 ? 0 : moved_by(s.copy, work.chunk.offset, copied),
                  copied,
                  static_cast<float>(work.step_factor * work.ratio),
                  work.coefficients};
  int phase = phase_of(s.parameter, sizeof(P));
  phase = common_phase(phase, phase_of(s.exp_avg, sizeof(float)));
  phase = common_phase(phase, phase_of(s.exp_avg_sq, sizeof(float)));
  if (s.copy != 0) phase = common_phase(phase, phase_of(s.copy, element_bytes(copied)));
  traverse<THREADS>(body, work.chunk.length, phase, threadIdx.x);
}

__global__ void __launch_bounds__(THREADS) square_sum_kernel(Tables tables, double* control) {
  __shared__ Work work;
  double sum = 0.0;
  bool bad = false;
  for (int64_t i = blockIdx.x; i < tables.chunk_count; i += gridDim.x) {
    __syncthreads();
    if (threadIdx.x == 0) {
      work.chunk = tables.chunks[i];
      work.segment = tables.segments[work.chunk.segment];
    }
    __syncthreads();
    switch (type_of_gradient(work.segment)) {
      case FLOAT16:
        add_squares<__half>(work, bad, sum);
        break;
      case BFLOAT16:
        add_squares<__nv_bfloat16>(work, bad, sum);
        break;
      default:
        add_squares<float>(work, bad, sum);
    }
  }
  const Pair block = block_sum(Pair{sum, bad ? 1.0 : 0.0});
  if (threadIdx.x == 0) {
    tables.partials[2 * blockIdx.x] = block.a;
    tables.partials[2 * blockIdx.x + 1] = block.b;
  }
  if (last_to_arrive(tables.arrived + tables.layer_count, gridDim.x)) {
    const Pair all = sum_of_partials(tables.partials, 0, gridDim.x);
    if (threadIdx.x == 0) {
      control[2] += all.a;
      if (all.b > 0.0) control[3] = 1.0;
    }
  }
}

__global__ void __launch_bounds__(THREADS) moments_kernel(Tables tables, double* norms, const double* control) {
  __shared__ Work work;
  if (control[3] != 0.0) return;
  if (threadIdx.x == 0) work.rule = -1;
  for (int64_t layer = blockIdx.x * int64_t{THREADS} + threadIdx.x; layer < tables.layer_count; layer += gridDim.x * int64_t{THREADS}) {
    if (tables.first_chunk[layer] == tables.first_chunk[layer + 1]) norms[2 * layer] = norms[2 * layer + 1] = 0.0;
  }
  for (int64_t i = blockIdx.x; i < tables.chunk_count; i += gridDim.x) {
    // From the end: the last gradients that square_sum read may still be in the cache.
    const int64_t index = tables.chunk_count - 1 - i;
    // No thread reads the previous chunk's work any more: last_to_arrive had all threads wait.
    if (threadIdx.x == 0) find_work(work, tables, index, control);
    __syncthreads();
    Pair sums;
    switch (type_of_parameter(work.segment)) {
      case FLOAT16:
        sums = moments_of_chunk<__half>(work);
        break;
      case BFLOAT16:
        sums = moments_of_chunk<__nv_bfloat16>(work);
        break;
      default:
        sums = moments_of_chunk<float>(work);
    }
    sums = block_sum(sums);
    if (threadIdx.x == 0) {
      tables.partials[2 * index] = sums.a;
      tables.partials[2 * index + 1] = sums.b;
    }
    const int64_t layer = work.segment.layer;
    const int64_t first = tables.first_chunk[layer];
    const int64_t end = tables.first_chunk[layer + 1];
    if (last_to_arrive(tables.arrived + layer, static_cast<uint32_t>(end - first))) {
      sums = sum_of_partials(tables.partials, first, end);
      if (threadIdx.x == 0) {
        norms[2 * layer] = sums.a;
        norms[2 * layer + 1] = sums.b;
      }
    }
  }
}

__global__ void __launch_bounds__(THREADS)
    apply_kernel(Tables tables, const double* norms, const double* control, double* ratios, bool advance) {
  __shared__ Work work;
  if (control[3] != 0.0) return;
  if (threadIdx.x == 0) work.rule = -1;
  for (int64_t layer = blockIdx.x * int64_t{THREADS} + threadIdx.x; layer < tables.layer_count; layer += gridDim.x * int64_t{THREADS}) {
    if (tables.first_chunk[layer] == tables.first_chunk[layer + 1]) ratios[layer] = 1.0;
  }
  // From the start, where moments ended.
  for (int64_t i = blockIdx.x; i < tables.chunk_count; i += gridDim.x) {
    __syncthreads();
    if (threadIdx.x == 0) {
      find_work(work, tables, i, control);
      const int64_t layer = work.segment.layer;
      work.ratio = trust_ratio(tables.rules[work.rule], norms[2 * layer], norms[2 * layer + 1]);
      if (i == tables.first_chunk[layer]) ratios[layer] = work.ratio;
    }
    __syncthreads();
    switch (type_of_parameter(work.segment)) {
      case FLOAT16:
        apply_to_chunk<__half>(work);
        break;
      case BFLOAT16:
        apply_to_chunk<__nv_bfloat16>(work);
        break;
      default:
        apply_to_chunk<float>(work);
    }
  }
  // The last block to come here knows that no other reads the step any more.
  if (advance && last_to_arrive(tables.arrived + tables.layer_count + 1, gridDim.x)) {
    for (int64_t i = threadIdx.x; i < tables.rule_count; i += THREADS) tables.rules[i].step += 1.0;
  }
}

const char* text_of(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

template <typename... Formal, typename... Actual>
const char* launch(void (*kernel)(Formal...), int blocks, void* stream, Actual... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks > 0 ? blocks : 1);
  config.blockDim = dim3(THREADS);
  config.stream = static_cast<cudaStream_t>(stream);
  return text_of(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <typename... Formal>
cudaError_t fill_device(void (*kernel)(Formal...), int processors, int* blocks) {
  int per_processor = 0;
  const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, THREADS, 0);
  *blocks = processors * per_processor;
  return error;
}

}  // namespace

int64_t chunk_elements() { return CHUNK; }

const char* blocks_of_device(Blocks* blocks) {
  int device = 0;
  int processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = fill_device(square_sum_kernel, processors, &blocks->square_sum);
  if (error == cudaSuccess) error = fill_device(moments_kernel, processors, &blocks->moments);
  if (error == cudaSuccess) error = fill_device(apply_kernel, processors, &blocks->apply);
  return text_of(error);
}

const char* square_sum(const Tables& tables, double* control, int blocks, void* stream) {
  return launch(square_sum_kernel, blocks, stream, tables, control);
}

const char* moments(const Tables& tables, double* norms, const double* control, int blocks, void* stream) {
  return launch(moments_kernel, blocks, stream, tables, norms, control);
}

const char* apply(const Tables& tables, const double* norms, const double* control, double* ratios, bool advance, int blocks,
                  void* stream) {
  return launch(apply_kernel, blocks, stream, tables, norms, control, ratios, advance);
}

const char* copy_rules(Rule* to, const Rule* from, int64_t rows, void* stream) {
  constexpr size_t before = offsetof(Rule, step);
  constexpr size_t after = before + sizeof(double);
  const auto copy_columns = [&](size_t first, size_t end) {
    return cudaMemcpy2DAsync(reinterpret_cast<char*>(to) + first, sizeof(Rule), reinterpret_cast<const char*>(from) + first, sizeof(Rule),
                             end - first, static_cast<size_t>(rows), cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream));
  };
  const cudaError_t error = copy_columns(0, before);
  return text_of(error == cudaSuccess ? copy_columns(after, sizeof(Rule)) : error);
}

const char* upload_now(void* device, const void* host, int64_t bytes) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return text_of(error);
  error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) error = cudaMemcpyAsync(device, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (stream != nullptr) cudaStreamDestroy(stream);
  cudaThreadExchangeStreamCaptureMode(&mode);
  return text_of(error);
}

}  // namespace lamb::cuda
