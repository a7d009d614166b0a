// Tile sizes of the mma.sync class: the only place where they stand.
//
// A row is chosen by the architecture's shared memory and the head-dim bucket. Shared memory is Q
// (kBlockM rows) and two stages of K and V (kBlockN rows each): 2 kDim (kBlockM + 4 kBlockN) bytes.
#pragma once

namespace flash::cuda {

template <int kBlockM_, int kBlockN_, int kWarps_, int kMinBlocks_, bool kQInRegs_>
struct TileShape {
  static constexpr int kBlockM = kBlockM_;      // query rows of a block
  static constexpr int kBlockN = kBlockN_;      // keys of a step
  static constexpr int kWarps = kWarps_;        // rows are split over them
  static constexpr int kMinBlocks = kMinBlocks_;  // blocks that share a multiprocessor
  static constexpr bool kQInRegs = kQInRegs_;   // Q stays in registers over the whole loop
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpRows = kBlockM / kWarps;
};

// kSmemKB: what a block may use; 99 (sm86, sm89, sm120), 163 (sm80, sm87), 227 (sm90, sm100).
template <int kDim, int kSmemKB>
struct FwdConfig;

template <int kSmemKB>
struct FwdConfig<64, kSmemKB> {
  using Shape = TileShape<128, 64, 4, 3, true>;
};
template <int kSmemKB>
struct FwdConfig<96, kSmemKB> {
  using Shape = TileShape<128, 64, 4, 2, false>;
};
template <int kSmemKB>
struct FwdConfig<128, kSmemKB> {
  using Shape = TileShape<128, 64, 4, kSmemKB >= 227 ? 2 : 1, false>;
};
template <int kSmemKB>
struct FwdConfig<192, kSmemKB> {
  using Shape = TileShape<128, 64, 8, 1, false>;
};
template <>
struct FwdConfig<192, 99> {
  using Shape = TileShape<64, 32, 4, 1, false>;
};
template <int kSmemKB>
struct FwdConfig<256, kSmemKB> {
  using Shape = TileShape<128, 64, 8, 1, false>;
};
template <>
struct FwdConfig<256, 163> {
  using Shape = TileShape<128, 32, 8, 1, false>;
};
template <>
struct FwdConfig<256, 99> {
  using Shape = TileShape<64, 32, 4, 1, false>;
};

}  // namespace flash::cuda
