// Tile sizes of the mma.sync class: the only place where they stand. The forward's come first, the
// backward's after them.
//
// A row is chosen by the head-dim bucket and by what a block may use of shared memory: 99 KB (sm86,
// sm89, sm120), 163 (sm80, sm87) or 227 (sm90, sm100). Shared memory holds Q (kBlockM rows) and two
// stages of K and V (kBlockN rows each): 2 kDim (kBlockM + 4 kBlockN) bytes. Figures are TFLOP/s on
// an H200, bf16, full mask, 16k tokens, at seqlen 1k / 4k / 16k; docs/tile.md has the log.
#pragma once

namespace flash::cuda {

// Whether the product of O with its correction is skipped where no row maximum of the warp moved.
enum class Rescale { kAlways, kWhenMoved };

template <int kBlockM_, int kBlockN_, int kWarps_, int kMinBlocks_,
          Rescale kRescale_ = Rescale::kWhenMoved>
struct TileShape {
  static constexpr int kBlockM = kBlockM_;        // query rows of a block
  static constexpr int kBlockN = kBlockN_;        // keys of a step
  static constexpr int kWarps = kWarps_;          // rows are split over them
  static constexpr int kMinBlocks = kMinBlocks_;  // blocks that share a multiprocessor
  static constexpr Rescale kRescale = kRescale_;
  static constexpr int kWarpRows = kBlockM / kWarps;
};

// Shape serves the plain scaled product, ModifiedShape scores that softcap, bias or ALiBi change:
// where those need registers that the plain step does not have to spare, with fewer keys a step.
template <int kDim, int kSmemKB>
struct FwdConfig;

// 32 rows a warp: every key that is read from shared memory serves two row blocks. 128 keys against
// 64: 295 / 323 / 328 against 287 / 321 / 329, and causal 1k at least as fast.
template <int kSmemKB>
struct FwdConfig<64, kSmemKB> {
  using Shape = TileShape<128, 128, 4, 2>;
  using ModifiedShape = TileShape<128, 64, 4, 2>;
};
template <>
struct FwdConfig<64, 99> {
  using Shape = TileShape<128, 64, 4, 2>;
  using ModifiedShape = Shape;
};

template <int kSmemKB>
struct FwdConfig<96, kSmemKB> {
  using Shape = TileShape<128, 64, 4, 2>;
  using ModifiedShape = TileShape<128, 32, 4, 2>;
};
template <>
struct FwdConfig<96, 99> {
  using Shape = TileShape<64, 64, 4, 1>;
  using ModifiedShape = Shape;
};

// Two blocks of 96 KB fill 227 KB: 337 / 368 / 368; with 32 keys 310 / 348 / 342. 163 KB hold two
// blocks only with 32 keys.
template <int kSmemKB>
struct FwdConfig<128, kSmemKB> {
  using Shape = TileShape<128, 64, 4, 2>;
  using ModifiedShape = TileShape<128, 32, 4, 2>;
};
template <>
struct FwdConfig<128, 163> {
  using Shape = TileShape<128, 32, 4, 2>;
  using ModifiedShape = Shape;
};
template <>
struct FwdConfig<128, 99> {
  using Shape = TileShape<64, 32, 4, 2>;
  using ModifiedShape = Shape;
};

// From here on one block a multiprocessor, eight warps of 16 rows. The branch around the product
// with O costs more than it saves, because the compiler schedules a step as one piece without it:
// 259 / 290 / 297 against 250 / 278 / 292.
template <int kSmemKB>
struct FwdConfig<192, kSmemKB> {
  using Shape = TileShape<128, 64, 8, 1, Rescale::kAlways>;
  using ModifiedShape = Shape;
};
template <>
struct FwdConfig<192, 99> {
  using Shape = TileShape<64, 32, 4, 1, Rescale::kAlways>;
  using ModifiedShape = Shape;
};

// 289 / 313 / 318; with the branch 286 / 313 / 323.
template <int kSmemKB>
struct FwdConfig<256, kSmemKB> {
  using Shape = TileShape<128, 64, 8, 1, Rescale::kAlways>;
  using ModifiedShape = Shape;
};
template <>
struct FwdConfig<256, 163> {
  using Shape = TileShape<128, 32, 8, 1, Rescale::kAlways>;
  using ModifiedShape = Shape;
};
template <>
struct FwdConfig<256, 99> {
  using Shape = TileShape<64, 32, 4, 1, Rescale::kAlways>;
  using ModifiedShape = Shape;
};

// Decoding: bytes in flight are what counts. A warp's ring has kStages stages of kKeys keys of K
// and V; two blocks share a multiprocessor where their rings fit, so that one's copies fill the
// time in which the other's warps merge.
template <int kDim, int kSmemKB>
struct DecodeConfig {
  static constexpr int kKeys = 16;                   // of a warp's tile
  static constexpr int kWarps = kDim > 128 ? 2 : 4;  // keys are split over them
  static constexpr int kStageBytes = 4 * kWarps * kKeys * kDim;
  static constexpr int kOtherBytes = 10 << 10;  // Q of 16 or 32 rows, sums
  static constexpr int stages(int blocks) {
    return ((kSmemKB << 10) / blocks - (1 << 10) - kOtherBytes) / kStageBytes;
  }
  static constexpr int kMinBlocks = stages(2) >= 3 ? 2 : 1;
  static constexpr int kStages = stages(kMinBlocks) > 6 ? 6 : stages(kMinBlocks);
  static constexpr int kLeastUnits = 2;  // a block's share of kWarps * kKeys keys, at least
  static_assert(kStages >= 2, "a stage is filled while another is read");
};

// The backward. A block owns kBlockN keys and walks over blocks of kBlockM query rows; a group of
// kDimParts warps owns kWarpKeys of the keys and shares out the columns of their dK and dV. A
// warp makes scores kSubM rows at a time. dQ of a step is shared out over the warps as
// kDqRowParts parts of its rows, the rest of the warps over its columns.
//
// Shared memory holds K, V, kStages of Q and dO, dS, and P where a group has more than one warp
// (both twice with three stages): 4 kDim (kBlockN + kStages kBlockM) + 2 kBlockM kBlockN (1, 2 or
// 4) bytes and 16 kBlockM of row values.
template <int kBlockM_, int kBlockN_, int kSubM_, int kWarpKeys_, int kDimParts_, int kDqRowParts_,
          int kStages_, int kMinBlocks_, int kDqChunks_ = 1>
struct BwdShape {
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kSubM = kSubM_;
  static constexpr int kWarpKeys = kWarpKeys_;
  static constexpr int kDimParts = kDimParts_;
  static constexpr int kWarps = kBlockN / kWarpKeys * kDimParts;
  static constexpr int kDqRowParts = kDqRowParts_;
  static constexpr int kDqColParts = kWarps / kDqRowParts;
  // Columns of dQ that a warp makes at a time: two units of 16 where a warp has four.
  static constexpr int kDqChunks = kDqChunks_;
  static constexpr int kStages = kStages_;  // three: one barrier a step
  static constexpr int kScoreStages = kStages == 3 ? 2 : 1;
  static constexpr int kMinBlocks = kMinBlocks_;
  static_assert(kDimParts == 1 ? kBlockM % kSubM == 0 : kBlockM == kSubM * kDimParts,
                "a group of warps makes each score once");
};

template <int kDim, int kSmemKB>
struct BwdConfig;

// One warp holds all of dK and dV of its keys, so that P and dS feed those products from
// registers.
template <int kSmemKB>
struct BwdConfig<64, kSmemKB> {
  using Shape = BwdShape<64, 128, 32, 32, 1, 2, 2, 2>;
  using ModifiedShape = BwdShape<64, 128, 16, 32, 1, 2, 2, 2>;
};
template <>
struct BwdConfig<64, 227> {
  using Shape = BwdShape<64, 128, 32, 32, 1, 2, 3, 2>;
  using ModifiedShape = BwdShape<64, 128, 16, 32, 1, 2, 3, 2>;
};
template <>
struct BwdConfig<64, 99> {
  using Shape = BwdShape<64, 128, 32, 32, 1, 2, 2, 1>;
  using ModifiedShape = BwdShape<64, 128, 16, 32, 1, 2, 2, 1>;
};

template <int kSmemKB>
struct BwdConfig<96, kSmemKB> {
  using Shape = BwdShape<64, 128, 32, 32, 2, 4, 2, 1>;
  using ModifiedShape = BwdShape<32, 64, 16, 32, 2, 2, 2, 2>;
};
template <>
struct BwdConfig<96, 99> {
  using Shape = BwdShape<64, 64, 32, 32, 2, 2, 2, 1>;
  using ModifiedShape = BwdShape<32, 64, 16, 32, 2, 2, 2, 1>;
};

template <int kSmemKB>
struct BwdConfig<128, kSmemKB> {
  using Shape = BwdShape<64, 128, 32, 32, 2, 2, 2, 1>;
  using ModifiedShape = BwdShape<32, 128, 16, 32, 2, 2, 2, 1>;
};
template <>
struct BwdConfig<128, 227> {
  using Shape = BwdShape<64, 128, 32, 32, 2, 2, 3, 1>;
  using ModifiedShape = BwdShape<32, 128, 16, 32, 2, 2, 3, 1>;
};
template <>
struct BwdConfig<128, 99> {
  using Shape = BwdShape<32, 64, 16, 32, 2, 2, 2, 1>;
  using ModifiedShape = Shape;
};

template <int kSmemKB>
struct BwdConfig<192, kSmemKB> {
  using Shape = BwdShape<64, 64, 16, 32, 4, 2, 2, 1>;
  using ModifiedShape = Shape;
};
template <>
struct BwdConfig<192, 99> {
  using Shape = BwdShape<32, 64, 16, 16, 2, 2, 1, 1>;
  using ModifiedShape = Shape;
};

template <int kSmemKB>
struct BwdConfig<256, kSmemKB> {
  using Shape = BwdShape<64, 64, 16, 32, 4, 2, 2, 1, 2>;
  using ModifiedShape = Shape;
};
template <>
struct BwdConfig<256, 163> {
  using Shape = BwdShape<64, 64, 16, 32, 4, 2, 1, 1, 2>;
  using ModifiedShape = Shape;
};
template <>
struct BwdConfig<256, 99> {
  using Shape = BwdShape<32, 32, 16, 16, 2, 2, 1, 1>;
  using ModifiedShape = Shape;
};

// The backward's side kernels, which recompute scores without dK and dV (row normalisers, a
// broadcast dbias): 16 keys a warp, small enough for 99 KB at head_dim 256.
struct ScanShape {
  static constexpr int kBlockM = 32;
  static constexpr int kBlockN = 64;
  static constexpr int kWarpKeys = 16;
  static constexpr int kWarps = kBlockN / kWarpKeys;
};

}  // namespace flash::cuda
