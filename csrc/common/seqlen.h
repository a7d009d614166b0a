// Where one sequence starts and how long it is, for dense and packed (varlen) tensors alike.
#pragma once

#include <cstdint>

#include "mask.h"

namespace flash {

// One side (queries or keys) of the problem. Lengths on the device are clamped, never trusted: a
// bad value gives wrong numbers in this call's outputs, not an access outside its tensors.
struct SeqSide {
  const int32_t* cu_seqlens;  // (batch + 1,) or null: dense
  const int32_t* seqused;     // (batch,) or null
  int64_t total;              // rows of a packed tensor; seqlen of a dense one; of pages, those
                              // that a sequence's row of the page table names
  int max_seqlen;             // no sequence is longer; the shape of a bias. May exceed the total
  const int32_t* leftpad = nullptr;  // (batch,) or null: rows that are hidden at the beginning

  // The most rows that a sequence can have: what a launch is sized by.
  FLASH_HD int longest() const { return static_cast<int>(min_of<int64_t>(max_seqlen, total)); }

  // First row of the sequence inside the packed tensor; 0 when dense.
  FLASH_HD int64_t offset(int batch) const {
    if (!cu_seqlens) return 0;
    return clamp_to<int64_t>(cu_seqlens[batch], 0, total);
  }

  // min(difference of cu_seqlens, max_seqlen, seqused), at least 0.
  FLASH_HD int length(int batch) const {
    int64_t n = total;
    if (cu_seqlens) {
      const int64_t begin = offset(batch);
      n = clamp_to<int64_t>(cu_seqlens[batch + 1], begin, total) - begin;
    }
    n = min_of<int64_t>(n, max_seqlen);
    if (seqused) n = min_of<int64_t>(n, max_of(seqused[batch], 0));
    return static_cast<int>(n);
  }

  // The sequence that a row of a packed tensor may belong to: the last one that starts at or before
  // it, when cu_seqlens never fall.
  FLASH_HD int sequence_of(int64_t row, int batch) const {
    int low = 0, high = batch - 1;
    while (low < high) {
      const int middle = low + (high - low + 1) / 2;
      if (cu_seqlens[middle] <= row)
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }

  // The first row that is not hidden, of a sequence of this length.
  FLASH_HD int first(int batch, int length) const {
    return leftpad ? clamp_to(leftpad[batch], 0, length) : 0;
  }
};

struct SeqInfo {
  int64_t offset_q;  // rows before this sequence in q, out, lse
  int64_t offset_k;  // rows before it in k, v
  int seqlen_q;
  int seqlen_k;
  int first_k;  // keys before it are hidden
};

FLASH_HD SeqInfo seq_info(const SeqSide& side_q, const SeqSide& side_k, int batch) {
  const int seqlen_k = side_k.length(batch);
  return {side_q.offset(batch), side_k.offset(batch), side_q.length(batch), seqlen_k,
          side_k.first(batch, seqlen_k)};
}

}  // namespace flash
