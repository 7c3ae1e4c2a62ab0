// CPU kernels: the cached-attention merge, the loss rows and the mixture of experts, forward and backward.
//
// Every kernel is a template over the storage type S (float, bfloat16, half, double) that computes in A
// (double for double, else float) with GCC vectors of 8 lanes. CLONES compiles it for x86-64 baseline, AVX2
// and AVX-512 and picks at load time, so a wheel built anywhere is fast anywhere. No -ffast-math: lse_0 =
// -inf is a legal input. Work is split by output row, never by summand, so results do not depend on the
// number of threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE inline __attribute__((always_inline))

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

INLINE F8 load(const float* p) {
  F8 v;
  std::memcpy(&v, p, 32);
  return v;
}
template <class V> INLINE V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
INLINE D8 load(const double* p) {
  D8 v;
  std::memcpy(&v, p, 64);
  return v;
}
INLINE F8 load(const c10::BFloat16* p) {
  H8 h;
  std::memcpy(&h, p, 16);
  return (F8)(__builtin_convertvector(h, U8) << 16);
}
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

// Write 8 results. `stream` writes past the cache: outputs larger than it would only evict the inputs, and an
// ordinary store first reads the line it is about to overwrite (a quarter of the forward's traffic).
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
INLINE void fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

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

template <class S> INLINE vec_t<S> load_n(const S* p, int64_t n, acc_t<S> fill) {
  if (n >= 8) return load(p);
  vec_t<S> v = vec_t<S>{} + fill;
  for (int64_t i = 0; i < n; i++) v[i] = (acc_t<S>)p[i];
  return v;
}
template <class S> INLINE const acc_t<S>* stage(const S* p, acc_t<S>* buffer, int n) {
  if constexpr (std::is_same_v<S, acc_t<S>>) {
    return p;
  } else {
    for (int i = 0; i < n; i += 8) store(buffer + i, load(p + i));
    return buffer;
  }
}

// ---- cached-attention merge
// ------------------------------------------------------------------------------------ s_j = scale q.k_j; lse
// = logsumexp(lse_0, s_1..s_k);  out = exp(lse_0 - lse) o_0 + sum_j exp(s_j - lse) v_j o_0, q, out [rows, H,
// D]; lse [rows, H]; k_j, v_j [rows, G, D]; rows = B T; head h uses key head h / (H / G). Bytes, s = element
// size, N = rows H, r = H / G: forward s N D (3 + 2 k / r) + 8 N; backward s N D (4 + 4 k / r) + 16 N, plus 2
// s N D for d o_0. Measured: see the table that --bench prints.
constexpr int MAX_K = 15, BLOCK = 4;

struct Merge {
  int64_t H, G, D, k;
  double scale;
  bool stream;
  const void *o_0, *lse_0, *q, *dout, *out, *lse;
  const void *const *ks, *const *vs;
  void *out_w, *lse_w, *dq, *do_0, *dlse_0;
  void *const *dks, *const *dvs;
};

// s[j step] = x.y_j for j < K: x is read once, the K sums stay in registers
template <int K, class S>
INLINE void dots(const S* x, const acc_t<S>* const* y, int D, acc_t<S>* s, int step) {
  vec_t<S> sum[K] = {};
  for (int d = 0; d < D; d += 8) {
    vec_t<S> a = load(x + d);
#pragma GCC unroll 4
    for (int j = 0; j < K; j++) sum[j] += a * load(y[j] + d);
  }
#pragma GCC unroll 4
  for (int j = 0; j < K; j++) s[j * step] = hsum(sum[j]);
}
#define BY_BLOCK(k, j, f)                                                                                    \
  for (int j = 0; j < k; j += BLOCK) {                                                                       \
    switch (k - j) {                                                                                         \
      case 1: f(1); break;                                                                                   \
      case 2: f(2); break;                                                                                   \
      case 3: f(3); break;                                                                                   \
      default: f(4);                                                                                         \
    }                                                                                                        \
  }
template <class S>
INLINE void dots(const S* x, const acc_t<S>* const* y, int k, int D, acc_t<S>* s, int step) {
#define MTP_BLOCK(K) dots<K, S>(x, y + j, D, s + j * step, step)
  BY_BLOCK(k, j, MTP_BLOCK)
#undef MTP_BLOCK
}

// out = w_0 o_0 + sum_j w_j v_j, in blocks of K; partial sums rest in `sum`
template <int K, class S>
INLINE void weigh(const S* o_0, const acc_t<S>* const* value, const acc_t<S>* w, int step, int D, bool first,
                  bool last, acc_t<S>* sum, S* out, bool stream) {
  const acc_t<S> w_0 = w[0];
  for (int d = 0; d < D; d += 8) {
    vec_t<S> v{};  // weight 0 skips o_0: a fully masked row may hold anything, NaN too
    if (!first) v = load(sum + d);
    if (first && w_0 != 0) v = load(o_0 + d) * w_0;
#pragma GCC unroll 4
    for (int j = 0; j < K; j++) v += load(value[j] + d) * w[(j + 1) * step];
    if (last)
      put8(out + d, v, stream);
    else
      store(sum + d, v);
  }
}

// Eight heads at a time, s[j step + h]: in s_0 = lse_0, s_j = scores / scale; out the weights, and the merged
// lse
template <class A> INLINE void softmax(A* s, int step, int k, int heads, A scale, A* lse) {
  using V = vec_t<A>;
  for (int h = 0; h < heads; h += 8) {
    V top = load(s + h), total{};
    for (int j = 1; j <= k; j++) {
      V x = load(s + j * step + h) * scale;
      store(s + j * step + h, x);
      top = x > top ? x : top;
    }
    for (int j = 0; j <= k; j++) {
      V e = vexp(load(s + j * step + h) - top);
      store(s + j * step + h, e);
      total += e;
    }
    for (int j = 0; j <= k; j++) store(s + j * step + h, load(s + j * step + h) / total);
    for (int i = h; i < std::min(heads, h + 8); i++) lse[i] = top[i - h] + std::log((A)total[i - h]);
  }
}
INLINE int padded(int heads) { return (heads + 7) / 8 * 8; }

// scratch: 2 k D (staged k, v), D, (k + 1) padded heads
template <class S>
CLONES void merge_forward_rows(const Merge& m, int64_t begin, int64_t end, acc_t<S>* scratch) {
  using A = acc_t<S>;
  const int D = m.D, k = m.k, group = m.H / m.G, step = padded(group);
  const A *key[MAX_K], *value[MAX_K];
  A *sum = scratch + 2 * k * D, *s = sum + D;
  for (int64_t row = begin * m.G; row < end * m.G; row++) {  // row = (b, t, key head)
    for (int j = 0; j < k; j++) {
      key[j] = stage((const S*)m.ks[j] + row * D, scratch + j * D, D);
      value[j] = stage((const S*)m.vs[j] + row * D, scratch + (k + j) * D, D);
    }
    const S *q = (const S*)m.q + row * group * D, *o_0 = (const S*)m.o_0 + row * group * D;
    S* out = (S*)m.out_w + row * group * D;
    std::memcpy(s, (const A*)m.lse_0 + row * group, group * sizeof(A));
    for (int h = 0; h < group; h++) dots(q + h * D, key, k, D, s + step + h, step);
    softmax(s, step, k, group, (A)m.scale, (A*)m.lse_w + row * group);
    for (int h = 0; h < group; h++) {
#define MTP_BLOCK(K)                                                                                         \
  weigh<K, S>(o_0 + h * D, value + j, s + j * step + h, step, D, !j, j + K == k, sum, out + h * D, m.stream)
      BY_BLOCK(k, j, MTP_BLOCK)
#undef MTP_BLOCK
    }
  }
  fence();
}

// One block of K cached steps for all query heads of a key head: the gradients of k_j and v_j stay in
// registers over the heads, that of q adds up over blocks in `dq`. w, ds: coefficients [k][step], already
// offset to the block.
template <int K, class V, class A>
INLINE void merge_backward_block(int D, int group, const A* const* key, const A* const* q,
                                 const A* const* dout, const A* w, const A* ds, int step, bool first, A* dq,
                                 A* const* dk, A* const* dv) {
  for (int d = 0; d < D; d += sizeof(V) / sizeof(A)) {
    V k[K], sum_k[K] = {}, sum_v[K] = {};
#pragma GCC unroll 4
    for (int j = 0; j < K; j++) k[j] = load_as<V>(key[j] + d);
    for (int h = 0; h < group; h++) {
      V x = load_as<V>(q[h] + d), y = load_as<V>(dout[h] + d), sum{};
      if (!first) sum = load_as<V>(dq + h * D + d);
#pragma GCC unroll 4
      for (int j = 0; j < K; j++) {
        A c = ds[j * step + h];
        sum += k[j] * c;
        sum_k[j] += x * c;
        sum_v[j] += y * w[j * step + h];
      }
      std::memcpy(dq + h * D + d, &sum, sizeof(V));
    }
#pragma GCC unroll 4
    for (int j = 0; j < K; j++) {
      std::memcpy(dk[j] + d, &sum_k[j], sizeof(V));
      std::memcpy(dv[j] + d, &sum_v[j], sizeof(V));
    }
  }
}

// s_j = q.k_j, a_j = dout.v_j and, once, delta = dout.out in one pass: seven chains of additions hide each
// other
template <int K, class S>
INLINE void backward_dots(const acc_t<S>* q, const acc_t<S>* dout, const S* out, const acc_t<S>* const* key,
                          const acc_t<S>* const* value, int D, int step, acc_t<S>* s, acc_t<S>* a,
                          acc_t<S>* delta) {
  vec_t<S> sum_s[K] = {}, sum_a[K] = {}, sum{};
  for (int d = 0; d < D; d += 8) {
    vec_t<S> x = load(q + d), y = load(dout + d);
    sum += y * load(out + d);
#pragma GCC unroll 4
    for (int j = 0; j < K; j++) {
      sum_s[j] += x * load(key[j] + d);
      sum_a[j] += y * load(value[j] + d);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < K; j++) s[j * step] = hsum(sum_s[j]), a[j * step] = hsum(sum_a[j]);
  *delta = hsum(sum);
}

// From scores and <dout, v_j> to w_j and ds_j = scale w_j <dout, v_j - out>, eight heads at a time
template <class A>
INLINE void coefficients(A* w, A* ds, const A* delta, const A* lse, int step, int k, int heads, A scale) {
  using V = vec_t<A>;
  for (int h = 0; h < heads; h += 8) {
    V l = load_n(lse + h, heads - h, A(0)), dot = load(delta + h);
    for (int j = 0; j < k; j++) {
      V e = vexp(load(w + j * step + h) * scale - l);
      store(w + j * step + h, e);
      store(ds + j * step + h, e * scale * (load(ds + j * step + h) - dot));
    }
  }
}

// d o_0 = w_0 dout and d lse_0 = w_0 <dout, o_0 - out>, w_0 = exp(lse_0 - lse)
template <class S>
INLINE void first_gradients(const Merge& m, int64_t head, const acc_t<S>* dout, acc_t<S> delta) {
  using A = acc_t<S>;
  const int D = m.D;
  A w_0 = std::exp(((const A*)m.lse_0)[head] - ((const A*)m.lse)[head]), dot = 0;
  if (w_0 != 0) dots<1, S>((const S*)m.o_0 + head * D, &dout, D, &dot, 1);
  ((A*)m.dlse_0)[head] = w_0 == 0 ? 0 : w_0 * (dot - delta);
  for (int d = 0; d < D; d += 8) put8((S*)m.do_0 + head * D + d, load(dout + d) * w_0, m.stream);
}

// scratch: 4 k D (staged and summed k, v), 3 group D (staged q, dout, summed dq), (2 k + 1) padded heads
template <class S>
CLONES void merge_backward_rows(const Merge& m, int64_t begin, int64_t end, acc_t<S>* scratch,
                                const acc_t<S>** pointers) {
  using A = acc_t<S>;
  using V = vec_t<S>;
  using W = std::conditional_t<std::is_same_v<A, float>, F16, D8>;
  const int D = m.D, k = m.k, group = m.H / m.G, step = padded(group);
  const A *key[MAX_K], *value[MAX_K], **q = pointers, **dout = pointers + group;
  A *dk[MAX_K], *dv[MAX_K], *heads = scratch + 4 * k * D, *dq = heads + 2 * group * D, *w = dq + group * D;
  A *ds = w + k * step, *delta = ds + k * step;
  for (int j = 0; j < k; j++) dk[j] = scratch + (2 * k + j) * D, dv[j] = scratch + (3 * k + j) * D;
  for (int64_t row = begin * m.G; row < end * m.G; row++) {
    for (int j = 0; j < k; j++) {
      key[j] = stage((const S*)m.ks[j] + row * D, scratch + j * D, D);
      value[j] = stage((const S*)m.vs[j] + row * D, scratch + (k + j) * D, D);
    }
    for (int h = 0; h < group; h++) {
      int64_t head = row * group + h;
      q[h] = stage((const S*)m.q + head * D, heads + 2 * h * D, D);
      dout[h] = stage((const S*)m.dout + head * D, heads + (2 * h + 1) * D, D);
#define MTP_BLOCK(K)                                                                                         \
  backward_dots<K, S>(q[h], dout[h], (const S*)m.out + head * D, key + j, value + j, D, step,                \
                      w + j * step + h, ds + j * step + h, delta + h)
      BY_BLOCK(k, j, MTP_BLOCK)
#undef MTP_BLOCK
      if (m.do_0) first_gradients<S>(m, head, dout[h], delta[h]);
    }
    coefficients(w, ds, delta, (const A*)m.lse + row * group, step, k, group, (A)m.scale);
#define MTP_BLOCK(K)                                                                                         \
  if (D % 16 == 0)                                                                                           \
    merge_backward_block<K, W, A>(D, group, key + j, q, dout, w + j * step, ds + j * step, step, !j, dq,     \
                                  dk + j, dv + j);                                                           \
  else                                                                                                       \
    merge_backward_block<K, V, A>(D, group, key + j, q, dout, w + j * step, ds + j * step, step, !j, dq,     \
                                  dk + j, dv + j)
    BY_BLOCK(k, j, MTP_BLOCK)
#undef MTP_BLOCK
    put((S*)m.dq + row * group * D, dq, group * D, m.stream);
    for (int j = 0; j < k; j++) put((S*)m.dks[j] + row * D, dk[j], D, m.stream);
    for (int j = 0; j < k; j++) put((S*)m.dvs[j] + row * D, dv[j], D, m.stream);
  }
  fence();
}

template <class F> void by_dtype(int dtype, F f) {  // the codes that bind.cpp passes
  if (dtype == 0) f(float());
  if (dtype == 1) f(c10::BFloat16());
  if (dtype == 2) f(c10::Half());
  if (dtype == 3) f(double());
}
int64_t grain(int64_t per_row) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, per_row)); }
constexpr int64_t STREAM_BYTES = 8 << 20;  // smaller outputs are better left in the cache for their reader

// ---- loss rows
// --------------------------------------------------------------------------------------------------- p =
// softmax(teacher), q = softmax(draft), y = argmax teacher. ce = -log q_y, kl = sum p (log p - log q), draft
// <- coeff ((ce_weight + kl_weight) q - kl_weight p - ce_weight [y]). Logits [R, V]; ties go to the lowest
// index. Bytes: s R V (2 + 2 + 1), the second read mostly from cache.
template <class A> struct Stats {
  A top, sum;
  int64_t index;
};

// Top, its first index and sum exp(x - top), one read: blocks of 512 logits sit in L1 while their top is
// looked for
template <class S> INLINE Stats<acc_t<S>> row_stats(const S* x, int64_t V) {
  using A = acc_t<S>;
  using W = vec_t<S>;
  const A low = -std::numeric_limits<A>::infinity();
  Stats<A> r{low, 0, 0};
  W total{};
  for (int64_t begin = 0; begin < V; begin += 512) {
    int64_t end = std::min(V, begin + 512);
    W top = W{} + low;
    for (int64_t i = begin; i < end; i += 8) {
      W v = load_n(x + i, end - i, low);
      top = v > top ? v : top;
    }
    A best = top[0];
    for (int i = 1; i < 8; i++) best = std::max(best, (A)top[i]);
    if (best > r.top) {
      for (r.index = begin; (A)x[r.index] != best;) r.index++;
      total *= r.top == low ? A(0) : std::exp(r.top - best);
      r.top = best;
    }
    if (r.top == low) continue;  // nothing but -inf so far
    W part{};  // summed per block, then over blocks: the rounding of 150,000 terms must not pile up
    for (int64_t i = begin; i < end; i += 8) part += vexp(load_n(x + i, end - i, low) - r.top);
    total += part;
  }
  r.sum = hsum(total);
  return r;
}

struct Loss {
  int64_t V;
  const void *teacher, *coeff;
  void *draft, *ce, *kl;
  int64_t *teacher_index, *draft_index;
  double ce_weight, kl_weight;
};
template <class S> CLONES void loss_rows_range(const Loss& m, int64_t begin, int64_t end) {
  using A = acc_t<S>;
  using W = vec_t<S>;
  const A low = -std::numeric_limits<A>::infinity();
  for (int64_t row = begin; row < end; row++) {
    const S* t = (const S*)m.teacher + row * m.V;
    S* d = (S*)m.draft + row * m.V;
    Stats<A> a = row_stats(t, m.V), b = row_stats(d, m.V);
    const A log_t = std::log(a.sum),
            log_d = std::log(b.sum);  // lse = top + log; x - top first: exact near the top
    const A c = ((const A*)m.coeff)[row], cq = c * (A)(m.ce_weight + m.kl_weight), cp = c * (A)m.kl_weight;
    const A ce = log_d - ((A)d[a.index] - b.top), gold = std::exp(-ce) * cq - std::exp(-log_t) * cp;
    W kl{}, part{};
    for (int64_t i = 0; i < m.V; i += 8) {
      W log_p = load_n(t + i, m.V - i, low) - a.top - log_t,
        log_q = load_n(d + i, m.V - i, low) - b.top - log_d;
      W p = vexp(log_p);
      part += p == 0 ? p : p * (log_p - log_q);
      if (i % 512 == 504) kl += part, part = W{};
      W g = vexp(log_q) * cq - p * cp;
      if (m.V - i >= 8) {
        store(d + i, g);
      } else {
        for (int64_t j = i; j < m.V; j++) d[j] = (S)(A)g[j - i];
      }
    }
    d[a.index] = (S)(gold - c * (A)m.ce_weight);
    ((A*)m.ce)[row] = ce;
    ((A*)m.kl)[row] = hsum(kl + part);
    m.teacher_index[row] = a.index;
    m.draft_index[row] = b.index;
  }
}

// ---- experts: the passes between the GEMMs
// --------------------------------------------------------------------- h = x[order] W1[e]^T = (gate, up);  a
// = silu(gate) up;  y[n] = sum_a w[n, a] (a W2[e]^T)
template <class S> INLINE void store_n(S* p, vec_t<S> v, int64_t n) {
  if (n >= 8) return store(p, v);
  for (int64_t i = 0; i < n; i++) p[i] = (S)(acc_t<S>)v[i];
}

template <class S> CLONES void act_rows(const S* h, S* a, int64_t F, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const S *gate = h + row * 2 * F, *up = gate + F;
    for (int64_t i = 0; i < F; i += 8) {
      vec_t<S> g = load_n(gate + i, F - i, acc_t<S>(0)), u = load_n(up + i, F - i, acc_t<S>(0));
      store_n(a + row * F + i, g / (1 + vexp(-g)) * u, F - i);
    }
  }
}

// g = dy W2 (router weight left out), in place -> w a, which d W2 needs; h -> dh; d w = <a, g>. dh = w g a'.
template <class S>
CLONES void act_backward_rows(const S* h, S* g, S* dh, const int* pairs, const acc_t<S>* weights,
                              acc_t<S>* dweights, int64_t F, int64_t begin, int64_t end) {
  using A = acc_t<S>;
  using V = vec_t<S>;
  for (int64_t row = begin; row < end; row++) {
    const S *gate = h + row * 2 * F, *up = gate + F;
    const A w = weights[pairs[row]];
    V dot{};
    for (int64_t i = 0; i < F; i += 8) {
      V x = load_n(gate + i, F - i, A(0)), u = load_n(up + i, F - i, A(0)),
        da = load_n(g + row * F + i, F - i, A(0));
      V s = 1 / (1 + vexp(-x)), silu = x * s, a = silu * u;
      dot += a * da;
      da *= w;
      store_n(g + row * F + i, a * w, F - i);
      store_n(dh + row * 2 * F + i, da * u * (s + silu * (1 - s)), F - i);
      store_n(dh + row * 2 * F + F + i, da * silu, F - i);
    }
    dweights[pairs[row]] = hsum(dot);
  }
}

// sum[n] += w rows[i] for the rows i that token n sent here. Tokens ascend within an expert; a range owns a
// token when it holds its first row, so that a token sent twice to one expert is never written by two
// threads.
template <class S>
CLONES void scatter_rows(const S* rows, const int* pairs, const acc_t<S>* weights, acc_t<S>* sum, int64_t A,
                         int64_t C, int64_t count, int64_t begin, int64_t end) {
  while (begin > 0 && begin < count && pairs[begin] / A == pairs[begin - 1] / A) begin++;
  while (end > 0 && end < count && pairs[end] / A == pairs[end - 1] / A) end++;
  for (int64_t i = begin; i < end; i++) {
    acc_t<S>* to = sum + pairs[i] / A * C;
    const acc_t<S> w = weights ? weights[pairs[i]] : 1;
    for (int64_t c = 0; c < C; c += 8) {
      store_n(to + c, load_n(to + c, C - c, acc_t<S>(0)) + load_n(rows + i * C + c, C - c, acc_t<S>(0)) * w,
              C - c);
    }
  }
}

template <class S> struct Experts {  // scratch tensors for the largest expert, and the segment at hand
  int64_t A, C, F, E;
  const int *order, *ends;
  at::Tensor largest(const at::Tensor& like, int64_t width) const {
    int64_t most = 1;
    for (int64_t e = 0; e < E; e++) most = std::max<int64_t>(most, ends[e] - begin(e));
    return at::empty({most, width}, like.options());
  }
  int64_t begin(int64_t e) const { return e ? ends[e - 1] : 0; }
  at::Tensor gather(const at::Tensor& from, const at::Tensor& scratch, int64_t e) const {
    const int64_t n = ends[e] - begin(e);
    const int* pairs = order + begin(e);
    const S* in = from.const_data_ptr<S>();
    S* out = scratch.mutable_data_ptr<S>();
    at::parallel_for(0, n, grain(C), [&](int64_t b, int64_t end) {
      for (int64_t i = b; i < end; i++) std::memcpy(out + i * C, in + pairs[i] / A * C, C * sizeof(S));
    });
    return scratch.narrow(0, 0, n);
  }
  void scatter(const at::Tensor& rows, const acc_t<S>* weights, acc_t<S>* sum, int64_t e) const {
    const int64_t n = ends[e] - begin(e);
    at::parallel_for(0, n, grain(C), [&](int64_t b, int64_t end) {
      scatter_rows<S>(rows.const_data_ptr<S>(), order + begin(e), weights, sum, A, C, n, b, end);
    });
  }
};
template <class S>
Experts<S> experts_of(const at::Tensor& x, const at::Tensor& w, const at::Tensor& down,
                      const at::Tensor& order, const at::Tensor& offsets) {
  return {w.size(1),
          x.size(1),
          down.size(2),
          down.size(0),
          order.const_data_ptr<int>(),
          offsets.const_data_ptr<int>()};
}
constexpr auto accumulator = [](const at::Tensor& x) {
  return at::zeros(x.sizes(), x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
};
}  // namespace

// Stable counting sort of the N A (token, choice) pairs by expert: order[0] = pair at each place, order[1] =
// place of each pair, offsets[e] = end of expert e. Returns false when an index is outside [0, E).
bool mtp_cpu_sort(const int64_t* index, int64_t pairs, int64_t E, int* order, int* offsets) {
  std::vector<int> next(E + 1, 0);
  for (int64_t i = 0; i < pairs; i++) {
    if (index[i] < 0 || index[i] >= E) return false;
    next[index[i] + 1]++;
  }
  for (int64_t e = 0; e < E; e++) offsets[e] = next[e + 1] += next[e];
  for (int64_t i = 0; i < pairs; i++) {
    int place = next[index[i]]++;
    order[place] = i;
    order[pairs + i] = place;
  }
  return true;
}

// Per expert: gather, GEMM, act, GEMM, weighted sum, in scratch of one expert's size: no [N A, C] tensor
// exists. Floor: the GEMMs, 6 N A C F multiply-adds. Measured: see the table that --bench prints.
template <class S>
void experts_forward(const at::Tensor& x, const at::Tensor& w, const at::Tensor& gate_up,
                     const at::Tensor& down, const at::Tensor& order, const at::Tensor& offsets,
                     at::Tensor& y, at::Tensor& pre) {
  auto m = experts_of<S>(x, w, down, order, offsets);
  at::Tensor sum = accumulator(x), rows = m.largest(x, m.C), act = m.largest(x, m.F);
  for (int64_t e = 0; e < m.E; e++) {
    const int64_t n = m.ends[e] - m.begin(e);
    if (!n) continue;
    at::Tensor h = pre.narrow(0, m.begin(e), n), a = act.narrow(0, 0, n), out = rows.narrow(0, 0, n);
    at::mm_out(h, m.gather(x, rows, e), gate_up.select(0, e).t());
    at::parallel_for(0, n, grain(m.F), [&](int64_t b, int64_t end) {
      act_rows<S>(h.const_data_ptr<S>(), a.mutable_data_ptr<S>(), m.F, b, end);
    });
    at::mm_out(out, a, down.select(0, e).t());
    m.scatter(out, w.const_data_ptr<acc_t<S>>(), sum.mutable_data_ptr<acc_t<S>>(), e);
  }
  y = sum.to(x.scalar_type());
}
template <class S>
void experts_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w,
                      const at::Tensor& gate_up, const at::Tensor& down, const at::Tensor& order,
                      const at::Tensor& offsets, const at::Tensor& pre, at::Tensor& dx, at::Tensor& dw,
                      at::Tensor& dgate_up, at::Tensor& ddown) {
  auto m = experts_of<S>(x, w, down, order, offsets);
  at::Tensor sum = accumulator(x), rows = m.largest(x, m.C), act = m.largest(x, m.F),
             dpre = m.largest(x, 2 * m.F);
  for (int64_t e = 0; e < m.E; e++) {
    const int64_t n = m.ends[e] - m.begin(e);
    at::Tensor dw1 = dgate_up.select(0, e), dw2 = ddown.select(0, e);
    if (!n) {
      dw1.zero_();
      dw2.zero_();
      continue;
    }
    at::Tensor h = pre.narrow(0, m.begin(e), n), g = act.narrow(0, 0, n), dh = dpre.narrow(0, 0, n);
    at::Tensor dout = m.gather(dy, rows, e);
    at::mm_out(g, dout, down.select(0, e));
    at::parallel_for(0, n, grain(m.F), [&](int64_t b, int64_t end) {
      act_backward_rows<S>(h.const_data_ptr<S>(), g.mutable_data_ptr<S>(), dh.mutable_data_ptr<S>(),
                           m.order + m.begin(e), w.const_data_ptr<acc_t<S>>(),
                           dw.mutable_data_ptr<acc_t<S>>(), m.F, b, end);
    });
    at::mm_out(dw2, dout.t(), g);
    at::mm_out(dw1, dh.t(), m.gather(x, rows, e));
    at::Tensor dxs = rows.narrow(0, 0, n);
    at::mm_out(dxs, dh, gate_up.select(0, e));
    m.scatter(dxs, nullptr, sum.mutable_data_ptr<acc_t<S>>(), e);
  }
  dx = sum.to(x.scalar_type());
}

// ---- what bind.cpp calls
// -------------------------------------------------------------------------------------------
void mtp_cpu_experts_forward(int dtype, const at::Tensor& x, const at::Tensor& w, const at::Tensor& gate_up,
                             const at::Tensor& down, const at::Tensor& order, const at::Tensor& offsets,
                             at::Tensor& y, at::Tensor& pre) {
  by_dtype(dtype, [&](auto s) { experts_forward<decltype(s)>(x, w, gate_up, down, order, offsets, y, pre); });
}
void mtp_cpu_experts_backward(int dtype, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w,
                              const at::Tensor& gate_up, const at::Tensor& down, const at::Tensor& order,
                              const at::Tensor& offsets, const at::Tensor& pre, at::Tensor& dx,
                              at::Tensor& dw, at::Tensor& dgate_up, at::Tensor& ddown) {
  by_dtype(dtype, [&](auto s) {
    experts_backward<decltype(s)>(dy, x, w, gate_up, down, order, offsets, pre, dx, dw, dgate_up, ddown);
  });
}

extern "C" {
int mtp_cpu_merge_forward(int dtype, int64_t rows, int64_t H, int64_t G, int64_t D, int64_t k, double scale,
                          const void* o_0, const void* lse_0, const void* q, const void* const* ks,
                          const void* const* vs, void* out, void* lse, void*) {
  by_dtype(dtype, [&](auto s) {
    using S = decltype(s);
    Merge m{H,  G,  D,  k,  scale, rows * H * D * (int64_t)sizeof(S) > STREAM_BYTES, o_0, lse_0, q,
            {}, {}, {}, ks, vs};
    m.out_w = out, m.lse_w = lse;
    at::parallel_for(0, rows, grain(H * D), [&](int64_t begin, int64_t end) {
      std::vector<acc_t<S>> scratch((2 * k + 1) * D + (k + 1) * padded(H / G));
      merge_forward_rows<S>(m, begin, end, scratch.data());
    });
  });
  return 0;
}
int mtp_cpu_merge_backward(int dtype, int64_t rows, int64_t H, int64_t G, int64_t D, int64_t k, double scale,
                           const void* dout, const void* q, const void* const* ks, const void* const* vs,
                           const void* out, const void* lse, const void* o_0, const void* lse_0, void* dq,
                           void* const* dks, void* const* dvs, void* do_0, void* dlse_0, void*, void*) {
  by_dtype(dtype, [&](auto s) {
    using S = decltype(s);
    Merge m{H,    G,   D,   k,  scale, rows * H * D * (int64_t)sizeof(S) > STREAM_BYTES, o_0, lse_0, q,
            dout, out, lse, ks, vs};
    m.dq = dq, m.do_0 = do_0, m.dlse_0 = dlse_0, m.dks = dks, m.dvs = dvs;
    at::parallel_for(0, rows, grain(H * D), [&](int64_t begin, int64_t end) {
      std::vector<acc_t<S>> scratch(4 * k * D + H / G * 3 * D + (2 * k + 1) * padded(H / G));
      std::vector<const acc_t<S>*> pointers(2 * H / G);
      merge_backward_rows<S>(m, begin, end, scratch.data(), pointers.data());
    });
  });
  return 0;
}
int mtp_cpu_loss_rows(int dtype, int64_t rows, int64_t V, const void* teacher, void* draft, const void* coeff,
                      double ce_weight, double kl_weight, void* ce, void* kl, int64_t* teacher_index,
                      int64_t* draft_index, void*) {
  by_dtype(dtype, [&](auto s) {
    Loss m{V, teacher, coeff, draft, ce, kl, teacher_index, draft_index, ce_weight, kl_weight};
    at::parallel_for(0, rows, grain(V),
                     [&](int64_t begin, int64_t end) { loss_rows_range<decltype(s)>(m, begin, end); });
  });
  return 0;
}
}
