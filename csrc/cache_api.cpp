// The operators of a cache: appending to it in place, and rotary embedding. Checks, params, lookup,
// launch; the kernels are found in the table like attention's.
#include <torch/csrc/stable/ops.h>

#include "api.h"
#include "args.h"

namespace flash {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::detail::from;

const KernelEntry& kernel_for(const Problem& problem) {
  const KernelEntry* entry = find_kernel(problem);
  if (!entry) throw std::runtime_error("flash: " + not_supported(problem));
  return *entry;
}

void check_dtype(const char* name, const Tensor& t, const char* other, const Tensor& like) {
  if (t.scalar_type() != like.scalar_type())
    refuse(name, " has dtype ", dtype_text(t), " and ", other, " has ", dtype_text(like),
           "; they must be equal: convert with ", name, ".to(", other, ".dtype)");
}

// The rows of x (batch, seqlen, heads, dim), or packed (total, heads, dim) by cu_seqlens.
void fill_rows(const char* name, const Tensor& x, OptTensor& cu_seqlens, RowParams& p) {
  if (dtype_of(x) == DType::kNone || dtype_of(x) == DType::kBool)
    refuse(name, " has dtype ", dtype_text(x),
           "; allowed are float16, bfloat16, float32 and float64");
  check_rank(name, x, cu_seqlens ? 3 : 4,
             cu_seqlens ? "(total, num_heads, head_dim) with cu_seqlens"
                        : "(batch, seqlen, num_heads, head_dim), or packed with cu_seqlens");
  int64_t batch = x.size(0);
  if (cu_seqlens) {
    if (cu_seqlens->dim() != 1 || cu_seqlens->size(0) < 1)
      refuse("cu_seqlens has shape ", shape_text(shape_of(*cu_seqlens)),
             "; allowed is (batch + 1,), starting with 0");
    batch = cu_seqlens->size(0) - 1;
    check_lengths("cu_seqlens", cu_seqlens, {batch + 1}, "(batch + 1,)", x);
  }
  const int64_t rows = x.size(cu_seqlens ? 0 : 1);
  check_at_most("batch", batch, kMaxCount, "split the batch into calls");
  check_at_most("seqlen", rows, kMaxSeqlen, "cut the sequence into chunks");
  check_at_most("num_heads", x.size(-2), kMaxCount, "fold heads into calls");
  check_at_most("head_dim", x.size(-1), kMaxHeadDim, "split the heads");
  p.batch = static_cast<int>(batch);
  p.side_q.cu_seqlens =
      cu_seqlens ? static_cast<const int32_t*>(cu_seqlens->const_data_ptr()) : nullptr;
  p.side_q.total = rows;
  p.side_q.max_seqlen = static_cast<int>(rows);
}

// cos and sin (rows, rotary_dim / 2), whose memory the call keeps alive.
void fill_rotary(OptTensor& cos, OptTensor& sin, bool interleaved, bool conjugate, int head_dim,
                 const Tensor& x, Rotary& rotary) {
  if (cos.has_value() != sin.has_value())
    refuse("rotary_cos and rotary_sin come together; got only ", cos ? "rotary_cos" : "rotary_sin");
  if (!cos) return;
  check_rank("rotary_cos", *cos, 2, "(seqlen_rotary, rotary_dim / 2)");
  check_shape("rotary_sin", *sin, shape_of(*cos), "the shape of rotary_cos");
  check_dtype("rotary_sin", *sin, "rotary_cos", *cos);
  for (const auto& [name, t] : {std::pair{"rotary_cos", &cos}, std::pair{"rotary_sin", &sin}}) {
    check_device(name, **t, x);
    if (dtype_of(**t) == DType::kNone || dtype_of(**t) == DType::kBool)
      refuse(name, " has dtype ", dtype_text(**t), "; allowed is any float dtype");
    *t = contiguous_rows(**t);
  }
  if (2 * cos->size(1) > head_dim)
    refuse("rotary_cos has ", cos->size(1), " columns, a rotary_dim of ", 2 * cos->size(1),
           "; allowed is a rotary_dim of at most head_dim ", head_dim);
  if (cos->size(0) < 1)
    refuse("rotary_cos has no rows; it needs one for each position that is rotated");
  check_at_most("rotary_cos' rows", cos->size(0), kMaxSeqlen, "pass the positions in use");
  rotary = {cos->const_data_ptr(),
            sin->const_data_ptr(),
            cos->stride(0),
            sin->stride(0),
            dtype_of(*cos),
            static_cast<int>(cos->size(0)),
            static_cast<int>(cos->size(1)),
            interleaved,
            conjugate};
}

// A cache is written where it lies: nothing of it may be copied, and no element may be two.
void check_cache(const char* name, const Tensor& cache, const Tensor& k) {
  check_rank(name, cache, 4,
             "(batch, seqlen_cache, num_heads_k, head_dim), or (num_pages, page_size, "
             "num_heads_k, head_dim) with page_table");
  check_device(name, cache, k);
  check_dtype("k", k, name, cache);
  if (cache.size(-1) > 1 && cache.stride(-1) != 1)
    refuse(name, " has stride ", cache.stride(-1),
           " in its last dimension; it is written in place and must have 1 there");
  for (int64_t d = 0; d + 1 < cache.dim(); ++d)
    if (cache.size(d) > 1 && cache.stride(d) == 0)
      refuse(name, " is expanded: its dimension ", d,
             " has stride 0, so that sequences share memory; clone() it before writing to it");
}

void fill_cache(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v,
                OptTensor& page_table, AppendParams& p) {
  check_cache("k_cache", k_cache, k);
  check_cache("v_cache", v_cache, k);
  const int64_t heads = k_cache.size(2), dim = k_cache.size(3), dim_v = v_cache.size(3);
  check_shape("v_cache", v_cache, {k_cache.size(0), k_cache.size(1), heads, dim_v},
              "the shape of k_cache but for head_dim");
  std::vector<int64_t> expected = shape_of(k);
  const bool packed = k.dim() == 3;
  expected[expected.size() - 2] = heads;
  expected.back() = dim;
  check_shape("k", k, expected, "with the heads of k_cache");
  expected.back() = dim_v;
  check_device("v", v, k);
  check_dtype("v", v, "k", k);
  check_shape("v", v, expected, "with the rows of k and the heads of v_cache");
  p.num_heads = p.num_heads_k = static_cast<int>(heads);
  p.head_dim = static_cast<int>(dim);
  p.head_dim_v = static_cast<int>(dim_v);
  check_at_most("head_dim_v", dim_v, kMaxHeadDim, "split the heads");
  if (page_table) {
    p.side_k.total = fill_pages(page_table, k_cache, k, p);
  } else {
    if (k_cache.size(0) != p.batch)
      refuse("k_cache has ", k_cache.size(0), " sequences and k has ", p.batch,
             "; they must be equal, or page_table must name the sequences");
    p.side_k.total = k_cache.size(1);
  }
  p.side_k.max_seqlen = static_cast<int>(min_of<int64_t>(p.side_k.total, kMaxSeqlen));
  p.k = view_of(k_cache, false);
  p.v = view_of(v_cache, false);
  p.new_k = view_of(k, packed);
  p.new_v = view_of(v, packed);
}

}  // namespace

void cache_append(StableIValue* stack, uint64_t, uint64_t) {
  Reader reader(stack);
  const Tensor k_cache = reader.next<Tensor>(), v_cache = reader.next<Tensor>();
  Tensor k = reader.next<Tensor>(), v = reader.next<Tensor>();
  OptTensor cache_seqlens = reader.next<Tensor>();
  OptTensor page_table = reader.next<OptTensor>(), cu_seqlens = reader.next<OptTensor>();
  OptTensor cos = reader.next<OptTensor>(), sin = reader.next<OptTensor>();
  const bool interleaved = reader.next<bool>();

  AppendParams p;
  fill_rows("k", k, cu_seqlens, p);
  k = contiguous_rows(k);
  v = contiguous_rows(v);
  fill_cache(k_cache, v_cache, k, v, page_table, p);
  check_lengths("cache_seqlens", cache_seqlens, {p.batch}, "(batch,)", k);
  fill_rotary(cos, sin, interleaved, false, p.head_dim, k, p.rotary);
  p.cache_seqlens = static_cast<const int32_t*>(cache_seqlens->const_data_ptr());

  DeviceScope scope(k);
  const uint32_t features = (cu_seqlens ? kVarlen : 0u) | (page_table ? kPaged : 0u) |
                            (p.head_dim != p.head_dim_v ? kHeadDimV : 0u);
  const KernelEntry& entry =
      kernel_for({Pass::kAppend, dtype_of(k), p.head_dim, p.head_dim_v, features, 0});
  Tensor seqused_k = torch::stable::new_empty(*cache_seqlens, {p.batch}, ScalarType::Int);
  p.seqused_k = static_cast<int32_t*>(seqused_k.mutable_data_ptr());
  if (p.batch > 0) entry.launch(p, scope.launch);
  stack[0] = from(seqused_k);
}

void rotary(StableIValue* stack, uint64_t, uint64_t) {
  Reader reader(stack);
  Tensor x = reader.next<Tensor>();
  OptTensor cos = reader.next<Tensor>(), sin = reader.next<Tensor>();
  OptTensor offsets = reader.next<OptTensor>(), cu_seqlens = reader.next<OptTensor>();
  const bool interleaved = reader.next<bool>(), conjugate = reader.next<bool>();

  RotaryParams p;
  fill_rows("x", x, cu_seqlens, p);
  x = contiguous_rows(x);
  p.num_heads = p.num_heads_k = static_cast<int>(x.size(-2));
  p.head_dim = p.head_dim_v = static_cast<int>(x.size(-1));
  check_lengths("seqlen_offsets", offsets, {p.batch}, "(batch,)", x);
  fill_rotary(cos, sin, interleaved, conjugate, p.head_dim, x, p.rotary);
  if (!offsets && !cu_seqlens && p.side_q.total > p.rotary.rows)
    refuse("rotary_cos has ", p.rotary.rows, " rows and x has ", p.side_q.total,
           " positions; every position needs its row");
  p.offsets = offsets ? static_cast<const int32_t*>(offsets->const_data_ptr()) : nullptr;

  DeviceScope scope(x);
  const KernelEntry& entry = kernel_for(
      {Pass::kRotary, dtype_of(x), p.head_dim, p.head_dim_v, cu_seqlens ? kVarlen : 0u, 0});
  // Packed rows of no sequence stay 0.
  Tensor out = cu_seqlens ? torch::stable::new_zeros(x, shape_of(x), x.scalar_type())
                          : torch::stable::new_empty(x, shape_of(x), x.scalar_type());
  p.q = view_of(x, cu_seqlens.has_value());
  p.out = view_of(out, cu_seqlens.has_value());
  if (p.batch > 0 && out.numel() > 0) entry.launch(p, scope.launch);
  stack[0] = from(out);
}

}  // namespace flash
