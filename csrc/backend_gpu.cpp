// A GPU library: stream, device guard, registration. The schemas are the CPU library's.
#include <cuda_runtime_api.h>

#include <array>

#include "api.h"
#include "cuda/launch.h"
#include "kernel_table.h"

// In CUDA builds of torch only, and so not declared by the headers of others.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream);

namespace flash {

// Whatever can fail comes before the switch, so that a failure leaves the caller's device current.
DeviceScope::DeviceScope(const torch::stable::Tensor& q) {
  const int device = q.get_device_index();
  int current = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &launch.stream));
  cuda::check(cudaGetDevice(&current), "asking for the current device");
  if (current == device) return;
  cuda::check(cudaSetDevice(device), "making q's device current");
  previous_device_ = current;
}

DeviceScope::~DeviceScope() {
  if (previous_device_ >= 0) cudaSetDevice(previous_device_);
}

namespace {

// Adds this library's rows to what flash::kernels() reads.
void register_table() {
  std::array<StableIValue, 1> stack{torch::stable::detail::from(table_json())};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("flash::register_kernels", "", stack.data(), TORCH_ABI_VERSION));
}

}  // namespace
}  // namespace flash

STABLE_TORCH_LIBRARY_IMPL(flash, CUDA, m) {
  m.impl("attn", flash::attn);
  m.impl("attn_backward", flash::attn_backward);
  m.impl("attn_probs", flash::attn_probs);
  m.impl("cache_append", flash::cache_append);
  m.impl("rotary", flash::rotary);
  m.impl("explain", flash::explain);
  flash::register_table();
}
