// Calls the CUDA launchers of the emulated sources, for the sanitizers and planted faults of test_kernels.py.
#include <numeric>
template <class T> struct Array {  // exactly its size, so that AddressSanitizer sees the first byte outside
  T* p;
  explicit Array(size_t n) : p((T*)std::aligned_alloc(16, (n * sizeof(T) + 15) / 16 * 16)) {
    for (size_t i = 0; i < n; i++) p[i] = (T)(i * 7 % 13);
  }
  ~Array() { std::free(p); }
  operator T*() const { return p; }
};
int main(int, char** argv) {
#ifndef MTP_EMULATE_THREADS
  mtp_emulate_order(argv[1][0] - '0');
#endif
  const int64_t N = 550, A = 2, E = 3, P = N * A, C = 16, W = 8, R = 3;
  const int H = 6, G = 2, D = 24, K = 5;
  for (int dtype = 0; dtype < 2 && !LAUNCH_ERROR(); dtype++) {
    const size_t unit = dtype ? 1 : 2;  // in 16-bit words
    auto data = [&](size_t n) { return Array<uint16_t>(n * unit); };
    Array<int64_t> index(P);
    for (int64_t i = 0; i < P; i++) index[i] = i * i % 7 % E;
    Array<int> order(2 * P), offsets(E), scratch(E * 257);
    Array<float> w(P), dw(P);
    auto x = data(N * C), xs = data(P * C), y = data(N * C);
    auto h = data(P * 2 * W), dh = data(P * 2 * W), a = data(P * W);
    auto weights = data(E * W * C);
    mtp_cuda_sort(index, P, E, order, offsets, scratch, nullptr);
    for (int64_t i = 1; i < P; i++)
      if (index[order[i - 1]] * P + order[i - 1] > index[order[i]] * P + order[i])
        return std::puts("not a stable sort"), 7;
    mtp_cuda_gather(dtype, x, order, P, A, C, xs, nullptr);
    mtp_cuda_act(dtype, h, P, W, a, nullptr);
    mtp_cuda_act_backward(dtype, h, a, order, w, P, W, dh, dw, nullptr);
    mtp_cuda_combine(dtype, xs, order + P, w, N, A, C, y, nullptr);
    offsets[1] = offsets[0];
    mtp_cuda_zero_empty(dtype, offsets, E, W * C, weights, nullptr);
    for (int k : {1, K}) {
      auto q = data(R * H * D), o = data(R * H * D), out = data(R * H * D);
      auto d = data(R * H * D), dq = data(R * H * D);
      auto cache = data(R * G * D * K * 4), first = data(R * H * D);
      Array<float> lse_0(R * H), lse(R * H), dlse(R * H);
      MergeArgs m = {.rows = R, .G = G, .group = H / G, .D = D, .k = k, .scale = 0.2,
                     .o_0 = o, .lse_0 = lse_0, .q = q, .ks = {}, .vs = {}, .out = out, .lse = lse,
                     .dout = d, .dq = dq, .dks = {}, .dvs = {}, .do_0 = first, .dlse_0 = dlse};
      for (int64_t j = 0; j < k; j++) {
        uint16_t* at = cache + R * G * D * unit * 4 * j;
        m.ks[j] = at, m.vs[j] = at + R * G * D * unit;
        m.dks[j] = at + 2 * R * G * D * unit, m.dvs[j] = at + 3 * R * G * D * unit;
      }
      mtp_cuda_merge_forward(dtype, m, nullptr);
      mtp_cuda_merge_backward(dtype, m, nullptr);
    }
    for (int64_t V : {37, 64}) {
      auto t = data(R * V), d = data(R * V);
      Array<float> c(R), ce(R), kl(R);
      Array<int64_t> ti(R), di(R);
      mtp_cuda_loss_rows(dtype, {R, V, t, d, c, 1, 1, ce, kl, ti, di}, nullptr);
    }
  }
#ifndef MTP_EMULATE_THREADS
  if (!emulation::error.empty()) return std::puts(emulation::error.c_str()), 8;
#endif
  return 0;
}
