// What the CUDA kernels share: words of 8 elements, and the storage types that are read into fp32.
//
// Plain C launchers (pointers, sizes, a stream) and no torch header, so a .cu file compiles in seconds and,
// through emulation.h with MTP_EMULATE, also as ordinary C++ for the tests. Arithmetic is fp32 whatever the
// storage type S. No float atomics and no host synchronisation: results are the same bit for bit every run. A
// thread moves 8 elements at a time as 16-byte words, so D, C and F are multiples of 8 and every pointer is
// 16-byte aligned (bind.cpp sees to it). Measured: none of the kernels has yet run on a GPU.
#pragma once
#ifdef MTP_EMULATE
#include "emulation.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#define LAUNCH(kernel, grid, block, stream, ...)                                                             \
  (kernel)<<<(grid), (block), 0, (cudaStream_t)(stream)>>>(__VA_ARGS__)
#define LAUNCH_ERROR() ((int)cudaGetLastError())
#define SHARED(type, name, n) __shared__ type name[n]
#endif

namespace {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};
template <class S> struct Pack {  // 8 elements
  uint4 w[sizeof(S) / 2];
};

// ---- load and store --------------------------------------------------------------------------------------
__device__ __forceinline__ void unpack2(uint32_t w, Bf16, float* x) {
  x[0] = __uint_as_float(w << 16);
  x[1] = __uint_as_float(w & 0xffff0000u);
}
__device__ __forceinline__ void unpack2(uint32_t w, Fp16, float* x) {
  x[0] = __half2float(__ushort_as_half((unsigned short)(w & 0xffff)));
  x[1] = __half2float(__ushort_as_half((unsigned short)(w >> 16)));
}
__device__ __forceinline__ uint32_t bits(float x, Bf16) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
__device__ __forceinline__ uint32_t bits(float x, Fp16) { return __half_as_ushort(__float2half_rn(x)); }

template <class S> __device__ __forceinline__ void unpack(const Pack<S>& p, float* x) {
  const uint32_t w[4] = {p.w[0].x, p.w[0].y, p.w[0].z, p.w[0].w};
#pragma unroll
  for (int i = 0; i < 4; i++) unpack2(w[i], S(), x + 2 * i);
}
template <> __device__ __forceinline__ void unpack<float>(const Pack<float>& p, float* x) {
  const uint32_t w[8] = {p.w[0].x, p.w[0].y, p.w[0].z, p.w[0].w, p.w[1].x, p.w[1].y, p.w[1].z, p.w[1].w};
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = __uint_as_float(w[i]);
}
template <class S> __device__ __forceinline__ Pack<S> pack(const float* x) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = bits(x[2 * i], S()) | bits(x[2 * i + 1], S()) << 16;
  return {{{w[0], w[1], w[2], w[3]}}};
}
template <> __device__ __forceinline__ Pack<float> pack<float>(const float* x) {
  uint32_t w[8];
#pragma unroll
  for (int i = 0; i < 8; i++) w[i] = __float_as_uint(x[i]);
  return {{{w[0], w[1], w[2], w[3]}, {w[4], w[5], w[6], w[7]}}};
}

// The 8 elements from base[at]; zeros where `on` is false, and then nothing is read
template <class S> __device__ __forceinline__ Pack<S> fetch(const void* base, int64_t at, bool on) {
  if (on) return *(const Pack<S>*)((const S*)base + at);
  const float zero[8] = {};
  return pack<S>(zero);
}
template <class S> __device__ __forceinline__ void load(const void* base, int64_t at, bool on, float* x) {
  unpack<S>(fetch<S>(base, at, on), x);
}
template <class S> __device__ __forceinline__ void store(void* base, int64_t at, const float* x) {
  *(Pack<S>*)((S*)base + at) = pack<S>(x);
}

// ---- arithmetic ------------------------------------------------------------------------------------------
__device__ __forceinline__ float dot8(const float* x, const float* y) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) sum += x[i] * y[i];
  return sum;
}
__device__ __forceinline__ void axpy8(float a, const float* x, float* y) {
#pragma unroll
  for (int i = 0; i < 8; i++) y[i] += a * x[i];
}
// Over aligned groups of `lanes`, a power of two
__device__ __forceinline__ float lane_sum(float v, int lanes) {
  for (int o = lanes / 2; o; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

// ---- launching -------------------------------------------------------------------------------------------
template <class F> int by_dtype(int dtype, F f) {  // the codes that bind.cpp passes
  if (dtype == 0) f(float());
  if (dtype == 1) f(Bf16());
  if (dtype == 2) f(Fp16());
  return LAUNCH_ERROR();
}
inline unsigned blocks(int64_t threads, int64_t per_block) {
  return (unsigned)((threads + per_block - 1) / per_block);
}
}  // namespace
