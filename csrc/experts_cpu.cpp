// Routed experts on a CPU; experts.h has formula, shapes and floor. Measured: see bench/kernels.py.
//
// Per expert: gather, GEMM, act, GEMM, weighted sum, in scratch of one expert's size: no [N A, C] tensor
// exists. The loop that this equals, over every expert e and its pairs (n, i), dpre = (dgate, dup):
//   gate, up = gate_up[e] x[n];  a = silu(gate) * up;  y[n] += w[n, i] * (down[e] a)
//   da = down[e]^T dy[n];  dw[n, i] = dot(a, da);  ddown[e] += w[n, i] * dy[n] a^T
//   dup = w[n, i] * da * silu(gate);  dgate = w[n, i] * da * up * silu'(gate)
//   dgate_up[e] += dpre x[n]^T;  dx[n] += gate_up[e]^T dpre
#include "experts.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "vec.h"

namespace {

using at::Tensor;

// ---- the passes between the GEMMs ------------------------------------------------------------------------
// a = silu(gate) up of rows begin .. end; pre = (gate, up) [rows, 2 F]
template <class S> CLONES void act_rows(const S* pre, S* a, int64_t F, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const S *gate = pre + row * 2 * F, *up = gate + F;
    for (int64_t i = 0; i < F; i += 8) {
      vec_t<S> g = load_n(gate + i, F - i, acc_t<S>(0)), u = load_n(up + i, F - i, acc_t<S>(0));
      store_n(a + row * F + i, g / (1 + vexp(-g)) * u, F - i);
    }
  }
}

// g = da, router weight left out, becomes w a, which ddown needs; dpre; dw = <a, da>
template <class S>
CLONES void act_backward_rows(const S* pre, S* g, S* dpre, const int* pairs, const acc_t<S>* weights,
                              acc_t<S>* dweights, int64_t F, int64_t begin, int64_t end) {
  using A = acc_t<S>;
  using V = vec_t<S>;
  for (int64_t row = begin; row < end; row++) {
    const S *gate = pre + row * 2 * F, *up = gate + F;
    const A w = weights[pairs[row]];
    V dot{};
    for (int64_t i = 0; i < F; i += 8) {
      V x = load_n(gate + i, F - i, A(0)), u = load_n(up + i, F - i, A(0));
      V da = load_n(g + row * F + i, F - i, A(0));
      V s = 1 / (1 + vexp(-x)), silu = x * s, a = silu * u;
      dot += a * da;
      da *= w;
      store_n(g + row * F + i, a * w, F - i);
      store_n(dpre + row * 2 * F + i, da * u * (s + silu * (1 - s)), F - i);
      store_n(dpre + row * 2 * F + F + i, da * silu, F - i);
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
      vec_t<S> old = load_n(to + c, C - c, acc_t<S>(0)), row = load_n(rows + i * C + c, C - c, acc_t<S>(0));
      store_n(to + c, old + row * w, C - c);
    }
  }
}

// ---- one expert's rows -----------------------------------------------------------------------------------
template <class S> struct Experts {
  int64_t A, C, F, E;
  const int *order, *ends;

  explicit Experts(const ExpertsArgs& m)
      : A(m.w.size(1)), C(m.x.size(1)), F(m.down.size(2)), E(m.down.size(0)),
        order(m.order.const_data_ptr<int>()), ends(m.offsets.const_data_ptr<int>()) {}

  int64_t begin(int64_t e) const { return e ? ends[e - 1] : 0; }
  int64_t count(int64_t e) const { return ends[e] - begin(e); }

  Tensor scratch(const Tensor& like, int64_t width) const {  // for the largest expert
    int64_t most = 1;
    for (int64_t e = 0; e < E; e++) most = std::max(most, count(e));
    return at::empty({most, width}, like.options());
  }
  Tensor gather(const Tensor& from, const Tensor& scratch, int64_t e) const {  // [count, C]
    const int* pairs = order + begin(e);
    const S* in = from.const_data_ptr<S>();
    S* out = scratch.mutable_data_ptr<S>();
    at::parallel_for(0, count(e), grain(C), [&](int64_t b, int64_t end) {
      for (int64_t i = b; i < end; i++) std::memcpy(out + i * C, in + pairs[i] / A * C, C * sizeof(S));
    });
    return scratch.narrow(0, 0, count(e));
  }
  void scatter(const Tensor& rows, const acc_t<S>* weights, acc_t<S>* sum, int64_t e) const {
    at::parallel_for(0, count(e), grain(C), [&](int64_t b, int64_t end) {
      scatter_rows<S>(rows.const_data_ptr<S>(), order + begin(e), weights, sum, A, C, count(e), b, end);
    });
  }
};

Tensor zero_sum(const Tensor& x) {
  return at::zeros(x.sizes(), x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
}

// Stable counting sort; false if an index is outside [0, E). With next[e] the next free place of expert e,
//   for pair: place = next[index[pair]]++;  order[0][place] = pair;  order[1][pair] = place
bool sort_by_expert(const int64_t* index, int64_t pairs, int64_t E, int* order, int* offsets) {
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

// ---- forward and backward --------------------------------------------------------------------------------
template <class S> Tensor forward(const ExpertsArgs& args, const Tensor& pre) {
  const Experts<S> m(args);
  const acc_t<S>* weights = args.w.const_data_ptr<acc_t<S>>();
  Tensor sum = zero_sum(args.x), rows = m.scratch(args.x, m.C), act = m.scratch(args.x, m.F);
  for (int64_t e = 0; e < m.E; e++) {
    const int64_t n = m.count(e);
    if (!n) continue;
    Tensor h = pre.narrow(0, m.begin(e), n), a = act.narrow(0, 0, n), out = rows.narrow(0, 0, n);
    at::mm_out(h, m.gather(args.x, rows, e), args.gate_up.select(0, e).t());
    at::parallel_for(0, n, grain(m.F), [&](int64_t b, int64_t end) {
      act_rows<S>(h.const_data_ptr<S>(), a.mutable_data_ptr<S>(), m.F, b, end);
    });
    at::mm_out(out, a, args.down.select(0, e).t());
    m.scatter(out, weights, sum.mutable_data_ptr<acc_t<S>>(), e);
  }
  return sum.to(args.x.scalar_type());
}

template <class S> ExpertsGradients backward(const ExpertsArgs& args, const Tensor& pre, const Tensor& dy) {
  const Experts<S> m(args);
  const acc_t<S>* weights = args.w.const_data_ptr<acc_t<S>>();
  Tensor dw = at::empty_like(args.w);
  Tensor dgate_up = at::empty_like(args.gate_up), ddown = at::empty_like(args.down);
  Tensor sum = zero_sum(args.x), rows = m.scratch(args.x, m.C);
  Tensor act = m.scratch(args.x, m.F), dpre = m.scratch(args.x, 2 * m.F);
  for (int64_t e = 0; e < m.E; e++) {
    const int64_t n = m.count(e);
    Tensor dw1 = dgate_up.select(0, e), dw2 = ddown.select(0, e);
    if (!n) {
      dw1.zero_();
      dw2.zero_();
      continue;
    }
    Tensor h = pre.narrow(0, m.begin(e), n), g = act.narrow(0, 0, n), dh = dpre.narrow(0, 0, n);
    Tensor dout = m.gather(dy, rows, e);
    at::mm_out(g, dout, args.down.select(0, e));
    at::parallel_for(0, n, grain(m.F), [&](int64_t b, int64_t end) {
      act_backward_rows<S>(h.const_data_ptr<S>(), g.mutable_data_ptr<S>(), dh.mutable_data_ptr<S>(),
                           m.order + m.begin(e), weights, dw.mutable_data_ptr<acc_t<S>>(), m.F, b, end);
    });
    at::mm_out(dw2, dout.t(), g);
    at::mm_out(dw1, dh.t(), m.gather(args.x, rows, e));
    Tensor dxs = rows.narrow(0, 0, n);
    at::mm_out(dxs, dh, args.gate_up.select(0, e));
    m.scatter(dxs, nullptr, sum.mutable_data_ptr<acc_t<S>>(), e);
  }
  return {sum.to(args.x.scalar_type()), dw, dgate_up, ddown};
}
}  // namespace

// ---- what bind.cpp calls ---------------------------------------------------------------------------------
std::tuple<Tensor, Tensor> mtp_cpu_experts_forward(const ExpertsArgs& m, const Tensor& index) {
  const int64_t pairs = index.numel(), E = m.down.size(0);
  TORCH_CHECK(sort_by_expert(index.const_data_ptr<int64_t>(), pairs, E, m.order.mutable_data_ptr<int>(),
                             m.offsets.mutable_data_ptr<int>()),
              "experts_forward: an expert index is outside [0, ", E, ")");
  Tensor y, pre = at::empty({pairs, m.gate_up.size(1)}, m.x.options());
  by_dtype(m.dtype, [&](auto s) { y = forward<decltype(s)>(m, pre); });
  return {y, pre};
}
ExpertsGradients mtp_cpu_experts_backward(const ExpertsArgs& m, const Tensor& pre, const Tensor& dy) {
  ExpertsGradients grads;
  by_dtype(m.dtype, [&](auto s) { grads = backward<decltype(s)>(m, pre, dy); });
  return grads;
}
