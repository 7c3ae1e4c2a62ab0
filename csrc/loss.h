// Loss rows: CE and KL of a chunk of rows, and the gradient of the draft's logits, which takes their place.
//
//   p = softmax(teacher), q = softmax(draft), y = argmax teacher;  ce = -log q_y;  kl = sum p (log p - log q)
//   draft <- coeff ((ce_weight + kl_weight) q - kl_weight p - ce_weight [y])
//
// Logits [rows, V]; ties go to the lowest index. Bytes, s = element size: 5 s V a row, each of the two read
// twice (on a CPU mostly from cache the second time), one written.
#pragma once
#include <cstdint>

struct LossArgs {
  int64_t rows, V;
  const void* teacher;  // [rows, V]
  void* draft;          // [rows, V], in place
  const void* coeff;    // from here on [rows]; coeff, ce, kl in float, for double in double
  double ce_weight, kl_weight;
  void *ce, *kl;
  int64_t *teacher_index, *draft_index;  // argmax of each
};

// dtype: bind.cpp's dtype_code. They return 0 or a CUDA error. loss_cpu.cpp ignores the stream.
extern "C" {
int mtp_cpu_loss_rows(int dtype, const LossArgs& m, void* stream);
int mtp_cuda_loss_rows(int dtype, const LossArgs& m, void* stream);
}
