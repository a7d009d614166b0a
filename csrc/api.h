// The operators: their schemas, their boxed implementations, and what a backend gives them.
//
// Everything here goes through PyTorch's stable C++ API, so that one library serves every Python
// and every torch from 2.10 on. api.cpp is compiled into each backend's library.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

#include "params.h"

namespace flash {

// The arguments that every operator shares, with the only defaults there are. attn_backward takes
// the same without defaults (attn_backward_schema), so that the two cannot drift apart; there
// num_splits has no meaning, because only the forward is split.
#define FLASH_ATTN_ARGS                                                                   \
  "Tensor? bias=None, Tensor? alibi_slopes=None, Tensor? sinks=None, "                    \
  "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, "        \
  "Tensor? seqused_k=None, Tensor? page_table=None, Tensor? rng_state=None, "             \
  "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, float? softmax_scale=None, "     \
  "bool causal=False, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, " \
  "float dropout_p=0.0, bool deterministic=False, int num_splits=0"

// What only the forward takes.
#define FLASH_ATTN_FORWARD_ARGS ", Tensor? leftpad_k=None"

constexpr const char* kAttnSchema =
    "attn(Tensor q, Tensor k, Tensor v, " FLASH_ATTN_ARGS FLASH_ATTN_FORWARD_ARGS
    ") -> (Tensor out, Tensor lse)";

std::string attn_backward_schema();

constexpr const char* kAttnProbsSchema =
    "attn_probs(Tensor q, Tensor k, Tensor lse, Tensor? bias=None, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? "
    "seqused_q=None, "
    "Tensor? seqused_k=None, Tensor? rng_state=None, SymInt? max_seqlen_q=None, "
    "SymInt? max_seqlen_k=None, float? softmax_scale=None, bool causal=False, "
    "SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, float dropout_p=0.0) "
    "-> Tensor";

constexpr const char* kMergeSchema =
    "merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)";

// In place: new keys and values at cache_seqlens, keys rotated on the way; returns seqused_k.
// Packed k and v come with cu_seqlens.
constexpr const char* kCacheAppendSchema =
    "cache_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor "
    "cache_seqlens, "
    "Tensor? page_table=None, Tensor? cu_seqlens=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, bool rotary_interleaved=True) -> Tensor";

constexpr const char* kRotarySchema =
    "rotary(Tensor x, Tensor cos, Tensor sin, Tensor? seqlen_offsets=None, "
    "Tensor? cu_seqlens=None, bool interleaved=False, bool conjugate=False) -> Tensor";

constexpr const char* kExplainSchema =
    "explain(Tensor q, Tensor k, Tensor v, " FLASH_ATTN_ARGS FLASH_ATTN_FORWARD_ARGS
    ", bool backward=False) -> str";

constexpr const char* kKernelsSchema = "kernels() -> str";
constexpr const char* kRegisterKernelsSchema = "register_kernels(str rows) -> ()";

// Boxed: they read the schema's arguments off the stack in order.
void attn(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
void attn_backward(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
void attn_probs(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
void cache_append(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
void rotary(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);
void explain(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);

// Makes q's device current for as long as it lives, and says where kernels run there. One
// definition a backend.
class DeviceScope {
 public:
  explicit DeviceScope(const torch::stable::Tensor& q);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  Launch launch;

 private:
  int previous_device_ = -1;
};

}  // namespace flash
