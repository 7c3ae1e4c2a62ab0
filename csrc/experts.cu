// Routed experts on CUDA: the passes around the grouped GEMMs of experts_cuda.cpp; experts.h has the formula.
// Bytes, s = element size: 24 a pair for the sort, for the others above each. Floor: those bytes.
#include "experts.h"

#include "pack.cuh"

namespace {

// ---- stable counting sort of the pairs by expert ---------------------------------------------------------
// The loop that this equals, next[e] being the next free place of expert e:
//   for pair: place = next[index[pair]]++;  order[place] = pair;  order[pairs + pair] = place
//   for e: offsets[e] = next[e]
// The pairs are cut into at most 256 chunks: count each (expert, chunk), scan over them, then one warp per
// chunk hands out the places in order, which makes the sort stable without a sort.
constexpr int MAX_EXPERTS = 1024, SCAN = 512;

__device__ __forceinline__ int expert_at(const int64_t* index, int64_t i, int E) {
  const int64_t e = index[i];
  if (e < 0 || e >= E) __trap();
  return (int)e;
}
__global__ void sort_count(const int64_t* index, int64_t pairs, int E, int64_t chunk, int* counts) {
  SHARED(int, seen, MAX_EXPERTS);
  for (int e = threadIdx.x; e < E; e += blockDim.x) seen[e] = 0;
  __syncthreads();
  const int64_t begin = blockIdx.x * chunk, end = begin + chunk < pairs ? begin + chunk : pairs;
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) atomicAdd(&seen[expert_at(index, i, E)], 1);
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += blockDim.x) counts[(int64_t)e * gridDim.x + blockIdx.x] = seen[e];
}
// One block; counts become first places
__global__ void sort_scan(int* counts, int E, int chunks, int* offsets) {
  SHARED(int, total, SCAN);
  const int n = E * chunks, span = (n + SCAN - 1) / SCAN, t = threadIdx.x;
  const int begin = t * span < n ? t * span : n, end = begin + span < n ? begin + span : n;
  int sum = 0;
  for (int i = begin; i < end; i++) sum += counts[i];
  total[t] = sum;
  __syncthreads();
  for (int step = 1; step < SCAN; step *= 2) {
    const int before = t >= step ? total[t - step] : 0;
    __syncthreads();  // everyone has read
    total[t] += before;
    __syncthreads();  // everyone has written
  }
  int place = total[t] - sum;
  for (int i = begin; i < end; i++) {
    const int count = counts[i];
    counts[i] = place;
    place += count;
    if (i % chunks == chunks - 1) offsets[i / chunks] = place;
  }
}
__global__ void sort_scatter(const int64_t* index, int64_t pairs, int E, int64_t chunk, const int* counts,
                             int* order) {
  SHARED(int, next, MAX_EXPERTS);
  const int lane = threadIdx.x;
  for (int e = lane; e < E; e += 32) next[e] = counts[(int64_t)e * gridDim.x + blockIdx.x];
  __syncwarp();
  const int64_t begin = blockIdx.x * chunk, end = begin + chunk < pairs ? begin + chunk : pairs;
  for (int64_t first = begin; first < end; first += 32) {
    const int64_t i = first + lane;
    const int e = i < end ? expert_at(index, i, E) : -1;
    const unsigned peers = __match_any_sync(0xffffffffu, e);
    const int before = __popc(peers & ((1u << lane) - 1));
    const int place = e >= 0 ? next[e] + before : 0;
    __syncwarp();  // everyone has read next[e]
    if (e >= 0) {
      if (!before) next[e] = place + __popc(peers);
      order[place] = (int)i;
      order[pairs + i] = place;
    }
    __syncwarp();
  }
}

// ---- the passes around the grouped GEMMs -----------------------------------------------------------------
// for place: rows[place] = x[order[place] / A]: 2 s C bytes a pair. One thread moves 8 elements.
template <class S>
__global__ void gather(const S* x, const int* order, int64_t pairs, int64_t A, int64_t C, S* rows) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, per_row = C / 8;
  if (i >= pairs * per_row) return;
  const int64_t place = i / per_row, c = i % per_row * 8;
  *(Pack<S>*)(rows + place * C + c) = fetch<S>(x, order[place] / A * C + c, true);
}

// a = silu(gate) * up, of pre = (gate, up) [pairs, 2 F]: 3 s F bytes a pair
template <class S> __global__ void act(const S* pre, int64_t pairs, int64_t F, S* a) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, per_row = F / 8;
  if (i >= pairs * per_row) return;
  const int64_t row = i / per_row, f = i % per_row * 8;
  float gate[8], up[8];
  load<S>(pre, row * 2 * F + f, true, gate);
  load<S>(pre, row * 2 * F + F + f, true, up);
#pragma unroll
  for (int j = 0; j < 8; j++) up[j] *= gate[j] / (1 + expf(-gate[j]));
  store<S>(a, row * F + f, up);
}

// g = da = down[e]^T dy, router weight left out, becomes w a, which ddown needs. The loop that this equals:
//   for row, pair = order[row], w = weights[pair]: a = silu(gate) * up;  dweights[pair] = dot(a, da)
//     dpre[row] = (w * da * up * silu'(gate), w * da * silu(gate));  g[row] = w * a
// A warp per row, 6 s F bytes a pair.
template <class S>
__global__ void act_backward(const S* pre, S* g, const int* order, const float* weights, int64_t pairs,
                             int64_t F, S* dpre, float* dweights) {
  const int64_t row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= pairs) return;  // a whole warp leaves
  const int pair = order[row];
  const float w = weights[pair];
  float dot = 0;
  for (int64_t f = lane * 8; f < F; f += 256) {
    float gate[8], up[8], da[8];
    load<S>(pre, row * 2 * F + f, true, gate);
    load<S>(pre, row * 2 * F + F + f, true, up);
    load<S>(g, row * F + f, true, da);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float s = 1 / (1 + expf(-gate[j])), silu = gate[j] * s, a = silu * up[j], d = da[j] * w;
      dot += a * da[j];
      da[j] = a * w;
      gate[j] = d * up[j] * (s + silu * (1 - s));
      up[j] = d * silu;
    }
    store<S>(g, row * F + f, da);
    store<S>(dpre, row * 2 * F + f, gate);
    store<S>(dpre, row * 2 * F + F + f, up);
  }
  dot = lane_sum(dot, 32);
  if (lane == 0) dweights[pair] = dot;
}

// for n: y[n] = sum_a weights[n, a] rows[places[n, a]], in the order of a: s C (A + 1) bytes a token. No
// weights: plain sum.
template <class S>
__global__ void combine(const S* rows, const int* places, const float* weights, int64_t N, int64_t A,
                        int64_t C, S* y) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, per_row = C / 8;
  if (i >= N * per_row) return;
  const int64_t n = i / per_row, c = i % per_row * 8;
  float sum[8] = {}, x[8];
  for (int64_t a = n * A; a < (n + 1) * A; a++) {
    load<S>(rows, places[a] * C + c, true, x);
    axpy8(weights ? weights[a] : 1.f, x, sum);
  }
  store<S>(y, n * C + c, sum);
}

// for e without rows: w[e] = 0. A grouped GEMM may leave the weight gradient of such an expert unwritten.
template <class S> __global__ void zero_empty(const int* offsets, int64_t per_expert, S* w) {
  const int e = blockIdx.x;
  if (offsets[e] != (e ? offsets[e - 1] : 0)) return;
  const float zero[8] = {};
  for (int64_t i = threadIdx.x * 8; i < per_expert; i += blockDim.x * 8)
    store<S>(w, e * per_expert + i, zero);
}
}  // namespace

// ---- what experts_cuda.cpp calls -------------------------------------------------------------------------
int mtp_cuda_sort(const int64_t* index, int64_t pairs, int64_t E, int* order, int* offsets, int* scratch,
                  void* stream) {
  int64_t chunk = (pairs + 255) / 256;  // scratch holds E counts for each of 256 chunks
  chunk = (chunk < 1024 ? 1024 : chunk + 31) / 32 * 32;
  const int chunks = (int)blocks(pairs, chunk);
  LAUNCH(sort_count, chunks, 256, stream, index, pairs, (int)E, chunk, scratch);
  LAUNCH(sort_scan, 1, SCAN, stream, scratch, (int)E, chunks, offsets);
  LAUNCH(sort_scatter, chunks, 32, stream, index, pairs, (int)E, chunk, scratch, order);
  return LAUNCH_ERROR();
}
int mtp_cuda_gather(int dtype, const void* x, const int* order, int64_t pairs, int64_t A, int64_t C,
                    void* rows, void* stream) {
  return by_dtype(dtype, [&](auto s) {
    using S = decltype(s);
    auto kernel = gather<S>;
    LAUNCH(kernel, blocks(pairs * (C / 8), 256), 256, stream, (const S*)x, order, pairs, A, C, (S*)rows);
  });
}
int mtp_cuda_act(int dtype, const void* pre, int64_t pairs, int64_t F, void* a, void* stream) {
  return by_dtype(dtype, [&](auto s) {
    using S = decltype(s);
    auto kernel = act<S>;
    LAUNCH(kernel, blocks(pairs * (F / 8), 256), 256, stream, (const S*)pre, pairs, F, (S*)a);
  });
}
int mtp_cuda_act_backward(int dtype, const void* pre, void* g, const int* order, const float* weights,
                          int64_t pairs, int64_t F, void* dpre, float* dweights, void* stream) {
  return by_dtype(dtype, [&](auto s) {
    using S = decltype(s);
    auto kernel = act_backward<S>;
    LAUNCH(kernel, blocks(pairs * 32, 256), 256, stream, (const S*)pre, (S*)g, order, weights, pairs, F,
           (S*)dpre, dweights);
  });
}
int mtp_cuda_combine(int dtype, const void* rows, const int* places, const float* weights, int64_t N,
                     int64_t A, int64_t C, void* y, void* stream) {
  return by_dtype(dtype, [&](auto s) {
    using S = decltype(s);
    auto kernel = combine<S>;
    LAUNCH(kernel, blocks(N * (C / 8), 256), 256, stream, (const S*)rows, places, weights, N, A, C, (S*)y);
  });
}
int mtp_cuda_zero_empty(int dtype, const int* offsets, int64_t E, int64_t per_expert, void* w, void* stream) {
  return by_dtype(dtype, [&](auto s) {
    using S = decltype(s);
    auto kernel = zero_empty<S>;
    LAUNCH(kernel, (unsigned)E, 256, stream, offsets, per_expert, (S*)w);
  });
}
