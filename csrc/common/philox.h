// Philox4x32 with 7 rounds (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flash {

struct Philox4 {
  uint32_t word[4];
};

FLASH_HD Philox4 philox4x32_7(Philox4 counter, uint32_t key0, uint32_t key1) {
  constexpr uint32_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  Philox4 c = counter;
  for (int round = 0; round < 7; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kMul0) * c.word[0];
    const uint64_t p1 = static_cast<uint64_t>(kMul1) * c.word[2];
    c = {{static_cast<uint32_t>(p1 >> 32) ^ c.word[1] ^ key0, static_cast<uint32_t>(p1),
          static_cast<uint32_t>(p0 >> 32) ^ c.word[3] ^ key1, static_cast<uint32_t>(p0)}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return c;
}

// The splitmix64 step: a bijection of 64-bit words whose outputs for neighbouring inputs share no
// pattern (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
FLASH_HD uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

}  // namespace flash
