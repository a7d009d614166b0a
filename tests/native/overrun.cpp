// A vector access at element `at` of a block of 64 floats, for the control of the sanitizer tests:
// one that reaches past either end must be reported, one inside must not.
//
//     overrun load|store at
#include <cstdlib>
#include <cstring>

#define FLASH_CPU_ISA isa_control
#include "cpu/vec.h"

int main(int count, char** arguments) {
  using namespace flash::cpu;
  if (count != 3) return 2;
  const int at = std::atoi(arguments[2]);
  float* block = static_cast<float*>(std::calloc(64, sizeof(float)));
  Vec<float> v = splat(1.0f);
  if (std::strcmp(arguments[1], "load") == 0)
    v = load(block + at);
  else
    store(block + at, v);
  const bool expected = v[0] == 0 || block[at] == 1;
  std::free(block);
  return expected ? 0 : 3;
}
