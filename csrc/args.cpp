#include "args.h"

#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <string>

#include "common/dropout.h"

namespace flash {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kMaxSplits = 256;

std::string name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return torch::headeronly::toString(type);
  }
}

bool is_float(const Tensor& t) {
  const DType dtype = dtype_of(t);
  return dtype != DType::kNone && dtype != DType::kBool;
}

std::string device_text(const Tensor& t) {
  if (t.is_cpu()) return "the CPU";
  return "device " + std::to_string(t.get_device_index());
}

}  // namespace

std::string shape_text(const std::vector<int64_t>& shape) {
  std::ostringstream text;
  text << "(";
  for (size_t i = 0; i < shape.size(); ++i) text << (i ? ", " : "") << shape[i];
  text << (shape.size() == 1 ? ",)" : ")");
  return text.str();
}

std::string dtype_text(const Tensor& t) { return name_of(t.scalar_type()); }

void check_device(const char* name, const Tensor& t, const Tensor& q) {
  if (t.device() != q.device())
    refuse(name, " is on ", device_text(t), " and q on ", device_text(q), "; move it there with ",
           name, ".to(q.device)");
}

void check_rank(const char* name, const Tensor& t, int64_t rank, const char* layout) {
  if (t.dim() != rank)
    refuse(name, " has ", t.dim(), " dimensions, shape ", shape_text(shape_of(t)), "; allowed is ",
           layout, ", ", rank, " dimensions");
}

void check_shape(const char* name, const Tensor& t, const std::vector<int64_t>& shape,
                 const char* meaning) {
  if (shape_of(t) != shape)
    refuse(name, " has shape ", shape_text(shape_of(t)), "; allowed is ", shape_text(shape), ", ",
           meaning);
}

void check_at_most(const char* what, int64_t got, int64_t most, const char* remedy) {
  if (got > most) refuse(what, " ", got, " is above ", most, "; ", remedy);
}

void check_lengths(const char* name, OptTensor& t, const std::vector<int64_t>& shape,
                   const char* meaning, const Tensor& q) {
  if (!t) return;
  if (t->scalar_type() != ScalarType::Int)
    refuse(name, " has dtype ", dtype_text(*t), "; allowed is int32: pass ", name, ".int()");
  check_device(name, *t, q);
  check_shape(name, *t, shape, meaning);
  t = as_contiguous(*t);
}

int64_t fill_pages(OptTensor& page_table, const Tensor& k, const Tensor& q, AttnParams& p) {
  check_rank("page_table", *page_table, 2, "(batch, max_pages)");
  const int64_t max_pages = page_table->size(1);
  check_lengths("page_table", page_table, {p.batch, max_pages}, "(batch, max_pages)", q);
  check_at_most("max_pages", max_pages, kMaxCount, "use larger pages");
  if (k.size(1) < 1) refuse("the page size is 0; allowed is 1 or more keys a page");
  check_at_most("num_pages", k.size(0), kMaxCount, "split the cache");
  check_at_most("page_size", k.size(1), kMaxSeqlen, "use smaller pages");
  p.pages = {static_cast<const int32_t*>(page_table->const_data_ptr()), static_cast<int>(max_pages),
             static_cast<int>(k.size(0)), static_cast<int>(k.size(1))};
  return k.size(0) == 0 ? 0 : max_pages * k.size(1);
}

namespace {

void check_qkv(const AttnArgs& args) {
  const Tensor &q = *args.q, &k = *args.k, &v = *args.v;
  if (!is_float(q))
    refuse("q has dtype ", dtype_text(q), "; allowed are float16, bfloat16, float32 and float64");
  for (const auto& [name, t] : {std::pair{"k", &k}, std::pair{"v", &v}}) {
    if (t->scalar_type() != q.scalar_type())
      refuse("q has dtype ", dtype_text(q), " and ", name, " has ", dtype_text(*t),
             "; q, k and v share one: convert with ", name, ".to(q.dtype)");
    check_device(name, *t, q);
  }
  const bool varlen = args.varlen();
  const char* layout_q =
      varlen ? "(total_q, num_heads, head_dim) with cu_seqlens_q"
             : "(batch, seqlen_q, num_heads, head_dim), or packed with cu_seqlens_q";
  const bool packed_k = varlen && !args.paged();
  const char* layout_k =
      args.paged() ? "(num_pages, page_size, num_heads_k, head_dim) with page_table"
      : varlen     ? "(total_k, num_heads_k, head_dim) with cu_seqlens_k"
                   : "(batch, seqlen_k, num_heads_k, head_dim), or packed with cu_seqlens_k";
  check_rank("q", q, varlen ? 3 : 4, layout_q);
  check_rank("k", k, packed_k ? 3 : 4, layout_k);
  check_rank("v", v, packed_k ? 3 : 4, layout_k);
  const int64_t num_heads = q.size(-2), num_heads_k = k.size(-2);
  if (num_heads_k == 0 || num_heads == 0)
    refuse("q has ", num_heads, " heads and k has ", num_heads_k, "; both need at least 1");
  if (num_heads % num_heads_k != 0)
    refuse("num_heads ", num_heads, " of q is no multiple of num_heads ", num_heads_k,
           " of k; every key head serves the same number of query heads (the layout is (batch, "
           "seqlen, num_heads, head_dim): transpose(1, 2) that of scaled_dot_product_attention)");
  if (v.size(-2) != num_heads_k)
    refuse("v has ", v.size(-2), " heads and k has ", num_heads_k, "; they must be equal");
  if (k.size(-1) != q.size(-1))
    refuse("k has head_dim ", k.size(-1), " and q has ", q.size(-1), "; they must be equal");
  for (const auto& [name, dim] :
       {std::pair{"head_dim", q.size(-1)}, std::pair{"head_dim_v", v.size(-1)}}) {
    if (dim < 1) refuse(name, " is ", dim, "; allowed are 1 to ", kMaxHeadDim);
    check_at_most(name, dim, kMaxHeadDim,
                  "the largest that any kernel is built for: split the heads, or use "
                  "torch.nn.functional.scaled_dot_product_attention");
  }
  if (!varlen && !args.paged() && (k.size(0) != q.size(0) || v.size(0) != q.size(0)))
    refuse("batch sizes of q, k, v are ", q.size(0), ", ", k.size(0), ", ", v.size(0),
           "; they must be equal (use expand for a shared k and v)");
  if (args.paged()) {
    if (v.size(0) != k.size(0) || v.size(1) != k.size(1))
      refuse("v has ", v.size(0), " pages of ", v.size(1), " keys and k has ", k.size(0), " of ",
             k.size(1), "; they must be equal");
  }
  const int64_t seq_dim = packed_k ? 0 : 1;
  if (v.size(seq_dim) != k.size(seq_dim))
    refuse("v has ", v.size(seq_dim), " keys and k has ", k.size(seq_dim), "; they must be equal");
  check_at_most("num_heads", num_heads, kMaxCount, "fold heads into calls");
}

void check_cu_seqlens(AttnArgs& args) {
  if (args.paged()) {
    if (args.cu_seqlens_k)
      refuse(
          "cu_seqlens_k comes with page_table; the keys of a page table are not packed: pass "
          "their numbers as seqused_k = cu_seqlens_k.diff()");
  } else if (args.cu_seqlens_q.has_value() != args.cu_seqlens_k.has_value())
    refuse("cu_seqlens_q and cu_seqlens_k come together; got only ",
           args.varlen() ? "cu_seqlens_q" : "cu_seqlens_k");
  if (!args.varlen()) {
    for (const auto& [name, value] : {std::pair{"max_seqlen_q", args.max_seqlen_q},
                                      std::pair{"max_seqlen_k", args.max_seqlen_k}})
      if (value && !(args.paged() && name[11] == 'k'))
        refuse(name, " is ", *value,
               " without cu_seqlens; the length of a dense tensor is its "
               "shape: leave it out, or pass seqused_q / seqused_k to shorten sequences");
    return;
  }
  if (args.cu_seqlens_q->dim() != 1 || args.cu_seqlens_q->size(0) < 1)
    refuse("cu_seqlens_q has shape ", shape_text(shape_of(*args.cu_seqlens_q)),
           "; allowed is (batch + 1,), starting with 0");
}

// Rows of one side: total, and the longest length in use.
void fill_side(const char* name, SeqSide& side, int64_t total, const OptTensor& cu_seqlens,
               const OptTensor& seqused, std::optional<int64_t> max_seqlen) {
  const int64_t longest = max_seqlen.value_or(total);
  if (longest < 0) refuse(name, " is ", longest, "; allowed is 0 or more");
  check_at_most(name, longest, kMaxSeqlen,
                "give the longest sequence's length, or cut the sequence into chunks and join "
                "them with flash_ext.merge");
  side.total = total;
  side.max_seqlen = static_cast<int>(longest);
  side.cu_seqlens =
      cu_seqlens ? static_cast<const int32_t*>(cu_seqlens->const_data_ptr()) : nullptr;
  side.seqused = seqused ? static_cast<const int32_t*>(seqused->const_data_ptr()) : nullptr;
}

void fill_shapes(AttnArgs& args, AttnParams& p) {
  const Tensor &q = *args.q, &k = *args.k;
  const bool varlen = args.varlen();
  const int64_t batch = varlen ? args.cu_seqlens_q->size(0) - 1 : q.size(0);
  check_at_most("batch", batch, kMaxCount, "split the batch into calls");
  check_lengths("cu_seqlens_q", args.cu_seqlens_q, {batch + 1}, "(batch + 1,)", q);
  check_lengths("cu_seqlens_k", args.cu_seqlens_k, {batch + 1}, "the length of cu_seqlens_q", q);
  check_lengths("seqused_q", args.seqused_q, {batch}, "(batch,)", q);
  check_lengths("seqused_k", args.seqused_k, {batch}, "(batch,)", q);
  p.batch = static_cast<int>(batch);
  p.num_heads = static_cast<int>(q.size(-2));
  p.num_heads_k = static_cast<int>(k.size(-2));
  p.head_dim = static_cast<int>(q.size(-1));
  p.head_dim_v = static_cast<int>(args.v->size(-1));
  fill_side("max_seqlen_q", p.side_q, q.size(varlen ? 0 : 1), args.cu_seqlens_q, args.seqused_q,
            args.max_seqlen_q);
  fill_side("max_seqlen_k", p.side_k,
            args.paged() ? fill_pages(args.page_table, k, q, p) : k.size(varlen ? 0 : 1),
            args.cu_seqlens_k, args.seqused_k, args.max_seqlen_k);
  check_lengths("leftpad_k", args.leftpad_k, {batch}, "(batch,)", q);
  if (args.leftpad_k)
    p.side_k.leftpad = static_cast<const int32_t*>(args.leftpad_k->const_data_ptr());
}

void fill_scalars(const AttnArgs& args, AttnParams& p) {
  p.softmax_scale = args.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  if (!std::isfinite(p.softmax_scale))
    refuse("softmax_scale is ", p.softmax_scale, "; allowed is any finite number");
  if (!(args.softcap >= 0) || !std::isfinite(args.softcap))
    refuse("softcap is ", args.softcap, "; allowed is 0 (off) or a positive finite number");
  p.softcap = args.softcap;
  for (const auto& [name, value] :
       {std::pair{"window_left", args.window_left}, std::pair{"window_right", args.window_right}})
    if (value < -1)
      refuse(name, " is ", value,
             "; allowed is -1 (unbounded) or the number of keys on that side, "
             "0 or more; W tokens as model configs count them are (W - 1, 0)");
  // A side that hides nothing is unbounded: the same kernel, the same bits.
  const int64_t right = args.causal ? 0 : args.window_right;
  p.window_left = args.window_left >= p.side_k.max_seqlen ? -1 : static_cast<int>(args.window_left);
  p.window_right = right >= p.side_q.max_seqlen ? -1 : static_cast<int>(right);
  p.deterministic = args.deterministic;
  if (args.num_splits < 0 || args.num_splits > kMaxSplits)
    refuse("num_splits is ", args.num_splits, "; allowed is 0 (chosen from shapes) to ",
           kMaxSplits);
}

void fill_bias(AttnArgs& args, AttnParams& p) {
  if (!args.bias) return;
  const Tensor &bias = *args.bias, &q = *args.q;
  check_rank("bias", bias, 4, "(batch or 1, num_heads or 1, seqlen_q or 1, seqlen_k or 1)");
  check_device("bias", bias, q);
  const bool dtype_ok = bias.scalar_type() == q.scalar_type() ||
                        bias.scalar_type() == ScalarType::Float ||
                        bias.scalar_type() == ScalarType::Bool;
  if (!dtype_ok)
    refuse("bias has dtype ", dtype_text(bias), "; allowed are q's dtype ", dtype_text(q),
           ", float32 and bool");
  const int64_t full[4] = {p.batch, p.num_heads, p.side_q.max_seqlen, p.side_k.max_seqlen};
  int64_t strides[4];
  for (int d = 0; d < 4; ++d) {
    if (bias.size(d) != full[d] && bias.size(d) != 1)
      refuse("bias has shape ", shape_text(shape_of(bias)), "; dimension ", d, " may be ", full[d],
             " or 1, of (batch, num_heads, seqlen_q, seqlen_k)",
             args.varlen() ? " where the lengths are max_seqlen_q and max_seqlen_k" : "");
    strides[d] = bias.size(d) == 1 ? 0 : bias.stride(d);
  }
  p.bias = {const_cast<void*>(bias.const_data_ptr()),
            strides[0],
            strides[1],
            strides[2],
            strides[3],
            dtype_of(bias)};
}

void check_float_values(const char* name, const Tensor& t, const Tensor& q) {
  if (!is_float(t)) refuse(name, " has dtype ", dtype_text(t), "; allowed is any float dtype");
  check_device(name, t, q);
}

void fill_heads(AttnArgs& args, AttnParams& p) {
  const Tensor& q = *args.q;
  if (args.alibi_slopes) {
    check_float_values("alibi_slopes", *args.alibi_slopes, q);
    if (shape_of(*args.alibi_slopes) != std::vector<int64_t>{p.batch, p.num_heads})
      check_shape("alibi_slopes", *args.alibi_slopes, {p.num_heads},
                  "(num_heads,), or (batch, num_heads)");
    args.alibi_slopes = as_contiguous(torch::stable::to(*args.alibi_slopes, acc_type(q)));
    p.alibi_slopes = {args.alibi_slopes->const_data_ptr(),
                      args.alibi_slopes->dim() == 2 ? p.num_heads : 0};
  }
  if (args.sinks) {
    check_float_values("sinks", *args.sinks, q);
    check_shape("sinks", *args.sinks, {p.num_heads}, "(num_heads,)");
    args.sinks = as_contiguous(torch::stable::to(*args.sinks, acc_type(q)));
    p.sinks = {args.sinks->const_data_ptr(), 0};
  }
}

void fill_dropout(AttnArgs& args, AttnParams& p) {
  if (!(args.dropout_p >= 0 && args.dropout_p <= 1))
    refuse("dropout_p is ", args.dropout_p, "; allowed is a probability from 0 to 1");
  if (args.rng_state) {
    if (args.rng_state->scalar_type() != ScalarType::Long)
      refuse("rng_state has dtype ", dtype_text(*args.rng_state), "; allowed is int64");
    check_device("rng_state", *args.rng_state, *args.q);
    check_shape("rng_state", *args.rng_state, {2}, "(seed, offset)");
    args.rng_state = as_contiguous(*args.rng_state);
    p.rng_state = static_cast<const int64_t*>(args.rng_state->const_data_ptr());
  } else if (args.dropout_p > 0) {
    refuse("dropout_p is ", args.dropout_p,
           " without rng_state; pass an int64 tensor (seed, "
           "offset) on q's device, or call flash_ext.attention, which draws one");
  }
  p.dropout_threshold = Dropout::threshold_of(args.dropout_p);
}

uint32_t features_of(const AttnArgs& args, const AttnParams& p) {
  uint32_t features = 0;
  const auto add = [&features](bool needed, Feature feature) {
    if (needed) features |= feature;
  };
  add(args.varlen(), kVarlen);
  add(p.group() > 1, kGqa);
  add(p.window_left >= 0 || p.window_right >= 0, kWindow);
  add(p.softcap > 0, kSoftcap);
  add(p.bias.data && p.bias.dtype != DType::kBool, kBias);
  add(p.bias.data && p.bias.dtype == DType::kBool, kBoolMask);
  add(p.alibi_slopes.data, kAlibi);
  add(p.sinks.data, kSinks);
  add(p.dropout_threshold > 0, kDropout);
  add(args.seqused_q || args.seqused_k, kSeqused);
  add(args.paged(), kPaged);
  add(args.leftpad_k.has_value(), kLeftpad);
  add(args.num_splits > 1, kSplits);
  add(p.head_dim != p.head_dim_v, kHeadDimV);
  add(p.deterministic, kDeterministic);
  return features;
}

}  // namespace

void AttnArgs::read_attn(Reader& reader) {
  for (OptTensor* t : {&bias, &alibi_slopes, &sinks, &cu_seqlens_q, &cu_seqlens_k, &seqused_q,
                       &seqused_k, &page_table, &rng_state})
    *t = reader.next<OptTensor>();
  max_seqlen_q = reader.next<std::optional<int64_t>>();
  max_seqlen_k = reader.next<std::optional<int64_t>>();
  softmax_scale = reader.next<std::optional<double>>();
  causal = reader.next<bool>();
  window_left = reader.next<int64_t>();
  window_right = reader.next<int64_t>();
  softcap = reader.next<double>();
  dropout_p = reader.next<double>();
  deterministic = reader.next<bool>();
  num_splits = reader.next<int64_t>();
}

void AttnArgs::read_probs(Reader& reader) {
  for (OptTensor* t : {&bias, &alibi_slopes, &sinks, &cu_seqlens_q, &cu_seqlens_k, &seqused_q,
                       &seqused_k, &rng_state})
    *t = reader.next<OptTensor>();
  max_seqlen_q = reader.next<std::optional<int64_t>>();
  max_seqlen_k = reader.next<std::optional<int64_t>>();
  softmax_scale = reader.next<std::optional<double>>();
  causal = reader.next<bool>();
  window_left = reader.next<int64_t>();
  window_right = reader.next<int64_t>();
  softcap = reader.next<double>();
  dropout_p = reader.next<double>();
}

uint32_t prepare(AttnArgs& args, AttnParams& p) {
  check_cu_seqlens(args);
  check_qkv(args);
  fill_shapes(args, p);
  fill_scalars(args, p);
  fill_bias(args, p);
  fill_heads(args, p);
  fill_dropout(args, p);
  for (OptTensor* t : {&args.q, &args.k, &args.v}) *t = contiguous_rows(**t);
  fill_views(args, p);
  return features_of(args, p);
}

void fill_views(const AttnArgs& args, AttnParams& p) {
  const bool packed_k = args.varlen() && !args.paged();
  p.q = view_of(*args.q, args.varlen());
  p.k = view_of(*args.k, packed_k);
  p.v = view_of(*args.v, packed_k);
}

std::vector<int64_t> shape_of(const Tensor& t) {
  return std::vector<int64_t>(t.sizes().begin(), t.sizes().end());
}

View view_of(const Tensor& t, bool varlen) {
  void* data = const_cast<void*>(t.const_data_ptr());
  if (varlen) return {data, 0, t.stride(0), t.stride(1)};
  return {data, t.stride(0), t.stride(1), t.stride(2)};
}

Tensor as_contiguous(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

Tensor contiguous_rows(const Tensor& t) {
  return t.size(-1) <= 1 || t.stride(-1) == 1 ? t : torch::stable::contiguous(t);
}

void check_like(const char* name, const Tensor& t, const std::vector<int64_t>& shape,
                ScalarType dtype, const Tensor& q) {
  check_device(name, t, q);
  check_shape(name, t, shape, "as the forward gives it");
  if (t.scalar_type() != dtype)
    refuse(name, " has dtype ", dtype_text(t), "; allowed is ", name_of(dtype),
           ", as the forward gives it");
}

DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Bool:
      return DType::kBool;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    default:
      return DType::kNone;
  }
}

ScalarType acc_type(const Tensor& q) {
  return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

std::vector<int64_t> out_shape(const AttnArgs& args) {
  std::vector<int64_t> shape = shape_of(*args.q);
  shape.back() = args.v->size(-1);
  return shape;
}

std::vector<int64_t> lse_shape(const AttnArgs& args) {
  const Tensor& q = *args.q;
  if (args.varlen()) return {q.size(1), q.size(0)};
  return {q.size(0), q.size(2), q.size(1)};
}

}  // namespace flash
