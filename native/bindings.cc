// The module socflower._native: checks arguments against the headers' contracts and does no arithmetic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "aggregate.h"

namespace nb = nanobind;

namespace {

// "'f'" may carry a byte order mark: '@' and '=' are the host's, '^' is NumPy's unaligned one.
bool is_native_float32(const Py_buffer& view) {
  const char* format = view.format;
  if (format == nullptr || view.itemsize != 4) return false;
  const std::uint16_t probe = 1;
  const bool little = *reinterpret_cast<const unsigned char*>(&probe) == 1;
  if (*format == '@' || *format == '=' || *format == '^' || *format == (little ? '<' : '>')) ++format;
  return std::strcmp(format, "f") == 0;
}

// A C-contiguous float32 buffer of any shape and byte alignment, held for the lifetime of this object. The
// buffer protocol (rather than nb::ndarray) is what gives read-only and unaligned views without a copy.
class Float32Buffer {
 public:
  Float32Buffer(nb::handle object, const std::string& name, bool writable) {
    const int flags = PyBUF_FORMAT | PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
      PyErr_Clear();
      throw nb::value_error((name + ": need a " + (writable ? "writable " : "") +
                             "C-contiguous float32 array, got " + nb::inst_name(object).c_str() +
                             (writable ? ", which gives no writable buffer" : ", which gives no buffer"))
                                .c_str());
    }
    if (!is_native_float32(view_)) {
      fail(name + ": need float32 in the machine's byte order, got format '" +
           (view_.format == nullptr ? "B" : view_.format) + "' with " + std::to_string(view_.itemsize) +
           " bytes per element");
    }
    if (PyBuffer_IsContiguous(&view_, 'C') == 0) {
      fail(name + ": need a C-contiguous array, got strides that leave gaps or another order; pass "
                  "numpy.ascontiguousarray(array)");
    }
  }
  ~Float32Buffer() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }
  Float32Buffer(Float32Buffer&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  Float32Buffer(const Float32Buffer&) = delete;
  Float32Buffer& operator=(const Float32Buffer&) = delete;
  Float32Buffer& operator=(Float32Buffer&&) = delete;

  unsigned char* begin() const { return static_cast<unsigned char*>(view_.buf); }
  unsigned char* end() const { return begin() + view_.len; }
  std::size_t length() const { return static_cast<std::size_t>(view_.len) / 4; }

 private:
  [[noreturn]] void fail(const std::string& message) {  // a throwing constructor runs no destructor
    PyBuffer_Release(&view_);
    view_.obj = nullptr;
    throw nb::value_error(message.c_str());
  }

  Py_buffer view_{};
};

struct Inputs {
  std::vector<Float32Buffer> buffers;
  std::vector<const unsigned char*> pointers;

  Inputs(nb::sequence inputs, const std::vector<double>& weights) {
    for (nb::handle input : inputs) {
      buffers.emplace_back(input, "inputs[" + std::to_string(buffers.size()) + "]", false);
      pointers.push_back(buffers.back().begin());
    }
    if (weights.size() != buffers.size()) {
      throw nb::value_error(("need one weight per input, got " + std::to_string(weights.size()) +
                             " weights for " + std::to_string(buffers.size()) + " inputs")
                                .c_str());
    }
  }

  void require_length(std::size_t length, const char* of) const {
    for (std::size_t k = 0; k < buffers.size(); ++k) {
      if (buffers[k].length() == length) continue;
      throw nb::value_error(("inputs[" + std::to_string(k) + "] has " + std::to_string(buffers[k].length()) +
                             " elements, " + of + " has " + std::to_string(length))
                                .c_str());
    }
  }
};

void weighted_sum_into(nb::handle out, nb::sequence inputs, const std::vector<double>& weights) {
  const Float32Buffer target(out, "out", true);
  const Inputs sources(inputs, weights);
  sources.require_length(target.length(), "out");
  for (std::size_t k = 0; k < sources.buffers.size(); ++k) {
    const Float32Buffer& source = sources.buffers[k];
    if (source.begin() < target.end() && target.begin() < source.end()) {
      throw nb::value_error(
          ("out shares memory with inputs[" + std::to_string(k) + "]; give it memory of its own").c_str());
    }
  }
  nb::gil_scoped_release release;
  socflower::weighted_sum(target.begin(), sources.pointers.data(), weights.data(), sources.pointers.size(),
                          target.length());
}

nb::bytes weighted_sum_bytes(nb::bytes prefix, nb::sequence inputs, const std::vector<double>& weights) {
  const Inputs sources(inputs, weights);
  if (sources.buffers.empty()) throw nb::value_error("need at least one input, got 0");
  const std::size_t length = sources.buffers[0].length();
  sources.require_length(length, "inputs[0]");
  // Filling a new bytes object before anyone else can see it is what this call of the C API is for.
  PyObject* result = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(prefix.size() + 4 * length));
  if (result == nullptr) throw nb::python_error();
  auto* body = reinterpret_cast<unsigned char*>(PyBytes_AS_STRING(result));
  std::memcpy(body, prefix.c_str(), prefix.size());
  body += prefix.size();
  {
    nb::gil_scoped_release release;
    socflower::weighted_sum(body, sources.pointers.data(), weights.data(), sources.pointers.size(), length);
  }
  return nb::steal<nb::bytes>(result);
}

Py_ssize_t first_non_finite(nb::handle x) {
  const Float32Buffer buffer(x, "x", false);
  std::size_t index;
  {
    nb::gil_scoped_release release;
    index = socflower::first_non_finite(buffer.begin(), buffer.length());
  }
  return index == buffer.length() ? -1 : static_cast<Py_ssize_t>(index);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "C++ kernels of socflower. Arrays are C-contiguous float32 buffers of any byte alignment.";
  m.def("weighted_sum_into", &weighted_sum_into, nb::arg("out"), nb::arg("inputs"), nb::arg("weights"),
        "Write sum_k weights[k] * inputs[k] into `out`, in double, in the order of the inputs.");
  m.def("weighted_sum_bytes", &weighted_sum_bytes, nb::arg("prefix"), nb::arg("inputs"), nb::arg("weights"),
        "Return `prefix` followed by the weighted sum as float32, as one bytes object made without a copy.");
  m.def("first_non_finite", &first_non_finite, nb::arg("x"),
        "Return the flat index of the first NaN or infinity in `x`, or -1.");
  m.def("all_finite", [](nb::handle x) { return first_non_finite(x) < 0; }, nb::arg("x"),
        "Return whether `x` holds neither NaN nor infinity.");
}
