// Loss rows on a CPU; loss.h has formula, shapes and bytes. Measured: see bench/kernels.py.
#include "loss.h"

#include <ATen/Parallel.h>

#include <limits>

#include "vec.h"

namespace {

template <class A> struct Stats {
  A top, sum;
  int64_t index;
};

// Top, its first index and sum exp(x - top), one read: blocks of 512 logits sit in L1 while their top is
// looked for. The loop that this equals:
//   for i: if x[i] > top: top = x[i], index = i
//   for i: sum += exp(x[i] - top)
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

// The loop that this equals:
//   for row: p = softmax(teacher[row]); q = softmax(draft[row]); y = argmax(teacher[row])
//     ce[row] = -log(q[y]);  kl[row] = sum_i p[i] * (log(p[i]) - log(q[i]))
//     for i: draft[row][i] = coeff[row] * (ce_weight * (q[i] - (i == y)) + kl_weight * (q[i] - p[i]))
template <class S> CLONES void loss_rows_range(const LossArgs& m, int64_t begin, int64_t end) {
  using A = acc_t<S>;
  using W = vec_t<S>;
  const A low = -std::numeric_limits<A>::infinity();
  for (int64_t row = begin; row < end; row++) {
    const S* t = (const S*)m.teacher + row * m.V;
    S* d = (S*)m.draft + row * m.V;
    Stats<A> a = row_stats(t, m.V), b = row_stats(d, m.V);
    // lse = top + log; x - top comes first, which is exact near the top
    const A log_t = std::log(a.sum), log_d = std::log(b.sum);
    const A c = ((const A*)m.coeff)[row], cq = c * (A)(m.ce_weight + m.kl_weight), cp = c * (A)m.kl_weight;
    const A ce = log_d - ((A)d[a.index] - b.top), gold = std::exp(-ce) * cq - std::exp(-log_t) * cp;
    W kl{}, part{};
    for (int64_t i = 0; i < m.V; i += 8) {
      W log_p = load_n(t + i, m.V - i, low) - a.top - log_t;
      W log_q = load_n(d + i, m.V - i, low) - b.top - log_d;
      W p = vexp(log_p);
      part += p == 0 ? p : p * (log_p - log_q);
      if (i % 512 == 504) kl += part, part = W{};
      store_n(d + i, vexp(log_q) * cq - p * cp, m.V - i);
    }
    d[a.index] = (S)(gold - c * (A)m.ce_weight);
    ((A*)m.ce)[row] = ce;
    ((A*)m.kl)[row] = hsum(kl + part);
    m.teacher_index[row] = a.index;
    m.draft_index[row] = b.index;
  }
}
}  // namespace

// ---- what bind.cpp calls ---------------------------------------------------------------------------------
extern "C" int mtp_cpu_loss_rows(int dtype, const LossArgs& m, void*) {
  by_dtype(dtype, [&](auto s) {
    at::parallel_for(0, m.rows, grain(m.V), [&](int64_t begin, int64_t end) {
      loss_rows_range<decltype(s)>(m, begin, end);
    });
  });
  return 0;
}
