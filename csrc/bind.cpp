// The ops of torch.ops.mtp_kernels: schema, checks, shapes for tracing, gradients, and the choice of CPU or
// CUDA code.
//
//   merge, merge_backward          attention over k cached keys of the own row, merged into block 0 (out,
//   lse) experts_forward, .._backward   routed experts, sorted by expert; saves the sorted order and the
//   pre-activations loss_rows                      CE + KL of a chunk of rows; the draft logits become their
//   own gradient
//
// Their PyTorch references, with the formulas, are merge_ref, merge_backward_ref, experts_ref and
// loss_rows_ref. merge and experts_forward are differentiable here; the backward ops are plain, for use in an
// autograd.Function.
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef MTP_CUDA
#include <ATen/ops/_grouped_mm.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <optional>
#include <tuple>
#include <vector>

using at::Tensor;
using at::TensorList;
using std::optional;
using Pair = std::tuple<Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using MergeGradients = std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>>;

// Plain launchers, the same on both devices; cpu.cpp and kernels.cu state formula, bytes and floor of each.
#define MTP_LAUNCHERS(device)                                                                                \
  int mtp_##device##_merge_forward(int dtype, int64_t rows, int64_t H, int64_t G, int64_t D, int64_t k,      \
                                   double scale, const void* o_0, const void* lse_0, const void* q,          \
                                   const void* const* ks, const void* const* vs, void* out, void* lse,       \
                                   void* stream);                                                            \
  int mtp_##device##_merge_backward(                                                                         \
      int dtype, int64_t rows, int64_t H, int64_t G, int64_t D, int64_t k, double scale, const void* dout,   \
      const void* q, const void* const* ks, const void* const* vs, const void* out, const void* lse,         \
      const void* o_0, const void* lse_0, void* dq, void* const* dks, void* const* dvs, void* do_0,          \
      void* dlse_0, void* scratch, void* stream);                                                            \
  int mtp_##device##_loss_rows(int dtype, int64_t rows, int64_t V, const void* teacher, void* draft,         \
                               const void* coeff, double ce_weight, double kl_weight, void* ce, void* kl,    \
                               int64_t* teacher_index, int64_t* draft_index, void* stream);
extern "C" {
MTP_LAUNCHERS(cpu)
#ifdef MTP_CUDA
MTP_LAUNCHERS(cuda)
int mtp_cuda_sort(const int64_t* index, int64_t pairs, int64_t E, int* order, int* offsets, int* scratch,
                  void* stream);
int mtp_cuda_gather(int dtype, const void* x, const int* order, int64_t pairs, int64_t A, int64_t C,
                    void* rows, void* stream);
int mtp_cuda_act(int dtype, const void* h, int64_t pairs, int64_t F, void* a, void* stream);
int mtp_cuda_act_backward(int dtype, const void* h, void* g, const int* order, const float* weights,
                          int64_t pairs, int64_t F, void* dh, float* dweights, void* stream);
int mtp_cuda_combine(int dtype, const void* rows, const int* places, const float* weights, int64_t N,
                     int64_t A, int64_t C, void* y, void* stream);
int mtp_cuda_zero_empty(int dtype, const int* offsets, int64_t E, int64_t per_expert, void* w, void* stream);
#endif
}
bool mtp_cpu_sort(const int64_t* index, int64_t pairs, int64_t E, int* order, int* offsets);
void mtp_cpu_experts_forward(int dtype, const Tensor& x, const Tensor& w, const Tensor& gate_up,
                             const Tensor& down, const Tensor& order, const Tensor& offsets, Tensor& y,
                             Tensor& pre);
void mtp_cpu_experts_backward(int dtype, const Tensor& dy, const Tensor& x, const Tensor& w,
                              const Tensor& gate_up, const Tensor& down, const Tensor& order,
                              const Tensor& offsets, const Tensor& pre, Tensor& dx, Tensor& dw,
                              Tensor& dgate_up, Tensor& ddown);

namespace {

at::ScalarType accumulator(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

int dtype_code(const Tensor& x, const char* op) {
  switch (x.scalar_type()) {
    case at::kFloat: return 0;
    case at::kBFloat16: return 1;
    case at::kHalf: return 2;
    case at::kDouble:
      TORCH_CHECK(x.is_cpu(), op, ": float64 runs on the CPU only, got a ", x.device(),
                  " tensor; use float32");
      return 3;
    default:
      TORCH_CHECK(false, op, ": dtype ", x.scalar_type(), " is not float32, bfloat16, float16 or float64");
  }
}
void check(const Tensor& x, const char* op, const char* name, at::IntArrayRef shape, at::ScalarType dtype,
           const Tensor& like) {
  TORCH_CHECK(x.sizes() == shape, op, ": ", name, " has shape ", x.sizes(), ", expected ", shape);
  TORCH_CHECK(x.scalar_type() == dtype, op, ": ", name, " is ", x.scalar_type(), ", expected ", dtype);
  TORCH_CHECK(x.device() == like.device(), op, ": ", name, " is on ", x.device(), ", expected ",
              like.device());
}
void check_launch(int error, const char* op) { TORCH_CHECK(error == 0, op, ": CUDA error ", error); }

#ifdef MTP_CUDA
#define ON_DEVICE(x, name, ...)                                                                              \
  ((x).is_cpu() ? mtp_cpu_##name(__VA_ARGS__, nullptr)                                                       \
                : mtp_cuda_##name(__VA_ARGS__, c10::cuda::getCurrentCUDAStream().stream()))
#define GUARD(x)                                                                                             \
  c10::cuda::OptionalCUDAGuard device_guard;                                                                 \
  if ((x).is_cuda()) device_guard.set_device((x).device())
#else
#define ON_DEVICE(x, name, ...) mtp_cpu_##name(__VA_ARGS__, nullptr)
#define GUARD(x)
#endif

// An uninitialised result of the merge. Large ones on the CPU come from mmap and cost more in page faults than
// the merge itself: asking for huge pages before the first touch takes 1/512 of the faults. (For the experts,
// whose time is in matrix products, that gained nothing: 1.02x with, 0.98x without, of the PyTorch path.)
Tensor fresh(at::IntArrayRef shape, at::TensorOptions options) {
  Tensor x = at::empty(shape, options);
#ifdef __linux__
  constexpr uintptr_t page = 2 << 20;
  const uintptr_t at = reinterpret_cast<uintptr_t>(x.data_ptr()), begin = (at + page - 1) / page * page;
  const uintptr_t end = (at + x.nbytes()) / page * page;
  if (x.is_cpu() && end > begin + page) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  return x;
}

// Contiguous and 16-byte aligned: what the kernels' wide loads need
Tensor ready(const Tensor& x) {
  Tensor c = x.contiguous();
  return reinterpret_cast<uintptr_t>(c.const_data_ptr()) % 16 ? c.clone() : c;
}

// ---- merge
// -----------------------------------------------------------------------------------------------------
struct Cache {  // k contiguous [B, T, G, D] tensors and their addresses
  std::vector<Tensor> tensors;
  std::vector<const void*> data;
  explicit Cache(TensorList list) {
    for (const Tensor& x : list) {
      tensors.push_back(ready(x));
      data.push_back(tensors.back().const_data_ptr());
    }
  }
};
void check_merge(const Tensor& q, TensorList ks, TensorList vs, const Tensor& o, const Tensor& lse,
                 const char* op) {
  TORCH_CHECK(q.dim() == 4, op, ": q has shape ", q.sizes(), ", expected (B, T, H, D)");
  const int64_t k = ks.size(), D = q.size(3), H = q.size(2);
  TORCH_CHECK(k >= 1 && k <= 15 && (int64_t)vs.size() == k, op, ": ", k, " keys and ", vs.size(),
              " values, expected 1 to 15 of each");
  TORCH_CHECK(D % 8 == 0 && D >= 8 && D <= 256, op, ": head dim ", D,
              " is not a multiple of 8 up to 256; zero-pad it");
  TORCH_CHECK(ks[0].dim() == 4, op, ": ks[0] has shape ", ks[0].sizes(), ", expected (B, T, G, D)");
  const int64_t G = ks[0].size(2);
  TORCH_CHECK(G >= 1 && H % G == 0, op, ": ", G, " key heads do not divide ", H, " query heads");
  check(o, op, "out (o_0)", q.sizes(), q.scalar_type(), q);
  check(lse, op, "lse (lse_0)", q.sizes().slice(0, 3), accumulator(q), q);
  for (int64_t j = 0; j < k; j++) {
    check(ks[j], op, "ks", {q.size(0), q.size(1), G, D}, q.scalar_type(), q);
    check(vs[j], op, "vs", {q.size(0), q.size(1), G, D}, q.scalar_type(), q);
  }
}

Pair merge(const Tensor& o_0, const Tensor& lse_0, const Tensor& q, TensorList ks, TensorList vs,
           double scale) {
  check_merge(q, ks, vs, o_0, lse_0, "merge");
  GUARD(q);
  Tensor o = ready(o_0), l = ready(lse_0), x = ready(q);
  Cache key(ks), value(vs);
  Tensor out = fresh(q.sizes(), q.options()), lse = fresh(l.sizes(), l.options());
  const int64_t D = q.size(3), H = q.size(2), rows = q.size(0) * q.size(1);
  if (rows > 0)
    check_launch(ON_DEVICE(q, merge_forward, dtype_code(q, "merge"), rows, H, ks[0].size(2), D, ks.size(),
                           scale, o.const_data_ptr(), l.const_data_ptr(), x.const_data_ptr(), key.data.data(),
                           value.data.data(), out.mutable_data_ptr(), lse.mutable_data_ptr()),
                 "merge");
  return {out, lse};
}

MergeGradients merge_backward(const Tensor& dout, const Tensor& q, TensorList ks, TensorList vs,
                              const Tensor& out, const Tensor& lse, double scale, const optional<Tensor>& o_0,
                              const optional<Tensor>& lse_0) {
  check_merge(q, ks, vs, out, lse, "merge_backward");
  check(dout, "merge_backward", "dout", q.sizes(), q.scalar_type(), q);
  TORCH_CHECK(o_0.has_value() == lse_0.has_value(), "merge_backward: give both o_0 and lse_0, or neither");
  if (o_0) check_merge(q, ks, vs, *o_0, *lse_0, "merge_backward");
  GUARD(q);
  const int64_t B = q.size(0), T = q.size(1), H = q.size(2), D = q.size(3), G = ks[0].size(2), k = ks.size();
  Tensor d = ready(dout), x = ready(q), o = ready(out), l = ready(lse), o_first, l_first;
  Cache key(ks), value(vs);
  Tensor dq = fresh(q.sizes(), q.options()), scratch;
  std::vector<Tensor> dks, dvs, first;
  std::vector<void*> dk_data, dv_data;
  for (int64_t j = 0; j < k; j++) {
    dks.push_back(fresh({B, T, G, D}, q.options()));
    dvs.push_back(fresh({B, T, G, D}, q.options()));
    dk_data.push_back(dks[j].mutable_data_ptr());
    dv_data.push_back(dvs[j].mutable_data_ptr());
  }
  if (o_0) {
    o_first = ready(*o_0), l_first = ready(*lse_0);
    first = {fresh(q.sizes(), q.options()), fresh(l.sizes(), l.options())};
  }
  if (q.is_cuda() && k > 4) scratch = fresh(q.sizes(), l.options());  // dq between launches of 4 steps each
  if (B * T > 0)
    check_launch(ON_DEVICE(q, merge_backward, dtype_code(q, "merge_backward"), B * T, H, G, D, k, scale,
                           d.const_data_ptr(), x.const_data_ptr(), key.data.data(), value.data.data(),
                           o.const_data_ptr(), l.const_data_ptr(), o_0 ? o_first.const_data_ptr() : nullptr,
                           o_0 ? l_first.const_data_ptr() : nullptr, dq.mutable_data_ptr(), dk_data.data(),
                           dv_data.data(), o_0 ? first[0].mutable_data_ptr() : nullptr,
                           o_0 ? first[1].mutable_data_ptr() : nullptr,
                           scratch.defined() ? scratch.mutable_data_ptr() : nullptr),
                 "merge_backward");
  return {dq, dks, dvs, first};
}

Pair merge_meta(const Tensor&, const Tensor& lse_0, const Tensor& q, TensorList, TensorList, double) {
  return {at::empty_symint(q.sym_sizes(), q.options()), at::empty_symint(lse_0.sym_sizes(), lse_0.options())};
}
MergeGradients merge_backward_meta(const Tensor&, const Tensor& q, TensorList ks, TensorList vs,
                                   const Tensor&, const Tensor& lse, double, const optional<Tensor>& o_0,
                                   const optional<Tensor>&) {
  auto like = [](const Tensor& x) { return at::empty_symint(x.sym_sizes(), x.options()); };
  std::vector<Tensor> dks, dvs, first;
  for (const Tensor& x : ks) dks.push_back(like(x));
  for (const Tensor& x : vs) dvs.push_back(like(x));
  if (o_0) first = {like(q), like(lse)};
  return {like(q), dks, dvs, first};
}

// ---- experts
// ---------------------------------------------------------------------------------------------------
void check_experts(const Tensor& x, const Tensor& w, const Tensor& gate_up, const Tensor& down,
                   const char* op) {
  TORCH_CHECK(x.dim() == 2, op, ": x has shape ", x.sizes(), ", expected (N, C)");
  TORCH_CHECK(w.dim() == 2, op, ": topk_weights has shape ", w.sizes(), ", expected (N, A)");
  TORCH_CHECK(down.dim() == 3, op, ": down_proj has shape ", down.sizes(), ", expected (E, C, F)");
  const int64_t N = x.size(0), C = x.size(1), A = w.size(1), E = down.size(0), F = down.size(2);
  check(w, op, "topk_weights", {N, A}, accumulator(x), x);
  check(gate_up, op, "gate_up_proj", {E, 2 * F, C}, x.scalar_type(), x);
  check(down, op, "down_proj", {E, C, F}, x.scalar_type(), x);
  TORCH_CHECK(E >= 1 && A >= 1 && N * A < INT32_MAX, op, ": E = ", E, ", A = ", A, ", N = ", N,
              "; expected E, A >= 1 and N A < 2^31");
  if (x.is_cuda())
    TORCH_CHECK(E <= 1024 && C % 8 == 0 && F % 8 == 0, op, ": E = ", E, ", C = ", C, ", F = ", F,
                "; on CUDA E is at most 1024, C and F are multiples of 8");
}

#ifdef MTP_CUDA
struct Cuda {  // what every launch below shares
  int dtype;
  int64_t pairs, A, C, F, E;
  const int* order;
  void* stream;
  Tensor gather(const Tensor& x) const {
    Tensor rows = at::empty({pairs, C}, x.options());
    check_launch(
        mtp_cuda_gather(dtype, x.const_data_ptr(), order, pairs, A, C, rows.mutable_data_ptr(), stream),
        "experts gather");
    return rows;
  }
  Tensor combine(const Tensor& rows, const float* weights) const {
    Tensor y = at::empty({pairs / A, C}, rows.options());
    check_launch(mtp_cuda_combine(dtype, rows.const_data_ptr(), order + pairs, weights, pairs / A, A, C,
                                  y.mutable_data_ptr(), stream),
                 "experts combine");
    return y;
  }
  Tensor weight_gradient(const Tensor& rows, const Tensor& in, const Tensor& offsets) const {
    Tensor g = at::_grouped_mm(rows.t(), in, offsets);
    check_launch(mtp_cuda_zero_empty(dtype, offsets.const_data_ptr<int>(), E, g.size(1) * g.size(2),
                                     g.mutable_data_ptr(), stream),
                 "experts zero");
    return g;
  }
};
Cuda cuda_of(const Tensor& x, const Tensor& w, const Tensor& down, const Tensor& order, const char* op) {
  return {dtype_code(x, op),
          w.numel(),
          w.size(1),
          x.size(1),
          down.size(2),
          down.size(0),
          order.const_data_ptr<int>(),
          c10::cuda::getCurrentCUDAStream().stream()};
}
void experts_forward_cuda(const Tensor& x, const Tensor& index, const Tensor& w, const Tensor& gate_up,
                          const Tensor& down, Tensor& order, Tensor& offsets, Tensor& y, Tensor& pre) {
  Cuda m = cuda_of(x, w, down, order, "experts_forward");
  Tensor scratch = at::empty({m.E * 257}, offsets.options());
  check_launch(mtp_cuda_sort(index.const_data_ptr<int64_t>(), m.pairs, m.E, order.mutable_data_ptr<int>(),
                             offsets.mutable_data_ptr<int>(), scratch.mutable_data_ptr<int>(), m.stream),
               "sort");
  pre = at::_grouped_mm(m.gather(x), gate_up.transpose(1, 2), offsets);
  Tensor a = at::empty({m.pairs, m.F}, x.options());
  check_launch(mtp_cuda_act(m.dtype, pre.const_data_ptr(), m.pairs, m.F, a.mutable_data_ptr(), m.stream),
               "experts act");
  y = m.combine(at::_grouped_mm(a, down.transpose(1, 2), offsets), w.const_data_ptr<float>());
}
void experts_backward_cuda(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& gate_up,
                           const Tensor& down, const Tensor& order, const Tensor& offsets, const Tensor& pre,
                           Tensor& dx, Tensor& dw, Tensor& dgate_up, Tensor& ddown) {
  Cuda m = cuda_of(x, w, down, order, "experts_backward");
  Tensor dys = m.gather(dy), g = at::_grouped_mm(dys, down, offsets);
  Tensor dh = at::empty({m.pairs, 2 * m.F}, x.options());
  check_launch(mtp_cuda_act_backward(m.dtype, pre.const_data_ptr(), g.mutable_data_ptr(), m.order,
                                     w.const_data_ptr<float>(), m.pairs, m.F, dh.mutable_data_ptr(),
                                     dw.mutable_data_ptr<float>(), m.stream),
               "experts act_backward");
  ddown = m.weight_gradient(dys, g, offsets);
  dgate_up = m.weight_gradient(dh, m.gather(x), offsets);
  dx = m.combine(at::_grouped_mm(dh, gate_up, offsets), nullptr);
}
#endif

Four experts_forward(const Tensor& x, const Tensor& topk_indices, const Tensor& topk_weights,
                     const Tensor& gate_up_proj, const Tensor& down_proj) {
  const char* op = "experts_forward";
  check_experts(x, topk_weights, gate_up_proj, down_proj, op);
  check(topk_indices, op, "topk_indices", topk_weights.sizes(), at::kLong, x);
  GUARD(x);
  const int64_t pairs = topk_weights.numel(), E = down_proj.size(0), F = down_proj.size(2);
  Tensor input = ready(x), index = ready(topk_indices), w = ready(topk_weights);
  Tensor gate_up = ready(gate_up_proj), down = ready(down_proj);
  Tensor order = fresh({2, pairs}, index.options().dtype(at::kInt)), offsets = fresh({E}, order.options());
  Tensor y, pre;
  if (x.is_cpu() || !pairs) {
    pre = at::empty({pairs, 2 * F}, x.options());
    if (!pairs) return {fresh(x.sizes(), x.options()), order, offsets.zero_(), pre};
    TORCH_CHECK(mtp_cpu_sort(index.const_data_ptr<int64_t>(), pairs, E, order.mutable_data_ptr<int>(),
                             offsets.mutable_data_ptr<int>()),
                op, ": an expert index is outside [0, ", E, ")");
    mtp_cpu_experts_forward(dtype_code(x, op), input, w, gate_up, down, order, offsets, y, pre);
  }
#ifdef MTP_CUDA
  else
    experts_forward_cuda(input, index, w, gate_up, down, order, offsets, y, pre);
#endif
  return {y, order, offsets, pre};
}

Four experts_backward(const Tensor& dy, const Tensor& x, const Tensor& topk_weights,
                      const Tensor& gate_up_proj, const Tensor& down_proj, const Tensor& order,
                      const Tensor& offsets, const Tensor& pre) {
  const char* op = "experts_backward";
  check_experts(x, topk_weights, gate_up_proj, down_proj, op);
  const int64_t pairs = topk_weights.numel(), E = down_proj.size(0), F = down_proj.size(2);
  check(dy, op, "dy", x.sizes(), x.scalar_type(), x);
  check(pre, op, "pre", {pairs, 2 * F}, x.scalar_type(), x);
  check(order, op, "order", {2, pairs}, at::kInt, x);
  check(offsets, op, "offsets", {E}, at::kInt, x);
  GUARD(x);
  Tensor d = ready(dy), input = ready(x), w = ready(topk_weights), h = ready(pre);
  Tensor gate_up = ready(gate_up_proj), down = ready(down_proj);
  Tensor dx, dw = fresh(w.sizes(), w.options()), dgate_up, ddown;
  if (x.is_cpu() || !pairs) {
    dgate_up = at::empty(gate_up.sizes(), gate_up.options());
    ddown = at::empty(down.sizes(), down.options());
    if (!pairs) return {fresh(x.sizes(), x.options()), dw, dgate_up.zero_(), ddown.zero_()};
    mtp_cpu_experts_backward(dtype_code(x, op), d, input, w, gate_up, down, order, offsets, h, dx, dw,
                             dgate_up, ddown);
  }
#ifdef MTP_CUDA
  else
    experts_backward_cuda(d, input, w, gate_up, down, order, offsets, h, dx, dw, dgate_up, ddown);
#endif
  return {dx, dw, dgate_up, ddown};
}

Four experts_forward_meta(const Tensor& x, const Tensor&, const Tensor& w, const Tensor&,
                          const Tensor& down) {
  c10::SymInt pairs = w.sym_size(0) * w.sym_size(1), F2 = down.sym_size(2) * 2, E = down.sym_size(0);
  auto integer = x.options().dtype(at::kInt);
  return {at::empty_symint(x.sym_sizes(), x.options()), at::empty_symint({c10::SymInt(2), pairs}, integer),
          at::empty_symint({E}, integer), at::empty_symint({pairs, F2}, x.options())};
}
Four experts_backward_meta(const Tensor&, const Tensor& x, const Tensor& w, const Tensor& gate_up,
                           const Tensor& down, const Tensor&, const Tensor&, const Tensor&) {
  auto like = [](const Tensor& t) { return at::empty_symint(t.sym_sizes(), t.options()); };
  return {like(x), like(w), like(gate_up), like(down)};
}

// ---- loss rows
// ---------------------------------------------------------------------------------------------------
Four loss_rows(const Tensor& teacher, const Tensor& draft, const Tensor& coeff, double ce_weight,
               double kl_weight) {
  const char* op = "loss_rows";
  TORCH_CHECK(draft.dim() == 2 && draft.size(1) > 0, op, ": draft has shape ", draft.sizes(),
              ", expected (R, V)");
  TORCH_CHECK(draft.is_contiguous(), op, ": draft is overwritten and must be contiguous");
  check(teacher, op, "teacher", draft.sizes(), draft.scalar_type(), draft);
  check(coeff, op, "coeff", {draft.size(0)}, accumulator(draft), draft);
  GUARD(draft);
  Tensor t = ready(teacher), c = ready(coeff);
  Tensor ce = at::empty(c.sizes(), c.options()), kl = at::empty(c.sizes(), c.options());
  Tensor teacher_index = at::empty(c.sizes(), c.options().dtype(at::kLong));
  Tensor draft_index = at::empty(c.sizes(), teacher_index.options());
  if (draft.size(0))
    check_launch(
        ON_DEVICE(draft, loss_rows, dtype_code(draft, op), draft.size(0), draft.size(1), t.const_data_ptr(),
                  draft.mutable_data_ptr(), c.const_data_ptr(), ce_weight, kl_weight, ce.mutable_data_ptr(),
                  kl.mutable_data_ptr(), teacher_index.mutable_data_ptr<int64_t>(),
                  draft_index.mutable_data_ptr<int64_t>()),
        op);
  return {ce, kl, teacher_index, draft_index};
}
Four loss_rows_meta(const Tensor&, const Tensor&, const Tensor& coeff, double, double) {
  auto like = [&](at::ScalarType t) { return at::empty_symint(coeff.sym_sizes(), coeff.options().dtype(t)); };
  return {like(coeff.scalar_type()), like(coeff.scalar_type()), like(at::kLong), like(at::kLong)};
}

// ---- gradients
// -------------------------------------------------------------------------------------------------
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
template <class F> auto op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}

struct MergeFunction : torch::autograd::Function<MergeFunction> {  // the lse gets no gradient of its own
  static variable_list forward(AutogradContext* ctx, const Tensor& o_0, const Tensor& lse_0, const Tensor& q,
                               TensorList ks, TensorList vs, double scale) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto forward_op = op<decltype(merge)>("mtp_kernels::merge");
    auto [out, lse] = forward_op.call(o_0, lse_0, q, ks, vs, scale);
    variable_list saved = {o_0, lse_0, q, out, lse};
    saved.insert(saved.end(), ks.begin(), ks.end());
    saved.insert(saved.end(), vs.begin(), vs.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["scale"] = scale;
    ctx->mark_non_differentiable({lse});
    return {out, lse};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    static auto backward_op = op<decltype(merge_backward)>("mtp_kernels::merge_backward");
    variable_list s = ctx->get_saved_variables();
    size_t k = (s.size() - 5) / 2;
    TensorList all(s), ks = all.slice(5, k), vs = all.slice(5 + k, k);
    auto [dq, dks, dvs, first] =
        backward_op.call(grads[0], s[2], ks, vs, s[3], s[4], ctx->saved_data["scale"].toDouble(), s[0], s[1]);
    variable_list result = {first[0], first[1], dq};
    result.insert(result.end(), dks.begin(), dks.end());
    result.insert(result.end(), dvs.begin(), dvs.end());
    result.emplace_back();
    return result;
  }
};
Pair merge_autograd(const Tensor& o_0, const Tensor& lse_0, const Tensor& q, TensorList ks, TensorList vs,
                    double scale) {
  auto r = MergeFunction::apply(o_0, lse_0, q, ks, vs, scale);
  return {r[0], r[1]};
}

struct ExpertsFunction : torch::autograd::Function<ExpertsFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& index, const Tensor& w,
                               const Tensor& gate_up, const Tensor& down) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto forward_op = op<decltype(experts_forward)>("mtp_kernels::experts_forward");
    auto [y, order, offsets, pre] = forward_op.call(x, index, w, gate_up, down);
    ctx->save_for_backward({x, w, gate_up, down, order, offsets, pre});
    ctx->mark_non_differentiable({order, offsets, pre});
    return {y, order, offsets, pre};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    static auto backward_op = op<decltype(experts_backward)>("mtp_kernels::experts_backward");
    variable_list s = ctx->get_saved_variables();
    auto [dx, dw, dgate_up, ddown] = backward_op.call(grads[0], s[0], s[1], s[2], s[3], s[4], s[5], s[6]);
    return {dx, Tensor(), dw, dgate_up, ddown};
  }
};
Four experts_autograd(const Tensor& x, const Tensor& index, const Tensor& w, const Tensor& gate_up,
                      const Tensor& down) {
  auto r = ExpertsFunction::apply(x, index, w, gate_up, down);
  return {r[0], r[1], r[2], r[3]};
}
}  // namespace

TORCH_LIBRARY(mtp_kernels, m) {
  m.def(
      "merge(Tensor o_0, Tensor lse_0, Tensor q, Tensor[] ks, Tensor[] vs, float scale) -> (Tensor, Tensor)");
  m.def(
      "merge_backward(Tensor dout, Tensor q, Tensor[] ks, Tensor[] vs, Tensor out, Tensor lse, float scale,"
      " Tensor? o_0=None, Tensor? lse_0=None) -> (Tensor, Tensor[], Tensor[], Tensor[])");
  m.def(
      "experts_forward(Tensor x, Tensor topk_indices, Tensor topk_weights, Tensor gate_up_proj, Tensor "
      "down_proj)"
      " -> (Tensor y, Tensor order, Tensor offsets, Tensor pre)");
  m.def(
      "experts_backward(Tensor dy, Tensor x, Tensor topk_weights, Tensor gate_up_proj, Tensor down_proj,"
      " Tensor order, Tensor offsets, Tensor pre) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "loss_rows(Tensor teacher, Tensor(a!) draft, Tensor coeff, float ce_weight, float kl_weight)"
      " -> (Tensor ce, Tensor kl, Tensor teacher_index, Tensor draft_index)");
}
#define MTP_IMPL(key, suffix)                                                                                \
  TORCH_LIBRARY_IMPL(mtp_kernels, key, m) {                                                                  \
    m.impl("merge", merge##suffix);                                                                          \
    m.impl("merge_backward", merge_backward##suffix);                                                        \
    m.impl("experts_forward", experts_forward##suffix);                                                      \
    m.impl("experts_backward", experts_backward##suffix);                                                    \
    m.impl("loss_rows", loss_rows##suffix);                                                                  \
  }
MTP_IMPL(CPU, )
MTP_IMPL(Meta, _meta)
#ifdef MTP_CUDA
MTP_IMPL(CUDA, )
#endif
TORCH_LIBRARY_IMPL(mtp_kernels, Autograd, m) {
  m.impl("merge", merge_autograd);
  m.impl("experts_forward", experts_autograd);
}

#ifdef MTP_CUDA
constexpr long HAS_CUDA = 1;
#else
constexpr long HAS_CUDA = 0;
#endif
// `import mtp_kernels` loads this file, which registers the ops; mtp_kernels.cuda says whether they have CUDA
// code
PyMODINIT_FUNC PyInit_mtp_kernels() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "mtp_kernels", "Compiled kernels of mtp.py", -1,
                                   nullptr};
  PyObject* module = PyModule_Create(&definition);
  if (module) PyModule_AddObject(module, "cuda", PyBool_FromLong(HAS_CUDA));
  return module;
}
