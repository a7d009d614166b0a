// From a problem to a kernel: what a call needs, what each kernel declares, and the first kernel
// that declares it all. The table itself is generated from kernels.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "params.h"

namespace flash {

enum class Pass : int { kFwd, kBwd, kProbs, kAppend, kRotary };

// What a call can ask for beyond the plain product. Names are those of kernels.py and of messages.
enum Feature : uint32_t {
  kVarlen = 1u << 0,
  kGqa = 1u << 1,
  kWindow = 1u << 2,  // causal included
  kSoftcap = 1u << 3,
  kBias = 1u << 4,
  kBoolMask = 1u << 5,
  kAlibi = 1u << 6,
  kSinks = 1u << 7,
  kDropout = 1u << 8,
  kSeqused = 1u << 9,
  kPaged = 1u << 10,
  kSplits = 1u << 11,
  kHeadDimV = 1u << 12,  // head_dim_v differs from head_dim
  kDeterministic = 1u << 13,
  kDlse = 1u << 14,
  kDbias = 1u << 15,
  kDalibi = 1u << 16,
  kDsinks = 1u << 17,
  kLeftpad = 1u << 18,
};
constexpr int kNumFeatures = 19;

struct Problem {
  Pass pass;
  DType dtype;
  int head_dim;
  int head_dim_v;
  uint32_t features;
  int64_t rows = 0;  // of queries that share a key head, at most: seqlen_q num_heads / num_heads_k
};

struct KernelEntry {
  const char* name;
  const char* arch;  // as FLASH_EXT_ARCHS names it
  Pass pass;
  DType dtype;
  int head_dim;    // largest that it serves
  int head_dim_v;  // likewise
  uint32_t features;
  int most_rows;      // Problem::rows that it is meant for; 0: any. A call that asks for splits may
                      // have more
  int row_alignment;  // bytes that every row of q, k, v (and dout, out) must start at a multiple of
  bool (*runs_here)();                     // the current device has what the code was compiled for
  size_t (*workspace)(const AttnParams&);  // bytes, 16-byte aligned; the kernel initialises them
  void (*launch)(const AttnParams&, const Launch&);  // the params struct of its pass
};

// Why an architecture declares a feature nowhere.
struct SkipReason {
  const char* arch;
  uint32_t feature;
  const char* reason;
};

// Generated; kernels in order of preference.
extern const KernelEntry kKernelTable[];
extern const int kKernelTableSize;
extern const SkipReason kSkipReasons[];
extern const int kSkipReasonsSize;

const char* pass_name(Pass pass);
const char* dtype_name(DType dtype);
std::string feature_names(uint32_t features);

// Whether `entry` serves `problem`: the one rule; why_not puts it into words.
bool serves(const KernelEntry& entry, const Problem& problem);

// Why `entry`, of the problem's pass, does not serve it; empty when it does.
std::string why_not(const KernelEntry& entry, const Problem& problem);

// The first entry that serves the problem, or null.
const KernelEntry* find_kernel(const Problem& problem);

// What is required and why no entry serves it.
std::string not_supported(const Problem& problem);

// One line an entry of the problem's pass: serves, or why not.
std::string explain(const Problem& problem);

// The table as the elements of a JSON list.
std::string table_json();

}  // namespace flash
