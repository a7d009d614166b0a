// Tile sizes of the Hopper class: the only place where they stand.
#pragma once

namespace flash::cuda::sm90 {

enum class PingPong { kOff, kOn };

template <int kConsumers_, int kBlockN_, int kStages_, int kQStages_, PingPong kPingPong_>
struct FwdShape {
  static constexpr int kConsumers = kConsumers_;    // warpgroups that compute, 64 query rows each
  static constexpr int kBlockM = 64 * kConsumers_;  // query rows of a tile
  static constexpr int kBlockN = kBlockN_;          // keys of a step
  static constexpr int kStages = kStages_;          // of K, and of V
  static constexpr int kQStages = kQStages_;
  static constexpr PingPong kPingPong = kPingPong_;
};

template <int kDim, int kDimV>
struct FwdConfig;

template <>
struct FwdConfig<64, 64> {
  using Shape = FwdShape<3, 128, 2, 2, PingPong::kOn>;
  using ModifiedShape = Shape;
};
template <>
struct FwdConfig<96, 96> {
  using Shape = FwdShape<2, 128, 2, 2, PingPong::kOn>;
  using ModifiedShape = Shape;
};
template <>
struct FwdConfig<128, 128> {
  using Shape = FwdShape<2, 128, 2, 2, PingPong::kOn>;
  using ModifiedShape = Shape;
};
template <>
struct FwdConfig<192, 128> {
  using Shape = FwdShape<2, 96, 2, 1, PingPong::kOn>;
  using ModifiedShape = Shape;
};
template <>
struct FwdConfig<192, 192> {
  using Shape = FwdShape<2, 96, 2, 1, PingPong::kOn>;
  using ModifiedShape = Shape;
};
template <>
struct FwdConfig<256, 256> {
  using Shape = FwdShape<2, 80, 2, 1, PingPong::kOn>;
  using ModifiedShape = Shape;
};

}  // namespace flash::cuda::sm90
