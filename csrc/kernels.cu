// CUDA kernels: the cached-attention merge, the loss rows and the passes around the experts' grouped GEMMs.
//
// Plain C launchers (pointers, sizes, a stream) and no torch header, so this compiles in seconds and, through
// emulation.h with MTP_EMULATE, also as ordinary C++ for the tests. Arithmetic is fp32 whatever the storage
// type S. No float atomics and no host synchronisation: results are the same bit for bit every run. A thread
// moves 8 elements at a time as 16-byte words, so D, C and F are multiples of 8 and every pointer is 16-byte
// aligned (bind.cpp sees to it).
#ifdef MTP_EMULATE
#include "emulation.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>
#define LAUNCH(kernel, grid, block, stream, ...)                                                             \
  (kernel)<<<(grid), (block), 0, (cudaStream_t)(stream)>>>(__VA_ARGS__)
#define LAUNCH_ERROR() ((int)cudaGetLastError())
#define SHARED(type, name, n) __shared__ type name[n]
#endif

namespace {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};
template <class S> struct Pack {
  uint4 w[sizeof(S) / 2];
};  // 8 elements

__device__ __forceinline__ void unpack2(uint32_t w, Bf16, float* x) {
  x[0] = __uint_as_float(w << 16);
  x[1] = __uint_as_float(w & 0xffff0000u);
}
__device__ __forceinline__ void unpack2(uint32_t w, Fp16, float* x) {
  x[0] = __half2float(__ushort_as_half((unsigned short)(w & 0xffff)));
  x[1] = __half2float(__ushort_as_half((unsigned short)(w >> 16)));
}
__device__ __forceinline__ uint32_t bits(float x, Bf16) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
__device__ __forceinline__ uint32_t bits(float x, Fp16) { return __half_as_ushort(__float2half_rn(x)); }

template <class S> __device__ __forceinline__ void unpack(const Pack<S>& p, float* x) {
  const uint32_t w[4] = {p.w[0].x, p.w[0].y, p.w[0].z, p.w[0].w};
#pragma unroll
  for (int i = 0; i < 4; i++) unpack2(w[i], S(), x + 2 * i);
}
template <> __device__ __forceinline__ void unpack<float>(const Pack<float>& p, float* x) {
  const uint32_t w[8] = {p.w[0].x, p.w[0].y, p.w[0].z, p.w[0].w, p.w[1].x, p.w[1].y, p.w[1].z, p.w[1].w};
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = __uint_as_float(w[i]);
}
template <class S> __device__ __forceinline__ Pack<S> pack(const float* x) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = bits(x[2 * i], S()) | bits(x[2 * i + 1], S()) << 16;
  return {{{w[0], w[1], w[2], w[3]}}};
}
template <> __device__ __forceinline__ Pack<float> pack<float>(const float* x) {
  uint32_t w[8];
#pragma unroll
  for (int i = 0; i < 8; i++) w[i] = __float_as_uint(x[i]);
  return {{{w[0], w[1], w[2], w[3]}, {w[4], w[5], w[6], w[7]}}};
}
template <class S> __device__ __forceinline__ Pack<S> fetch(const void* base, int64_t at, bool on) {
  if (on) return *(const Pack<S>*)((const S*)base + at);
  const float zero[8] = {};
  return pack<S>(zero);
}
template <class S> __device__ __forceinline__ void load(const void* base, int64_t at, bool on, float* x) {
  unpack<S>(fetch<S>(base, at, on), x);
}
template <class S> __device__ __forceinline__ void store(void* base, int64_t at, const float* x) {
  *(Pack<S>*)((S*)base + at) = pack<S>(x);
}
__device__ __forceinline__ float dot8(const float* x, const float* y) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) sum += x[i] * y[i];
  return sum;
}
__device__ __forceinline__ void axpy8(float a, const float* x, float* y) {
#pragma unroll
  for (int i = 0; i < 8; i++) y[i] += a * x[i];
}
__device__ __forceinline__ float lane_sum(float v,
                                          int lanes) {  // over aligned groups of `lanes`, a power of two
  for (int o = lanes / 2; o; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

// ---- cached-attention merge
// ------------------------------------------------------------------------------------ s_j = scale q.k_j; lse
// = logsumexp(lse_0, s_1..s_k);  out = exp(lse_0 - lse) o_0 + sum_j exp(s_j - lse) v_j o_0, q, out [rows, H,
// D]; lse [rows, H] fp32; k_j, v_j [rows, G, D]; rows = B T; head h uses key head h / (H / G). A group of
// `lanes` threads owns one (row, key head) and walks its H / G query heads with k_j and v_j in registers.
// Bytes, s = element size, N = rows H, r = H / G: forward s N D (3 + 2 k / r) + 8 N;
// backward s N D (4 + 4 k / r) + 16 N, plus 2 s N D for d o_0.
// Floor on an H200 (4.3 TB/s), B = 1, H = 32, G = 4, T = 8192, D = 128, k = 3, bf16: 59 us, backward 103 us.
// Measured: not yet run on a GPU.
constexpr int THREADS = 128, MAX_K = 15, FORWARD_K = 7, BACKWARD_K = 4;

struct Merge {
  int64_t rows;
  int G, group, D, lanes, k;
  float scale;
  const void *o_0, *q, *dout, *out;
  const float *lse_0, *lse;
  const void *ks[MAX_K], *vs[MAX_K];
  void *out_w, *dq, *do_0, *dks[MAX_K], *dvs[MAX_K];
  float *lse_w, *dlse_0, *scratch;
};

template <class S, int K> __global__ void __launch_bounds__(THREADS) merge_forward(Merge m) {
  const int64_t row = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / m.lanes;
  const int d = threadIdx.x % m.lanes * 8;
  const bool in = row < m.rows * m.G, on = in && d < m.D;  // all lanes stay to the end: the sums need them
  Pack<S> key[K], value[K];
#pragma unroll
  for (int j = 0; j < K; j++) {
    key[j] = fetch<S>(m.ks[j], row * m.D + d, on);
    value[j] = fetch<S>(m.vs[j], row * m.D + d, on);
  }
  for (int h = 0; h < m.group; h++) {
    const int64_t head = row * m.group + h, at = head * m.D + d;
    float x[8], y[8], sum[8], s[K], lse_0 = in ? m.lse_0[head] : 0, top = lse_0;
    load<S>(m.q, at, on, x);
    load<S>(m.o_0, at, on, sum);
#pragma unroll
    for (int j = 0; j < K; j++) {
      unpack<S>(key[j], y);
      s[j] = lane_sum(dot8(x, y), m.lanes) * m.scale;
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
    if (on) store<S>(m.out_w, at, sum);
    if (in && d == 0) m.lse_w[head] = top + logf(total);
  }
}

// Any k, for chains longer than the registers hold: the keys come from cache again for every query head, the
// softmax is kept running.
template <class S> __global__ void __launch_bounds__(THREADS, 4) merge_forward_long(Merge m) {
  const int64_t row = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / m.lanes;
  const int d = threadIdx.x % m.lanes * 8;
  const bool in = row < m.rows * m.G, on = in && d < m.D;
  for (int h = 0; h < m.group; h++) {
    const int64_t head = row * m.group + h, at = head * m.D + d;
    float x[8], y[8], sum[8], top = in ? m.lse_0[head] : 0, total = 1;
    load<S>(m.q, at, on, x);
    load<S>(m.o_0, at, on, sum);
    if (top == -INFINITY) {
      total = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i] = 0;
    }
#pragma unroll 1
    for (int j = 0; j < m.k; j++) {
      load<S>(m.ks[j], row * m.D + d, on, y);
      const float s = lane_sum(dot8(x, y), m.lanes) * m.scale, next = fmaxf(top, s);
      const float keep = expf(top - next), w = expf(s - next);
      load<S>(m.vs[j], row * m.D + d, on, y);
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i] = sum[i] * keep + w * y[i];
      total = total * keep + w;
      top = next;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] /= total;
    if (on) store<S>(m.out_w, at, sum);
    if (in && d == 0) m.lse_w[head] = top + logf(total);
  }
}

// w_j = exp(s_j - lse), ds_j = scale w_j <dout, v_j - out>; dv_j = sum_h w_j dout, dk_j = sum_h ds_j q, dq =
// sum_j ds_j k_j Steps j0 .. j0 + K - 1 of one launch; over several launches dq is summed in fp32 `scratch`.
template <class S, int K> __global__ void __launch_bounds__(THREADS) merge_backward(Merge m, int j0) {
  const int64_t row = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / m.lanes;
  const int d = threadIdx.x % m.lanes * 8;
  const bool in = row < m.rows * m.G, on = in && d < m.D, last = j0 + K == m.k;
  Pack<S> key[K], value[K];
  float dk[K][8] = {}, dv[K][8] = {};
#pragma unroll
  for (int j = 0; j < K; j++) {
    key[j] = fetch<S>(m.ks[j0 + j], row * m.D + d, on);
    value[j] = fetch<S>(m.vs[j0 + j], row * m.D + d, on);
  }
  for (int h = 0; h < m.group; h++) {
    const int64_t head = row * m.group + h, at = head * m.D + d;
    float q[8], dout[8], x[8], dq[8] = {};
    const float lse = in ? m.lse[head] : 0;
    load<S>(m.q, at, on, q);
    load<S>(m.dout, at, on, dout);
    load<S>(m.out, at, on, x);
    const float delta = lane_sum(dot8(dout, x), m.lanes);
    if (j0) load<float>(m.scratch, at, on, dq);
#pragma unroll
    for (int j = 0; j < K; j++) {
      unpack<S>(value[j], x);
      const float da = lane_sum(dot8(dout, x), m.lanes);
      unpack<S>(key[j], x);
      const float w = expf(lane_sum(dot8(q, x), m.lanes) * m.scale - lse), ds = m.scale * w * (da - delta);
      axpy8(ds, x, dq);
      axpy8(ds, q, dk[j]);
      axpy8(w, dout, dv[j]);
    }
    if (on && last) store<S>(m.dq, at, dq);
    if (on && !last) store<float>(m.scratch, at, dq);
    if (j0 || !m.do_0) continue;  // the same for every thread of the grid
    const float w_0 = in ? expf(m.lse_0[head] - lse) : 0;
    load<S>(m.o_0, at, on, x);
    const float dot = lane_sum(dot8(dout, x), m.lanes);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = w_0 * dout[i];
    if (on) store<S>(m.do_0, at, x);
    if (in && d == 0) m.dlse_0[head] = w_0 == 0 ? 0 : w_0 * (dot - delta);
  }
#pragma unroll
  for (int j = 0; j < K; j++) {
    if (on) store<S>(m.dks[j0 + j], row * m.D + d, dk[j]);
    if (on) store<S>(m.dvs[j0 + j], row * m.D + d, dv[j]);
  }
}

// ---- stable counting sort of (token, choice) pairs by expert
// ----------------------------------------------------- order[place] = pair, order[pairs + pair] = place,
// offsets[e] = end of expert e. Bytes: 8 + 8 + 4 + 4 per pair. The pairs are cut into at most 256 chunks:
// count each (expert, chunk), scan over them, then one warp per chunk hands out the places in order, which
// makes the sort stable without a sort. Measured: not yet run on a GPU.
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
__global__ void sort_scan(int* counts, int E, int chunks,
                          int* offsets) {  // one block; counts become first places
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

// ---- the passes around the grouped GEMMs
// ------------------------------------------------------------------------- rows[place] = x[order[place] /
// A]: 2 s C bytes a pair. One thread moves 8 elements.
template <class S>
__global__ void gather(const S* x, const int* order, int64_t pairs, int64_t A, int64_t C, S* rows) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, per_row = C / 8;
  if (i >= pairs * per_row) return;
  const int64_t place = i / per_row, c = i % per_row * 8;
  *(Pack<S>*)(rows + place * C + c) = fetch<S>(x, order[place] / A * C + c, true);
}
// a = silu(gate) up; h = (gate, up) [pairs, 2 F]: 3 s F bytes a pair
template <class S> __global__ void act(const S* h, int64_t pairs, int64_t F, S* a) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, per_row = F / 8;
  if (i >= pairs * per_row) return;
  const int64_t row = i / per_row, f = i % per_row * 8;
  float gate[8], up[8];
  load<S>(h, row * 2 * F + f, true, gate);
  load<S>(h, row * 2 * F + F + f, true, up);
#pragma unroll
  for (int j = 0; j < 8; j++) up[j] *= gate[j] / (1 + expf(-gate[j]));
  store<S>(a, row * F + f, up);
}
// g = dy W2, router weight left out; in place g <- w a, which d W2 needs; dh = w g da/dh; dw = <a, g>. A warp
// per row, 6 s F bytes a pair.
template <class S>
__global__ void act_backward(const S* h, S* g, const int* order, const float* weights, int64_t pairs,
                             int64_t F, S* dh, float* dweights) {
  const int64_t row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= pairs) return;  // a whole warp leaves
  const int pair = order[row];
  const float w = weights[pair];
  float dot = 0;
  for (int64_t f = lane * 8; f < F; f += 256) {
    float gate[8], up[8], da[8];
    load<S>(h, row * 2 * F + f, true, gate);
    load<S>(h, row * 2 * F + F + f, true, up);
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
    store<S>(dh, row * 2 * F + f, gate);
    store<S>(dh, row * 2 * F + F + f, up);
  }
  dot = lane_sum(dot, 32);
  if (lane == 0) dweights[pair] = dot;
}
// y[n] = sum_a w[n, a] rows[place of (n, a)], in the order of a: s C (A + 1) bytes a token. No weights: plain
// sum.
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
// A grouped GEMM may leave the weight gradient of an expert without rows unwritten.
template <class S> __global__ void zero_empty(const int* offsets, int64_t per_expert, S* w) {
  const int e = blockIdx.x;
  if (offsets[e] != (e ? offsets[e - 1] : 0)) return;
  const float zero[8] = {};
  for (int64_t i = threadIdx.x * 8; i < per_expert; i += blockDim.x * 8)
    store<S>(w, e * per_expert + i, zero);
}

// ---- loss rows
// --------------------------------------------------------------------------------------------------- p =
// softmax(teacher), q = softmax(draft), y = argmax teacher. ce = -log q_y, kl = sum p (log p - log q), draft
// <- coeff ((ce_weight + kl_weight) q - kl_weight p - ce_weight [y]). Logits [R, V]; ties go to the lowest
// index. A block per row. Bytes: 5 s V a row (both read twice, one written); floor at V = 151936, bf16, 4.3
// TB/s: 353 ns a row. Measured: not yet run on a GPU.
constexpr int LOSS_THREADS = 512;
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
template <class S>
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
template <class S>
__global__ void __launch_bounds__(LOSS_THREADS)
    loss_rows(int64_t V, const S* teacher, S* draft, const float* coeff, float ce_weight, float kl_weight,
              bool aligned, float* ce_out, float* kl_out, int64_t* teacher_index, int64_t* draft_index) {
  SHARED(float, warps, LOSS_THREADS / 32);
  SHARED(float, gold, 1);
  const int64_t row = blockIdx.x;
  const S* t = teacher + row * V;
  S* d = draft + row * V;
  const Stats a = row_stats(t, V, aligned), b = row_stats(d, V, aligned);
  // lse = top + log; x - top comes first, which is exact near the top
  const float log_t = logf(a.sum), log_d = logf(b.sum), c = coeff[row];
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
  ce_out[row] = log_d - (gold[0] - b.top);
  kl_out[row] = kl;
  teacher_index[row] = a.index;
  draft_index[row] = b.index;
}

// ---- launchers
// ---------------------------------------------------------------------------------------------------
template <class F> int by_dtype(int dtype, F f) {
  if (dtype == 0) f(float());
  if (dtype == 1) f(Bf16());
  if (dtype == 2) f(Fp16());
  return LAUNCH_ERROR();
}
unsigned blocks(int64_t threads, int64_t per_block) {
  return (unsigned)((threads + per_block - 1) / per_block);
}

Merge merge_of(int64_t rows, int64_t H, int64_t G, int64_t D, int64_t k, double scale, const void* const* ks,
               const void* const* vs) {
  Merge m = {};
  m.rows = rows, m.G = (int)G, m.group = (int)(H / G), m.D = (int)D, m.k = (int)k, m.scale = (float)scale;
  for (m.lanes = 1; m.lanes * 8 < D;) m.lanes *= 2;
  for (int j = 0; j < k; j++) m.ks[j] = ks[j], m.vs[j] = vs[j];
  return m;
}
template <class S, int K> void forward_with(const Merge& m, void* stream) {
  if (m.k != K) {
    if constexpr (K > 1) forward_with<S, K - 1>(m, stream);
    return;
  }
  auto kernel = merge_forward<S, K>;
  LAUNCH(kernel, blocks(m.rows * m.G * m.lanes, THREADS), THREADS, stream, m);
}
template <class S, int K> void backward_with(const Merge& m, int j0, int n, void* stream) {
  if (n != K) {
    if constexpr (K > 1) backward_with<S, K - 1>(m, j0, n, stream);
    return;
  }
  auto kernel = merge_backward<S, K>;
  LAUNCH(kernel, blocks(m.rows * m.G * m.lanes, THREADS), THREADS, stream, m, j0);
}
}  // namespace

extern "C" {
int mtp_cuda_merge_forward(int dtype, int64_t rows, int64_t H, int64_t G, int64_t D, int64_t k, double scale,
                           const void* o_0, const void* lse_0, const void* q, const void* const* ks,
                           const void* const* vs, void* out, void* lse, void* stream) {
  Merge m = merge_of(rows, H, G, D, k, scale, ks, vs);
  m.o_0 = o_0, m.lse_0 = (const float*)lse_0, m.q = q, m.out_w = out, m.lse_w = (float*)lse;
  return by_dtype(dtype, [&](auto s) {
    using S = decltype(s);
    if (k <= FORWARD_K) return forward_with<S, FORWARD_K>(m, stream);
    auto kernel = merge_forward_long<S>;
    LAUNCH(kernel, blocks(rows * G * m.lanes, THREADS), THREADS, stream, m);
  });
}
int mtp_cuda_merge_backward(int dtype, int64_t rows, int64_t H, int64_t G, int64_t D, int64_t k, double scale,
                            const void* dout, const void* q, const void* const* ks, const void* const* vs,
                            const void* out, const void* lse, const void* o_0, const void* lse_0, void* dq,
                            void* const* dks, void* const* dvs, void* do_0, void* dlse_0, void* scratch,
                            void* stream) {
  Merge m = merge_of(rows, H, G, D, k, scale, ks, vs);
  m.dout = dout, m.q = q, m.out = out, m.lse = (const float*)lse, m.o_0 = o_0, m.lse_0 = (const float*)lse_0;
  m.dq = dq, m.do_0 = do_0, m.dlse_0 = (float*)dlse_0, m.scratch = (float*)scratch;
  for (int j = 0; j < k; j++) m.dks[j] = dks[j], m.dvs[j] = dvs[j];
  return by_dtype(dtype, [&](auto s) {
    for (int j = 0; j < k; j += BACKWARD_K)
      backward_with<decltype(s), BACKWARD_K>(m, j, (int)(k - j < BACKWARD_K ? k - j : BACKWARD_K), stream);
  });
}
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
int mtp_cuda_act(int dtype, const void* h, int64_t pairs, int64_t F, void* a, void* stream) {
  return by_dtype(dtype, [&](auto s) {
    using S = decltype(s);
    auto kernel = act<S>;
    LAUNCH(kernel, blocks(pairs * (F / 8), 256), 256, stream, (const S*)h, pairs, F, (S*)a);
  });
}
int mtp_cuda_act_backward(int dtype, const void* h, void* g, const int* order, const float* weights,
                          int64_t pairs, int64_t F, void* dh, float* dweights, void* stream) {
  return by_dtype(dtype, [&](auto s) {
    using S = decltype(s);
    auto kernel = act_backward<S>;
    LAUNCH(kernel, blocks(pairs * 32, 256), 256, stream, (const S*)h, (S*)g, order, weights, pairs, F, (S*)dh,
           dweights);
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
int mtp_cuda_loss_rows(int dtype, int64_t rows, int64_t V, const void* teacher, void* draft,
                       const void* coeff, double ce_weight, double kl_weight, void* ce, void* kl,
                       int64_t* teacher_index, int64_t* draft_index, void* stream) {
  const bool aligned = V % 8 == 0 && ((uintptr_t)teacher | (uintptr_t)draft) % 16 == 0;
  return by_dtype(dtype, [&](auto s) {
    using S = decltype(s);
    auto kernel = loss_rows<S>;
    LAUNCH(kernel, (unsigned)rows, LOSS_THREADS, stream, V, (const S*)teacher, (S*)draft, (const float*)coeff,
           (float)ce_weight, (float)kl_weight, aligned, (float*)ce, (float*)kl, teacher_index, draft_index);
  });
}
}
