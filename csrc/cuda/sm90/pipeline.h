// The forward's pipeline: what a block keeps in shared memory, and the producer that fills it.
#pragma once

#include "../../params.h"

#include "../primitives/mbarrier.h"
#include "../primitives/tma.h"

#include "config.h"
#include "fragment.h"
#include "work.h"

namespace flash::cuda::sm90 {

// Plain: the scaled product. Modified: softcap, or a scale that is not positive.
enum class ScoreKind { kPlain, kModified };

template <typename In_, int kDim_, int kDimV_, typename Shape_, ScoreKind kScore_>
struct FwdTraits {
  using In = In_;
  using Shape = Shape_;
  static constexpr int kDim = kDim_;    // of q and k, padded
  static constexpr int kDimV = kDimV_;  // of v and out
  static constexpr ScoreKind kScore = kScore_;
  static constexpr int kConsumers = Shape::kConsumers;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  // 65536 registers in all; 168 (or 128) a thread at the start, in multiples of 8.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  using QTile = SmemTile<Shape::kBlockM, kDim>;
  using KTile = SmemTile<Shape::kBlockN, kDim>;
  using VTile = SmemTile<Shape::kBlockN, kDimV>;
};

// Uses of a ring of stages are counted; from the count come the stage and the parity of its turn.
template <int kStages>
__device__ __forceinline__ int stage_of(unsigned count) {
  return count % kStages;
}
template <int kStages>
__device__ __forceinline__ uint32_t parity_of(unsigned count) {
  return count / kStages & 1;
}

template <typename Traits>
struct FwdStorage {
  using Shape = typename Traits::Shape;
  // A consumer reads a tile's entry until it has stored the tile; the producer is ahead by the
  // stages of Q, and one tile of a single key block may still wait for its store.
  static constexpr int kTiles = 4;
  static_assert(kTiles >= Shape::kQStages + 2, "see above");
  alignas(1024) char q[Shape::kQStages][Traits::QTile::kBytes];
  alignas(1024) char k[Shape::kStages][Traits::KTile::kBytes];
  alignas(1024) char v[Shape::kStages][Traits::VTile::kBytes];
  Tile tile[kTiles];
  Tile next;  // the producer's
  uint64_t q_full[Shape::kQStages], q_empty[Shape::kQStages];
  uint64_t k_full[Shape::kStages], k_empty[Shape::kStages];
  uint64_t v_full[Shape::kStages], v_empty[Shape::kStages];
};

constexpr float kLog2e = 1.4426950408889634f;

struct FwdMaps {
  CUtensorMap q, k, v, o;
  bool stores_out;  // out's rows fit a map
  float exp_scale;  // from the unit of scores to powers of two
};

__device__ __forceinline__ uint32_t smem_of(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- producer ----------------------------------------------------------------------------------

// One thread. Loads go out in the order of use: Q, K0, K1, V0, K2, V1, ..., where K1 may be the
// first of the next tile.
template <typename Traits>
class FwdProducer {
  using Shape = typename Traits::Shape;
  using Storage = FwdStorage<Traits>;

 public:
  __device__ __forceinline__ FwdProducer(const FwdParams& params, const FwdMaps& tensor_maps,
                                         const Schedule& schedule, Storage& storage)
      : p(params), maps(tensor_maps), schedule_(schedule), smem(storage) {}

  __device__ __forceinline__ void run() {
    upcoming = blockIdx.x;
    find_next();
    if (!open_tile()) return;
    for (;;) {
      // The next tile is looked up behind the first loads of this one: it may take microseconds.
      if (n_block > first_block) load_step();
      find_next();
#pragma unroll 1
      while (n_block > first_block) load_step();
      const Keys last = keys;
      const int last_block = n_block;
      if (Shape::kQStages == 1 || smem.next.head < 0) load_v(last, last_block);
      if (!open_tile()) return;
      if (Shape::kQStages > 1) load_v(last, last_block);
    }
  }

 private:
  // Where the keys of a tile's head are.
  struct Keys {
    int first_row;
    int head;
    int batch;
  };

  // Past the rows of short sequences, whose tiles hold nothing. The tile waits in shared memory:
  // this warp has few registers.
  __device__ __forceinline__ void find_next() {
    Tile& next = smem.next;
    do {
      const unsigned index = upcoming;
      if (index < schedule_.tiles) upcoming = schedule_.after(index);
      schedule_.template locate<Shape::kBlockM, Shape::kBlockN>(p, index, next);
    } while (next.head >= 0 && next.first_row >= next.seqlen_q);
  }

  // Loads the next tile's Q and its first K. The end of the list takes the place of a Q.
  __device__ __forceinline__ bool open_tile() {
    const Tile& next = smem.next;
    const int stage = stage_of<Shape::kQStages>(q_count);
    const uint32_t full = smem_of(&smem.q_full[stage]);
    mbarrier_wait(smem_of(&smem.q_empty[stage]), parity_of<Shape::kQStages>(q_count) ^ 1);
    smem.tile[q_count++ % Storage::kTiles] = next;
    if (next.head < 0) {
      mbarrier_arrive(full);
      return false;
    }
    mbarrier_arrive_expect(full, Traits::QTile::kBytes);
    load<typename Traits::QTile>(smem.q[stage], &maps.q, full, next.offset_q + next.first_row,
                                 next.head, p.side_q.cu_seqlens ? 0 : next.batch);
    keys = {next.offset_k, next.head_k, p.side_k.cu_seqlens ? 0 : next.batch};
    first_block = next.first_block;
    n_block = next.last_block;
    load_k();
    return true;
  }

  __device__ __forceinline__ void load_step() {
    const int n = n_block--;
    load_k();
    load_v(keys, n);
  }
  __device__ __forceinline__ void load_k() {
    const int stage = stage_of<Shape::kStages>(k_count);
    const uint32_t full = smem_of(&smem.k_full[stage]);
    mbarrier_wait(smem_of(&smem.k_empty[stage]), parity_of<Shape::kStages>(k_count++) ^ 1);
    mbarrier_arrive_expect(full, Traits::KTile::kBytes);
    load<typename Traits::KTile>(smem.k[stage], &maps.k, full,
                                 keys.first_row + n_block * Shape::kBlockN, keys.head, keys.batch);
  }
  __device__ __forceinline__ void load_v(Keys at, int n) {
    const int stage = stage_of<Shape::kStages>(v_count);
    const uint32_t full = smem_of(&smem.v_full[stage]);
    mbarrier_wait(smem_of(&smem.v_empty[stage]), parity_of<Shape::kStages>(v_count++) ^ 1);
    mbarrier_arrive_expect(full, Traits::VTile::kBytes);
    load<typename Traits::VTile>(smem.v[stage], &maps.v, full, at.first_row + n * Shape::kBlockN,
                                 at.head, at.batch);
  }

  template <typename Target>
  __device__ __forceinline__ void load(char* target, const CUtensorMap* map, uint32_t full, int row,
                                       int head, int batch) {
#pragma unroll
    for (int block = 0; block < Target::kBlocks; ++block)
      tma_load(smem_of(target) + block * Target::kBlockBytes, map, full, block * kBlockDim, row,
               head, batch);
  }

  const FwdParams& p;
  const FwdMaps& maps;
  const Schedule& schedule_;
  Storage& smem;
  unsigned upcoming;  // claimed one tile ahead
  Keys keys{};
  int n_block = 0, first_block = 0;  // the block whose K was loaded last; the tile's last one
  unsigned q_count = 0, k_count = 0, v_count = 0;
};

}  // namespace flash::cuda::sm90
