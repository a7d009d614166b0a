// New keys and values into a cache, in place, the keys rotated on the way: a task is one new row.
// What would lie past a sequence's capacity, or in a page that does not exist, is dropped.
#pragma once

#include "rotary.h"

namespace flash::cpu {
inline namespace FLASH_CPU_ISA {

template <typename In>
inline void append_row(const AppendParams& p, const NewRow& row) {
  if (!row.is_written) return;
  for (int head = 0; head < p.num_heads_k; ++head) {
    const In* k = static_cast<const In*>(p.new_k.data) + p.new_k.at(row.batch_new, row.row, head);
    const In* v = static_cast<const In*>(p.new_v.data) + p.new_v.at(row.batch_new, row.row, head);
    In* to_k = static_cast<In*>(p.k.data) + p.k.at(row.batch_cache, row.row_cache, head);
    In* to_v = static_cast<In*>(p.v.data) + p.v.at(row.batch_cache, row.row_cache, head);
    rotate_row<In>(p.rotary, k, to_k, p.head_dim, row.position);
    for (int d = 0; d < p.head_dim_v; ++d) to_v[d] = v[d];
  }
}

template <typename In>
size_t append_workspace(const AppendParams&) {
  return 0;
}

template <typename In>
void append(const AppendParams& p, const Launch& launch) {
  for (int b = 0; b < p.batch; ++b) p.seqused_k[b] = p.used_after(b);
  parallel(launch, p.num_new_rows(), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) append_row<In>(p, p.locate(row));
  });
}

}  // namespace FLASH_CPU_ISA
}  // namespace flash::cpu
