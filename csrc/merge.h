// The cached-attention merge: block 0's attention (o_0, lse_0) joined by one key per row and later step.
//
//   s_j = scale q.k_j;  lse = logsumexp(lse_0, s_1..s_k);
//   out = exp(lse_0 - lse) o_0 + sum_j exp(s_j - lse) v_j
// and backward, with the merged out and lse,
//   w_j = exp(s_j - lse);  ds_j = scale w_j <dout, v_j - out>
//   dq = sum_j ds_j k_j;  dk_j = sum_h ds_j q;  dv_j = sum_h w_j dout, over the query heads h of a key head
//   w_0 = exp(lse_0 - lse);  do_0 = w_0 dout;  dlse_0 = w_0 <dout, o_0 - out>
//
// Bytes, s = element size, N = rows H, r = H / G: forward s N D (3 + 2 k / r) + 8 N;
// backward s N D (4 + 4 k / r) + 16 N, plus 2 s N D for do_0.
#pragma once
#include <cstdint>

constexpr int MAX_STEPS = 7;

// Heads H = G group: query head h uses key head h / group. lse in float, for double in double.
struct MergeArgs {
  int64_t rows;  // B T
  int G, group, D, k;
  double scale;
  const void *o_0, *lse_0, *q;                // [rows, H, D], [rows, H], [rows, H, D]
  const void *ks[MAX_STEPS], *vs[MAX_STEPS];  // k of each, [rows, G, D]
  void *out, *lse;                            // as o_0, lse_0: written forward, read backward
  // the backward's alone, each of the shape of what it is the gradient of
  const void* dout;
  void *dq, *dks[MAX_STEPS], *dvs[MAX_STEPS];
  void *do_0, *dlse_0;  // null if not wanted; o_0 and lse_0 are then not read
};

// dtype: bind.cpp's dtype_code. They return 0 or a CUDA error. merge_cpu.cpp ignores the stream.
extern "C" {
int mtp_cpu_merge_forward(int dtype, const MergeArgs& m, void* stream);
int mtp_cpu_merge_backward(int dtype, const MergeArgs& m, void* stream);
int mtp_cuda_merge_forward(int dtype, const MergeArgs& m, void* stream);
int mtp_cuda_merge_backward(int dtype, const MergeArgs& m, void* stream);
}
