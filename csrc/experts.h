// Routed experts: each of N tokens goes through A of the E experts, sorted by expert.
//
//   (gate, up) = gate_up[e] x[n];  a = silu(gate) up;  y[n] = sum_i w[n, i] down[e] a,  e = index[n, i]
//
// A pair is a (token, choice), numbered n A + i. The sort is stable: order[0] = pair at each place, order[1]
// = place of each pair, offsets[e] = end of expert e. The backward reads these and `pre`, the (gate, up) of
// every pair in sorted order. Floor: the GEMMs, 3 N A C F multiply-adds forward and 6 N A C F backward.
#pragma once
#include <cstdint>
#include <tuple>

namespace at {
class Tensor;
}

struct ExpertsArgs {
  int dtype;                                 // bind.cpp's dtype_code
  const at::Tensor &x, &w, &gate_up, &down;  // [N, C], [N, A], [E, 2 F, C], [E, C, F]
  const at::Tensor &order, &offsets;         // int [2, N A], [E]: written forward, read backward
};
// dx, dw, dgate_up, ddown
using ExpertsGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Forward: (y, pre). On CUDA the GEMMs are at::_grouped_mm, on a CPU at::mm per expert.
std::tuple<at::Tensor, at::Tensor> mtp_cpu_experts_forward(const ExpertsArgs& m, const at::Tensor& index);
std::tuple<at::Tensor, at::Tensor> mtp_cuda_experts_forward(const ExpertsArgs& m, const at::Tensor& index);
ExpertsGradients mtp_cpu_experts_backward(const ExpertsArgs& m, const at::Tensor& pre, const at::Tensor& dy);
ExpertsGradients mtp_cuda_experts_backward(const ExpertsArgs& m, const at::Tensor& pre, const at::Tensor& dy);

// The passes of experts.cu around those GEMMs; they return 0 or a CUDA error
extern "C" {
int mtp_cuda_sort(const int64_t* index, int64_t pairs, int64_t E, int* order, int* offsets, int* scratch,
                  void* stream);
int mtp_cuda_gather(int dtype, const void* x, const int* order, int64_t pairs, int64_t A, int64_t C,
                    void* rows, void* stream);
int mtp_cuda_act(int dtype, const void* pre, int64_t pairs, int64_t F, void* a, void* stream);
int mtp_cuda_act_backward(int dtype, const void* pre, void* g, const int* order, const float* weights,
                          int64_t pairs, int64_t F, void* dpre, float* dweights, void* stream);
int mtp_cuda_combine(int dtype, const void* rows, const int* places, const float* weights, int64_t N,
                     int64_t A, int64_t C, void* y, void* stream);
int mtp_cuda_zero_empty(int dtype, const int* offsets, int64_t E, int64_t per_expert, void* w, void* stream);
}
