// Work of the NCCL stand-in on a device: one kernel, a block for each piece.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "nccl_work.h"

namespace {

constexpr unsigned kThreads = 256;

void check(cudaError_t error, const char* call) {
  if (error) fprintf(stderr, "nccl stand-in: %s failed with %d\n", call, static_cast<int>(error)), abort();
}

bool share_with_device(void* memory, size_t bytes) {
  const cudaError_t error = cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error) fprintf(stderr, "nccl stand-in: cudaHostRegister failed with %d\n", static_cast<int>(error));
  return !error;
}

void leave_device(void* memory) { cudaHostUnregister(memory); }

__device__ void wait_for(const std::atomic<uint32_t>* flag, uint32_t value) {
  if (threadIdx.x == 0) {
    while (*reinterpret_cast<const volatile uint32_t*>(flag) < value) __nanosleep(500);
    __threadfence_system();
  }
  __syncthreads();
}

__device__ void mark(std::atomic<uint32_t>* flag, uint32_t value) {
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) *reinterpret_cast<volatile uint32_t*>(flag) = value;
}

template <class Unit>
__device__ void copy_as(void* to, const void* from, size_t count) {
  for (size_t i = threadIdx.x; i < count; i += kThreads)
    static_cast<Unit*>(to)[i] = __ldcv(static_cast<const Unit*>(from) + i);
}

__device__ void copy(void* to, const void* from, size_t bytes) {
  const size_t places = reinterpret_cast<size_t>(to) | reinterpret_cast<size_t>(from) | bytes;
  if (places % 16 == 0) return copy_as<uint4>(to, from, bytes / 16);
  if (places % 4 == 0) return copy_as<unsigned>(to, from, bytes / 4);
  copy_as<unsigned char>(to, from, bytes);
}

__device__ void do_piece(const Piece& piece) {
  uint32_t number = piece.number;
  for (size_t at = 0; at < piece.bytes; at += kChunk, ++number) {
    char* memory = static_cast<char*>(piece.memory) + at;
    char* slot = piece.channel->slots[number % kSlots];
    const size_t bytes = min(kChunk, piece.bytes - at);
    if (piece.kind == Piece::kPut) {
      if (number >= kSlots) wait_for(&piece.channel->taken, number + 1 - kSlots);
      copy(slot, memory, bytes);
      mark(&piece.channel->full, number + 1);
    } else {
      wait_for(&piece.channel->full, number + 1);
      copy(memory, slot, bytes);
      mark(&piece.channel->taken, number + 1);
    }
  }
  if (piece.until_taken) wait_for(&piece.channel->taken, number);
}

template <class T>
__device__ T folded(T a, T b, int op) {
  return op == 1 ? a * b : op == 2 ? (a > b ? a : b) : op == 3 ? (a < b ? a : b) : a + b;
}

template <class T, class Wide = T>
__device__ void do_fold(const Work& work) {
  const Fold& fold = work.fold;
  const size_t step = kChunk / sizeof(T);
  for (size_t at = 0, chunk = 0; at < fold.count; at += step, ++chunk) {
    for (int rank = 0; rank < fold.size; ++rank)
      if (rank != fold.rank) wait_for(&fold.channels[rank]->full, fold.numbers[rank] + chunk + 1);
    for (int each = 0; each < work.count; ++each)  // in place, the sum overwrites what they put
      wait_for(&work.pieces[each].channel->full, work.pieces[each].number + chunk + 1);
    for (size_t i = at + threadIdx.x; i < min(at + step, fold.count); i += kThreads) {
      Wide sum{};
      for (int rank = 0; rank < fold.size; ++rank) {
        const void* slot = fold.channels[rank]->slots[(fold.numbers[rank] + chunk) % kSlots];
        const T* from = rank == fold.rank ? static_cast<const T*>(fold.own) + i : static_cast<const T*>(slot) + (i - at);
        const Wide value = static_cast<Wide>(__ldcv(from));
        sum = rank ? folded(sum, value, fold.op) : value;
      }
      static_cast<T*>(fold.into)[i] = static_cast<T>(fold.op == 4 ? sum / static_cast<Wide>(fold.size) : sum);
    }
    __syncthreads();
    for (int rank = 0; rank < fold.size; ++rank)
      if (rank != fold.rank) mark(&fold.channels[rank]->taken, fold.numbers[rank] + chunk + 1);
  }
}

__global__ void nccl_stand_in(Work work) {
  if (blockIdx.x < work.count) return do_piece(work.pieces[blockIdx.x]);
  switch (work.fold.type) {
    case 0: return do_fold<char>(work);
    case 1: return do_fold<unsigned char>(work);
    case 2: return do_fold<int>(work);
    case 3: return do_fold<unsigned>(work);
    case 4: return do_fold<long long>(work);
    case 5: return do_fold<unsigned long long>(work);
    case 6: return do_fold<__half, float>(work);
    case 7: return do_fold<float>(work);
    case 8: return do_fold<double>(work);
    case 9: return do_fold<__nv_bfloat16, float>(work);
  }
}

void run(cudaStream_t stream, const Work& work) {
  const int blocks = work.count + (work.fold.into != nullptr);
  if (!blocks) return;
  nccl_stand_in<<<blocks, kThreads, 0, stream>>>(work);
  check(cudaPeekAtLastError(), "a kernel");
}

}  // namespace
