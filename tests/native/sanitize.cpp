// The CPU kernels over small problems, as a program of its own for the compiler's sanitizers.
//
// Links the generated kernels and kernel_table.cpp, no torch. Every tensor is an allocation of
// exactly its extent, so AddressSanitizer sees a vector load that goes one element too far; tasks
// run on several threads, so ThreadSanitizer sees two that touch one element. The numbers are
// tested elsewhere: here a row's probabilities must add up to one, and nothing may be NaN.
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <vector>

#include "common/tile_range.h"
#include "kernel_table.h"

namespace flash {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Elements of one type, read and written as double.
class Array {
 public:
  Array() = default;
  Array(DType dtype, int64_t count) : dtype_(dtype), bytes_(count * size_of(dtype)) {}

  static int64_t size_of(DType dtype) {
    constexpr int kSizes[] = {0, 1, 2, 2, 4, 8};
    return kSizes[static_cast<int>(dtype)];
  }
  void* data() { return bytes_.empty() ? nullptr : bytes_.data(); }
  int64_t size() const { return static_cast<int64_t>(bytes_.size()) / size_of(dtype_); }

  double get(int64_t at) const {
    const void* x = bytes_.data() + at * size_of(dtype_);
    switch (dtype_) {
      case DType::kFloat16:
        return float16_to_float(*static_cast<const uint16_t*>(x));
      case DType::kBFloat16:
        return bfloat16_to_float(*static_cast<const uint16_t*>(x));
      case DType::kFloat32:
        return *static_cast<const float*>(x);
      default:
        return *static_cast<const double*>(x);
    }
  }
  void set(int64_t at, double value) {
    void* x = bytes_.data() + at * size_of(dtype_);
    switch (dtype_) {
      case DType::kBool:
        *static_cast<uint8_t*>(x) = value > 0;
        break;
      case DType::kFloat16:
        *static_cast<uint16_t*>(x) = float_to_float16(static_cast<float>(value));
        break;
      case DType::kBFloat16:
        *static_cast<uint16_t*>(x) = float_to_bfloat16(static_cast<float>(value));
        break;
      case DType::kFloat32:
        *static_cast<float*>(x) = static_cast<float>(value);
        break;
      default:
        *static_cast<double*>(x) = value;
    }
  }
  void fill(double value) {
    for (int64_t at = 0; at < size(); ++at) set(at, value);
  }
  void fill_normal(std::mt19937& generator, double scale) {
    std::normal_distribution<double> normal;
    for (int64_t at = 0; at < size(); ++at) set(at, scale * normal(generator));
  }

 private:
  DType dtype_ = DType::kFloat64;
  std::vector<uint8_t> bytes_;
};

// One problem. Packed when cu_seqlens are given: seqlen_q and seqlen_k are then the totals.
struct Case {
  const char* name = "";
  int batch = 2, num_heads = 2, num_heads_k = 2;
  int seqlen_q = 70, seqlen_k = 130, head_dim = 16, head_dim_v = 16;
  int window_left = -1, window_right = -1;
  double softcap = 0;
  DType bias = DType::kNone;
  bool broadcast_bias = false;
  bool alibi = false, sinks = false;
  double dropout_p = 0;
  int num_splits = 1;
  int row_gap = 0;  // unused elements between rows
  double scale = 1;
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k;
  int page_size = 0;  // 0: not paged; else keys lie in num_pages pages
  int num_pages = 0;
  std::vector<int32_t> page_table;  // (batch, max_pages)
  bool overlaps = false;            // sequences share rows: one thread, and rows mean nothing
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const auto add = [&cases](const char* name, auto change) {
    Case c;
    c.name = name;
    change(c);
    cases.push_back(c);
  };
  constexpr int kMost = std::numeric_limits<int32_t>::max();
  constexpr int kLeast = std::numeric_limits<int32_t>::min();
  add("plain", [](Case&) {});
  add("one of everything", [](Case& c) {
    c.batch = c.num_heads = c.num_heads_k = c.seqlen_q = c.seqlen_k = c.head_dim = c.head_dim_v = 1;
  });
  add("whole tiles", [](Case& c) { c.seqlen_q = 64, c.seqlen_k = 128, c.head_dim = 32; });
  add("largest head dim",
      [](Case& c) { c.seqlen_q = 3, c.seqlen_k = 65, c.head_dim = 256, c.head_dim_v = 256; });
  add("odd head dims", [](Case& c) { c.head_dim = 33, c.head_dim_v = 7; });
  add("gqa, rows with gaps",
      [](Case& c) { c.num_heads = 6, c.num_heads_k = 2, c.row_gap = 3, c.head_dim_v = 9; });
  add("causal, more rows than keys",
      [](Case& c) { c.seqlen_q = 131, c.seqlen_k = 67, c.window_right = 0; });
  add("causal, sinks, no keys",
      [](Case& c) { c.seqlen_k = 0, c.window_right = 0, c.sinks = true; });
  add("window", [](Case& c) { c.seqlen_q = 130, c.window_left = 5, c.window_right = 3; });
  add("softcap, float bias, alibi",
      [](Case& c) { c.softcap = 4, c.bias = DType::kFloat32, c.alibi = true; });
  add("bool mask, sinks", [](Case& c) { c.bias = DType::kBool, c.sinks = true; });
  add("broadcast bias, causal",
      [](Case& c) { c.bias = DType::kFloat32, c.broadcast_bias = true, c.window_right = 0; });
  add("dropout, one head", [](Case& c) {
    c.batch = c.num_heads = c.num_heads_k = 1, c.seqlen_k = 200, c.dropout_p = 0.3;
  });
  add("everything dropped", [](Case& c) { c.dropout_p = 1; });
  add("splits, more than blocks", [](Case& c) { c.num_splits = 5, c.sinks = true; });
  add("large logits", [](Case& c) { c.scale = 300, c.window_right = 0; });
  add("packed", [](Case& c) {
    c.cu_seqlens_q = {0, 31, 31, 70}, c.cu_seqlens_k = {0, 5, 90, 130}, c.batch = 3;
    c.window_right = 0, c.alibi = true, c.bias = DType::kFloat32, c.num_splits = 2;
  });
  add("packed, lengths out of range", [](Case& c) {
    c.cu_seqlens_q = {-9, 40, kMost}, c.cu_seqlens_k = {kLeast, 3, kMost};
    c.seqused_k = {kMost, -1}, c.sinks = true;
  });
  add("packed, lengths overlap", [](Case& c) {
    c.cu_seqlens_q = {0, 60, 2}, c.cu_seqlens_k = {100, 3, 130}, c.overlaps = true;
  });
  add("hidden keys, out of range too",
      [](Case& c) { c.leftpad_k = {70, kMost}, c.window_right = 0, c.sinks = true; });
  add("pages", [](Case& c) {
    c.page_size = 48, c.num_pages = 5, c.page_table = {4, 0, 2, 1, 3, 9};
    c.seqused_k = {130, 50}, c.leftpad_k = {3, kLeast}, c.window_right = 0, c.num_splits = 2;
  });
  add("pages of one key, entries and lengths out of range", [](Case& c) {
    c.seqlen_k = 6, c.page_size = 1, c.num_pages = 3;
    c.page_table = {kMost, kLeast, 0, 1, 2, 3, -1, 5, 2, 0, 1, kMost}, c.seqused_k = {kMost, 5};
  });
  add("used lengths out of range",
      [](Case& c) { c.seqused_q = {kMost, kLeast}, c.seqused_k = {0, kMost}, c.window_left = 9; });
  return cases;
}

void on_threads(int64_t begin, int64_t end, Launch::Body body, void* context) {
  constexpr int64_t kThreads = 3;
  const int64_t chunk = ceil_div(end - begin, kThreads);
  std::vector<std::thread> threads;
  for (int64_t at = begin; at < end; at += chunk)
    threads.emplace_back(body, at, min_of(at + chunk, end), context);
  for (std::thread& thread : threads) thread.join();
}

void on_this_thread(int64_t begin, int64_t end, Launch::Body body, void* context) {
  body(begin, end, context);
}

// (batch, rows, heads, dim), or (rows, heads, dim) when packed; ends with its last element.
struct Tensor {
  Array array;
  View view;

  Tensor(DType dtype, bool packed, int batch, int rows, int heads, int dim, int row_gap = 0) {
    const int64_t head_stride = dim, row_stride = heads * dim + row_gap;
    const int64_t batch_stride = packed ? 0 : rows * row_stride;
    const int64_t count = rows ? (packed ? 0 : (batch - 1) * batch_stride) + rows * row_stride : 0;
    array = Array(dtype, max_of<int64_t>(count - row_gap, 0));
    view = {array.data(), batch_stride, row_stride, head_stride};
  }
};

class Run {
 public:
  Run(const Case& config, DType type)
      : c(config),
        dtype(type),
        acc(type == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32),
        packed(!c.cu_seqlens_q.empty()),
        q(rows_q(c.head_dim, c.row_gap)),
        k(rows_k(c.head_dim, c.row_gap)),
        v(rows_k(c.head_dim_v, c.row_gap)),
        out(rows_q(c.head_dim_v)) {
    for (Tensor* t : {&q, &k, &v}) t->array.fill_normal(generator, 1);
    fill_params();
    lse = Array(acc, base.num_rows());
    lse.fill(-kInf);
    launch.parallel_for = c.overlaps ? on_this_thread : on_threads;
  }

  bool all() {
    forward();
    if (!finite("out", out.array)) return false;
    // Appends have no instruction set of their own: the build of the portable kernels has them.
    const bool has_append = find_kernel({Pass::kAppend, dtype, c.head_dim, c.head_dim_v, 0});
    if (c.page_size > 0) return !has_append || append();
    return !c.leftpad_k.empty() || (backward() && probs());  // only the forward hides keys
  }

 private:
  Tensor rows_q(int dim, int gap = 0) const {
    return Tensor(dtype, packed, c.batch, c.seqlen_q, c.num_heads, dim, gap);
  }
  Tensor rows_k(int dim, int gap = 0) const {
    if (c.page_size > 0) return Tensor(dtype, false, c.num_pages, c.page_size, c.num_heads_k, dim);
    return Tensor(dtype, packed, c.batch, c.seqlen_k, c.num_heads_k, dim, gap);
  }

  static const int32_t* pointer(const std::vector<int32_t>& lengths) {
    return lengths.empty() ? nullptr : lengths.data();
  }

  void fill_params() {
    AttnParams& p = base;
    p.q = q.view, p.k = k.view, p.v = v.view;
    p.batch = c.batch, p.num_heads = c.num_heads, p.num_heads_k = c.num_heads_k;
    p.head_dim = c.head_dim, p.head_dim_v = c.head_dim_v;
    p.side_q = {pointer(c.cu_seqlens_q), pointer(c.seqused_q), c.seqlen_q, c.seqlen_q};
    p.side_k = {pointer(c.cu_seqlens_k), pointer(c.seqused_k), c.seqlen_k, c.seqlen_k};
    p.side_k.leftpad = pointer(c.leftpad_k);
    if (c.page_size > 0) {
      const int max_pages = static_cast<int>(c.page_table.size()) / c.batch;
      p.pages = {pointer(c.page_table), max_pages, c.num_pages, c.page_size};
      p.side_k.total = max_pages * c.page_size;
    }
    p.softmax_scale = c.scale / std::sqrt(c.head_dim), p.softcap = c.softcap;
    p.window_left = c.window_left, p.window_right = c.window_right;
    p.rng_state = rng_state, p.dropout_threshold = static_cast<int>(256 * c.dropout_p + 0.5);
    if (c.bias != DType::kNone) {
      p.bias = bias_view(bias, c.bias);
      bias.fill_normal(generator, 1);
    }
    if (c.alibi) {
      slopes = Array(acc, c.batch * c.num_heads);
      slopes.fill(0.25);
      p.alibi_slopes = {slopes.data(), c.num_heads};
    }
    if (c.sinks) {
      sinks = Array(acc, c.num_heads);
      sinks.fill_normal(generator, 1);
      p.sinks = {sinks.data(), 0};
    }
  }

  // (batch, num_heads, seqlen_q, seqlen_k), or (1, num_heads, 1, seqlen_k) when broadcast.
  BiasView bias_view(Array& array, DType type) const {
    const int64_t rows = c.broadcast_bias ? 1 : c.seqlen_q, batch = c.broadcast_bias ? 1 : c.batch;
    array = Array(type, batch * c.num_heads * rows * c.seqlen_k);
    const int64_t head_stride = rows * c.seqlen_k;
    return {array.data(),
            c.broadcast_bias ? 0 : c.num_heads * head_stride,
            head_stride,
            c.broadcast_bias ? 0 : c.seqlen_k,
            1,
            type};
  }

  template <typename Params>
  void start(Pass pass, Params& p) {
    const KernelEntry* entry = find_kernel({pass, dtype, c.head_dim, c.head_dim_v, 0});
    if (!entry) throw std::runtime_error("no kernel for this pass and dtype in the table");
    Array workspace(DType::kBool, static_cast<int64_t>(entry->workspace(p)));
    workspace.fill(1);  // the kernel initialises what it reads
    if constexpr (std::is_same_v<Params, FwdParams> || std::is_same_v<Params, BwdParams>)
      p.workspace = workspace.data();
    entry->launch(p, launch);
  }

  void forward() {
    FwdParams p;
    static_cast<AttnParams&>(p) = base;
    p.out = out.view, p.lse = lse.data(), p.num_splits = c.num_splits;
    start(Pass::kFwd, p);
  }

  bool backward() {
    Tensor dout = rows_q(c.head_dim_v), dq = rows_q(c.head_dim), dk = rows_k(c.head_dim),
           dv = rows_k(c.head_dim_v);
    Array dlse(acc, lse.size()), dbias, dslopes(acc, slopes.size()), dsinks(acc, sinks.size());
    dout.array.fill_normal(generator, 1);
    dlse.fill_normal(generator, 1);
    BwdParams p;
    static_cast<AttnParams&>(p) = base;
    p.out = out.view, p.dout = dout.view, p.lse = lse.data(), p.dlse = dlse.data();
    p.dq = dq.view, p.dk = dk.view, p.dv = dv.view;
    if (c.bias == DType::kFloat32) p.dbias = bias_view(dbias, c.bias);
    p.dalibi_slopes = dslopes.data(), p.dsinks = dsinks.data();
    start(Pass::kBwd, p);
    return finite("dq", dq.array) && finite("dk", dk.array) && finite("dv", dv.array) &&
           finite("dbias", dbias) && finite("dalibi_slopes", dslopes) && finite("dsinks", dsinks);
  }

  // Three new rows a sequence, rotated, into the pages that the forward has read.
  bool append() {
    constexpr int kNew = 3;
    Tensor new_k(dtype, false, c.batch, kNew, c.num_heads_k, c.head_dim),
        new_v(dtype, false, c.batch, kNew, c.num_heads_k, c.head_dim_v);
    Array table(DType::kFloat32, 7 * (c.head_dim / 2));
    std::vector<int32_t> used(c.batch);
    for (Array* array : {&new_k.array, &new_v.array, &table}) array->fill_normal(generator, 1);
    AppendParams p;
    static_cast<AttnParams&>(p) = base;
    p.side_q = {nullptr, nullptr, kNew, kNew};
    p.new_k = new_k.view, p.new_v = new_v.view;
    p.rotary = {table.data(),  table.data(), c.head_dim / 2, c.head_dim / 2, DType::kFloat32, 7,
                c.head_dim / 2};
    p.cache_seqlens = c.seqused_k.data(), p.seqused_k = used.data();
    start(Pass::kAppend, p);
    return finite("k after an append", k.array) && finite("v after an append", v.array);
  }

  bool probs() {
    Array prob(dtype, static_cast<int64_t>(c.batch) * c.num_heads * c.seqlen_q * c.seqlen_k);
    if (prob.size() == 0) return true;
    ProbsParams p;
    static_cast<AttnParams&>(p) = base;
    p.lse = lse.data(), p.probs = prob.data();
    start(Pass::kProbs, p);
    return finite("probs", prob) && (c.overlaps || rows_add_up(prob));
  }

  bool rows_add_up(const Array& prob) const {
    const double tolerance = dtype == DType::kFloat32 || dtype == DType::kFloat64 ? 1e-4 : 2e-2;
    for (int b = 0; b < c.batch; ++b) {
      const SeqInfo seq = seq_info(base.side_q, base.side_k, b);
      for (int h = 0; h < c.num_heads; ++h)
        for (int i = 0; i < seq.seqlen_q; ++i) {
          const double row_lse = lse.get(base.row_index(b, h, seq, i));
          double sum = c.sinks && row_lse > -kInf ? std::exp(sinks.get(h) - row_lse) : 0;
          const int64_t row = ((static_cast<int64_t>(b) * c.num_heads + h) * c.seqlen_q + i);
          for (int j = 0; j < c.seqlen_k; ++j) sum += std::fabs(prob.get(row * c.seqlen_k + j));
          const double expected = row_lse > -kInf ? 1 : 0;
          if (!(std::fabs(sum - expected) < tolerance)) {
            std::fprintf(stderr, "%s: sequence %d, head %d, row %d: probabilities add up to %g\n",
                         c.name, b, h, i, sum);
            return false;
          }
        }
    }
    return true;
  }

  bool finite(const char* what, const Array& array) const {
    for (int64_t at = 0; at < array.size(); ++at) {
      if (std::isfinite(array.get(at))) continue;
      std::fprintf(stderr, "%s: %s[%lld] is not finite\n", c.name, what,
                   static_cast<long long>(at));
      return false;
    }
    return true;
  }

  const Case c;
  const DType dtype, acc;
  const bool packed;
  std::mt19937 generator{1};
  const int64_t rng_state[2] = {0x0123456789ABCDEF, -5};
  Tensor q, k, v, out;
  Array lse, bias, slopes, sinks;
  AttnParams base;
  Launch launch;
};

}  // namespace
}  // namespace flash

int main() {
  const std::vector<flash::Case> cases = flash::all_cases();
  int failed = 0, runs = 0;
  for (flash::DType dtype : {flash::DType::kFloat16, flash::DType::kBFloat16,
                             flash::DType::kFloat32, flash::DType::kFloat64}) {
    if (!flash::find_kernel({flash::Pass::kFwd, dtype, 1, 1, 0})) continue;
    for (const flash::Case& config : cases) {
      ++runs;
      failed += !flash::Run(config, dtype).all();
    }
  }
  std::printf("%d cases, %d failed\n", runs, failed);
  return failed != 0 || runs == 0;
}
