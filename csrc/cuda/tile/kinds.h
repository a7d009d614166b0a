// What changes the registers or the loop of a mainloop, and so is compiled apart.
#pragma once

#include "../../params.h"

namespace flash::cuda {

enum class ScoreKind { kPlain, kModified };  // plain: the scaled product, nothing else
enum class DropoutKind { kOff, kOn };
enum class KeysKind { kRows, kPages };

// Whether the score is the scaled product and nothing else.
FLASH_HD bool is_plain(const AttnParams& p) {
  return p.softcap == 0 && !p.bias.data && !p.alibi_slopes.data && p.softmax_scale > 0;
}

}  // namespace flash::cuda
