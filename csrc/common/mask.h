// Which keys a row sees: causal, sliding window, and the ends of the sequence.
//
// Rows i and keys j count inside one sequence. The diagonal of row i is i + seqlen_k - seqlen_q
// (bottom-right aligned); causal is right = 0. seqlen_q = 4, seqlen_k = 6, left = 2, right = 0:
//
//            key j   0 1 2 3 4 5
//      row i = 0     x x x . . .      diagonal of row 0 is 2
//              1     . x x x . .
//              2     . . x x x .
//              3     . . . x x x      diagonal of the last row is the last key
//
// Keys before `first` are hidden from every row and change no diagonal.
//
// The mask owns the key range of a block of rows (and the row range of a block of keys), the test
// whether a tile needs a per-element predicate, and the predicate itself.
#pragma once

#include "host_device.h"

namespace flash {

// Half open; empty when end <= begin.
struct Range {
  int begin;
  int end;
  FLASH_HD bool empty() const { return end <= begin; }
  FLASH_HD int size() const { return empty() ? 0 : end - begin; }
};

FLASH_HD Range intersect(Range a, Range b) {
  return {max_of(a.begin, b.begin), min_of(a.end, b.end)};
}

// Lengths and windows are below 2^30 (checked by the caller), so no sum here leaves 32 bits.
struct Mask {
  int seqlen_q;
  int seqlen_k;
  int left;       // keys before the diagonal that stay visible, or -1: unbounded
  int right;      // keys after it, or -1
  int first = 0;  // keys before it are hidden from every row: the padding at the left of a cache

  FLASH_HD int diagonal() const { return seqlen_k - seqlen_q; }

  // Keys that row i sees: [first_key(i), end_key(i)), possibly empty.
  FLASH_HD int first_key(int i) const {
    return left < 0 ? first : max_of(first, i + diagonal() - left);
  }
  FLASH_HD int end_key(int i) const {
    return right < 0 ? seqlen_k : min_of(seqlen_k, i + diagonal() + right + 1);
  }

  // Keys seen by at least one row of [rows.begin, rows.end).
  FLASH_HD Range keys_of(Range rows) const {
    rows = intersect(rows, {0, seqlen_q});
    if (rows.empty()) return {0, 0};
    return {first_key(rows.begin), end_key(rows.end - 1)};
  }

  // Rows that see at least one key of [keys.begin, keys.end).
  FLASH_HD Range rows_of(Range keys) const {
    keys = intersect(keys, {first, seqlen_k});
    if (keys.empty()) return {0, 0};
    const int begin = right < 0 ? 0 : keys.begin - diagonal() - right;
    const int end = left < 0 ? seqlen_q : keys.end - diagonal() + left;
    return intersect({begin, end}, {0, seqlen_q});
  }

  // Whether row i, one of the sequence's, sees key j.
  FLASH_HD bool sees(int i, int j) const { return j >= first_key(i) && j < end_key(i); }

  // True when some (row, key) of the tile is masked or lies outside the sequence.
  FLASH_HD bool is_edge(Range rows, Range keys) const {
    return rows.end > seqlen_q || keys.begin < first_key(rows.end - 1) ||
           keys.end > end_key(rows.begin);
  }
};

}  // namespace flash
