// Block numbers from the mask: which tiles a mainloop walks, and which of them are edges.
#pragma once

#include "mask.h"

namespace flash {

// Blocks of `block` elements that touch [range.begin, range.end).
FLASH_HD Range blocks_of(Range range, int block) {
  if (range.empty()) return {0, 0};
  return {range.begin / block, ceil_div(range.end, block)};
}

// The elements of one block.
FLASH_HD Range block_range(int index, int block) { return {index * block, (index + 1) * block}; }

// The blocks of split `index` out of `count`: contiguous runs of equal length, the last ones
// shorter or empty. Depends on this sequence's own blocks only.
FLASH_HD Range split_blocks(Range blocks, int index, int count) {
  if (count <= 1) return blocks;
  const int per_split = ceil_div(blocks.size(), count);
  const int begin = blocks.begin + index * per_split;
  return intersect({begin, begin + per_split}, blocks);
}

// The range counted from `origin`.
FLASH_HD Range shifted(Range range, int origin) {
  return {range.begin - origin, range.end - origin};
}

}  // namespace flash
