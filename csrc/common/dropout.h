// Dropout on the probabilities: which (sequence, head, row, key) is kept.
//
// The kept set is a pure function of rng_state and the position, so it is the same on every
// backend, for any tiling, in the forward and in the backward (semantics.md, Arithmetic). One
// Philox call gives the 16 bytes of the 16 keys j = 64 a + 8 n + 2 t + c of one row (n = 0..7, c =
// 0, 1; byte 2 n + c): in the register layouts of mma.sync and of 32 x 32 MFMA a thread holds just
// those.
#pragma once

#include <cstdint>

#include "philox.h"

namespace flash {

struct Dropout {
  static constexpr int kGroup = 64;  // keys that share a counter, four calls apart

  uint32_t key0, key1;      // rng_state[0]
  uint32_t mix_lo, mix_hi;  // splitmix64(rng_state[1]): spreads nearby offsets over all 64 bits, so
                            // that (offset, head) and (offset + 1, head - 1) are unrelated
  int threshold;            // T = round(256 p), 0 (off) to 256 (all dropped)

  // T = floor(256 p + 0.5): the probability in steps of 1/256.
  static FLASH_HD int threshold_of(double p) { return static_cast<int>(256.0 * p + 0.5); }

  static FLASH_HD Dropout make(const int64_t* rng_state, int threshold) {
    if (threshold == 0) return {0, 0, 0, 0, 0};
    const uint64_t seed = static_cast<uint64_t>(rng_state[0]);
    const uint64_t mix = splitmix64(static_cast<uint64_t>(rng_state[1]));
    return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
            static_cast<uint32_t>(mix), static_cast<uint32_t>(mix >> 32), threshold};
  }

  FLASH_HD bool enabled() const { return threshold > 0; }

  // Kept probabilities are multiplied by this; 0 when everything is dropped.
  FLASH_HD float keep_scale() const { return scale_of(threshold); }
  static FLASH_HD float scale_of(int threshold) {
    return threshold >= 256 ? 0.f : 256.f / static_cast<float>(256 - threshold);
  }

  // The 16 random bytes of keys 64 a + 8 n + 2 t + c of row i; t = 0..3.
  FLASH_HD Philox4 bytes(int sequence, int head, int i, int a, int t) const {
    const Philox4 counter = {{static_cast<uint32_t>(4 * a + t), static_cast<uint32_t>(i),
                              static_cast<uint32_t>(head) ^ mix_lo,
                              static_cast<uint32_t>(sequence) ^ mix_hi}};
    return philox4x32_7(counter, key0, key1);
  }

  // Whether byte 2 n + c of a call is kept.
  FLASH_HD bool keep_byte(const Philox4& random, int n, int c) const {
    const int byte = 2 * n + c;
    return static_cast<int>((random.word[byte / 4] >> (8 * (byte % 4))) & 0xFFu) >= threshold;
  }

  // Reference form: one key at a time.
  FLASH_HD bool keep(int sequence, int head, int i, int j) const {
    const int in_group = j % kGroup;
    const Philox4 random = bytes(sequence, head, i, j / kGroup, (in_group % 8) / 2);
    return keep_byte(random, in_group / 8, in_group % 2);
  }
};

}  // namespace flash
