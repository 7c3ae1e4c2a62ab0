// Runs the .cu files on a CPU, for the tests: the CUDA words they use become an engine of ordinary C++.
//
// Default: one ucontext fiber per CUDA thread, blocks one after another. mtp_emulate_order sets the order in
// which the threads of a block run: 0 ascending, 1 descending, 2 shuffled, 3 shuffled again at every barrier.
// Shared memory starts as NaN (all bits set). A barrier that not every thread reaches, or that they reach at
// different lines, is an error. MTP_EMULATE_THREADS: one OS thread per CUDA thread, for ThreadSanitizer,
// AddressSanitizer and UBSan. Not seen here: races between blocks, coalescing, speed.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>
#ifdef MTP_EMULATE_THREADS
#include <barrier>
#include <thread>
#else
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SHARED(type, name, n)                                                                                \
  static type name[n];                                                                                       \
  static emulation::Poison name##_poison(name, sizeof(name))
#define LAUNCH(kernel, grid, block, stream, ...) emulation::launch(grid, block, [&] { kernel(__VA_ARGS__); })
#define LAUNCH_ERROR() (emulation::error.empty() ? 0 : 1)
#define __syncthreads() emulation::block_barrier(__LINE__)
#define __syncwarp() emulation::warp_barrier(__LINE__)
#define __trap() emulation::trap(__LINE__)
#define __shfl_xor_sync(mask, value, offset) emulation::shuffle_xor(value, offset, __LINE__)
#define __match_any_sync(mask, value) emulation::match_any(value, __LINE__)
#define __popc __builtin_popcount

struct Index {
  unsigned x;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

namespace emulation {
inline std::string error;
inline int order = 0;
#ifdef MTP_EMULATE_THREADS
inline thread_local Index thread_index, block_index;
#else
inline Index thread_index, block_index;
#endif
inline Index block_dim, grid_dim;

struct Poison {  // a __shared__ array: overwritten before every block
  static std::vector<Poison*>& all() {
    static std::vector<Poison*> list;
    return list;
  }
  void* data;
  size_t bytes;
  Poison(void* p, size_t n) : data(p), bytes(n) {
    fill();
    all().push_back(this);
  }
  void fill() const { std::memset(data, 0xff, bytes); }
};
inline void poison() {
  for (Poison* p : Poison::all()) p->fill();
}

struct Slots {
  uint64_t value[2][32];
};  // double-buffered: nobody writes a buffer that a slow lane still reads
inline std::vector<Slots> slots;
inline std::vector<int> parity;

#ifdef MTP_EMULATE_THREADS
inline std::unique_ptr<std::barrier<>> block_gate;
inline std::vector<std::unique_ptr<std::barrier<>>> warp_gates;
inline void block_barrier(int) { block_gate->arrive_and_wait(); }
inline void warp_barrier(int) { warp_gates[thread_index.x / 32]->arrive_and_wait(); }
inline void trap(int line) {
  std::fprintf(stderr, "trap at line %d\n", line);
  std::abort();
}
template <class F> void launch(int64_t grid, int64_t block, F body) {
  block_dim = {(unsigned)block}, grid_dim = {(unsigned)grid};
  slots.assign((block + 31) / 32, {});
  parity.assign(block, 0);
  block_gate = std::make_unique<std::barrier<>>(block);
  warp_gates.clear();
  for (int64_t w = 0; w < block; w += 32)
    warp_gates.push_back(std::make_unique<std::barrier<>>(block - w < 32 ? block - w : 32));
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < block; t++) {
    threads.emplace_back([&, t] {
      for (int64_t b = 0; b < grid; b++) {
        thread_index = {(unsigned)t}, block_index = {(unsigned)b};
        if (t == 0) poison();
        block_gate->arrive_and_wait();
        body();
        block_gate->arrive_and_wait();
      }
    });
  }
  for (std::thread& t : threads) t.join();
}
#else
enum State { READY, AT_BLOCK, AT_WARP, DONE };
struct Fiber {
  ucontext_t context;
  State state;
  int line;
};
inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline std::function<void()> body_of_block;
constexpr size_t STACK = 64 << 10;

inline void wait(State state, int line) {
  Fiber& f = fibers[thread_index.x];
  f.state = state, f.line = line;
  swapcontext(&f.context, &scheduler);
}
inline void block_barrier(int line) { wait(AT_BLOCK, line); }
inline void warp_barrier(int line) { wait(AT_WARP, line); }
inline void fail(const std::string& what) {
  if (error.empty()) error = what;
}
inline void trap(int line) {
  fail("trap at line " + std::to_string(line));
  wait(DONE, line);
}
inline void enter() {
  body_of_block();
  wait(DONE, 0);
}
// All threads of [begin, end) wait for `state` at one line: let them go on. Otherwise the kernel is wrong.
inline bool release(size_t begin, size_t end, State state) {
  for (size_t t = begin; t < end; t++) {
    if (fibers[t].state != state || fibers[t].line != fibers[begin].line) {
      fail("divergent barrier: thread " + std::to_string(begin) + " at line " +
           std::to_string(fibers[begin].line) + ", thread " + std::to_string(t) + " at line " +
           std::to_string(fibers[t].line));
      return false;
    }
  }
  for (size_t t = begin; t < end; t++) fibers[t].state = READY;
  return true;
}
inline bool release_all() {  // false: the block is over
  const size_t n = fibers.size();
  size_t done = 0;
  bool warps = false;
  for (size_t w = 0; w < n; w += 32) {
    const size_t end = w + 32 < n ? w + 32 : n;
    bool waits = false;
    for (size_t t = w; t < end; t++) {
      waits |= fibers[t].state == AT_WARP;
      done += fibers[t].state == DONE;
    }
    if (waits && !release(w, end, AT_WARP)) return false;
    warps |= waits;
  }
  return warps || (done < n && release(0, n, AT_BLOCK));
}
inline void run_block(std::vector<int>& turn, std::mt19937& random) {
  do {
    if (order == 3) std::shuffle(turn.begin(), turn.end(), random);
    for (int t : turn) {
      if (fibers[t].state != READY) continue;
      thread_index = {(unsigned)t};
      swapcontext(&scheduler, &fibers[t].context);
    }
  } while (error.empty() && release_all());
}
template <class F> void launch(int64_t grid, int64_t block, F body) {
  static std::vector<char> stacks;
  if (stacks.size() < block * STACK) stacks.resize(block * STACK);
  block_dim = {(unsigned)block}, grid_dim = {(unsigned)grid};
  slots.assign((block + 31) / 32, {});
  std::mt19937 random(order);
  std::vector<int> turn(block);
  for (int64_t t = 0; t < block; t++) turn[t] = (int)(order == 1 ? block - 1 - t : t);
  body_of_block = body;
  for (int64_t b = 0; b < grid && error.empty(); b++) {
    block_index = {(unsigned)b};
    poison();
    parity.assign(block, 0);
    if (order == 2) std::shuffle(turn.begin(), turn.end(), random);
    fibers.resize(block);
    for (int64_t t = 0; t < block; t++) {
      getcontext(&fibers[t].context);
      fibers[t].context.uc_stack = {&stacks[t * STACK], 0, STACK};
      fibers[t].context.uc_link = nullptr;
      fibers[t].state = READY;
      makecontext(&fibers[t].context, enter, 0);
    }
    run_block(turn, random);
  }
}
#endif

// One value per lane through the warp's slots
inline const uint64_t* exchange(uint64_t value, int line) {
  const unsigned t = thread_index.x;
  const int side = parity[t] ^= 1;
  slots[t / 32].value[side][t % 32] = value;
  warp_barrier(line);
  return slots[t / 32].value[side];
}
template <class T> T shuffle_xor(T value, int offset, int line) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  word = exchange(word, line)[thread_index.x % 32 ^ offset];
  std::memcpy(&value, &word, sizeof(T));
  return value;
}
inline unsigned match_any(int value, int line) {
  const uint64_t* all = exchange((uint32_t)value, line);
  unsigned mask = 0;
  for (int i = 0; i < 32; i++) mask |= (unsigned)(all[i] == (uint32_t)value) << i;
  return mask;
}
}  // namespace emulation

#define threadIdx emulation::thread_index
#define blockIdx emulation::block_index
#define blockDim emulation::block_dim
#define gridDim emulation::grid_dim

inline int atomicAdd(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
template <typename To, typename From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __uint_as_float(uint32_t u) { return same_bits<float>(u); }
inline uint32_t __float_as_uint(float f) { return same_bits<uint32_t>(f); }
struct Bits {
  unsigned short bits;
};
inline unsigned short __bfloat16_as_ushort(Bits b) { return b.bits; }
inline unsigned short __half_as_ushort(Bits b) { return b.bits; }
inline Bits __ushort_as_half(unsigned short b) { return {b}; }
inline Bits __float2bfloat16_rn(float f) {
  const uint32_t u = __float_as_uint(f);
  return {(unsigned short)(f != f ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline Bits __float2half_rn(float f) { return same_bits<Bits>((_Float16)f); }
inline float __half2float(Bits b) { return (float)same_bits<_Float16>(b); }

extern "C" {
__attribute__((used)) inline const char* mtp_emulate_error() {  // of the launches since the last call
  static std::string last;
  last.swap(emulation::error);
  emulation::error.clear();
  return last.c_str();
}
__attribute__((used)) inline void mtp_emulate_order(int order) { emulation::order = order; }
}
