// Tile sizes of the Hopper class: the only place where they stand.
//
// Shared memory holds kQStages of Q (kBlockM rows) and kStages of K and V each (kBlockN keys).
// Registers: two consumers have 232 a thread, three 160; S takes kBlockN / 2, P kBlockN / 4 and O
// kDimV / 2 of them. docs/hopper.md has what was measured.
#pragma once

namespace flash::cuda::sm90 {

enum class PingPong { kOff, kOn };

template <int kConsumers_, int kBlockN_, int kStages_, int kQStages_,
          PingPong kPingPong_ = PingPong::kOn>
struct FwdShape {
  static constexpr int kConsumers = kConsumers_;    // warpgroups that compute, 64 query rows each
  static constexpr int kBlockM = 64 * kConsumers_;  // query rows of a tile
  static constexpr int kBlockN = kBlockN_;          // keys of a step
  static constexpr int kStages = kStages_;          // of K, and of V
  static constexpr int kQStages = kQStages_;        // two: O leaves through its tile's Q
  static constexpr PingPong kPingPong = kPingPong_;
};

// Calls with fewer keys take ShortShape: a tile of a causal mask wastes half a step of keys.
constexpr int kShort = 2048;

// ModifiedShape serves softcap and scales that are not positive.
template <int kDim, int kDimV>
struct FwdConfig;

template <>
struct FwdConfig<64, 64> {
  using Shape = FwdShape<2, 192, 2, 2>;
  using ShortShape = FwdShape<2, 128, 2, 2>;
  using ModifiedShape = ShortShape;
};
template <>
struct FwdConfig<96, 96> {
  using Shape = FwdShape<2, 128, 2, 1>;
  using ShortShape = Shape;
  using ModifiedShape = Shape;
};
template <>
struct FwdConfig<128, 128> {
  using Shape = FwdShape<2, 176, 2, 1>;
  using ShortShape = FwdShape<2, 128, 2, 1>;
  using ModifiedShape = ShortShape;
};
template <>
struct FwdConfig<192, 128> {
  using Shape = FwdShape<2, 96, 2, 1>;
  using ShortShape = Shape;
  using ModifiedShape = Shape;
};
template <>
struct FwdConfig<192, 192> {
  using Shape = FwdShape<2, 96, 2, 1>;
  using ShortShape = Shape;
  using ModifiedShape = Shape;
};
template <>
struct FwdConfig<256, 256> {
  using Shape = FwdShape<2, 80, 2, 1>;
  using ShortShape = Shape;
  using ModifiedShape = Shape;
};

}  // namespace flash::cuda::sm90
