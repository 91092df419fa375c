// Work of the NCCL stand-in on the stand-in runtime, whose streams are threads: one host function, an entry of its stream.
#pragma once
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "nccl_work.h"

extern "C" void stand_in_access(void* stream, const void* memory, size_t bytes, int writes, const char* name);

namespace {

bool share_with_device(void* memory, size_t bytes) { return !cudaHostRegister(memory, bytes, 0); }

void leave_device(void* memory) { cudaHostUnregister(memory); }

void wait_for(const std::atomic<uint32_t>& flag, uint32_t value) {
  using Clock = std::chrono::steady_clock;
  for (const auto begin = Clock::now(); flag.load() < value;)
    usleep(Clock::now() - begin < std::chrono::milliseconds(2) ? 20 : 300);
}

void do_piece(const Piece& piece, uint32_t chunk) {
  const size_t at = chunk * kChunk, bytes = std::min(kChunk, piece.bytes - at);
  const uint32_t number = piece.number + chunk;
  char* memory = static_cast<char*>(piece.memory) + at;
  char* slot = piece.channel->slots[number % kSlots];
  if (piece.kind == Piece::kPut) {
    if (number >= kSlots) wait_for(piece.channel->taken, number + 1 - kSlots);
    memcpy(slot, memory, bytes);
    piece.channel->full.store(number + 1);
  } else {
    wait_for(piece.channel->full, number + 1);
    memcpy(memory, slot, bytes);
    piece.channel->taken.store(number + 1);
  }
}

struct Half {
  _Float16 value;
  Half() = default;
  explicit Half(float number) : value(static_cast<_Float16>(number)) {}
  operator float() const { return static_cast<float>(value); }
};

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(float number) {
    uint32_t wide;
    memcpy(&wide, &number, sizeof wide);
    bits = number != number ? 0x7fc0 : static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float number;
    memcpy(&number, &wide, sizeof number);
    return number;
  }
};

template <class T>
T folded(T a, T b, int op) {
  return op == 1 ? a * b : op == 2 ? (a > b ? a : b) : op == 3 ? (a < b ? a : b) : a + b;
}

template <class T, class Wide = T>
void fold_as(const Fold& fold, uint32_t chunk) {
  const size_t step = kChunk / sizeof(T), begin = chunk * step;
  for (size_t i = begin; i < std::min(begin + step, fold.count); ++i) {
    Wide sum{};
    for (int rank = 0; rank < fold.size; ++rank) {
      const void* slot = fold.channels[rank]->slots[(fold.numbers[rank] + chunk) % kSlots];
      const T* from = rank == fold.rank ? static_cast<const T*>(fold.own) + i : static_cast<const T*>(slot) + (i - begin);
      const Wide value = static_cast<Wide>(*from);
      sum = rank ? folded<Wide>(sum, value, fold.op) : value;
    }
    static_cast<T*>(fold.into)[i] = static_cast<T>(fold.op == 4 ? sum / static_cast<Wide>(fold.size) : sum);
  }
}

void fold_numbers(const Fold& fold, uint32_t chunk) {
  switch (fold.type) {
    case 0: return fold_as<int8_t>(fold, chunk);
    case 1: return fold_as<uint8_t>(fold, chunk);
    case 2: return fold_as<int32_t>(fold, chunk);
    case 3: return fold_as<uint32_t>(fold, chunk);
    case 4: return fold_as<int64_t>(fold, chunk);
    case 5: return fold_as<uint64_t>(fold, chunk);
    case 6: return fold_as<Half, float>(fold, chunk);
    case 7: return fold_as<float>(fold, chunk);
    case 8: return fold_as<double>(fold, chunk);
    case 9: return fold_as<BFloat16, float>(fold, chunk);
    default: fprintf(stderr, "nccl stand-in: numbers of type %d\n", fold.type), abort();
  }
}

void do_fold(const Fold& fold, uint32_t chunk) {
  for (int rank = 0; rank < fold.size; ++rank)
    if (rank != fold.rank) wait_for(fold.channels[rank]->full, fold.numbers[rank] + chunk + 1);
  fold_numbers(fold, chunk);
  for (int rank = 0; rank < fold.size; ++rank)
    if (rank != fold.rank) fold.channels[rank]->taken.store(fold.numbers[rank] + chunk + 1);
}

void run_now(const Work& work) {
  const uint32_t folds = work.fold.into ? chunks_of(work.fold.count * work.fold.item) : 0;
  uint32_t most = folds;
  for (int each = 0; each < work.count; ++each) most = std::max(most, chunks_of(work.pieces[each].bytes));
  for (uint32_t chunk = 0; chunk < most; ++chunk) {
    for (const auto kind : {Piece::kPut, Piece::kTake})
      for (int each = 0; each < work.count; ++each)
        if (work.pieces[each].kind == kind && chunk < chunks_of(work.pieces[each].bytes)) do_piece(work.pieces[each], chunk);
    if (chunk < folds) do_fold(work.fold, chunk);
  }
  for (int each = 0; each < work.count; ++each) {
    const Piece& piece = work.pieces[each];
    if (piece.until_taken) wait_for(piece.channel->taken, piece.number + chunks_of(piece.bytes));
  }
}

void run(cudaStream_t stream, const Work& work) {
  for (int each = 0; each < work.count; ++each) {
    const Piece& piece = work.pieces[each];
    stand_in_access(stream, piece.memory, piece.bytes, piece.kind == Piece::kTake, "NCCL's message");
  }
  if (work.fold.into) {
    const size_t bytes = work.fold.count * work.fold.item;
    stand_in_access(stream, work.fold.own, bytes, 0, "NCCL's sum");
    stand_in_access(stream, work.fold.into, bytes, 1, "NCCL's sum");
  }
  const auto call = [](void* data) {
    const auto* issued = static_cast<Work*>(data);
    run_now(*issued);
    delete issued;
  };
  cudaLaunchHostFunc(stream, call, new Work(work));
}

}  // namespace
