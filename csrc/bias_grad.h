// The gradient of a bias: where an element goes, and which dimensions it is summed over.
#pragma once

#include "common/mask.h"
#include "params.h"

namespace flash {

FLASH_HD void store_bias_grad(const BiasView& dbias, int batch, int head, int i, int j, double x) {
  const int64_t at = batch * dbias.batch_stride + head * dbias.head_stride + i * dbias.row_stride +
                     j * dbias.key_stride;
  switch (dbias.dtype) {
    case DType::kFloat16:
      static_cast<uint16_t*>(dbias.data)[at] = float_to_float16(static_cast<float>(x));
      break;
    case DType::kBFloat16:
      static_cast<uint16_t*>(dbias.data)[at] = float_to_bfloat16(static_cast<float>(x));
      break;
    case DType::kFloat32:
      static_cast<float*>(dbias.data)[at] = static_cast<float>(x);
      break;
    default:
      static_cast<double*>(dbias.data)[at] = x;
  }
}

// Whether one element of dbias is a sum over more than one (sequence, head, row, key).
FLASH_HD bool dbias_is_broadcast(const BwdParams& p) {
  return (p.dbias.batch_stride == 0 && p.batch > 1) ||
         (p.dbias.head_stride == 0 && p.num_heads > 1) ||
         (p.dbias.row_stride == 0 && p.side_q.max_seqlen > 1) ||
         (p.dbias.key_stride == 0 && p.side_k.max_seqlen > 1);
}

// What a loop over one dimension covers: all of it when dbias broadcasts it, else the cell's own.
FLASH_HD Range sweep(int64_t stride, int own, int count) {
  return stride == 0 ? Range{0, count} : Range{own, own + 1};
}

// What the pass over key blocks computes dS for; a broadcast dbias computes its own.
FLASH_HD bool main_needs_dscore(const BwdParams& p) {
  return p.dq.data || p.dk.data || p.dalibi_slopes || (p.dbias.data && !dbias_is_broadcast(p));
}

}  // namespace flash
