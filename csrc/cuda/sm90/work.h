// Which tiles a block works on, and how long each is: the schedule of persistent blocks.
#pragma once

#include "../../common/tile_range.h"
#include "../../params.h"

namespace flash::cuda::sm90 {

// Query rows of one (sequence, head) and the blocks of keys that they see. The producer writes it
// to shared memory beside the tile's Q.
struct Tile {
  int head;  // -1: there are no more tiles
  int head_k;
  int batch;
  int first_row;  // inside the sequence
  int seqlen_q;
  int seqlen_k;
  int first_block;  // of keys; walked from the last one down. At least one: where no row sees a
                    // key,
  int last_block;   // its scores are all masked
  int keep_begin;   // keys whose V rows are clean: others of a block are zeroed, because 0 x NaN
  int keep_end;     // must not come into being. Past the tensor's end TMA has zero-filled already
  int clears;       // whether there are such rows
  int offset_q;     // rows before the sequence in q, in k
  int offset_k;
};

// Bytes of K and V whose heads are worked on together: a good half of an H200's 50 MB of L2.
constexpr int64_t kFwdBandBytes = int64_t{32} << 20;

// The order of tiles: neighbours share a head, so that its K and V stay in L2; within a band of
// heads the longest rows of a causal mask come first.
struct Schedule {
  unsigned m_blocks;
  unsigned band;      // heads whose tiles are ordered together
  unsigned tiles;     // in all
  unsigned* claimed;  // beyond each block's first; null: tiles are dealt out in turn

  // The tile that this block takes after `index`; `tiles` or more: none.
  __device__ __forceinline__ unsigned after(unsigned index) const {
    return gridDim.x + (claimed ? atomicAdd(claimed, 1) : index);
  }

  // 32-bit unsigned throughout: a 64-bit division costs hundreds of cycles.
  template <int kBlockM, int kBlockN>
  __device__ __forceinline__ void locate(const AttnParams& p, unsigned index, Tile& t) const {
    t.head = -1;
    if (index >= tiles) return;
    const unsigned num_heads = static_cast<unsigned>(p.num_heads);
    const unsigned heads = static_cast<unsigned>(p.batch) * num_heads;
    const unsigned first = index / (band * m_blocks) * band;
    const unsigned in_band = index - first * m_blocks;
    const unsigned width = min_of(band, heads - first);
    const int m_block = static_cast<int>(m_blocks - 1 - in_band / width);
    const unsigned at = first + in_band % width;
    t.batch = static_cast<int>(at / num_heads);
    t.head = static_cast<int>(at % num_heads);
    t.head_k = t.head / p.group();
    const SeqInfo seq = seq_info(p.side_q, p.side_k, t.batch);
    t.first_row = m_block * kBlockM;
    t.seqlen_q = seq.seqlen_q;
    t.seqlen_k = seq.seqlen_k;
    t.offset_q = static_cast<int>(seq.offset_q);
    t.offset_k = static_cast<int>(seq.offset_k);
    const Mask mask{seq.seqlen_q, seq.seqlen_k, p.window_left, p.window_right};
    const Range seen = mask.keys_of(block_range(m_block, kBlockM));
    const Range blocks = blocks_of(seen, kBlockN);
    t.first_block = blocks.begin;
    t.last_block = max_of(blocks.begin, blocks.end - 1);
    t.keep_begin = seen.begin;
    t.keep_end = seq.offset_k + seen.end >= p.side_k.total && !seen.empty() ? 1 << 30 : seen.end;
    t.clears = t.keep_begin > t.first_block * kBlockN || t.keep_end < (t.last_block + 1) * kBlockN;
  }
};

}  // namespace flash::cuda::sm90
