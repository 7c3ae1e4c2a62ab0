// The cached-attention merge on a CPU; merge.h has formula, shapes and bytes. Floor: the bytes.
// Measured: see bench/kernels.py.
#include "merge.h"

#include <ATen/Parallel.h>

#include <vector>

#include "vec.h"

namespace {

// ---- forward ---------------------------------------------------------------------------------------------
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
    if (last) put8(out + d, v, stream);
    else store(sum + d, v);
  }
}

// Eight heads at a time, s[j step + h]: in s_0 = lse_0, s_j = scores / scale; out the weights. And the lse.
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

// The loop that this equals:
//   for row, for query head h, g = h / group:
//     s[0] = lse_0[row, h];  for j = 1..k: s[j] = scale * dot(q[row, h], k_j[row, g])
//     lse[row, h] = log(sum_j exp(s[j])) over j = 0..k
//     out[row, h] = exp(s[0] - lse[row, h]) * o_0[row, h]
//     for j = 1..k: out[row, h] += exp(s[j] - lse[row, h]) * v_j[row, g]
// scratch: 2 k D (staged k, v), D, (k + 1) padded heads
template <class S>
CLONES void forward_rows(const MergeArgs& m, int64_t begin, int64_t end, bool stream, acc_t<S>* scratch) {
  using A = acc_t<S>;
  const int D = m.D, k = m.k, group = m.group, step = padded(group);
  const A *key[MAX_STEPS], *value[MAX_STEPS];
  A *sum = scratch + 2 * k * D, *s = sum + D;
  for (int64_t row = begin * m.G; row < end * m.G; row++) {  // row = (b, t, key head)
    for (int j = 0; j < k; j++) {
      key[j] = stage((const S*)m.ks[j] + row * D, scratch + j * D, D);
      value[j] = stage((const S*)m.vs[j] + row * D, scratch + (k + j) * D, D);
    }
    const S *q = (const S*)m.q + row * group * D, *o_0 = (const S*)m.o_0 + row * group * D;
    S* out = (S*)m.out + row * group * D;
    std::memcpy(s, (const A*)m.lse_0 + row * group, group * sizeof(A));
    for (int h = 0; h < group; h++) {
      by_block(k, [&](int j, auto K) ALWAYS_INLINE {
        dots<K.value, S>(q + h * D, key + j, D, s + step + h + j * step, step);
      });
    }
    softmax(s, step, k, group, (A)m.scale, (A*)m.lse + row * group);
    for (int h = 0; h < group; h++) {
      by_block(k, [&](int j, auto K) ALWAYS_INLINE {
        weigh<K.value, S>(o_0 + h * D, value + j, s + j * step + h, step, D, j == 0, j + K.value == k, sum,
                          out + h * D, stream);
      });
    }
  }
  fence();
}

// ---- backward --------------------------------------------------------------------------------------------
// One block of K cached steps for all query heads of a key head: the gradients of k_j and v_j stay in
// registers over the heads, that of q adds up over blocks in `dq`. w, ds: the block's first coefficients,
// [K][step].
template <int K, class V, class A>
INLINE void backward_block(int D, int group, const A* const* key, const A* const* q, const A* const* dout,
                           const A* w, const A* ds, int step, bool first, A* dq, A* const* dk, A* const* dv) {
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

// s_j = q.k_j, a_j = dout.v_j and delta = dout.out in one pass: 2 K + 1 chains of additions hide each other
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

// do_0 = w_0 dout and dlse_0 = w_0 <dout, o_0 - out>, w_0 = exp(lse_0 - lse)
template <class S>
INLINE void first_gradients(const MergeArgs& m, int64_t head, const acc_t<S>* dout, acc_t<S> delta,
                            bool stream) {
  using A = acc_t<S>;
  const int D = m.D;
  A w_0 = std::exp(((const A*)m.lse_0)[head] - ((const A*)m.lse)[head]), dot = 0;
  if (w_0 != 0) dots<1, S>((const S*)m.o_0 + head * D, &dout, D, &dot, 1);
  ((A*)m.dlse_0)[head] = w_0 == 0 ? 0 : w_0 * (dot - delta);
  for (int d = 0; d < D; d += 8) put8((S*)m.do_0 + head * D + d, load(dout + d) * w_0, stream);
}

// The loop that this equals, w_0's part above:
//   for row, for query head h, g = h / group, for j = 1..k:
//     w = exp(scale * dot(q[row, h], k_j[row, g]) - lse[row, h])
//     ds = scale * w * dot(dout[row, h], v_j[row, g] - out[row, h])
//     dq[row, h] += ds * k_j[row, g];  dk_j[row, g] += ds * q[row, h];  dv_j[row, g] += w * dout[row, h]
// scratch: 4 k D (staged and summed k, v), 3 group D (staged q, dout, summed dq), (2 k + 1) padded heads
template <class S>
CLONES void backward_rows(const MergeArgs& m, int64_t begin, int64_t end, bool stream, acc_t<S>* scratch,
                          const acc_t<S>** pointers) {
  using A = acc_t<S>;
  using V = vec_t<S>;
  using W = std::conditional_t<std::is_same_v<A, float>, F16, D8>;
  const int D = m.D, k = m.k, group = m.group, step = padded(group);
  const A *key[MAX_STEPS], *value[MAX_STEPS], **q = pointers, **dout = pointers + group;
  A *dk[MAX_STEPS], *dv[MAX_STEPS], *heads = scratch + 4 * k * D, *dq = heads + 2 * group * D;
  A *w = dq + group * D, *ds = w + k * step, *delta = ds + k * step;
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
      by_block(k, [&](int j, auto K) ALWAYS_INLINE {
        backward_dots<K.value, S>(q[h], dout[h], (const S*)m.out + head * D, key + j, value + j, D, step,
                                  w + j * step + h, ds + j * step + h, delta + h);
      });
      if (m.do_0) first_gradients<S>(m, head, dout[h], delta[h], stream);
    }
    coefficients(w, ds, delta, (const A*)m.lse + row * group, step, k, group, (A)m.scale);
    by_block(k, [&](int j, auto K) ALWAYS_INLINE {
      const A *w_j = w + j * step, *ds_j = ds + j * step;
      if (D % 16 == 0)
        backward_block<K.value, W>(D, group, key + j, q, dout, w_j, ds_j, step, j == 0, dq, dk + j, dv + j);
      else
        backward_block<K.value, V>(D, group, key + j, q, dout, w_j, ds_j, step, j == 0, dq, dk + j, dv + j);
    });
    put((S*)m.dq + row * group * D, dq, group * D, stream);
    for (int j = 0; j < k; j++) put((S*)m.dks[j] + row * D, dk[j], D, stream);
    for (int j = 0; j < k; j++) put((S*)m.dvs[j] + row * D, dv[j], D, stream);
  }
  fence();
}

template <class S> bool streams(const MergeArgs& m) {
  return m.rows * m.G * m.group * m.D * (int64_t)sizeof(S) > STREAM_BYTES;
}
}  // namespace

// ---- what bind.cpp calls ---------------------------------------------------------------------------------
extern "C" int mtp_cpu_merge_forward(int dtype, const MergeArgs& m, void*) {
  by_dtype(dtype, [&](auto s) {
    using S = decltype(s);
    at::parallel_for(0, m.rows, grain(m.G * m.group * m.D), [&](int64_t begin, int64_t end) {
      std::vector<acc_t<S>> scratch((2 * m.k + 1) * m.D + (m.k + 1) * padded(m.group));
      forward_rows<S>(m, begin, end, streams<S>(m), scratch.data());
    });
  });
  return 0;
}
extern "C" int mtp_cpu_merge_backward(int dtype, const MergeArgs& m, void*) {
  by_dtype(dtype, [&](auto s) {
    using S = decltype(s);
    at::parallel_for(0, m.rows, grain(m.G * m.group * m.D), [&](int64_t begin, int64_t end) {
      std::vector<acc_t<S>> scratch(4 * m.k * m.D + m.group * 3 * m.D + (2 * m.k + 1) * padded(m.group));
      std::vector<const acc_t<S>*> pointers(2 * m.group);
      backward_rows<S>(m, begin, end, streams<S>(m), scratch.data(), pointers.data());
    });
  });
  return 0;
}
