// The cached-attention merge on CUDA; merge.h has formula, shapes and bytes.
//
// A group of `lanes` threads, 8 elements each, owns one (row, key head) and walks its query heads with k_j
// and v_j in registers; the gradients of both stay there over the heads, so nothing is added atomically.
// Floor on an H200 (4.3 TB/s), B = 1, H = 32, G = 4, T = 8192, D = 128, k = 3, bf16: 59 us, backward 103 us.
#include "merge.h"

#include <type_traits>

#include "pack.cuh"

namespace {

constexpr int THREADS = 128;

// The loop that this equals, in fp32:
//   for row, for query head h, g = h / group:
//     s[0] = lse_0[row, h];  for j = 1..k: s[j] = scale * dot(q[row, h], k_j[row, g])
//     lse[row, h] = log(sum_j exp(s[j])) over j = 0..k
//     out[row, h] = exp(s[0] - lse[row, h]) * o_0[row, h]
//     for j = 1..k: out[row, h] += exp(s[j] - lse[row, h]) * v_j[row, g]
template <class S, int K>
__global__ void __launch_bounds__(THREADS) merge_forward(MergeArgs m, int lanes, float scale) {
  const int64_t row = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / lanes;
  const int d = threadIdx.x % lanes * 8;
  const bool in = row < m.rows * m.G, on = in && d < m.D;  // all lanes stay to the end: the sums need them
  Pack<S> key[K], value[K];
#pragma unroll
  for (int j = 0; j < K; j++) {
    key[j] = fetch<S>(m.ks[j], row * m.D + d, on);
    value[j] = fetch<S>(m.vs[j], row * m.D + d, on);
  }
  for (int h = 0; h < m.group; h++) {
    const int64_t head = row * m.group + h, at = head * m.D + d;
    float x[8], y[8], sum[8], s[K], lse_0 = in ? ((const float*)m.lse_0)[head] : 0, top = lse_0;
    load<S>(m.q, at, on, x);
    load<S>(m.o_0, at, on, sum);
#pragma unroll
    for (int j = 0; j < K; j++) {
      unpack<S>(key[j], y);
      s[j] = lane_sum(dot8(x, y), lanes) * scale;
      top = fmaxf(top, s[j]);
    }
    float w_0 = expf(lse_0 - top), total = w_0;
#pragma unroll
    for (int j = 0; j < K; j++) total += s[j] = expf(s[j] - top);
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = w_0 == 0 ? 0 : sum[i] * (w_0 / total);  // weight 0: o_0 may be NaN
#pragma unroll
    for (int j = 0; j < K; j++) {
      unpack<S>(value[j], y);
      axpy8(s[j] / total, y, sum);
    }
    if (on) store<S>(m.out, at, sum);
    if (in && d == 0) ((float*)m.lse)[head] = top + logf(total);
  }
}

// The loop that this equals, in fp32:
//   for row, for query head h, g = h / group, delta = dot(dout[row, h], out[row, h]):
//     for j = 1..k: w = exp(scale * dot(q[row, h], k_j[row, g]) - lse[row, h])
//       ds = scale * w * (dot(dout[row, h], v_j[row, g]) - delta)
//       dq[row, h] += ds * k_j[row, g];  dk_j[row, g] += ds * q[row, h];  dv_j[row, g] += w * dout[row, h]
//     w_0 = exp(lse_0[row, h] - lse[row, h]);  do_0[row, h] = w_0 * dout[row, h]
//     dlse_0[row, h] = w_0 * (dot(dout[row, h], o_0[row, h]) - delta)
// Up to 4 keys and values fit in the registers beside their gradients. More would spill, so each head reads
// them again, from cache. Left to choose (0), ptxas then wants 3 blocks per SM and spills on sm_100; 2 fit.
template <class S, int K>
__global__ void __launch_bounds__(THREADS, K <= 4 ? 0 : 2)
    merge_backward(MergeArgs m, int lanes, float scale) {
  constexpr bool KEEP = K <= 4;
  const int64_t row = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / lanes;
  const int d = threadIdx.x % lanes * 8;
  const bool in = row < m.rows * m.G, on = in && d < m.D;
  Pack<S> key[K], value[K];
  float dk[K][8] = {}, dv[K][8] = {};
#pragma unroll
  for (int j = 0; KEEP && j < K; j++) {
    key[j] = fetch<S>(m.ks[j], row * m.D + d, on);
    value[j] = fetch<S>(m.vs[j], row * m.D + d, on);
  }
  for (int h = 0; h < m.group; h++) {
    const int64_t head = row * m.group + h, at = head * m.D + d;
    float q[8], dout[8], x[8], dq[8] = {};
    const float lse = in ? ((const float*)m.lse)[head] : 0;
    load<S>(m.q, at, on, q);
    load<S>(m.dout, at, on, dout);
    load<S>(m.out, at, on, x);
    const float delta = lane_sum(dot8(dout, x), lanes);
#pragma unroll
    for (int j = 0; j < K; j++) {
      unpack<S>(KEEP ? value[j] : fetch<S>(m.vs[j], row * m.D + d, on), x);
      const float da = lane_sum(dot8(dout, x), lanes);
      unpack<S>(KEEP ? key[j] : fetch<S>(m.ks[j], row * m.D + d, on), x);
      const float w = expf(lane_sum(dot8(q, x), lanes) * scale - lse), ds = scale * w * (da - delta);
      axpy8(ds, x, dq);
      axpy8(ds, q, dk[j]);
      axpy8(w, dout, dv[j]);
    }
    if (on) store<S>(m.dq, at, dq);
    if (!m.do_0) continue;  // the same for every thread of the grid
    const float w_0 = in ? expf(((const float*)m.lse_0)[head] - lse) : 0;
    load<S>(m.o_0, at, on, x);
    const float dot = lane_sum(dot8(dout, x), lanes);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = w_0 * dout[i];
    if (on) store<S>(m.do_0, at, x);
    if (in && d == 0) ((float*)m.dlse_0)[head] = w_0 == 0 ? 0 : w_0 * (dot - delta);
  }
#pragma unroll
  for (int j = 0; j < K; j++) {
    if (on) store<S>(m.dks[j], row * m.D + d, dk[j]);
    if (on) store<S>(m.dvs[j], row * m.D + d, dv[j]);
  }
}

// f(K) with k as a constant: the kernels are templates over the exact number of steps
template <int K = MAX_STEPS, class F> void by_steps(int k, F f) {
  if (k == K) return f(std::integral_constant<int, K>());
  if constexpr (K > 1) by_steps<K - 1>(k, f);
}
int lanes_of(int D) {  // a power of two
  int lanes = 1;
  while (lanes * 8 < D) lanes *= 2;
  return lanes;
}
}  // namespace

// ---- what bind.cpp calls ---------------------------------------------------------------------------------
extern "C" int mtp_cuda_merge_forward(int dtype, const MergeArgs& m, void* stream) {
  const int lanes = lanes_of(m.D);
  return by_dtype(dtype, [&](auto s) {
    by_steps(m.k, [&](auto K) {
      auto kernel = merge_forward<decltype(s), K.value>;
      LAUNCH(kernel, blocks(m.rows * m.G * lanes, THREADS), THREADS, stream, m, lanes, (float)m.scale);
    });
  });
}
extern "C" int mtp_cuda_merge_backward(int dtype, const MergeArgs& m, void* stream) {
  const int lanes = lanes_of(m.D);
  return by_dtype(dtype, [&](auto s) {
    by_steps(m.k, [&](auto K) {
      auto kernel = merge_backward<decltype(s), K.value>;
      LAUNCH(kernel, blocks(m.rows * m.G * lanes, THREADS), THREADS, stream, m, lanes, (float)m.scale);
    });
  });
}
