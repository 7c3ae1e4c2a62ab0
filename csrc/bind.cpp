// The ops of torch.ops.mtp_kernels: schema, checks, shapes for tracing, gradients, and which code runs them.
//
//   merge, merge_backward          attention over k cached keys of the own row, merged into block 0
//                                  (out, lse)
//   experts_forward, .._backward   routed experts, sorted by expert; saves the sorted order and the
//                                  pre-activations
//   loss_rows                      CE + KL of a chunk of rows; the draft logits become their own gradient
//
// Formulas, shapes and bytes are in merge.h, experts.h and loss.h, the code in *_cpu.cpp (CPU) and *.cu
// (CUDA, with experts_cuda.cpp). The PyTorch references are mtp.py's merge_ref, merge_backward_ref,
// experts_ref and judge_ce_kl_ref. merge and experts_forward are differentiable here; the backward ops are
// plain, for use in an autograd.Function.
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
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <optional>
#include <tuple>
#include <vector>

#include "experts.h"
#include "loss.h"
#include "merge.h"

namespace {

using at::Tensor;
using at::TensorList;
using std::optional;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Pair = std::tuple<Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using MergeGradients = std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>, std::vector<Tensor>>;

// ---- checks and allocation -------------------------------------------------------------------------------
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

// While it lives the device of x is the current one; its stream. Nothing on the CPU.
struct Device {
  void* stream = nullptr;
#ifdef MTP_CUDA
  c10::cuda::OptionalCUDAGuard guard;
  explicit Device(const Tensor& x) {
    if (!x.is_cuda()) return;
    guard.set_device(x.device());
    stream = c10::cuda::getCurrentCUDAStream().stream();
  }
#else
  explicit Device(const Tensor&) {}
#endif
};

// An uninitialised result of the merge. Large ones on the CPU come from mmap and cost more in page faults
// than the merge itself: asking for huge pages before the first touch takes 1/512 of the faults. (For the
// experts, whose time is in matrix products, that gained nothing: 1.02x with, 0.98x without, of the PyTorch
// path.)
Tensor fresh(const Tensor& like) {
  Tensor x = at::empty(like.sizes(), like.options());
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
std::vector<Tensor> ready(TensorList list) {
  std::vector<Tensor> result;
  for (const Tensor& x : list) result.push_back(ready(x));
  return result;
}
Tensor like(const Tensor& x) { return at::empty_symint(x.sym_sizes(), x.options()); }  // for tracing

template <class F> auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}

// ---- merge -----------------------------------------------------------------------------------------------
void check_merge(const Tensor& q, TensorList ks, TensorList vs, const Tensor& o, const Tensor& lse,
                 const char* op) {
  TORCH_CHECK(q.dim() == 4, op, ": q has shape ", q.sizes(), ", expected (B, T, H, D)");
  const int64_t k = ks.size(), D = q.size(3), H = q.size(2);
  TORCH_CHECK(k >= 1 && k <= MAX_STEPS && (int64_t)vs.size() == k, op, ": ", k, " keys and ", vs.size(),
              " values, expected 1 to ", MAX_STEPS, " of each; mtp.", op,
              " computes longer chains in PyTorch");
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

// The sizes and inputs that both directions share. The tensors must outlive it.
MergeArgs merge_args(const Tensor& q, const std::vector<Tensor>& ks, const std::vector<Tensor>& vs,
                     double scale) {
  MergeArgs m{};
  m.rows = q.size(0) * q.size(1);
  m.G = ks[0].size(2), m.group = q.size(2) / m.G, m.D = q.size(3), m.k = ks.size();
  m.scale = scale;
  m.q = q.const_data_ptr();
  for (int j = 0; j < m.k; j++) {
    m.ks[j] = ks[j].const_data_ptr();
    m.vs[j] = vs[j].const_data_ptr();
  }
  return m;
}

template <auto launch>  // mtp_cpu_merge_forward or mtp_cuda_merge_forward
Pair merge(const Tensor& o_0, const Tensor& lse_0, const Tensor& q, TensorList ks, TensorList vs,
           double scale) {
  check_merge(q, ks, vs, o_0, lse_0, "merge");
  Device device(q);
  const Tensor x = ready(q), o = ready(o_0), l = ready(lse_0);
  const std::vector<Tensor> keys = ready(ks), values = ready(vs);
  Tensor out = fresh(x), lse = fresh(l);
  MergeArgs m = merge_args(x, keys, values, scale);
  m.o_0 = o.const_data_ptr(), m.lse_0 = l.const_data_ptr();
  m.out = out.mutable_data_ptr(), m.lse = lse.mutable_data_ptr();
  if (m.rows > 0) check_launch(launch(dtype_code(q, "merge"), m, device.stream), "merge");
  return {out, lse};
}

template <auto launch>
MergeGradients merge_backward(const Tensor& dout, const Tensor& q, TensorList ks, TensorList vs,
                              const Tensor& out, const Tensor& lse, double scale, const optional<Tensor>& o_0,
                              const optional<Tensor>& lse_0) {
  const char* op = "merge_backward";
  check_merge(q, ks, vs, out, lse, op);
  check(dout, op, "dout", q.sizes(), q.scalar_type(), q);
  TORCH_CHECK(o_0.has_value() == lse_0.has_value(), op, ": give both o_0 and lse_0, or neither");
  if (o_0) check_merge(q, ks, vs, *o_0, *lse_0, op);
  Device device(q);
  const Tensor d = ready(dout), x = ready(q), o = ready(out), l = ready(lse);
  const std::vector<Tensor> keys = ready(ks), values = ready(vs);
  Tensor dq = fresh(x), o_first, lse_first;
  std::vector<Tensor> dks, dvs, first;
  MergeArgs m = merge_args(x, keys, values, scale);
  m.out = o.data_ptr(), m.lse = l.data_ptr(), m.dout = d.const_data_ptr(), m.dq = dq.mutable_data_ptr();
  for (int j = 0; j < m.k; j++) {
    dks.push_back(fresh(keys[j]));
    dvs.push_back(fresh(values[j]));
    m.dks[j] = dks[j].mutable_data_ptr();
    m.dvs[j] = dvs[j].mutable_data_ptr();
  }
  if (o_0) {
    o_first = ready(*o_0), lse_first = ready(*lse_0);
    first = {fresh(x), fresh(l)};
    m.o_0 = o_first.const_data_ptr(), m.lse_0 = lse_first.const_data_ptr();
    m.do_0 = first[0].mutable_data_ptr(), m.dlse_0 = first[1].mutable_data_ptr();
  }
  if (m.rows > 0) check_launch(launch(dtype_code(q, op), m, device.stream), op);
  return {dq, dks, dvs, first};
}

Pair merge_meta(const Tensor&, const Tensor& lse_0, const Tensor& q, TensorList, TensorList, double) {
  return {like(q), like(lse_0)};
}
MergeGradients merge_backward_meta(const Tensor&, const Tensor& q, TensorList ks, TensorList vs,
                                   const Tensor&, const Tensor& lse, double, const optional<Tensor>& o_0,
                                   const optional<Tensor>&) {
  std::vector<Tensor> dks, dvs, first;
  for (const Tensor& x : ks) dks.push_back(like(x));
  for (const Tensor& x : vs) dvs.push_back(like(x));
  if (o_0) first = {like(q), like(lse)};
  return {like(q), dks, dvs, first};
}

struct MergeFunction : torch::autograd::Function<MergeFunction> {  // the lse gets no gradient of its own
  static variable_list forward(AutogradContext* ctx, const Tensor& o_0, const Tensor& lse_0, const Tensor& q,
                               TensorList ks, TensorList vs, double scale) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto op = find_op<decltype(merge_meta)>("mtp_kernels::merge");
    auto [out, lse] = op.call(o_0, lse_0, q, ks, vs, scale);
    variable_list saved = {o_0, lse_0, q, out, lse};
    saved.insert(saved.end(), ks.begin(), ks.end());
    saved.insert(saved.end(), vs.begin(), vs.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["scale"] = scale;
    ctx->mark_non_differentiable({lse});
    return {out, lse};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    static auto op = find_op<decltype(merge_backward_meta)>("mtp_kernels::merge_backward");
    variable_list s = ctx->get_saved_variables();
    size_t k = (s.size() - 5) / 2;
    TensorList all(s), ks = all.slice(5, k), vs = all.slice(5 + k, k);
    auto [dq, dks, dvs, first] =
        op.call(grads[0], s[2], ks, vs, s[3], s[4], ctx->saved_data["scale"].toDouble(), s[0], s[1]);
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

// ---- experts ---------------------------------------------------------------------------------------------
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

template <auto run>  // mtp_cpu_experts_forward or mtp_cuda_experts_forward
Four experts_forward(const Tensor& x, const Tensor& topk_indices, const Tensor& topk_weights,
                     const Tensor& gate_up_proj, const Tensor& down_proj) {
  const char* op = "experts_forward";
  check_experts(x, topk_weights, gate_up_proj, down_proj, op);
  check(topk_indices, op, "topk_indices", topk_weights.sizes(), at::kLong, x);
  Device device(x);
  const int64_t pairs = topk_weights.numel(), E = down_proj.size(0), F = down_proj.size(2);
  const Tensor input = ready(x), index = ready(topk_indices), w = ready(topk_weights);
  const Tensor gate_up = ready(gate_up_proj), down = ready(down_proj);
  const Tensor order = at::empty({2, pairs}, index.options().dtype(at::kInt));
  const Tensor offsets = at::empty({E}, order.options());
  if (!pairs)
    return {at::empty(x.sizes(), x.options()), order, offsets.zero_(), at::empty({0, 2 * F}, x.options())};
  auto [y, pre] = run({dtype_code(x, op), input, w, gate_up, down, order, offsets}, index);
  return {y, order, offsets, pre};
}

template <auto run>
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
  Device device(x);
  const Tensor d = ready(dy), input = ready(x), w = ready(topk_weights), h = ready(pre);
  const Tensor gate_up = ready(gate_up_proj), down = ready(down_proj);
  const Tensor sorted = ready(order), ends = ready(offsets);
  if (!pairs)
    return {at::empty(x.sizes(), x.options()), at::empty(w.sizes(), w.options()),
            at::empty(gate_up.sizes(), gate_up.options()).zero_(),
            at::empty(down.sizes(), down.options()).zero_()};
  return run({dtype_code(x, op), input, w, gate_up, down, sorted, ends}, h, d);
}

Four experts_forward_meta(const Tensor& x, const Tensor&, const Tensor& w, const Tensor&,
                          const Tensor& down) {
  c10::SymInt pairs = w.sym_size(0) * w.sym_size(1), F2 = down.sym_size(2) * 2, E = down.sym_size(0);
  auto integer = x.options().dtype(at::kInt);
  return {like(x), at::empty_symint({c10::SymInt(2), pairs}, integer), at::empty_symint({E}, integer),
          at::empty_symint({pairs, F2}, x.options())};
}
Four experts_backward_meta(const Tensor&, const Tensor& x, const Tensor& w, const Tensor& gate_up,
                           const Tensor& down, const Tensor&, const Tensor&, const Tensor&) {
  return {like(x), like(w), like(gate_up), like(down)};
}

struct ExpertsFunction : torch::autograd::Function<ExpertsFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& index, const Tensor& w,
                               const Tensor& gate_up, const Tensor& down) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto op = find_op<decltype(experts_forward_meta)>("mtp_kernels::experts_forward");
    auto [y, order, offsets, pre] = op.call(x, index, w, gate_up, down);
    ctx->save_for_backward({x, w, gate_up, down, order, offsets, pre});
    ctx->mark_non_differentiable({order, offsets, pre});
    return {y, order, offsets, pre};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    static auto op = find_op<decltype(experts_backward_meta)>("mtp_kernels::experts_backward");
    variable_list s = ctx->get_saved_variables();
    auto [dx, dw, dgate_up, ddown] = op.call(grads[0], s[0], s[1], s[2], s[3], s[4], s[5], s[6]);
    return {dx, Tensor(), dw, dgate_up, ddown};
  }
};
Four experts_autograd(const Tensor& x, const Tensor& index, const Tensor& w, const Tensor& gate_up,
                      const Tensor& down) {
  auto r = ExpertsFunction::apply(x, index, w, gate_up, down);
  return {r[0], r[1], r[2], r[3]};
}

// ---- loss rows -------------------------------------------------------------------------------------------
template <auto launch>  // mtp_cpu_loss_rows or mtp_cuda_loss_rows
Four loss_rows(const Tensor& teacher, const Tensor& draft, const Tensor& coeff, double ce_weight,
               double kl_weight) {
  const char* op = "loss_rows";
  TORCH_CHECK(draft.dim() == 2 && draft.size(1) > 0, op, ": draft has shape ", draft.sizes(),
              ", expected (R, V)");
  TORCH_CHECK(draft.is_contiguous(), op, ": draft is overwritten and must be contiguous");
  check(teacher, op, "teacher", draft.sizes(), draft.scalar_type(), draft);
  check(coeff, op, "coeff", {draft.size(0)}, accumulator(draft), draft);
  Device device(draft);
  const Tensor t = ready(teacher), c = ready(coeff);
  Tensor ce = at::empty(c.sizes(), c.options()), kl = at::empty(c.sizes(), c.options());
  Tensor teacher_index = at::empty(c.sizes(), c.options().dtype(at::kLong));
  Tensor draft_index = at::empty(c.sizes(), teacher_index.options());
  const LossArgs m = {
      .rows = draft.size(0), .V = draft.size(1),
      .teacher = t.const_data_ptr(), .draft = draft.mutable_data_ptr(), .coeff = c.const_data_ptr(),
      .ce_weight = ce_weight, .kl_weight = kl_weight,
      .ce = ce.mutable_data_ptr(), .kl = kl.mutable_data_ptr(),
      .teacher_index = teacher_index.mutable_data_ptr<int64_t>(),
      .draft_index = draft_index.mutable_data_ptr<int64_t>()};
  if (m.rows > 0) check_launch(launch(dtype_code(draft, op), m, device.stream), op);
  return {ce, kl, teacher_index, draft_index};
}
Four loss_rows_meta(const Tensor&, const Tensor&, const Tensor& coeff, double, double) {
  auto rows = [&](at::ScalarType t) { return at::empty_symint(coeff.sym_sizes(), coeff.options().dtype(t)); };
  return {like(coeff), like(coeff), rows(at::kLong), rows(at::kLong)};
}
}  // namespace

// ---- registration ----------------------------------------------------------------------------------------
TORCH_LIBRARY(mtp_kernels, m) {
  m.def("merge(Tensor o_0, Tensor lse_0, Tensor q, Tensor[] ks, Tensor[] vs, float scale)"
        " -> (Tensor, Tensor)");
  m.def("merge_backward(Tensor dout, Tensor q, Tensor[] ks, Tensor[] vs, Tensor out, Tensor lse,"
        " float scale, Tensor? o_0=None, Tensor? lse_0=None) -> (Tensor, Tensor[], Tensor[], Tensor[])");
  m.def("experts_forward(Tensor x, Tensor topk_indices, Tensor topk_weights, Tensor gate_up_proj,"
        " Tensor down_proj) -> (Tensor y, Tensor order, Tensor offsets, Tensor pre)");
  m.def("experts_backward(Tensor dy, Tensor x, Tensor topk_weights, Tensor gate_up_proj, Tensor down_proj,"
        " Tensor order, Tensor offsets, Tensor pre) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("loss_rows(Tensor teacher, Tensor(a!) draft, Tensor coeff, float ce_weight, float kl_weight)"
        " -> (Tensor ce, Tensor kl, Tensor teacher_index, Tensor draft_index)");
}
TORCH_LIBRARY_IMPL(mtp_kernels, CPU, m) {
  m.impl("merge", merge<mtp_cpu_merge_forward>);
  m.impl("merge_backward", merge_backward<mtp_cpu_merge_backward>);
  m.impl("experts_forward", experts_forward<mtp_cpu_experts_forward>);
  m.impl("experts_backward", experts_backward<mtp_cpu_experts_backward>);
  m.impl("loss_rows", loss_rows<mtp_cpu_loss_rows>);
}
#ifdef MTP_CUDA
TORCH_LIBRARY_IMPL(mtp_kernels, CUDA, m) {
  m.impl("merge", merge<mtp_cuda_merge_forward>);
  m.impl("merge_backward", merge_backward<mtp_cuda_merge_backward>);
  m.impl("experts_forward", experts_forward<mtp_cuda_experts_forward>);
  m.impl("experts_backward", experts_backward<mtp_cuda_experts_backward>);
  m.impl("loss_rows", loss_rows<mtp_cuda_loss_rows>);
}
constexpr long HAS_CUDA = 1;
#else
constexpr long HAS_CUDA = 0;
#endif
TORCH_LIBRARY_IMPL(mtp_kernels, Meta, m) {
  m.impl("merge", merge_meta);
  m.impl("merge_backward", merge_backward_meta);
  m.impl("experts_forward", experts_forward_meta);
  m.impl("experts_backward", experts_backward_meta);
  m.impl("loss_rows", loss_rows_meta);
}
TORCH_LIBRARY_IMPL(mtp_kernels, Autograd, m) {
  m.impl("merge", merge_autograd);
  m.impl("experts_forward", experts_autograd);
}

// `import mtp_kernels` loads this file, which registers the ops; mtp_kernels.cuda: they have CUDA code
PyMODINIT_FUNC PyInit_mtp_kernels() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "mtp_kernels", "Compiled kernels of mtp.py", -1,
                                   nullptr};
  PyObject* module = PyModule_Create(&definition);
  if (module) PyModule_AddObject(module, "cuda", PyBool_FromLong(HAS_CUDA));
  return module;
}
