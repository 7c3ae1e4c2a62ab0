// What the CPU kernels share: vectors of 8 lanes, and the storage types that are read into them.
//
// Every kernel is a template over the storage type S (float, bfloat16, half, double) that computes in
// acc_t<S> (double for double, else float) with GCC vectors of 8 lanes. CLONES compiles it for x86-64
// baseline, AVX2 and AVX-512 and picks at load time, so a wheel built anywhere is fast anywhere. No
// -ffast-math: lse_0 = -inf is a legal input. Work is split by output row, never by summand, so results do
// not depend on the number of threads.
#pragma once
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define ALWAYS_INLINE __attribute__((always_inline))
#define INLINE inline ALWAYS_INLINE

namespace {

typedef float F8 __attribute__((vector_size(32)));
typedef double D8 __attribute__((vector_size(64)));
typedef float F16 __attribute__((vector_size(64)));
typedef uint32_t U8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef uint16_t H8 __attribute__((vector_size(16)));

template <class S> struct Acc {
  using type = float;
  using vec = F8;
};
template <> struct Acc<double> {
  using type = double;
  using vec = D8;
};
template <class S> using acc_t = typename Acc<S>::type;
template <class S> using vec_t = typename Acc<S>::vec;

// ---- load and store --------------------------------------------------------------------------------------
template <class V> INLINE V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
INLINE F8 load(const float* p) { return load_as<F8>(p); }
INLINE D8 load(const double* p) { return load_as<D8>(p); }
INLINE F8 load(const c10::BFloat16* p) { return (F8)(__builtin_convertvector(load_as<H8>(p), U8) << 16); }
INLINE F8 load(const c10::Half* p) {
  F8 v;
  for (int i = 0; i < 8; i++) v[i] = static_cast<float>(p[i]);
  return v;
}

INLINE H8 to_bfloat16(F8 v) {  // round to nearest even; NaN stays NaN
  U8 u = (U8)v;
  U8 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return __builtin_convertvector((U8)(v != v ? (U8)(rounded * 0 + 0x7fc0) : rounded), H8);
}
INLINE void store(float* p, F8 v) { std::memcpy(p, &v, 32); }
INLINE void store(double* p, D8 v) { std::memcpy(p, &v, 64); }
INLINE void store(c10::BFloat16* p, F8 v) {
  H8 h = to_bfloat16(v);
  std::memcpy(p, &h, 16);
}
INLINE void store(c10::Half* p, F8 v) {
  for (int i = 0; i < 8; i++) p[i] = v[i];
}

// The first n of 8 lanes, for the end of a row; lanes beyond it read as `fill` and are not written
template <class S> INLINE vec_t<S> load_n(const S* p, int64_t n, acc_t<S> fill) {
  if (n >= 8) return load(p);
  vec_t<S> v = vec_t<S>{} + fill;
  for (int64_t i = 0; i < n; i++) v[i] = (acc_t<S>)p[i];
  return v;
}
template <class S> INLINE void store_n(S* p, vec_t<S> v, int64_t n) {
  if (n >= 8) return store(p, v);
  for (int64_t i = 0; i < n; i++) p[i] = (S)(acc_t<S>)v[i];
}

// Write 8 results. `stream` writes past the cache: outputs larger than it would only evict the inputs, and an
// ordinary store first reads the line it is about to overwrite (a quarter of the merge's forward traffic).
template <class S> INLINE void put8(S* p, vec_t<S> v, bool stream) {
#if defined(__SSE2__)
  if constexpr (std::is_same_v<S, float>) {
    if (stream) {
      typedef float F4 __attribute__((vector_size(16)));
      _mm_stream_ps(p, (__m128)(F4)__builtin_shufflevector(v, v, 0, 1, 2, 3));
      _mm_stream_ps(p + 4, (__m128)(F4)__builtin_shufflevector(v, v, 4, 5, 6, 7));
      return;
    }
  }
  if constexpr (std::is_same_v<S, c10::BFloat16>) {
    if (stream) return _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)to_bfloat16(v));
  }
#endif
  store(p, v);
}
template <class S> INLINE void put(S* p, const acc_t<S>* v, int n, bool stream) {
  for (int i = 0; i < n; i += 8) put8(p + i, load(v + i), stream);
}
INLINE void fence() {  // after streamed writes
#if defined(__SSE2__)
  _mm_sfence();
#endif
}
constexpr int64_t STREAM_BYTES = 8 << 20;  // smaller outputs are better left in the cache for their reader

// n elements as acc_t: where they are if that is their type, else converted into `buffer`
template <class S> INLINE const acc_t<S>* stage(const S* p, acc_t<S>* buffer, int n) {
  if constexpr (std::is_same_v<S, acc_t<S>>) {
    return p;
  } else {
    for (int i = 0; i < n; i += 8) store(buffer + i, load(p + i));
    return buffer;
  }
}

// ---- arithmetic ------------------------------------------------------------------------------------------
INLINE int padded(int n) { return (n + 7) / 8 * 8; }  // to whole vectors
template <class V> INLINE auto hsum(V v) {
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
  return v[0] + v[1];
}
INLINE D8 vexp(D8 x) {
  for (int i = 0; i < 8; i++) x[i] = std::exp(x[i]);
  return x;
}
// exp by x = n ln 2 + r, a degree 7 polynomial in r, and n added to the exponent; at most 2 ulp. 0 below
// -87.3 (also for -inf), NaN stays NaN.
INLINE F8 vexp(F8 x) {
  const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer kept in the low mantissa bits
  F8 y = x > 88.3f ? x * 0 + 88.3f : x;
  F8 shifted = y * 1.44269504088896341f + magic, n = shifted - magic;
  F8 r = y - n * 0.693359375f + n * 2.12194440e-4f;
  F8 p = r * (1.f / 5040) + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  I8 scale = ((I8)shifted << 23) + 0x3f800000;
  return x < -87.3f ? F8{} : p * (F8)scale;
}

// ---- dispatch --------------------------------------------------------------------------------------------
template <class F> void by_dtype(int dtype, F f) {  // the codes that bind.cpp passes
  if (dtype == 0) f(float());
  if (dtype == 1) f(c10::BFloat16());
  if (dtype == 2) f(c10::Half());
  if (dtype == 3) f(double());
}

// f(j, K) for blocks of K = 4 numbers j .. j + K - 1 below k and a last block of 1 to 4. K is a constant: the
// sums of a block stay in registers.
constexpr int BLOCK = 4;
template <class F> INLINE void by_block(int k, F f) {
  for (int j = 0; j < k; j += BLOCK) {
    switch (k - j) {
      case 1: f(j, std::integral_constant<int, 1>()); break;
      case 2: f(j, std::integral_constant<int, 2>()); break;
      case 3: f(j, std::integral_constant<int, 3>()); break;
      default: f(j, std::integral_constant<int, BLOCK>());
    }
  }
}
inline int64_t grain(int64_t per_row) {  // rows of `per_row` elements that are worth a thread
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, per_row));
}
}  // namespace
