// Waits, marks and sums of the NCCL stand-in on the stand-in runtime, whose streams are threads and run host functions in order.
#pragma once
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

extern "C" void stand_in_access(void* stream, void* memory, size_t bytes, int writes, const char* name);

namespace {

bool share_with_device(void* memory, size_t bytes) { return !cudaHostRegister(memory, bytes, 0); }

void leave_device(void* memory) { cudaHostUnregister(memory); }

void enqueue(cudaStream_t stream, std::function<void()> work) {
  const auto call = [](void* data) {
    auto* function = static_cast<std::function<void()>*>(data);
    (*function)();
    delete function;
  };
  cudaLaunchHostFunc(stream, call, new std::function<void()>(std::move(work)));
}

// The stream goes on when the flag has come to the value.
void wait_for(cudaStream_t stream, std::atomic<uint32_t>* flag, uint32_t value) {
  enqueue(stream, [=] {
    using Clock = std::chrono::steady_clock;
    for (const auto begin = Clock::now(); flag->load() < value;)
      usleep(Clock::now() - begin < std::chrono::milliseconds(2) ? 20 : 300);
  });
}

void mark(cudaStream_t stream, std::atomic<uint32_t>* flag, uint32_t value) {
  enqueue(stream, [=] { flag->store(value); });
}

struct Operands {
  const char* from[16];
  int size;
};

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
void fold_as(const Operands& operands, char* into, size_t count, int op) {
  for (size_t i = 0; i < count; ++i) {
    Wide sum = static_cast<Wide>(reinterpret_cast<const T*>(operands.from[0])[i]);
    for (int rank = 1; rank < operands.size; ++rank)
      sum = folded<Wide>(sum, static_cast<Wide>(reinterpret_cast<const T*>(operands.from[rank])[i]), op);
    reinterpret_cast<T*>(into)[i] = static_cast<T>(op == 4 ? sum / static_cast<Wide>(operands.size) : sum);
  }
}

void fold_now(const Operands& operands, char* into, size_t count, int type, int op) {
  switch (type) {
    case 0: return fold_as<int8_t>(operands, into, count, op);
    case 1: return fold_as<uint8_t>(operands, into, count, op);
    case 2: return fold_as<int32_t>(operands, into, count, op);
    case 3: return fold_as<uint32_t>(operands, into, count, op);
    case 4: return fold_as<int64_t>(operands, into, count, op);
    case 5: return fold_as<uint64_t>(operands, into, count, op);
    case 6: return fold_as<Half, float>(operands, into, count, op);
    case 7: return fold_as<float>(operands, into, count, op);
    case 8: return fold_as<double>(operands, into, count, op);
    case 9: return fold_as<BFloat16, float>(operands, into, count, op);
    default: fprintf(stderr, "nccl stand-in: numbers of type %d\n", type), abort();
  }
}

void fold(cudaStream_t stream, const Operands& operands, char* into, size_t bytes, size_t count, int type, int op) {
  for (int rank = 0; rank < operands.size; ++rank)
    stand_in_access(stream, const_cast<char*>(operands.from[rank]), bytes, 0, "NCCL's sum");
  stand_in_access(stream, into, bytes, 1, "NCCL's sum");
  enqueue(stream, [=] { fold_now(operands, into, count, type, op); });
}

}  // namespace
