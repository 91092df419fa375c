// Operations of the NCCL stand-in, as data: pieces of messages, and at most one sum.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr size_t kChunk = 256 << 10;
constexpr uint32_t kSlots = 4;
constexpr int kMostRanks = 8;
constexpr int kMostPieces = 2 * kMostRanks;

// One direction between two ranks: chunks go round in slots.
struct Channel {
  alignas(64) std::atomic<uint32_t> full;   // chunks that the sender has put
  alignas(64) std::atomic<uint32_t> taken;  // chunks that the receiver has taken
  alignas(256) char slots[kSlots][kChunk];
};

inline uint32_t chunks_of(size_t bytes) { return static_cast<uint32_t>((bytes + kChunk - 1) / kChunk); }

struct Piece {
  enum Kind { kPut, kTake } kind;
  bool until_taken;
  void* memory;
  size_t bytes;
  Channel* channel;
  uint32_t number;  // of its first chunk in the channel
};

struct Fold {
  const void* own;
  void* into;  // null: nothing is folded
  size_t count, item;
  int type, op, size, rank;
  Channel* channels[kMostRanks];
  uint32_t numbers[kMostRanks];
};

struct Work {
  int count = 0;
  Piece pieces[kMostPieces];
  Fold fold{};

  void add(const Piece& piece) {
    if (count == kMostPieces) fprintf(stderr, "nccl stand-in: more than %d messages in a group\n", kMostPieces), abort();
    pieces[count++] = piece;
  }
};

}  // namespace
