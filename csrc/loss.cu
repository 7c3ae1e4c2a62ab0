// Loss rows on CUDA; loss.h has formula, shapes and bytes. A block per row, which it reads twice.
// Floor on an H200 (4.3 TB/s), V = 151936, bf16: 353 ns a row.
#include "loss.h"

#include "pack.cuh"

namespace {

constexpr int LOSS_THREADS = 512;

// ---- one row's logits, 8 at a time -----------------------------------------------------------------------
template <class S>  // aligned: as words of 8, else one by one
__device__ __forceinline__ void load_row(const S* p, int64_t i, int64_t V, bool aligned, float* x) {
  if (aligned) return load<S>(p, i, true, x);
  const uint16_t* half = (const uint16_t*)p;
  for (int j = 0; j < 8; j++) {
    float pair[2] = {-INFINITY, 0};
    if (i + j < V && sizeof(S) == 4) pair[0] = ((const float*)p)[i + j];
    if constexpr (sizeof(S) == 2) {
      if (i + j < V) unpack2(half[i + j], S(), pair);
    }
    x[j] = pair[0];
  }
}
template <class S> __device__ __forceinline__ void store_one(S* p, int64_t i, float x) {
  if constexpr (sizeof(S) == 4)
    p[i] = x;
  else
    p[i].bits = (uint16_t)bits(x, S());
}

// ---- top, its first index and sum exp(x - top) -----------------------------------------------------------
struct Stats {
  float top, sum;
  int64_t index;
};

__device__ __forceinline__ Stats join(const Stats& a, const Stats& b) {
  const float top = fmaxf(a.top, b.top);
  const bool first = a.top > b.top || (a.top == b.top && a.index < b.index);
  return {top,
          a.sum * (a.top == top ? 1 : expf(a.top - top)) + b.sum * (b.top == top ? 1 : expf(b.top - top)),
          first ? a.index : b.index};
}

// The loop that this equals:
//   for i: if x[i] > top: top = x[i], index = i
//   for i: sum += exp(x[i] - top)
template <class S> __device__ Stats row_stats(const S* p, int64_t V, bool aligned) {
  Stats r = {-INFINITY, 0, V};
  for (int64_t i = threadIdx.x * 8; i < V; i += LOSS_THREADS * 8) {
    float x[8], top = r.top, sum = 0;
    load_row(p, i, V, aligned, x);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (x[j] > top) {
        top = x[j];
        r.index = i + j;
      }
    }
    if (top == -INFINITY) continue;
#pragma unroll
    for (int j = 0; j < 8; j++) sum += expf(x[j] - top);
    r.sum = r.sum * expf(r.top - top) + sum;
    r.top = top;
  }
  SHARED(Stats, warps, LOSS_THREADS / 32);
  for (int o = 16; o; o /= 2)
    r = join(r, {__shfl_xor_sync(0xffffffffu, r.top, o), __shfl_xor_sync(0xffffffffu, r.sum, o),
                 __shfl_xor_sync(0xffffffffu, r.index, o)});
  __syncthreads();  // the last reader of the previous call has left
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = r;
  __syncthreads();
  r = warps[0];
  for (int i = 1; i < LOSS_THREADS / 32; i++) r = join(r, warps[i]);
  if (r.index == V) r.index = 0;  // nothing but -inf and NaN: any index will do, but a legal one
  return r;
}

// ---- loss and gradient -----------------------------------------------------------------------------------
// The loop that this equals:
//   for row: p = softmax(teacher[row]); q = softmax(draft[row]); y = argmax(teacher[row])
//     ce[row] = -log(q[y]);  kl[row] = sum_i p[i] * (log(p[i]) - log(q[i]))
//     for i: draft[row][i] = coeff[row] * (ce_weight * (q[i] - (i == y)) + kl_weight * (q[i] - p[i]))
// The weights come as floats: converted here, 10 to 16 more registers leave 2 blocks an SM instead of 3.
template <class S>
__global__ void __launch_bounds__(LOSS_THREADS)
    loss_rows(LossArgs m, float ce_weight, float kl_weight, bool aligned) {
  SHARED(float, warps, LOSS_THREADS / 32);
  SHARED(float, gold, 1);
  const int64_t row = blockIdx.x, V = m.V;
  const S* t = (const S*)m.teacher + row * V;
  S* d = (S*)m.draft + row * V;
  const Stats a = row_stats(t, V, aligned), b = row_stats(d, V, aligned);
  // lse = top + log; x - top comes first, which is exact near the top
  const float log_t = logf(a.sum), log_d = logf(b.sum), c = ((const float*)m.coeff)[row];
  if (threadIdx.x == 0) {
    float x[8];
    load_row(d, a.index, a.index + 1, false, x);  // before anyone overwrites it
    gold[0] = x[0];
  }
  __syncthreads();
  float kl = 0;
  for (int64_t i = threadIdx.x * 8; i < V; i += LOSS_THREADS * 8) {
    float x[8], g[8];
    load_row(t, i, V, aligned, x);
    load_row(d, i, V, aligned, g);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float log_p = x[j] - a.top - log_t, log_q = g[j] - b.top - log_d, p = expf(log_p);
      kl += p == 0 ? 0 : p * (log_p - log_q);
      g[j] = c * ((ce_weight + kl_weight) * expf(log_q) - kl_weight * p - (i + j == a.index ? ce_weight : 0));
    }
    if (aligned) store<S>(d, i, g);
    for (int j = 0; j < 8 && !aligned && i + j < V; j++) store_one(d, i + j, g[j]);
  }
  kl = lane_sum(kl, 32);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = kl;
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < LOSS_THREADS / 32; i++) kl += warps[i];
  ((float*)m.ce)[row] = log_d - (gold[0] - b.top);
  ((float*)m.kl)[row] = kl;
  m.teacher_index[row] = a.index;
  m.draft_index[row] = b.index;
}
}  // namespace

// ---- what bind.cpp calls ---------------------------------------------------------------------------------
extern "C" int mtp_cuda_loss_rows(int dtype, const LossArgs& m, void* stream) {
  const bool aligned = m.V % 8 == 0 && ((uintptr_t)m.teacher | (uintptr_t)m.draft) % 16 == 0;
  return by_dtype(dtype, [&](auto s) {
    auto kernel = loss_rows<decltype(s)>;
    LAUNCH(kernel, (unsigned)m.rows, LOSS_THREADS, stream, m, (float)m.ce_weight, (float)m.kl_weight,
           aligned);
  });
}
