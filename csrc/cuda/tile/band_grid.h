// The order in which a mainloop's blocks start. Neighbours work on different heads of one band,
// whose tensors fit into L2 together; within a band the blocks of a head start in order.
#pragma once

#include "../../common/host_device.h"

#include <cstdint>

namespace flash::cuda {

// Bytes of the heads of a band: a good half of an H200's 60 MB of L2.
constexpr int64_t kBandBytes = int64_t{32} << 20;

struct BandGrid {
  unsigned blocks;  // of a head
  unsigned band;    // heads whose blocks are ordered together

  static BandGrid of(int blocks, int64_t heads, int64_t head_bytes) {
    const int64_t band = kBandBytes / max_of<int64_t>(head_bytes, 1);
    return {static_cast<unsigned>(blocks),
            static_cast<unsigned>(clamp_to<int64_t>(band, 1, heads))};
  }

  // Which of its head's blocks a thread block is, in the order of their start, and which (sequence,
  // head). 32-bit unsigned throughout (a grid has at most 2^31 blocks): a 64-bit division here
  // costs every block hundreds of cycles before its first copy.
  __device__ __forceinline__ void locate(int num_sequences, int num_heads, int& nth, int& head,
                                         int& batch) const {
    const unsigned per_sequence = static_cast<unsigned>(num_heads);
    const unsigned heads = static_cast<unsigned>(num_sequences) * per_sequence;
    const unsigned first = blockIdx.x / (band * blocks) * band;
    const unsigned in_band = blockIdx.x - first * blocks;
    const unsigned width = min_of(band, heads - first);
    nth = static_cast<int>(in_band / width);
    const unsigned at = first + in_band % width;
    batch = static_cast<int>(at / per_sequence);
    head = static_cast<int>(at % per_sequence);
  }
};

}  // namespace flash::cuda
