// The operators: allocation, the kernel for the problem, its launch. Checks are args.cpp's.
#include "api.h"

#include <torch/csrc/stable/ops.h>

#include <initializer_list>
#include <limits>

#include "args.h"

namespace flash {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::detail::from;

// Query rows that share a key head.
int64_t rows_of_group(const AttnParams& p) { return int64_t{p.side_q.longest()} * p.group(); }

const KernelEntry& kernel_for(Pass pass, const AttnArgs& args, const AttnParams& p,
                              uint32_t features) {
  const Problem problem = {pass,         dtype_of(*args.q), p.head_dim,
                           p.head_dim_v, features,          rows_of_group(p)};
  const KernelEntry* entry = find_kernel(problem);
  if (!entry) throw std::runtime_error("flash: " + not_supported(problem));
  return *entry;
}

// One byte tensor that the kernel shares out and initialises itself; lives until the launch is
// queued, and on a GPU the allocator keeps the memory for this stream.
OptTensor allocate_workspace(const KernelEntry& entry, const AttnParams& p, const Tensor& q) {
  const int64_t bytes = static_cast<int64_t>(entry.workspace(p));
  if (bytes == 0) return std::nullopt;
  return torch::stable::new_empty(q, {bytes}, ScalarType::Byte);
}

void* data_of(const OptTensor& t) { return t ? t->mutable_data_ptr() : nullptr; }

// Zero-filled when some rows belong to no sequence: those are never launched over.
Tensor allocate(const Tensor& like, std::vector<int64_t> shape, ScalarType dtype, bool has_gaps) {
  return has_gaps ? torch::stable::new_zeros(like, shape, dtype)
                  : torch::stable::new_empty(like, shape, dtype);
}

bool rows_are_aligned(const Tensor& t, int64_t bytes) {
  bool aligned = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % bytes == 0;
  for (int64_t d = 0; d + 1 < t.dim(); ++d)
    aligned &= t.size(d) <= 1 || t.stride(d) * static_cast<int64_t>(t.element_size()) % bytes == 0;
  return aligned;
}

// The same values with every row at a multiple of `bytes`: itself where it already is (any head_dim
// that is a multiple of 8, as models have them), otherwise a copy whose rows are padded.
Tensor aligned_rows(const Tensor& t, int64_t bytes) {
  if (bytes <= 1 || rows_are_aligned(t, bytes)) return t;
  std::vector<int64_t> shape = shape_of(t);
  const int64_t dim = shape.back(), step = bytes / static_cast<int64_t>(t.element_size());
  shape.back() = ceil_div(dim, step) * step;
  Tensor padded = torch::stable::new_empty(t, shape, t.scalar_type());
  Tensor rows = torch::stable::narrow(padded, t.dim() - 1, 0, dim);
  return torch::stable::copy_(rows, t);
}

void align_inputs(const KernelEntry& entry, AttnArgs& args, AttnParams& p) {
  for (OptTensor* t : {&args.q, &args.k, &args.v}) *t = aligned_rows(**t, entry.row_alignment);
  fill_views(args, p);
}

bool has_gaps_q(const AttnArgs& args) { return args.varlen() || args.seqused_q; }
bool has_gaps_k(const AttnArgs& args) { return args.varlen() || args.seqused_k; }

// Nothing to attend from, or nothing to attend to and no sink to fill in for it.
bool is_empty(const AttnParams& p) {
  return p.num_rows() == 0 || p.batch == 0 || (p.side_k.longest() == 0 && !p.sinks.data) ||
         p.side_q.longest() == 0;
}

std::tuple<Tensor, Tensor> run_fwd(AttnArgs& args) {
  FwdParams p;
  const uint32_t features = prepare(args, p);
  p.num_splits = static_cast<int>(args.num_splits);
  const Tensor& q = *args.q;
  DeviceScope scope(q);
  const KernelEntry& entry = kernel_for(Pass::kFwd, args, p, features);
  const bool empty = is_empty(p);
  const bool fill = empty || has_gaps_q(args);
  Tensor out = allocate(q, out_shape(args), q.scalar_type(), fill);
  Tensor lse = torch::stable::new_empty(q, lse_shape(args), acc_type(q));
  if (fill) torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
  if (empty) return {out, lse};
  p.out = view_of(out, args.varlen());
  p.lse = lse.mutable_data_ptr();
  const OptTensor workspace = allocate_workspace(entry, p, q);
  p.workspace = data_of(workspace);
  align_inputs(entry, args, p);
  entry.launch(p, scope.launch);
  return {out, lse};
}

struct Needed {
  bool q, k, v, bias, alibi_slopes, sinks;
};

struct Grads {
  OptTensor dq, dk, dv, dbias, dalibi_slopes, dsinks;
};

void check_needed(const AttnArgs& args, const Needed& needed) {
  if (needed.bias && !args.bias) refuse("needed asks for dbias, but bias is None");
  if (needed.bias && dtype_of(*args.bias) == DType::kBool)
    refuse("needed asks for dbias, but bias is a bool mask, which has no gradient");
  if (needed.alibi_slopes && !args.alibi_slopes)
    refuse("needed asks for dalibi_slopes, but alibi_slopes is None");
  if (needed.sinks && !args.sinks) refuse("needed asks for dsinks, but sinks is None");
}

BiasView bias_grad_view(const Tensor& dbias, DType dtype) {
  BiasView view = {dbias.mutable_data_ptr(), 0, 0, 0, 0, dtype};
  int64_t* strides[4] = {&view.batch_stride, &view.head_stride, &view.row_stride, &view.key_stride};
  for (int d = 0; d < 4; ++d) *strides[d] = dbias.size(d) == 1 ? 0 : dbias.stride(d);
  return view;
}

struct BwdInputs {
  Tensor dout;
  OptTensor dlse;
  Tensor out, lse;
};

// Views of the forward's results and of the incoming gradients, any strides.
void fill_bwd_inputs(const AttnArgs& args, BwdInputs& in, BwdParams& p) {
  const Tensor& q = *args.q;
  check_like("dout", in.dout, out_shape(args), q.scalar_type(), q);
  check_like("out", in.out, out_shape(args), q.scalar_type(), q);
  check_like("lse", in.lse, lse_shape(args), acc_type(q), q);
  if (in.dlse) check_like("dlse", *in.dlse, lse_shape(args), acc_type(q), q);
  in.dout = contiguous_rows(in.dout);
  in.out = contiguous_rows(in.out);
  in.lse = as_contiguous(in.lse);
  if (in.dlse) in.dlse = as_contiguous(*in.dlse);
  p.dout = view_of(in.dout, args.varlen());
  p.out = view_of(in.out, args.varlen());
  p.lse = in.lse.const_data_ptr();
  p.dlse = in.dlse ? in.dlse->const_data_ptr() : nullptr;
}

// Gradients of what is needed, in their inputs' shapes; slopes and sinks in acc until the end.
Grads allocate_grads(const AttnArgs& args, const AttnArgs& given, const Needed& needed, bool fill,
                     BwdParams& p) {
  Grads grads;
  const Tensor& q = *args.q;
  const bool varlen = args.varlen();
  if (needed.q) {
    grads.dq = allocate(q, shape_of(q), q.scalar_type(), fill || has_gaps_q(args));
    p.dq = view_of(*grads.dq, varlen);
  }
  if (needed.k) {
    grads.dk = allocate(q, shape_of(*args.k), q.scalar_type(), fill || has_gaps_k(args));
    p.dk = view_of(*grads.dk, varlen);
  }
  if (needed.v) {
    grads.dv = allocate(q, shape_of(*args.v), q.scalar_type(), fill || has_gaps_k(args));
    p.dv = view_of(*grads.dv, varlen);
  }
  if (needed.bias) {
    grads.dbias = torch::stable::new_zeros(q, shape_of(*args.bias), args.bias->scalar_type());
    p.dbias = bias_grad_view(*grads.dbias, dtype_of(*args.bias));
  }
  if (needed.alibi_slopes) {
    grads.dalibi_slopes = allocate(q, shape_of(*given.alibi_slopes), acc_type(q), fill);
    p.dalibi_slopes = grads.dalibi_slopes->mutable_data_ptr();
  }
  if (needed.sinks) {
    grads.dsinks = allocate(q, shape_of(*given.sinks), acc_type(q), fill);
    p.dsinks = grads.dsinks->mutable_data_ptr();
  }
  return grads;
}

uint32_t grad_features(const BwdParams& p, const Needed& needed) {
  return (p.dlse ? kDlse : 0u) | (needed.bias ? kDbias : 0u) |
         (needed.alibi_slopes ? kDalibi : 0u) | (needed.sinks ? kDsinks : 0u);
}

Grads run_bwd(AttnArgs& args, BwdInputs& in, const Needed& needed) {
  BwdParams p;
  const AttnArgs given = args;  // dtypes of slopes and sinks before they become acc
  const uint32_t features = prepare(args, p) & ~kSplits;  // only the forward is split
  check_needed(args, needed);
  fill_bwd_inputs(args, in, p);
  const Tensor& q = *args.q;
  DeviceScope scope(q);
  const KernelEntry& entry = kernel_for(Pass::kBwd, args, p, features | grad_features(p, needed));
  const bool empty = is_empty(p);
  Grads grads = allocate_grads(args, given, needed, empty, p);
  if (!empty) {
    const OptTensor workspace = allocate_workspace(entry, p, q);
    p.workspace = data_of(workspace);
    align_inputs(entry, args, p);
    in.dout = aligned_rows(in.dout, entry.row_alignment);
    in.out = aligned_rows(in.out, entry.row_alignment);
    p.dout = view_of(in.dout, args.varlen());
    p.out = view_of(in.out, args.varlen());
    entry.launch(p, scope.launch);
  }
  if (grads.dalibi_slopes)
    grads.dalibi_slopes =
        torch::stable::to(*grads.dalibi_slopes, given.alibi_slopes->scalar_type());
  if (grads.dsinks) grads.dsinks = torch::stable::to(*grads.dsinks, given.sinks->scalar_type());
  return grads;
}

Tensor run_probs(AttnArgs& args, const Tensor& lse_given) {
  ProbsParams p;
  const uint32_t features = prepare(args, p);
  const Tensor& q = *args.q;
  check_like("lse", lse_given, lse_shape(args), acc_type(q), q);
  const Tensor lse = as_contiguous(lse_given);
  DeviceScope scope(q);
  const KernelEntry& entry = kernel_for(Pass::kProbs, args, p, features);
  Tensor probs = torch::stable::new_zeros(
      q, {p.batch, p.num_heads, p.side_q.max_seqlen, p.side_k.max_seqlen}, q.scalar_type());
  if (probs.numel() == 0) return probs;
  p.lse = lse.const_data_ptr();
  p.probs = probs.mutable_data_ptr();
  align_inputs(entry, args, p);
  entry.launch(p, scope.launch);
  return probs;
}

template <typename... Outputs>
void return_outputs(StableIValue* stack, const Outputs&... outputs) {
  int at = 0;
  ((stack[at++] = from(outputs)), ...);
}

}  // namespace

std::string attn_backward_schema() {
  std::string args = FLASH_ATTN_ARGS;
  for (size_t at = args.find('='); at != std::string::npos; at = args.find('='))
    args.erase(at, args.find(',', at) - at);  // the last one reaches to the end
  return "attn_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
         "Tensor lse, " +
         args +
         ", bool[6] needed) -> (Tensor? dq, Tensor? dk, Tensor? dv, Tensor? dbias, "
         "Tensor? dalibi_slopes, Tensor? dsinks)";
}

void attn(StableIValue* stack, uint64_t, uint64_t) {
  Reader reader(stack);
  AttnArgs args;
  for (OptTensor* t : {&args.q, &args.k, &args.v}) *t = reader.next<Tensor>();
  args.read_attn(reader);
  args.leftpad_k = reader.next<OptTensor>();
  const auto [out, lse] = run_fwd(args);
  return_outputs(stack, out, lse);
}

void attn_backward(StableIValue* stack, uint64_t, uint64_t) {
  Reader reader(stack);
  Tensor dout = reader.next<Tensor>();
  OptTensor dlse = reader.next<OptTensor>();
  AttnArgs args;
  for (OptTensor* t : {&args.q, &args.k, &args.v}) *t = reader.next<Tensor>();
  Tensor out = reader.next<Tensor>();
  Tensor lse = reader.next<Tensor>();
  args.read_attn(reader);
  const auto n = reader.next<std::vector<bool>>();
  if (n.size() != 6) refuse("needed has ", n.size(), " values; allowed are 6");
  BwdInputs in = {dout, dlse, out, lse};
  const Grads g = run_bwd(args, in, {n[0], n[1], n[2], n[3], n[4], n[5]});
  return_outputs(stack, g.dq, g.dk, g.dv, g.dbias, g.dalibi_slopes, g.dsinks);
}

void attn_probs(StableIValue* stack, uint64_t, uint64_t) {
  Reader reader(stack);
  AttnArgs args;
  args.q = reader.next<Tensor>();
  args.k = reader.next<Tensor>();
  args.v = args.k;  // only scores are computed: v's checks are k's
  const Tensor lse = reader.next<Tensor>();
  args.read_probs(reader);
  return_outputs(stack, run_probs(args, lse));
}

void explain(StableIValue* stack, uint64_t, uint64_t) {
  Reader reader(stack);
  AttnArgs args;
  for (OptTensor* t : {&args.q, &args.k, &args.v}) *t = reader.next<Tensor>();
  args.read_attn(reader);
  args.leftpad_k = reader.next<OptTensor>();
  const bool backward = reader.next<bool>();
  AttnParams p;
  uint32_t features = prepare(args, p);
  if (backward) features &= ~kSplits;
  DeviceScope scope(*args.q);
  return_outputs(stack, explain(Problem{backward ? Pass::kBwd : Pass::kFwd, dtype_of(*args.q),
                                        p.head_dim, p.head_dim_v, features, rows_of_group(p)}));
}

}  // namespace flash
