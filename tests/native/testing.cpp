// flash_ext_testing: csrc/common as a Python module, so that pytest can hold it against brute
// force.
//
// Each binding is the function itself with its own names. Ranges travel as (begin, end) tuples. No
// torch here: what common/ needs is a C++ compiler and nothing else, and this file shows it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common/dropout.h"
#include "common/number.h"
#include "common/score.h"
#include "common/seqlen.h"
#include "common/softmax.h"
#include "common/tile_range.h"

namespace py = pybind11;

namespace flash {
namespace {

using Pair = std::pair<int, int>;
using Words = std::array<uint32_t, 4>;

Range to_range(Pair pair) { return {pair.first, pair.second}; }
Pair to_pair(Range range) { return {range.begin, range.end}; }

Philox4 to_philox(const Words& w) { return {{w[0], w[1], w[2], w[3]}}; }
Words to_words(const Philox4& p) { return {p.word[0], p.word[1], p.word[2], p.word[3]}; }

void bind_mask(py::module_& m) {
  m.def("intersect", [](Pair a, Pair b) { return to_pair(intersect(to_range(a), to_range(b))); });
  m.def("range_size", [](Pair range) { return to_range(range).size(); });
  m.def("blocks_of",
        [](Pair range, int block) { return to_pair(blocks_of(to_range(range), block)); });
  m.def("block_range", [](int index, int block) { return to_pair(block_range(index, block)); });
  m.def("split_blocks", [](Pair blocks, int index, int count) {
    return to_pair(split_blocks(to_range(blocks), index, count));
  });
  py::class_<Mask>(m, "Mask")
      .def(py::init([](int seqlen_q, int seqlen_k, int left, int right) {
        return Mask{seqlen_q, seqlen_k, left, right};
      }))
      .def("diagonal", [](const Mask& mask) { return mask.diagonal(); })
      .def("first_key", [](const Mask& mask, int i) { return mask.first_key(i); })
      .def("end_key", [](const Mask& mask, int i) { return mask.end_key(i); })
      .def("keys_of",
           [](const Mask& mask, Pair rows) { return to_pair(mask.keys_of(to_range(rows))); })
      .def("rows_of",
           [](const Mask& mask, Pair keys) { return to_pair(mask.rows_of(to_range(keys))); })
      .def("sees", [](const Mask& mask, int i, int j) { return mask.sees(i, j); })
      .def("is_edge", [](const Mask& mask, Pair rows, Pair keys) {
        return mask.is_edge(to_range(rows), to_range(keys));
      });
}

// A SeqSide and the lengths that it points to.
struct OwnedSide {
  std::vector<int32_t> cu_seqlens, seqused;
  SeqSide side;

  OwnedSide(std::optional<std::vector<int32_t>> cu, std::optional<std::vector<int32_t>> used,
            int64_t total, int max_seqlen)
      : cu_seqlens(cu.value_or(std::vector<int32_t>())),
        seqused(used.value_or(std::vector<int32_t>())),
        side{cu ? cu_seqlens.data() : nullptr, used ? seqused.data() : nullptr, total, max_seqlen} {
  }
  OwnedSide(const OwnedSide&) = delete;
};

void bind_seqlen(py::module_& m) {
  py::class_<OwnedSide>(m, "SeqSide")
      .def(py::init<std::optional<std::vector<int32_t>>, std::optional<std::vector<int32_t>>,
                    int64_t, int>(),
           py::arg("cu_seqlens"), py::arg("seqused"), py::arg("total"), py::arg("max_seqlen"))
      .def("offset", [](const OwnedSide& s, int batch) { return s.side.offset(batch); })
      .def("length", [](const OwnedSide& s, int batch) { return s.side.length(batch); });
  m.def("seq_info", [](const OwnedSide& q, const OwnedSide& k, int batch) {
    const SeqInfo seq = seq_info(q.side, k.side, batch);
    return std::make_tuple(seq.offset_q, seq.offset_k, seq.seqlen_q, seq.seqlen_k);
  });
}

void bind_dropout(py::module_& m) {
  m.def("philox4x32_7", [](const Words& counter, std::array<uint32_t, 2> key) {
    return to_words(philox4x32_7(to_philox(counter), key[0], key[1]));
  });
  m.def("splitmix64", [](uint64_t x) { return splitmix64(x); });
  py::class_<Dropout>(m, "Dropout")
      .def(py::init([](std::array<int64_t, 2> rng_state, int threshold) {
             return Dropout::make(rng_state.data(), threshold);
           }),
           py::arg("rng_state"), py::arg("threshold"))
      .def_static("threshold_of", [](double p) { return Dropout::threshold_of(p); })
      .def("enabled", [](const Dropout& d) { return d.enabled(); })
      .def("keep_scale", [](const Dropout& d) { return d.keep_scale(); })
      .def("bytes", [](const Dropout& d, int sequence, int head, int i, int a,
                       int t) { return to_words(d.bytes(sequence, head, i, a, t)); })
      .def("keep_byte", [](const Dropout& d, const Words& random, int n,
                           int c) { return d.keep_byte(to_philox(random), n, c); })
      .def("keep", [](const Dropout& d, int sequence, int head, int i, int j) {
        return d.keep(sequence, head, i, j);
      });
}

// Element by element over numpy arrays; 16-bit floats are uint16 bits.
void bind_number(py::module_& m) {
  m.def("float16_to_float", py::vectorize([](uint16_t bits) { return float16_to_float(bits); }));
  m.def("bfloat16_to_float", py::vectorize([](uint16_t bits) { return bfloat16_to_float(bits); }));
  m.def("float_to_float16", py::vectorize([](float x) { return float_to_float16(x); }));
  m.def("float_to_bfloat16", py::vectorize([](float x) { return float_to_bfloat16(x); }));
}

DType dtype_of(const py::array& array) {
  const char kind = array.dtype().kind();
  const auto size = array.itemsize();
  if (kind == 'b') return DType::kBool;
  if (kind == 'u' && size == 2) return DType::kBFloat16;  // its bits: numpy has no bfloat16
  if (kind == 'f' && size == 2) return DType::kFloat16;
  if (kind == 'f' && size == 4) return DType::kFloat32;
  if (kind == 'f' && size == 8) return DType::kFloat64;
  throw std::invalid_argument("bias must be bool, uint16 (bfloat16 bits) or float16, 32 or 64");
}

// A Score and the array that its bias points to.
template <typename T>
struct OwnedScore {
  std::optional<py::array> bias;
  Score<T> score;

  OwnedScore(T scale, T softcap, std::optional<py::array> matrix, T slope, int diagonal)
      : bias(matrix), score(make_score<T>(scale, softcap, view(bias), slope, diagonal)) {}

  static BiasMatrix view(const std::optional<py::array>& array) {
    if (!array) return {nullptr, 0, 0, DType::kNone};
    if (array->ndim() != 2) throw std::invalid_argument("bias must be (rows, keys)");
    const int64_t size = array->itemsize();
    return {array->data(), array->strides(0) / size, array->strides(1) / size, dtype_of(*array)};
  }
};

template <typename T>
void bind_score(py::module_& m, const char* name) {
  py::class_<OwnedScore<T>>(m, name)
      .def(py::init<T, T, std::optional<py::array>, T, int>(), py::arg("scale") = 1,
           py::arg("softcap") = 0, py::arg("bias") = py::none(), py::arg("slope") = 0,
           py::arg("diagonal") = 0)
      .def("apply",
           [](const OwnedScore<T>& s, T x, int i, int j) { return s.score.apply(x, i, j); })
      .def("grad", [](const OwnedScore<T>& s, T x, int i, int j) { return s.score.grad(x, i, j); });
}

template <typename T>
void bind_softmax(py::module_ m) {
  m.def("rescale_factor", [](T m_old, T m_new) { return rescale_factor<T>(m_old, m_new); });
  m.def("finish_row", [](T row_max, T row_sum, T sink) {
    const RowEnd<T> end = finish_row<T>(row_max, row_sum, sink);
    return std::make_pair(end.lse, end.out_scale);
  });
  m.def("needs_renormalising", [](T lse) { return needs_renormalising<T>(lse); });
}

}  // namespace
}  // namespace flash

PYBIND11_MODULE(flash_ext_testing, m) {
  flash::bind_mask(m);
  flash::bind_seqlen(m);
  flash::bind_dropout(m);
  flash::bind_number(m);
  flash::bind_score<float>(m, "Score32");
  flash::bind_score<double>(m, "Score64");
  flash::bind_softmax<float>(m.def_submodule("float32"));
  flash::bind_softmax<double>(m.def_submodule("float64"));
}
