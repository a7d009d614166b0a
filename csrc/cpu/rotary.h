// Rotary position embedding of every head of a tensor: a task is one row.
#pragma once

#include "../common/rotary.h"
#include "tile.h"

namespace flash::cpu {
inline namespace FLASH_CPU_ISA {

// One head's row; `to` may be `from`.
template <typename In>
inline void rotate_row(const Rotary& rotary, const In* from, In* to, int dim, int64_t position) {
  using T = Acc<In>;
  for (int c = 0; c < Rotary::pairs(dim); ++c) {
    const Rotary::Pair pair = rotary.pair(c);
    if (!pair.turns) {
      to[pair.first] = from[pair.first];
      if (pair.second < dim) to[pair.second] = from[pair.second];
      continue;
    }
    T a = to_acc(from[pair.first]), b = to_acc(from[pair.second]);
    rotary.turn(a, b, position, c);
    to[pair.first] = from_acc<In>(a);
    to[pair.second] = from_acc<In>(b);
  }
}

template <typename In>
size_t rotary_workspace(const RotaryParams&) {
  return 0;
}

template <typename In>
void rotary(const RotaryParams& p, const Launch& launch) {
  parallel(launch, p.num_new_rows(), [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const SeqRow row = p.find_row(at);
      if (!row.is_inside) continue;
      const int64_t position = p.position(row);
      for (int head = 0; head < p.num_heads; ++head) {
        const In* from = static_cast<const In*>(p.q.data) + p.q.at(row.dense_batch, row.row, head);
        In* to = static_cast<In*>(p.out.data) + p.out.at(row.dense_batch, row.row, head);
        rotate_row<In>(p.rotary, from, to, p.head_dim, position);
      }
    }
  });
}

}  // namespace FLASH_CPU_ISA
}  // namespace flash::cpu
