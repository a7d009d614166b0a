// The CPU library: schemas, the CPU implementations, torch's threads.
#include <torch/csrc/stable/ops.h>

#include "api.h"
#include "kernel_table.h"

namespace flash {

DeviceScope::DeviceScope(const torch::stable::Tensor&) {
  launch.parallel_for = [](int64_t begin, int64_t end, Launch::Body body, void* context) {
    constexpr int64_t kGrain = 1;  // a task is a tile row or more: worth a thread each
    STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, kGrain, body, context));
  };
}

DeviceScope::~DeviceScope() = default;

}  // namespace flash

namespace {

// The tables of every loaded library: this one's, then those that GPU libraries register.
std::string& all_tables() {
  static std::string tables = flash::table_json();
  return tables;
}

std::string kernels() { return "[" + all_tables() + "]"; }

void register_kernels(std::string rows) { all_tables() += ",\n " + rows; }

}  // namespace

STABLE_TORCH_LIBRARY(flash, m) {
  m.def(flash::kAttnSchema);
  m.def(flash::attn_backward_schema().c_str());
  m.def(flash::kAttnProbsSchema);
  m.def(flash::kMergeSchema);
  m.def(flash::kCacheAppendSchema);
  m.def(flash::kRotarySchema);
  m.def(flash::kExplainSchema);
  m.def(flash::kKernelsSchema);
  m.def(flash::kRegisterKernelsSchema);
}

STABLE_TORCH_LIBRARY_IMPL(flash, CPU, m) {
  m.impl("attn", flash::attn);
  m.impl("attn_backward", flash::attn_backward);
  m.impl("attn_probs", flash::attn_probs);
  m.impl("cache_append", flash::cache_append);
  m.impl("rotary", flash::rotary);
  m.impl("explain", flash::explain);
}

STABLE_TORCH_LIBRARY_IMPL(flash, CompositeExplicitAutograd, m) {
  m.impl("kernels", TORCH_BOX(&kernels));
  m.impl("register_kernels", TORCH_BOX(&register_kernels));
}
