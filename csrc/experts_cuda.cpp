// Routed experts on CUDA: the passes of experts.cu around at::_grouped_mm, in the sequence of experts_cpu.cpp
// but all experts at once. C++, because nvcc takes a minute for a file that includes torch's headers.
#include "experts.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAStream.h>

namespace {

using at::Tensor;

void check_launch(int error, const char* pass) {
  TORCH_CHECK(error == 0, "experts ", pass, ": CUDA error ", error);
}

struct Experts {  // what every launch shares
  int dtype;
  int64_t pairs, A, C, F, E;
  const int* order;
  const Tensor& offsets;
  void* stream;

  explicit Experts(const ExpertsArgs& m)
      : dtype(m.dtype), pairs(m.w.numel()), A(m.w.size(1)), C(m.x.size(1)), F(m.down.size(2)),
        E(m.down.size(0)), order(m.order.const_data_ptr<int>()), offsets(m.offsets),
        stream(c10::cuda::getCurrentCUDAStream().stream()) {}

  Tensor gather(const Tensor& x) const {  // [N, C] -> [pairs, C], sorted
    Tensor rows = at::empty({pairs, C}, x.options());
    check_launch(mtp_cuda_gather(dtype, x.const_data_ptr(), order, pairs, A, C, rows.mutable_data_ptr(),
                                 stream),
                 "gather");
    return rows;
  }
  Tensor combine(const Tensor& rows, const float* weights) const {  // [pairs, C] -> [N, C]
    Tensor y = at::empty({pairs / A, C}, rows.options());
    check_launch(mtp_cuda_combine(dtype, rows.const_data_ptr(), order + pairs, weights, pairs / A, A, C,
                                  y.mutable_data_ptr(), stream),
                 "combine");
    return y;
  }
  Tensor weight_gradient(const Tensor& rows, const Tensor& in) const {  // per expert: rows^T in
    Tensor g = at::_grouped_mm(rows.t(), in, offsets);
    check_launch(mtp_cuda_zero_empty(dtype, offsets.const_data_ptr<int>(), E, g.size(1) * g.size(2),
                                     g.mutable_data_ptr(), stream),
                 "zero_empty");
    return g;
  }
};
}  // namespace

std::tuple<Tensor, Tensor> mtp_cuda_experts_forward(const ExpertsArgs& args, const Tensor& index) {
  const Experts m(args);
  Tensor scratch = at::empty({m.E * 257}, args.offsets.options());
  check_launch(mtp_cuda_sort(index.const_data_ptr<int64_t>(), m.pairs, m.E,
                             args.order.mutable_data_ptr<int>(), args.offsets.mutable_data_ptr<int>(),
                             scratch.mutable_data_ptr<int>(), m.stream),
               "sort");
  Tensor pre = at::_grouped_mm(m.gather(args.x), args.gate_up.transpose(1, 2), args.offsets);
  Tensor a = at::empty({m.pairs, m.F}, args.x.options());
  check_launch(mtp_cuda_act(m.dtype, pre.const_data_ptr(), m.pairs, m.F, a.mutable_data_ptr(), m.stream),
               "act");
  Tensor rows = at::_grouped_mm(a, args.down.transpose(1, 2), args.offsets);
  return {m.combine(rows, args.w.const_data_ptr<float>()), pre};
}

ExpertsGradients mtp_cuda_experts_backward(const ExpertsArgs& args, const Tensor& pre, const Tensor& dy) {
  const Experts m(args);
  Tensor dys = m.gather(dy), g = at::_grouped_mm(dys, args.down, args.offsets);
  Tensor dw = at::empty_like(args.w), dpre = at::empty({m.pairs, 2 * m.F}, args.x.options());
  check_launch(mtp_cuda_act_backward(m.dtype, pre.const_data_ptr(), g.mutable_data_ptr(), m.order,
                                     args.w.const_data_ptr<float>(), m.pairs, m.F, dpre.mutable_data_ptr(),
                                     dw.mutable_data_ptr<float>(), m.stream),
               "act_backward");
  Tensor ddown = m.weight_gradient(dys, g), dgate_up = m.weight_gradient(dpre, m.gather(args.x));
  Tensor dx = m.combine(at::_grouped_mm(dpre, args.gate_up, args.offsets), nullptr);
  return {dx, dw, dgate_up, ddown};
}
