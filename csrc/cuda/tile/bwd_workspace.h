// The backward's workspace: row values, the dQ accumulator, and what blocks leave for later
// kernels.
//
// Rows are numbered in whole blocks of kBlockM, so that every (query block, head, sequence) owns
// kBlockM row values and one kBlockM x kDim tile of dQ, whatever the lengths. Of packed sequences
// sequence b starts at block (offset + b kBlockM) / kBlockM: no two share a block, and the sum
// stays within rows / kBlockM + batch + 1 blocks even where the lengths on the device are wrong.
#pragma once

#include "../../common/tile_range.h"
#include "../../params.h"

namespace flash::cuda {

struct BwdWorkspace {
  float* shift;         // (rows): lse in powers of two; +inf: the row saw nothing; kLargeRow
  float* delta;         // (rows): sum_d dout out - dlse
  float* large_anchor;  // (rows), of rows marked kLargeRow: lse in the unit of the products
  float* large_shift;   // (rows), the same: log2 of the sum that is left when large_anchor is taken
  float* dslopes;       // (batch, num_heads, key blocks)
  int* turns;           // (blocks): key blocks that have added to a tile of dQ
  float* dq;            // (blocks, kBlockM kDim), in the order of add_to_global

  int block_m;
  int blocks_a_head;  // of all sequences when packed
  int key_blocks;
  int tile_floats;  // kBlockM kDim

  // A block's number among all.
  FLASH_HD int64_t block(const AttnParams& p, int batch, int head, int64_t offset_q,
                         int m_block) const {
    const int64_t heads =
        p.side_q.cu_seqlens ? head : static_cast<int64_t>(batch) * p.num_heads + head;
    const int64_t first =
        p.side_q.cu_seqlens ? (offset_q + static_cast<int64_t>(batch) * block_m) / block_m : 0;
    return heads * blocks_a_head + first + m_block;
  }
  FLASH_HD float* dslope(const AttnParams& p, int batch, int head) const {
    return dslopes + (static_cast<int64_t>(batch) * p.num_heads + head) * key_blocks;
  }
};

// Where shift is this, lse is too large to keep a row's digits (needs_renormalising).
constexpr float kLargeRow = -INFINITY;

// Lays the parts out behind `memory` (null to count) and returns the bytes.
inline size_t lay_out(BwdWorkspace& w, const BwdParams& p, char* memory, int block_m, int block_n,
                      int dim) {
  w.block_m = block_m;
  w.tile_floats = block_m * dim;
  w.key_blocks = ceil_div(p.side_k.longest(), block_n);
  w.blocks_a_head = p.side_q.cu_seqlens ? static_cast<int>(p.side_q.total / block_m) + p.batch + 1
                                        : ceil_div(p.side_q.longest(), block_m);
  const int64_t sequences = p.side_q.cu_seqlens ? 1 : p.batch;
  const int64_t blocks = sequences * p.num_heads * w.blocks_a_head;
  size_t used = 0;
  const auto take = [&](auto*& part, int64_t count) {
    part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(memory + used);
    used += ceil_div<size_t>(count * 4, 128) * 128;
  };
  take(w.shift, blocks * block_m);
  take(w.delta, blocks * block_m);
  take(w.large_anchor, blocks * block_m);
  take(w.large_shift, blocks * block_m);
  take(w.dslopes, p.dalibi_slopes ? static_cast<int64_t>(p.batch) * p.num_heads * w.key_blocks : 0);
  take(w.turns, p.deterministic && p.dq.data ? blocks : 0);
  take(w.dq, p.dq.data ? blocks * w.tile_floats : 0);
  return used;
}

}  // namespace flash::cuda
