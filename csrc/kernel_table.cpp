#include "kernel_table.h"

#include <sstream>

namespace flash {
namespace {

constexpr const char* kFeatureNames[kNumFeatures] = {
    "varlen", "gqa",     "window",        "softcap",    "bias",       "bool_mask",  "alibi",
    "sinks",  "dropout", "seqused",       "page_table", "num_splits", "head_dim_v", "deterministic",
    "dlse",   "dbias",   "dalibi_slopes", "dsinks",     "leftpad_k"};

std::string feature_list(uint32_t features, const char* before, const char* after) {
  std::string text;
  for (int bit = 0; bit < kNumFeatures; ++bit) {
    if (!(features >> bit & 1u)) continue;
    if (!text.empty()) text += ", ";
    text += before + std::string(kFeatureNames[bit]) + after;
  }
  return text;
}

bool has_too_many_rows(const KernelEntry& entry, const Problem& problem) {
  return entry.most_rows > 0 && problem.rows > entry.most_rows && !(problem.features & kSplits);
}

void describe(std::ostream& out, const Problem& problem) {
  out << pass_name(problem.pass) << ", " << dtype_name(problem.dtype) << ", head_dim "
      << problem.head_dim << ", head_dim_v " << problem.head_dim_v;
  if (problem.features) out << ", " << feature_names(problem.features);
}

}  // namespace

const char* pass_name(Pass pass) {
  constexpr const char* kNames[] = {"forward", "backward", "probs", "append", "rotary"};
  return kNames[static_cast<int>(pass)];
}

const char* dtype_name(DType dtype) {
  constexpr const char* kNames[] = {"none", "bool", "float16", "bfloat16", "float32", "float64"};
  return kNames[static_cast<int>(dtype)];
}

std::string feature_names(uint32_t features) { return feature_list(features, "", ""); }

std::string why_not(const KernelEntry& entry, const Problem& problem) {
  std::ostringstream reason;
  if (entry.dtype != problem.dtype) {
    reason << "is for " << dtype_name(entry.dtype);
  } else if (entry.head_dim < problem.head_dim || entry.head_dim_v < problem.head_dim_v) {
    reason << "serves head_dim up to " << entry.head_dim << ", head_dim_v up to "
           << entry.head_dim_v;
  } else if (problem.features & ~entry.features) {
    reason << "lacks " << feature_names(problem.features & ~entry.features);
  } else if (has_too_many_rows(entry, problem)) {
    reason << "is for up to " << entry.most_rows << " query rows a key head";
  } else if (!entry.runs_here()) {
    reason << "is not for this processor (instructions or shared memory)";
  }
  return reason.str();
}

bool serves(const KernelEntry& entry, const Problem& problem) {
  return entry.pass == problem.pass && entry.dtype == problem.dtype &&
         entry.head_dim >= problem.head_dim && entry.head_dim_v >= problem.head_dim_v &&
         !(problem.features & ~entry.features) && !has_too_many_rows(entry, problem) &&
         entry.runs_here();
}

const KernelEntry* find_kernel(const Problem& problem) {
  for (int i = 0; i < kKernelTableSize; ++i)
    if (serves(kKernelTable[i], problem)) return &kKernelTable[i];
  return nullptr;
}

std::string explain(const Problem& problem) {
  std::ostringstream text;
  describe(text << "required: ", problem);
  const KernelEntry* chosen = find_kernel(problem);
  text << "\nserves: " << (chosen ? chosen->name : "no kernel");
  for (int i = 0; i < kKernelTableSize; ++i) {
    const KernelEntry& entry = kKernelTable[i];
    if (entry.pass != problem.pass || &entry == chosen) continue;
    const std::string reason = why_not(entry, problem);
    text << "\nnot " << entry.name << ": "
         << (reason.empty() ? "would serve, but an earlier entry is preferred" : reason);
  }
  return text.str();
}

std::string not_supported(const Problem& problem) {
  std::ostringstream text;
  describe(text << "no kernel of this build serves ", problem);
  bool has_pass = false, has_dtype = false;
  std::string dtypes;  // of the pass
  for (int i = 0; i < kKernelTableSize; ++i) {
    const KernelEntry& entry = kKernelTable[i];
    if (entry.pass != problem.pass) continue;
    has_pass = true;
    const std::string name = dtype_name(entry.dtype);
    if (dtypes.find(name) == std::string::npos) dtypes += (dtypes.empty() ? "" : ", ") + name;
    if (entry.dtype != problem.dtype) continue;
    has_dtype = true;
    text << "; " << entry.name << " " << why_not(entry, problem);
  }
  if (!has_pass)
    text << "; it has no " << pass_name(problem.pass)
         << " kernels for this device: run that call on CPU tensors";
  else if (!has_dtype)
    text << "; allowed here are " << dtypes << ": convert q, k and v, or run under torch.autocast";
  for (int i = 0; i < kSkipReasonsSize; ++i) {
    const SkipReason& skip = kSkipReasons[i];
    if (problem.features & skip.feature)
      text << "; " << feature_names(skip.feature) << " on " << skip.arch << ": " << skip.reason;
  }
  return text.str();
}

std::string table_json() {
  std::ostringstream json;
  for (int i = 0; i < kKernelTableSize; ++i) {
    const KernelEntry& entry = kKernelTable[i];
    json << (i ? ",\n " : "") << "{\"name\": \"" << entry.name << "\", \"arch\": \"" << entry.arch
         << "\", \"pass\": \"" << pass_name(entry.pass) << "\", \"dtype\": \""
         << dtype_name(entry.dtype) << "\", \"head_dim\": " << entry.head_dim
         << ", \"head_dim_v\": " << entry.head_dim_v << ", \"features\": ["
         << feature_list(entry.features, "\"", "\"") << "]}";
  }
  return json.str();
}

}  // namespace flash
