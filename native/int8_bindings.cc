// The module socflower._int8: checks arguments against the headers' contracts, lets go of the interpreter's
// lock, and does no arithmetic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "buffer.h"
#include "convolution.h"
#include "gemm.h"
#include "kernel_choice.h"
#include "layers.h"
#include "matrix_products.h"
#include "paths/registry.h"
#include "rows.h"
#include "weight_exchange.h"
#include "reference.h"

namespace nb = nanobind;
using namespace socflower;
using namespace socflower::int8;

namespace {

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

// A kernel path and its threads.
struct Engine {
  Engine(int num_threads, const std::vector<int>& cores, const std::string& kernel)
      : path(choose_path(kernel)), pool(num_threads, cores) {}

  const Path& path;
  ThreadPool pool;
};

Requantise how_to(int shift, int rounding, bool relu) {
  if (shift < 0 || shift > 30) refuse("shift: need 0 to 30, got " + std::to_string(shift));
  if (rounding != 0 && rounding != 1) {
    refuse("rounding: need 0 (nearest) or 1 (pseudo-stochastic), got " + std::to_string(rounding));
  }
  return {shift, static_cast<Rounding>(rounding), relu, nullptr};
}

// An argument that may be None.
template <typename T>
std::optional<Array<T>> maybe(nb::handle object, const char* name, bool writable,
                              std::initializer_list<Py_ssize_t> shape) {
  std::optional<Array<T>> array;
  if (!object.is_none()) array.emplace(object, name, writable, shape);
  return array;
}

template <typename T>
T* pointer(const std::optional<Array<T>>& array) {
  return array ? array->data() : nullptr;
}

// int8 in any shape, in whole blocks of channels.
std::size_t blocks_of(const Array<std::int8_t>& x) {
  if (x.size() % kChannelBlock != 0) {
    refuse(x.name() + ": need a multiple of " + std::to_string(kChannelBlock) + " elements, got " +
           std::to_string(x.size()));
  }
  return x.size();
}

template <typename A, typename B>
void require_same_size(const A& a, const B& b) {
  if (a.size() != b.size()) {
    refuse(a.name() + " has " + std::to_string(a.size()) + " elements, " + b.name() + " has " +
           std::to_string(b.size()));
  }
}

// The quick kernels for activations are exact for 0..127 only.
void require_activations(const Array<std::int8_t>& x) {
  std::int8_t any = 0;
  const std::int8_t* values = x.data();
  for (std::size_t i = 0; i < x.size(); ++i) any |= values[i];
  if (any < 0) refuse(x.name() + ": activations must lie in 0..127, but there is a negative value");
}

// A bias is added to sums of `depth` products of -127..127, in int32.
void require_room_for(const Array<std::int32_t>& bias, std::int64_t depth) {
  const std::int64_t room = 0x7fffffff - depth * 127 * 127;
  for (std::size_t c = 0; c < bias.size(); ++c) {
    if (std::abs(std::int64_t(bias.data()[c])) > room) {
      refuse("bias[" + std::to_string(c) + "] = " + std::to_string(bias.data()[c]) + " may take sums of " +
             std::to_string(depth) + " products beyond int32; need at most +-" + std::to_string(room));
    }
  }
}

// Whether an int8 or int32 array has int32.
bool is_wide_array(nb::handle object, const std::string& name) {
  Py_buffer view;
  if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_ND) != 0) {
    PyErr_Clear();
    refuse(name + ": need an int8 or int32 array");
  }
  const bool is_wide = view.itemsize == 4;
  PyBuffer_Release(&view);
  return is_wide;
}

// int8 or int32, as the caller likes: rounded, or the accumulators themselves.
struct Output {
  Output(nb::handle object, std::initializer_list<Py_ssize_t> shape, const Requantise& how) {
    to.how = how;
    if (is_wide_array(object, "out")) {
      acc.emplace(object, "out", true, shape);
      to.acc = acc->data();
    } else {
      out.emplace(object, "out", true, shape);
      to.out = out->data();
    }
  }
  // Have the accumulators as well, beside an int8 `out`.
  void keep_accumulators(nb::handle object, std::initializer_list<Py_ssize_t> shape) {
    if (!out) refuse("accumulators: out must be int8 beside them");
    acc.emplace(object, "accumulators", true, shape);
    acc->require_apart_from(*out);
    to.acc = acc->data();
  }
  template <typename T>
  void require_apart_from(const Array<T>& other) const {
    if (acc) acc->require_apart_from(other);
    if (out) out->require_apart_from(other);
  }

  std::optional<Array<std::int32_t>> acc;
  std::optional<Array<std::int8_t>> out;
  Destination to;
};

class Workspace {
 public:
  Workspace(nb::handle object, std::size_t bytes) : array_(object, "workspace", true) {
    if (array_.size() < bytes) {
      refuse("workspace: need " + std::to_string(bytes) + " bytes, got " + std::to_string(array_.size()));
    }
  }
  operator const Array<std::uint8_t>&() const { return array_; }
  template <typename T>
  void require_apart_from(const Array<T>& other) const {
    array_.require_apart_from(other);
  }
  void* data() const { return array_.data(); }

 private:
  Array<std::uint8_t> array_;
};

Algorithm algorithm_named(const std::string& name) {
  if (name == "auto") return Algorithm::kAutomatic;
  if (name == "direct") return Algorithm::kDirect;
  if (name == "winograd") return Algorithm::kWinograd;
  refuse("algorithm: need 'auto', 'direct' or 'winograd', got '" + name + "'");
}

struct BoundConvolution : Convolution {
  using Convolution::Convolution;
  Py_ssize_t in_cs() const { return channel_stride(shape().in_c); }
  Py_ssize_t out_cs() const { return channel_stride(shape().out_c); }

  const char* algorithm(const Engine& engine, const std::string& function) const {
    const char* const names[] = {"forward", "input_gradient", "weight_gradient"};
    for (int f = 0; f < 3; ++f) {
      if (function == names[f]) {
        return uses_winograd(engine.path, static_cast<winograd::Function>(f)) ? "winograd" : "direct";
      }
    }
    refuse("function: need 'forward', 'input_gradient' or 'weight_gradient', got '" + function + "'");
  }

  std::uint32_t forward(Engine& engine, nb::handle x_, nb::handle weight_, nb::handle bias_, nb::handle out_,
                        nb::handle workspace_, bool activations, int shift, int rounding, bool relu,
                        nb::handle accumulators_) const {
    const ConvShape& s = shape();
    const Array<std::int8_t> x(x_, "x", false, {s.in_h, s.in_w, s.batch, in_cs()});
    const Array<std::int8_t> weight(weight_, "weight", false, {s.kernel_h, s.kernel_w, s.group_in_c(), out_cs()});
    const auto bias = maybe<std::int32_t>(bias_, "bias", false, {out_cs()});
    Output out(out_, {s.out_h(), s.out_w(), s.batch, out_cs()}, how_to(shift, rounding, relu));
    if (!accumulators_.is_none()) out.keep_accumulators(accumulators_, {s.out_h(), s.out_w(), s.batch, out_cs()});
    const Workspace workspace(workspace_, workspace_bytes(engine.path, engine.pool.size()));
    out.require_apart_from(x), out.require_apart_from(weight);
    workspace.require_apart_from(x), workspace.require_apart_from(weight);
    out.require_apart_from<std::uint8_t>(workspace);
    if (bias) {
      out.require_apart_from(*bias), workspace.require_apart_from(*bias);
      require_room_for(*bias, s.forward_depth());
    }
    if (activations) require_activations(x);
    nb::gil_scoped_release release;
    return Convolution::forward(engine.path, engine.pool, x.data(), activations, weight.data(), pointer(bias), out.to,
                                workspace.data());
  }

  std::uint32_t input_gradient(Engine& engine, nb::handle dy_, nb::handle weight_, nb::handle out_,
                               nb::handle workspace_, int shift, int rounding, nb::handle mask_) const {
    const ConvShape& s = shape();
    const Array<std::int8_t> dy(dy_, "dy", false, {s.out_h(), s.out_w(), s.batch, out_cs()});
    const Array<std::int8_t> weight(weight_, "weight", false, {s.kernel_h, s.kernel_w, s.group_in_c(), out_cs()});
    const auto mask = maybe<std::int8_t>(mask_, "mask", false, {s.in_h, s.in_w, s.batch, in_cs()});
    Output out(out_, {s.in_h, s.in_w, s.batch, in_cs()}, how_to(shift, rounding, false));
    const Workspace workspace(workspace_, workspace_bytes(engine.path, engine.pool.size()));
    out.require_apart_from(dy), out.require_apart_from(weight);
    workspace.require_apart_from(dy), workspace.require_apart_from(weight);
    out.require_apart_from<std::uint8_t>(workspace);
    if (mask) out.require_apart_from(*mask), workspace.require_apart_from(*mask);
    out.to.how.mask = pointer(mask);
    nb::gil_scoped_release release;
    return Convolution::input_gradient(engine.path, engine.pool, dy.data(), weight.data(), out.to, workspace.data());
  }

  std::uint32_t weight_gradient(Engine& engine, nb::handle x_, nb::handle dy_, nb::handle out_, nb::handle workspace_,
                                bool activations) const {
    const ConvShape& s = shape();
    const Array<std::int8_t> x(x_, "x", false, {s.in_h, s.in_w, s.batch, in_cs()});
    const Array<std::int8_t> dy(dy_, "dy", false, {s.out_h(), s.out_w(), s.batch, out_cs()});
    const Array<std::int32_t> out(out_, "out", true, {s.kernel_h, s.kernel_w, s.group_in_c(), out_cs()});
    const Workspace workspace(workspace_, workspace_bytes(engine.path, engine.pool.size()));
    out.require_apart_from(x), out.require_apart_from(dy);
    workspace.require_apart_from(x), workspace.require_apart_from(dy);
    out.require_apart_from<std::uint8_t>(workspace);
    if (activations) require_activations(x);
    nb::gil_scoped_release release;
    return Convolution::weight_gradient(engine.path, engine.pool, x.data(), activations, dy.data(), out.data(),
                                        workspace.data());
  }
};

struct BoundPooling : Pooling {
  using Pooling::Pooling;
  Py_ssize_t cs() const { return channel_stride(shape().channels); }

  void max(Engine& engine, nb::handle x_, nb::handle out_, nb::handle argmax_) const {
    const PoolShape& s = shape();
    const Array<std::int8_t> x(x_, "x", false, {s.in_h, s.in_w, s.batch, cs()});
    const Array<std::int8_t> out(out_, "out", true, {s.out_h(), s.out_w(), s.batch, cs()});
    const Array<std::uint8_t> argmax(argmax_, "argmax", true, {s.out_h(), s.out_w(), s.batch, cs()});
    out.require_apart_from(x), argmax.require_apart_from(x), out.require_apart_from(argmax);
    nb::gil_scoped_release release;
    Pooling::max(engine.path, engine.pool, x.data(), out.data(), argmax.data());
  }

  std::uint32_t max_gradient(Engine& engine, nb::handle dy_, nb::handle argmax_, nb::handle out_, int shift,
                             int rounding, nb::handle mask_) const {
    const PoolShape& s = shape();
    const Array<std::int8_t> dy(dy_, "dy", false, {s.out_h(), s.out_w(), s.batch, cs()});
    const Array<std::uint8_t> argmax(argmax_, "argmax", false, {s.out_h(), s.out_w(), s.batch, cs()});
    const auto out = maybe<std::int8_t>(out_, "out", true, {s.in_h, s.in_w, s.batch, cs()});
    const auto mask = maybe<std::int8_t>(mask_, "mask", false, {s.in_h, s.in_w, s.batch, cs()});
    Requantise how = how_to(shift, rounding, false);
    how.mask = pointer(mask);
    if (out) {
      out->require_apart_from(dy), out->require_apart_from(argmax);
      if (mask) out->require_apart_from(*mask);
    }
    nb::gil_scoped_release release;
    return Pooling::max_gradient(engine.path, engine.pool, dy.data(), argmax.data(), pointer(out), how);
  }

  std::uint32_t average(Engine& engine, nb::handle x_, int multiplier, nb::handle out_, int shift, int rounding) const {
    const PoolShape& s = shape();
    const Array<std::int8_t> x(x_, "x", false, {s.in_h, s.in_w, s.batch, cs()});
    const auto out = maybe<std::int8_t>(out_, "out", true, {s.out_h(), s.out_w(), s.batch, cs()});
    if (out) out->require_apart_from(x);
    require_multiplier(multiplier);
    const Requantise how = how_to(shift, rounding, false);
    nb::gil_scoped_release release;
    return Pooling::average(engine.path, engine.pool, x.data(), multiplier, pointer(out), how);
  }

  std::uint32_t average_gradient(Engine& engine, nb::handle dy_, int multiplier, nb::handle out_, int shift,
                                 int rounding, nb::handle mask_) const {
    const PoolShape& s = shape();
    const Array<std::int8_t> dy(dy_, "dy", false, {s.out_h(), s.out_w(), s.batch, cs()});
    const auto out = maybe<std::int8_t>(out_, "out", true, {s.in_h, s.in_w, s.batch, cs()});
    const auto mask = maybe<std::int8_t>(mask_, "mask", false, {s.in_h, s.in_w, s.batch, cs()});
    if (out) {
      out->require_apart_from(dy);
      if (mask) out->require_apart_from(*mask);
    }
    require_multiplier(multiplier);
    Requantise how = how_to(shift, rounding, false);
    how.mask = pointer(mask);
    nb::gil_scoped_release release;
    return Pooling::average_gradient(engine.path, engine.pool, dy.data(), multiplier, pointer(out), how);
  }

  void require_multiplier(int multiplier) const {
    const int most = 0x7fffffff / (128 * shape().kernel_h * shape().kernel_w);
    if (multiplier < 0 || multiplier > most) {
      refuse("multiplier: need 0 to " + std::to_string(most) + " for this window, got " + std::to_string(multiplier));
    }
  }
};

std::uint32_t bound_requantise(Engine& engine, nb::handle acc_, nb::handle out_, int shift, int rounding, bool relu,
                               nb::handle mask_) {
  const Array<std::int32_t> acc(acc_, "acc", false);
  const auto out = maybe<std::int8_t>(out_, "out", true, {});
  const auto mask = maybe<std::int8_t>(mask_, "mask", false, {});
  Requantise how = how_to(shift, rounding, relu);
  how.mask = pointer(mask);
  if (acc.size() % kChannelBlock != 0) {
    refuse("acc: need a multiple of " + std::to_string(kChannelBlock) + " elements, got " + std::to_string(acc.size()));
  }
  if (out) require_same_size(*out, acc), out->require_apart_from(acc);
  if (mask) require_same_size(*mask, acc);
  if (out && mask) out->require_apart_from(*mask);
  nb::gil_scoped_release release;
  return requantise(engine.path, engine.pool, acc.data(), pointer(out), acc.size(), how);
}

std::uint32_t bound_add(Engine& engine, nb::handle a_, int shift_a, nb::handle b_, int shift_b, nb::handle out_,
                        int shift, int rounding, bool relu, nb::handle mask_) {
  const Array<std::int8_t> a(a_, "a", false), b(b_, "b", false);
  const auto out = maybe<std::int8_t>(out_, "out", true, {});
  const auto mask = maybe<std::int8_t>(mask_, "mask", false, {});
  if (shift_a < 0 || shift_a > 20 || shift_b < 0 || shift_b > 20) {
    refuse("shift_a and shift_b: need 0 to 20, got " + std::to_string(shift_a) + " and " + std::to_string(shift_b));
  }
  Requantise how = how_to(shift, rounding, relu);
  how.mask = pointer(mask);
  blocks_of(a), require_same_size(b, a);
  if (out) require_same_size(*out, a), out->require_apart_from(a), out->require_apart_from(b);
  if (mask) require_same_size(*mask, a);
  if (out && mask) out->require_apart_from(*mask);
  nb::gil_scoped_release release;
  return add(engine.path, engine.pool, a.data(), shift_a, b.data(), shift_b, pointer(out), a.size(), how);
}

// Per-channel coefficients: their number is the channel stride, and their bounds keep the sums in int32.
int stride_of(const Array<std::int32_t>& coefficients, std::size_t size, std::initializer_list<const Array<std::int32_t>*>
                  scales, const Array<std::int32_t>& offset) {
  const std::size_t cs = coefficients.size();
  if (cs == 0 || cs % kChannelBlock != 0 || size % cs != 0) {
    refuse(coefficients.name() + ": need one value per channel, in a multiple of " + std::to_string(kChannelBlock) +
           " that divides " + std::to_string(size) + ", got " + std::to_string(cs));
  }
  for (const auto* scale : scales) {
    require_same_size(*scale, coefficients);
    for (std::size_t c = 0; c < cs; ++c) {
      if (std::abs(std::int64_t(scale->data()[c])) >= (1 << 22)) {
        refuse(scale->name() + "[" + std::to_string(c) + "] = " + std::to_string(scale->data()[c]) +
               " is beyond +-2^22");
      }
    }
  }
  require_same_size(offset, coefficients);
  for (std::size_t c = 0; c < cs; ++c) {
    if (std::abs(std::int64_t(offset.data()[c])) >= (1 << 29)) {
      refuse(offset.name() + "[" + std::to_string(c) + "] = " + std::to_string(offset.data()[c]) + " is beyond +-2^29");
    }
  }
  return static_cast<int>(cs);
}

std::uint32_t bound_affine(Engine& engine, nb::handle x_, nb::handle scale_, nb::handle offset_, nb::handle out_,
                           int shift, int rounding, bool relu) {
  const Array<std::int8_t> x(x_, "x", false);
  const Array<std::int32_t> scale(scale_, "scale", false), offset(offset_, "offset", false);
  const auto out = maybe<std::int8_t>(out_, "out", true, {});
  const int cs = stride_of(scale, x.size(), {&scale}, offset);
  if (out) {
    require_same_size(*out, x), out->require_apart_from(x);
    out->require_apart_from(scale), out->require_apart_from(offset);
  }
  const Requantise how = how_to(shift, rounding, relu);
  nb::gil_scoped_release release;
  return affine(engine.path, engine.pool, x.data(), scale.data(), offset.data(), pointer(out), x.size() / cs, cs, how);
}

std::uint32_t bound_affine_gradient(Engine& engine, nb::handle dy_, nb::handle x_, nb::handle gate_,
                                    nb::handle scale_dy_, nb::handle scale_x_, nb::handle offset_, nb::handle out_,
                                    int shift, int rounding, bool relu, nb::handle mask_) {
  const Array<std::int8_t> dy(dy_, "dy", false), x(x_, "x", false);
  const auto gate = maybe<std::int8_t>(gate_, "gate", false, {});
  const Array<std::int32_t> scale_dy(scale_dy_, "scale_dy", false), scale_x(scale_x_, "scale_x", false),
      offset(offset_, "offset", false);
  const auto out = maybe<std::int8_t>(out_, "out", true, {});
  const auto mask = maybe<std::int8_t>(mask_, "mask", false, {});
  const int cs = stride_of(scale_dy, dy.size(), {&scale_dy, &scale_x}, offset);
  require_same_size(x, dy);
  if (gate) require_same_size(*gate, dy);
  if (out) {
    require_same_size(*out, dy), out->require_apart_from(dy), out->require_apart_from(x);
    out->require_apart_from(scale_dy), out->require_apart_from(scale_x), out->require_apart_from(offset);
    if (gate) out->require_apart_from(*gate);
  }
  if (mask) require_same_size(*mask, dy);
  if (out && mask) out->require_apart_from(*mask);
  Requantise how = how_to(shift, rounding, relu);
  how.mask = pointer(mask);
  nb::gil_scoped_release release;
  return affine_gradient(engine.path, engine.pool, dy.data(), x.data(), pointer(gate), scale_dy.data(), scale_x.data(),
                         offset.data(), pointer(out), dy.size() / cs, cs, how);
}

// How `rows` rows of a share are numbered in the whole batch.
Dither dither_of(std::uint32_t seed, int batch, int total, int first, std::size_t rows) {
  if (batch < 1 || rows % batch != 0) {
    refuse("batch: need a divisor of " + std::to_string(rows) + " rows, got " + std::to_string(batch));
  }
  if (first < 0 || first > total - batch) {
    refuse("first: need 0 to total - batch = " + std::to_string(total - batch) + ", got " + std::to_string(first));
  }
  return {seed, batch, total, first};
}

std::uint32_t bound_affine_gradient_at_random(Engine& engine, nb::handle dy_, nb::handle x_, nb::handle gate_,
                                              nb::handle scale_dy_, nb::handle scale_x_, nb::handle offset_,
                                              nb::handle out_, int shift, std::uint32_t seed, int batch, int total,
                                              int first) {
  const Array<std::int8_t> dy(dy_, "dy", false), x(x_, "x", false);
  const auto gate = maybe<std::int8_t>(gate_, "gate", false, {});
  const Array<std::int32_t> scale_dy(scale_dy_, "scale_dy", false), scale_x(scale_x_, "scale_x", false),
      offset(offset_, "offset", false);
  const auto out = maybe<std::int8_t>(out_, "out", true, {});
  const int cs = stride_of(scale_dy, dy.size(), {&scale_dy, &scale_x}, offset);
  require_same_size(x, dy);
  if (gate) require_same_size(*gate, dy);
  if (out) {
    require_same_size(*out, dy), out->require_apart_from(dy), out->require_apart_from(x);
    out->require_apart_from(scale_dy), out->require_apart_from(scale_x), out->require_apart_from(offset);
    if (gate) out->require_apart_from(*gate);
  }
  if (shift < 0 || shift > 30) refuse("shift: need 0 to 30, got " + std::to_string(shift));
  const std::size_t rows = dy.size() / cs;
  const Dither dither = dither_of(seed, batch, total, first, rows);
  nb::gil_scoped_release release;
  return affine_gradient_at_random(engine.path, engine.pool, dy.data(), x.data(), pointer(gate), scale_dy.data(),
                                   scale_x.data(), offset.data(), pointer(out), rows, cs, shift,
                                   dither);
}

void bound_affine_real(Engine& engine, nb::handle acc_, nb::handle by_image_, nb::handle scale_, nb::handle offset_,
                       nb::handle other_, nb::handle other_by_image_, nb::handle out_, nb::handle inverse_,
                       nb::handle largest_, bool relu) {
  const bool is_wide = is_wide_array(acc_, "acc");
  std::optional<Array<std::int8_t>> narrow;
  std::optional<Array<std::int32_t>> wide;
  if (is_wide) wide.emplace(acc_, "acc", false);
  else narrow.emplace(acc_, "acc", false);
  const std::size_t size = is_wide ? wide->size() : narrow->size();
  const Array<float> by_image(by_image_, "by_image", false), scale(scale_, "scale", false),
      offset(offset_, "offset", false);
  const auto other = maybe<std::int8_t>(other_, "other", false, {});
  const auto out = maybe<std::int8_t>(out_, "out", true, {});
  const auto batch = static_cast<Py_ssize_t>(by_image.size());
  const auto other_by_image = maybe<float>(other_by_image_, "other_by_image", false, {batch});
  const auto inverse = maybe<float>(inverse_, "inverse", false, {batch});
  const auto largest = maybe<float>(largest_, "largest", true, {batch});
  const std::size_t cs = scale.size();
  if (cs == 0 || cs % kChannelBlock != 0 || size % cs != 0) {
    refuse("scale: need one value per channel, in a multiple of " + std::to_string(kChannelBlock) +
           " that divides " + std::to_string(size) + ", got " + std::to_string(cs));
  }
  require_same_size(offset, scale);
  const std::size_t rows = size / cs;
  if (batch < 1 || rows % batch != 0) {
    refuse("by_image: need a divisor of " + std::to_string(rows) + " rows, got " + std::to_string(batch));
  }
  if (other.has_value() != other_by_image.has_value()) refuse("other and other_by_image belong together");
  if (out.has_value() != inverse.has_value()) refuse("out and inverse belong together");
  const auto require_size = [&](const Array<std::int8_t>& array) {
    if (array.size() != size) {
      refuse(array.name() + " has " + std::to_string(array.size()) + " elements, acc has " + std::to_string(size));
    }
  };
  if (other) require_size(*other);
  if (out) {
    require_size(*out);
    if (wide) out->require_apart_from(*wide);
    if (narrow) out->require_apart_from(*narrow);
    if (other) out->require_apart_from(*other);
  }
  if (largest) largest->require_apart_from(by_image);
  nb::gil_scoped_release release;
  const auto run = [&](const auto& acc) {
    affine_real(engine.path, engine.pool, acc.data(), by_image.data(), scale.data(), offset.data(), pointer(other),
                pointer(other_by_image), pointer(out), pointer(inverse), pointer(largest), rows,
                static_cast<int>(cs), static_cast<int>(batch), relu);
  };
  if (wide) run(*wide);
  else run(*narrow);
}

void bound_channel_sums(Engine& engine, nb::handle a_, nb::handle b_, nb::handle gate_, nb::handle sum_a_,
                        nb::handle sum_ab_) {
  const Array<std::int8_t> a(a_, "a", false), b(b_, "b", false);
  const auto gate = maybe<std::int8_t>(gate_, "gate", false, {});
  const Array<std::int64_t> sum_a(sum_a_, "sum_a", true), sum_ab(sum_ab_, "sum_ab", true);
  const std::size_t cs = sum_a.size();
  if (cs == 0 || cs % kChannelBlock != 0 || a.size() % cs != 0) {
    refuse("sum_a: need one value per channel, in a multiple of " + std::to_string(kChannelBlock) + " that divides " +
           std::to_string(a.size()) + ", got " + std::to_string(cs));
  }
  require_same_size(b, a), require_same_size(sum_ab, sum_a), sum_a.require_apart_from(sum_ab);
  if (gate) require_same_size(*gate, a);
  sum_a.require_apart_from(a), sum_a.require_apart_from(b), sum_ab.require_apart_from(a), sum_ab.require_apart_from(b);
  if (gate) sum_a.require_apart_from(*gate), sum_ab.require_apart_from(*gate);
  // Per thread of Python, since several may share an engine; it grows to the widest tensor and stays.
  thread_local std::vector<std::int64_t> sums;
  const std::size_t needed = channel_sums_size(engine.pool, static_cast<int>(cs));
  if (sums.size() < needed) sums.resize(needed);
  nb::gil_scoped_release release;
  channel_sums(engine.path, engine.pool, a.data(), b.data(), pointer(gate), sum_a.data(), sum_ab.data(), a.size() / cs,
               static_cast<int>(cs), sums.data());
}

void bound_channel_largest(Engine& engine, nb::handle a_, nb::handle gate_, nb::handle largest_) {
  const Array<std::int32_t> largest(largest_, "largest", true);
  const std::size_t cs = largest.size();
  const auto rows_of = [&](std::size_t size) {
    if (cs == 0 || cs % kChannelBlock != 0 || size % cs != 0) {
      refuse("largest: need one value per channel, in a multiple of " + std::to_string(kChannelBlock) +
             " that divides " + std::to_string(size) + ", got " + std::to_string(cs));
    }
    return size / cs;
  };
  if (is_wide_array(a_, "a")) {
    if (!gate_.is_none()) refuse("gate: int32 has none");
    const Array<std::int32_t> acc(a_, "a", false);
    const std::size_t rows = rows_of(acc.size());
    largest.require_apart_from(acc);
    nb::gil_scoped_release release;
    return channel_largest(engine.path, engine.pool, acc.data(), largest.data(), rows, static_cast<int>(cs));
  }
  const Array<std::int8_t> a(a_, "a", false);
  const auto gate = maybe<std::int8_t>(gate_, "gate", false, {});
  const std::size_t rows = rows_of(a.size());
  if (gate) require_same_size(*gate, a), largest.require_apart_from(*gate);
  largest.require_apart_from(a);
  nb::gil_scoped_release release;
  channel_largest(engine.path, engine.pool, a.data(), pointer(gate), largest.data(), rows, static_cast<int>(cs));
}

// Sums of squares of 2^10 numbers of this magnitude are exact in double.
constexpr std::int64_t kMostMoment = std::int64_t(1) << 21;

void bound_channel_moments(Engine& engine, nb::handle acc_, int shift, nb::handle sum_, nb::handle squares_,
                           nb::handle least_, nb::handle most_) {
  const Array<std::int32_t> acc(acc_, "acc", false), least(least_, "least", true), most(most_, "most", true);
  const Array<std::int64_t> sum(sum_, "sum", true), squares(squares_, "squares", true);
  const std::size_t cs = sum.size();
  if (cs == 0 || cs % kChannelBlock != 0 || acc.size() % cs != 0) {
    refuse("sum: need one value per channel, in a multiple of " + std::to_string(kChannelBlock) + " that divides " +
           std::to_string(acc.size()) + ", got " + std::to_string(cs));
  }
  if (shift < 0 || shift > 30) refuse("shift: need 0 to 30, got " + std::to_string(shift));
  require_same_size(squares, sum), require_same_size(least, sum), require_same_size(most, sum);
  sum.require_apart_from(squares), least.require_apart_from(most);
  sum.require_apart_from(acc), squares.require_apart_from(acc);
  least.require_apart_from(acc), most.require_apart_from(acc);
  std::vector<std::int64_t> sums(channel_sums_size(engine.pool, static_cast<int>(cs)));
  {
    nb::gil_scoped_release release;
    channel_moments(engine.path, engine.pool, acc.data(), shift,
                    {sum.data(), squares.data(), least.data(), most.data()}, acc.size() / cs, static_cast<int>(cs),
                    sums.data());
  }
  for (std::size_t c = 0; c < cs && acc.size() > 0; ++c) {
    const std::int64_t largest = std::max(-std::int64_t(least.data()[c]), std::int64_t(most.data()[c]));
    if (largest >> shift >= kMostMoment) {
      refuse("acc: magnitudes reach " + std::to_string(largest) + ", beyond 2^(21 + shift)");
    }
  }
}

// Rows of the channel stride that `per_channel` has.
template <typename T>
int row_stride(const Array<T>& per_channel, const Array<std::int8_t>& x) {
  const std::size_t cs = per_channel.size();
  if (cs == 0 || cs % kChannelBlock != 0 || x.size() % cs != 0) {
    refuse(per_channel.name() + ": need one value per channel, in a multiple of " + std::to_string(kChannelBlock) +
           " that divides " + std::to_string(x.size()) + ", got " + std::to_string(cs));
  }
  return static_cast<int>(cs);
}

// The largest magnitude; infinity if a value is no number.
double most_of(const Array<double>& values) {
  double most = 0.0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double m = std::fabs(values.data()[i]);
    if (!(m <= most)) most = std::isnan(m) ? std::numeric_limits<double>::infinity() : m;
  }
  return most;
}

void require_at_most(const char* what, double value, double most) {
  if (!(value <= most)) {
    refuse(std::string(what) + ": magnitudes reach " + std::to_string(value) + ", need at most " +
           std::to_string(most));
  }
}

constexpr double kMostScale = 1 << 22, kMostOffset = 1 << 29;

void bound_row_sums(Engine& engine, nb::handle a_, nb::handle b_, nb::handle weight_, nb::handle sum_a_,
                    nb::handle sum_ab_) {
  const Array<std::int8_t> a(a_, "a", false), b(b_, "b", false);
  const Array<double> weight(weight_, "weight", false);
  const int cs = row_stride(weight, a);
  const auto rows = static_cast<Py_ssize_t>(a.size() / cs);
  const Array<double> sum_a(sum_a_, "sum_a", true, {rows}), sum_ab(sum_ab_, "sum_ab", true, {rows});
  require_same_size(b, a), sum_a.require_apart_from(sum_ab);
  require_at_most("weight", most_of(weight), kMostScale);
  nb::gil_scoped_release release;
  row_sums(engine.path, engine.pool, a.data(), b.data(), weight.data(), sum_a.data(), sum_ab.data(), rows, cs);
}

std::uint32_t bound_row_affine(Engine& engine, nb::handle x_, nb::handle gamma_, nb::handle beta_, nb::handle slope_,
                               nb::handle mean_, nb::handle out_, int shift, int rounding) {
  const Array<std::int8_t> x(x_, "x", false);
  const Array<double> gamma(gamma_, "gamma", false), beta(beta_, "beta", false);
  const int cs = row_stride(gamma, x);
  const auto rows = static_cast<Py_ssize_t>(x.size() / cs);
  const Array<double> slope(slope_, "slope", false, {rows}), mean(mean_, "mean", false, {rows});
  const auto out = maybe<std::int8_t>(out_, "out", true, {});
  require_same_size(beta, gamma);
  if (out) require_same_size(*out, x), out->require_apart_from(x);
  require_at_most("gamma * slope", most_of(gamma) * most_of(slope), kMostScale);
  require_at_most("offset", most_of(beta) + most_of(gamma) * most_of(slope) * most_of(mean), 2.0 * kMostOffset);
  const Requantise how = how_to(shift, rounding, false);
  nb::gil_scoped_release release;
  return row_affine(engine.path, engine.pool, x.data(), {gamma.data(), beta.data(), slope.data(), mean.data()},
                    pointer(out), rows, cs, how);
}

std::uint32_t bound_row_affine_gradient(Engine& engine, nb::handle dy_, nb::handle x_, nb::handle gamma_,
                                        nb::handle counted_, nb::handle gain_, nb::handle scale_x_,
                                        nb::handle offset_, nb::handle out_, int shift, int rounding,
                                        nb::handle mask_) {
  const Array<std::int8_t> dy(dy_, "dy", false), x(x_, "x", false);
  const Array<double> gamma(gamma_, "gamma", false), counted(counted_, "counted", false);
  const int cs = row_stride(gamma, dy);
  const auto rows = static_cast<Py_ssize_t>(dy.size() / cs);
  const Array<double> gain(gain_, "gain", false, {rows}), scale_x(scale_x_, "scale_x", false, {rows}),
      offset(offset_, "offset", false, {rows});
  const auto out = maybe<std::int8_t>(out_, "out", true, {});
  const auto mask = maybe<std::int8_t>(mask_, "mask", false, {});
  require_same_size(x, dy), require_same_size(counted, gamma);
  if (out) require_same_size(*out, dy), out->require_apart_from(dy), out->require_apart_from(x);
  if (mask) require_same_size(*mask, dy);
  if (out && mask) out->require_apart_from(*mask);
  require_at_most("gamma * gain", most_of(gamma) * most_of(gain), kMostScale);
  require_at_most("scale_x", most_of(scale_x), kMostScale);
  require_at_most("offset", most_of(offset), kMostOffset);
  require_at_most("counted", most_of(counted), 1.0);
  Requantise how = how_to(shift, rounding, false);
  how.mask = pointer(mask);
  nb::gil_scoped_release release;
  return row_affine_gradient(engine.path, engine.pool, dy.data(), x.data(),
                             {gamma.data(), counted.data(), gain.data(), scale_x.data(), offset.data()}, pointer(out),
                             rows, cs, how);
}

void bound_row_scale_gradient(Engine& engine, nb::handle dy_, nb::handle x_, nb::handle slope_, nb::handle mean_,
                              nb::handle terms_, nb::handle sum_dy_) {
  const Array<std::int8_t> dy(dy_, "dy", false), x(x_, "x", false);
  const Array<std::int64_t> terms(terms_, "terms", true), sum_dy(sum_dy_, "sum_dy", true);
  const int cs = row_stride(terms, dy);
  const auto rows = static_cast<Py_ssize_t>(dy.size() / cs);
  const Array<double> slope(slope_, "slope", false, {rows}), mean(mean_, "mean", false, {rows});
  require_same_size(x, dy), require_same_size(sum_dy, terms), terms.require_apart_from(sum_dy);
  require_at_most("slope * (127 * 127 + 127 * mean)", most_of(slope) * 127.0 * (127.0 + most_of(mean)),
                  double(std::int64_t(1) << 36));
  nb::gil_scoped_release release;
  row_scale_gradient(engine.path, engine.pool, dy.data(), x.data(), slope.data(), mean.data(), terms.data(),
                     sum_dy.data(), rows, cs);
}

std::uint32_t bound_softmax(Engine& engine, nb::handle x_, nb::handle powers_, int channels, nb::handle out_,
                            int shift, int rounding) {
  if (channels < 1 || channels > kMaxExactDepth) {
    refuse("channels: need 1 to " + std::to_string(kMaxExactDepth) + ", got " + std::to_string(channels));
  }
  const Array<std::int8_t> x(x_, "x", false);
  const Array<std::int32_t> powers(powers_, "powers", false, {255});
  const auto out = maybe<std::int8_t>(out_, "out", true, {});
  const std::size_t cs = channel_stride(channels);
  if (x.size() % cs != 0) {
    refuse("x: need rows of " + std::to_string(cs) + " channels, got " + std::to_string(x.size()) + " elements");
  }
  if (out) require_same_size(*out, x), out->require_apart_from(x);
  for (std::size_t d = 0; d < powers.size(); ++d) {
    const std::int32_t power = powers.data()[d];
    if (power < 0 || power > (1 << 20) || (d == 0 && power == 0)) {
      refuse("powers[" + std::to_string(d) + "] = " + std::to_string(power) + ": need 0 to 2^20, the first above 0");
    }
  }
  const Requantise how = how_to(shift, rounding, false);
  nb::gil_scoped_release release;
  return softmax(engine.path, engine.pool, x.data(), powers.data(), pointer(out), x.size() / cs, channels, how);
}

int softmax_stride(const Array<std::int8_t>& p, const Array<std::int8_t>& dy, int channels,
                   const SoftmaxGradient& by) {
  if (channels < 1 || channels > kMaxExactDepth) {
    refuse("channels: need 1 to " + std::to_string(kMaxExactDepth) + ", got " + std::to_string(channels));
  }
  const int cs = channel_stride(channels);
  require_same_size(dy, p);
  if (p.size() % cs != 0) {
    refuse("p: need rows of " + std::to_string(cs) + " channels, got " + std::to_string(p.size()) + " elements");
  }
  if (by.up < 0 || by.up > 14 || by.factor < 0 || by.factor > (1 << 15) || by.drop < 0 || by.drop > 40) {
    refuse("up, factor and drop: need 0 to 14, 0 to 2^15 and 0 to 40, got " + std::to_string(by.up) + ", " +
           std::to_string(by.factor) + " and " + std::to_string(by.drop));
  }
  return cs;
}

double bound_softmax_gradient_largest(Engine& engine, nb::handle p_, nb::handle dy_, int channels, int up,
                                      int factor) {
  const Array<std::int8_t> p(p_, "p", false), dy(dy_, "dy", false);
  const SoftmaxGradient by{up, factor, 0};
  const int cs = softmax_stride(p, dy, channels, by);
  nb::gil_scoped_release release;
  return softmax_gradient_largest(engine.path, engine.pool, p.data(), dy.data(), by, p.size() / cs, cs);
}

std::uint32_t bound_softmax_input_gradient(Engine& engine, nb::handle p_, nb::handle dy_, int channels, int up,
                                           int factor, int drop, nb::handle out_, int shift, int rounding,
                                           nb::handle mask_) {
  const Array<std::int8_t> p(p_, "p", false), dy(dy_, "dy", false);
  const auto out = maybe<std::int8_t>(out_, "out", true, {});
  const auto mask = maybe<std::int8_t>(mask_, "mask", false, {});
  const SoftmaxGradient by{up, factor, drop};
  const int cs = softmax_stride(p, dy, channels, by);
  if (out) require_same_size(*out, p), out->require_apart_from(p), out->require_apart_from(dy);
  if (mask) require_same_size(*mask, p);
  if (out && mask) out->require_apart_from(*mask);
  Requantise how = how_to(shift, rounding, false);
  how.mask = pointer(mask);
  nb::gil_scoped_release release;
  return softmax_gradient(engine.path, engine.pool, p.data(), dy.data(), by, pointer(out), p.size() / cs, cs, how);
}

void bound_scale_sums(Engine& engine, nb::handle acc_, int factor, int drop) {
  const Array<std::int32_t> acc(acc_, "acc", true);
  if (acc.size() % kChannelBlock != 0) {
    refuse("acc: need a multiple of " + std::to_string(kChannelBlock) + " elements, got " + std::to_string(acc.size()));
  }
  if (factor < 0 || factor > (1 << 20) || drop < 0 || drop > 40) {
    refuse("factor and drop: need 0 to 2^20 and 0 to 40, got " + std::to_string(factor) + " and " +
           std::to_string(drop));
  }
  nb::gil_scoped_release release;
  scale_sums(engine.path, engine.pool, acc.data(), acc.size(), factor, drop);
}

struct ImageRows {
  std::size_t pixels;
  int batch, channels;

  ImageRows(const Array<double>& values, std::size_t batch_) {
    if (values.ndim() != 4 || batch_ == 0 || values.shape()[2] != static_cast<Py_ssize_t>(batch_)) {
      refuse("values: need (height, width, batch, channels) of a batch of " + std::to_string(batch_));
    }
    pixels = std::size_t(values.shape()[0]) * values.shape()[1];
    batch = static_cast<int>(batch_), channels = static_cast<int>(values.shape()[3]);
  }
};

void bound_largest_by_image(nb::handle values_, nb::handle largest_) {
  const Array<double> values(values_, "values", false);
  const Array<float> largest(largest_, "largest", true);
  const ImageRows rows(values, largest.size());
  nb::gil_scoped_release release;
  largest_by_image(values.data(), largest.data(), rows.pixels, rows.batch, rows.channels);
}

void bound_round_by_image(Engine& engine, nb::handle values_, nb::handle inverse_, nb::handle out_) {
  const Array<double> values(values_, "values", false);
  const Array<float> inverse(inverse_, "inverse", false);
  const ImageRows rows(values, inverse.size());
  const Array<std::int8_t> out(out_, "out", true,
                               {values.shape()[0], values.shape()[1], rows.batch, channel_stride(rows.channels)});
  out.require_apart_from(values);
  nb::gil_scoped_release release;
  round_by_image(engine.pool, values.data(), inverse.data(), out.data(), rows.pixels, rows.batch, rows.channels);
}

void bound_look_up(Engine& engine, nb::handle x_, nb::handle table_, nb::handle out_) {
  const Array<std::int8_t> x(x_, "x", false), table(table_, "table", false, {256});
  const Array<std::int8_t> out(out_, "out", true);
  require_same_size(out, x), out.require_apart_from(table);
  nb::gil_scoped_release release;
  look_up(engine.pool, x.data(), table.data(), out.data(), x.size());
}

void bound_bytes_seen(nb::handle x_, int channels, nb::handle seen_) {
  if (channels < 1) refuse("channels: need at least 1, got " + std::to_string(channels));
  const Array<std::int8_t> x(x_, "x", false);
  const Array<std::uint8_t> seen(seen_, "seen", true, {256});
  const int cs = channel_stride(channels);
  if (x.size() % cs != 0) {
    refuse("x: need rows of " + std::to_string(cs) + " channels, got " + std::to_string(x.size()) + " elements");
  }
  nb::gil_scoped_release release;
  bytes_seen(x.data(), seen.data(), x.size() / cs, channels, cs);
}

std::uint32_t bound_table_gradient(Engine& engine, nb::handle dy_, nb::handle x_, nb::handle table_, nb::handle out_,
                                   int shift, int rounding, nb::handle mask_) {
  const Array<std::int8_t> dy(dy_, "dy", false), x(x_, "x", false);
  const Array<std::int32_t> table(table_, "table", false, {256});
  const auto out = maybe<std::int8_t>(out_, "out", true, {});
  const auto mask = maybe<std::int8_t>(mask_, "mask", false, {});
  blocks_of(dy), require_same_size(x, dy);
  if (out) require_same_size(*out, dy), out->require_apart_from(dy), out->require_apart_from(x);
  if (mask) require_same_size(*mask, dy);
  if (out && mask) out->require_apart_from(*mask);
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (std::abs(std::int64_t(table.data()[i])) > (1 << 23)) {
      refuse("table[" + std::to_string(i) + "] = " + std::to_string(table.data()[i]) + " is beyond +-2^23");
    }
  }
  Requantise how = how_to(shift, rounding, false);
  how.mask = pointer(mask);
  nb::gil_scoped_release release;
  return table_gradient(engine.path, engine.pool, dy.data(), x.data(), table.data(), pointer(out), dy.size(), how);
}

struct BoundProducts : MatrixProducts {
  BoundProducts(int batches, int samples, int rows, int cols, int depth, const std::string& transposed)
      : MatrixProducts{batches, samples, rows, cols, depth, transposed_named(transposed)} {
    if (batches < 1 || samples < 1 || rows < 1 || cols < 1 || depth < 1) {
      refuse("batches, samples, rows, cols and depth must be at least 1");
    }
    if (depth > kMaxExactDepth) {
      refuse("depth " + std::to_string(depth) + ": a sum of so many products of int8 may leave int32; at most " +
             std::to_string(kMaxExactDepth) + " are exact");
    }
  }

  static Transposed transposed_named(const std::string& name) {
    if (name == "neither") return Transposed::kNeither;
    if (name == "right") return Transposed::kRight;
    if (name == "left") return Transposed::kLeft;
    refuse("transposed: need 'neither', 'right' or 'left', got '" + name + "'");
  }

  // Elements of an operand with so many rows and columns in each matrix.
  template <typename T>
  void require_size(const Array<T>& array, int matrix_rows, int matrix_cols) const {
    const std::size_t size = std::size_t(batches) * matrix_rows * samples * channel_stride(matrix_cols);
    if (array.size() != size) {
      refuse(array.name() + ": need " + std::to_string(size) + " elements, got " + std::to_string(array.size()));
    }
  }

  std::uint32_t multiply(Engine& engine, nb::handle left_, nb::handle right_, nb::handle out_,
                         nb::handle workspace_) const {
    const Array<std::int8_t> left(left_, "left", false), right(right_, "right", false);
    const Array<std::int32_t> out(out_, "out", true);
    const Workspace workspace(workspace_, matrix_products_bytes(engine.path, *this, engine.pool.size()));
    require_size(left, left_rows(), left_cols()), require_size(right, right_rows(), right_cols());
    require_size(out, rows, cols);
    out.require_apart_from(left), out.require_apart_from(right), out.require_apart_from<std::uint8_t>(workspace);
    workspace.require_apart_from(left), workspace.require_apart_from(right);
    nb::gil_scoped_release release;
    return int8::multiply(engine.path, engine.pool, *this, left.data(), right.data(), out.data(), workspace.data());
  }
};

void bound_update_weight(Engine& engine, nb::handle weight_, nb::handle gradient_, int shift, int rounding) {
  const Array<std::int8_t> weight(weight_, "weight", true);
  const Array<std::int32_t> gradient(gradient_, "gradient", false);
  blocks_of(weight), require_same_size(gradient, weight), weight.require_apart_from(gradient);
  const Requantise how = how_to(shift, rounding, false);
  nb::gil_scoped_release release;
  update_weight(engine.path, engine.pool, weight.data(), gradient.data(), weight.size(), how.shift, how.rounding);
}

// Rows of one value for each of the channels that `per_channel` has.
template <typename T>
int channels_of(const Array<float>& per_channel, const Array<T>& x) {
  const std::size_t cs = per_channel.size();
  if (cs == 0 || cs % kChannelBlock != 0 || x.size() % cs != 0) {
    refuse(per_channel.name() + ": need one value per channel, in a multiple of " + std::to_string(kChannelBlock) +
           " that divides " + std::to_string(x.size()) + ", got " + std::to_string(cs));
  }
  for (std::size_t c = 0; c < cs; ++c) {
    if (!std::isfinite(per_channel.data()[c])) refuse(per_channel.name() + ": need finite numbers");
  }
  return static_cast<int>(cs);
}

void bound_normalise(Engine& engine, nb::handle acc_, nb::handle own_scale_, nb::handle own_offset_, nb::handle scale_,
                     nb::handle offset_, float inverse, nb::handle x_, nb::handle out_, bool relu) {
  const Array<std::int32_t> acc(acc_, "acc", false);
  const Array<float> own_scale(own_scale_, "own_scale", false), own_offset(own_offset_, "own_offset", false),
      scale(scale_, "scale", false), offset(offset_, "offset", false);
  const Array<std::int8_t> x(x_, "x", true), out(out_, "out", true);
  const int cs = channels_of(scale, acc);
  require_same_size(own_scale, scale), require_same_size(own_offset, scale), require_same_size(offset, scale);
  require_same_size(x, acc), require_same_size(out, acc);
  x.require_apart_from(acc), out.require_apart_from(acc), out.require_apart_from(x);
  const Normalisation by{own_scale.data(), own_offset.data(), scale.data(), offset.data(), inverse};
  nb::gil_scoped_release release;
  normalise(engine.path, engine.pool, acc.data(), by, x.data(), out.data(), acc.size() / cs, cs, relu);
}

float bound_descend(Engine& engine, nb::handle values_, nb::handle velocity_, nb::handle gradient_, nb::handle scale_,
                    float inverse, float learning_rate, float momentum, float weight_decay, nb::handle out_,
                    int exponent) {
  const Array<float> values(values_, "values", true), scale(scale_, "scale", false);
  const auto velocity = maybe<float>(velocity_, "velocity", true, {});
  const Array<std::int32_t> gradient(gradient_, "gradient", false);
  require_same_size(gradient, values), values.require_apart_from(gradient), values.require_apart_from(scale);
  const int cs = channels_of(scale, values);
  if (velocity) {
    require_same_size(*velocity, values), velocity->require_apart_from(values);
    velocity->require_apart_from(gradient), velocity->require_apart_from(scale);
  } else if (momentum != 0.0f) {
    refuse("velocity: needed with a momentum");
  }
  const auto out = maybe<std::int8_t>(out_, "out", true, {});
  if (out && out->size() != values.size()) refuse("out: need the size of values");
  if (exponent < -100 || exponent > 100) refuse("exponent: need -100 to 100, got " + std::to_string(exponent));
  const float out_scale = std::ldexp(1.0f, -exponent);
  nb::gil_scoped_release release;
  return descend(engine.path, engine.pool, values.data(), pointer(velocity), gradient.data(), scale.data(),
                 pointer(out), values.size() / cs, cs, {inverse, learning_rate, momentum, weight_decay, out_scale});
}

void bound_quantise_images(Engine& engine, nb::handle x_, nb::handle out_, int batch, int channels, int height,
                           int width, int exponent) {
  if (batch < 1 || channels < 1 || height < 1 || width < 1) {
    refuse("batch, channels, height and width must be at least 1");
  }
  const Array<float> x(x_, "x", false, {batch, channels, height, width});
  const Array<std::int8_t> out(out_, "out", true, {height, width, batch, channel_stride(channels)});
  out.require_apart_from(x);
  if (exponent < -100 || exponent > 100) refuse("exponent: need -100 to 100, got " + std::to_string(exponent));
  nb::gil_scoped_release release;
  quantise_images(engine.path, engine.pool, x.data(), out.data(), batch, channels, height, width, exponent);
}

void bound_quantise_patches(Engine& engine, const BoundConvolution& convolution, nb::handle x_, nb::handle out_,
                            nb::handle workspace_, int exponent) {
  const ConvShape& s = convolution.shape();
  if (s.groups != 1) refuse("patches are for convolutions of one group, got " + std::to_string(s.groups));
  if (s.dilated()) refuse("patches are for convolutions of dilation 1");
  const Array<float> x(x_, "x", false, {s.batch, s.in_c, s.in_h, s.in_w});
  const Array<std::int8_t> out(out_, "out", true,
                               {s.out_h(), s.out_w(), s.batch, channel_stride(s.taps() * s.in_c)});
  const Workspace workspace(workspace_, patch_images_bytes(s));
  out.require_apart_from(x), out.require_apart_from<std::uint8_t>(workspace), workspace.require_apart_from(x);
  if (exponent < -100 || exponent > 100) refuse("exponent: need -100 to 100, got " + std::to_string(exponent));
  nb::gil_scoped_release release;
  quantise_patches(engine.path, engine.pool, s, x.data(), out.data(), exponent,
                   static_cast<std::int8_t*>(workspace.data()));
}

void bound_quantise(Engine& engine, nb::handle x_, nb::handle out_, int exponent) {
  const Array<float> x(x_, "x", false);
  const Array<std::int8_t> out(out_, "out", true);
  blocks_of(out), require_same_size(x, out), out.require_apart_from(x);
  if (exponent < -100 || exponent > 100) refuse("exponent: need -100 to 100, got " + std::to_string(exponent));
  nb::gil_scoped_release release;
  quantise(engine.path, engine.pool, x.data(), out.data(), x.size(), exponent);
}

void bound_quantise_by_channel(Engine& engine, nb::handle x_, nb::handle inverse_, nb::handle out_) {
  const Array<float> x(x_, "x", false), inverse(inverse_, "inverse", false);
  const Array<std::int8_t> out(out_, "out", true);
  const int cs = channels_of(inverse, x);
  require_same_size(out, x), out.require_apart_from(x), out.require_apart_from(inverse);
  nb::gil_scoped_release release;
  quantise_by_channel(engine.path, engine.pool, x.data(), inverse.data(), out.data(), x.size() / cs, cs);
}

void bound_round_by_channel_at_random(Engine& engine, nb::handle acc_, nb::handle inverse_, nb::handle out_,
                                      std::uint32_t seed, int batch, int total, int first) {
  const Array<std::int32_t> acc(acc_, "acc", false);
  const Array<float> inverse(inverse_, "inverse", false);
  const Array<std::int8_t> out(out_, "out", true);
  const int cs = channels_of(inverse, acc);
  require_same_size(out, acc), out.require_apart_from(acc), out.require_apart_from(inverse);
  const Dither dither = dither_of(seed, batch, total, first, acc.size() / cs);
  nb::gil_scoped_release release;
  round_by_channel_at_random(engine.path, engine.pool, acc.data(), inverse.data(), out.data(), acc.size() / cs, cs,
                             dither);
}

// x as round_elements takes it: a group lies along the first two of four dimensions.
void require_groups(const Array<std::int8_t>& x, int mantissa_bits) {
  if (x.ndim() != 4 || x.shape()[3] % kChannelBlock != 0 || x.size() == 0) {
    refuse("x: need (height, width, images, channels), a multiple of " + std::to_string(kChannelBlock) + " channels");
  }
  if (mantissa_bits < 1 || mantissa_bits > 4) {
    refuse("mantissa_bits: need 1 to 4, got " + std::to_string(mantissa_bits));
  }
}

void bound_round_elements(Engine& engine, nb::handle x_, int mantissa_bits) {
  const Array<std::int8_t> x(x_, "x", true);
  require_groups(x, mantissa_bits);
  nb::gil_scoped_release release;
  round_elements(engine.pool, x.data(), x.shape()[0] * x.shape()[1], static_cast<int>(x.shape()[2]),
                 static_cast<int>(x.shape()[3]), mantissa_bits, nullptr);
}

void bound_round_elements_at_random(Engine& engine, nb::handle x_, int mantissa_bits, std::uint32_t seed, int total,
                                    int first) {
  const Array<std::int8_t> x(x_, "x", true);
  require_groups(x, mantissa_bits);
  const int images = static_cast<int>(x.shape()[2]), cs = static_cast<int>(x.shape()[3]);
  const std::size_t pixels = x.shape()[0] * x.shape()[1];
  const Dither dither = dither_of(seed, images, total, first, pixels * images);
  nb::gil_scoped_release release;
  round_elements(engine.pool, x.data(), pixels, images, cs, mantissa_bits, &dither);
}

std::int64_t bound_sum_of_magnitudes(nb::handle x_) {
  if (is_wide_array(x_, "x")) {
    const Array<std::int32_t> x(x_, "x", false);
    nb::gil_scoped_release release;
    return sum_of_magnitudes(x.data(), x.size());
  }
  const Array<std::int8_t> x(x_, "x", false);
  nb::gil_scoped_release release;
  return sum_of_magnitudes(x.data(), x.size());
}

void bound_largest_by_channel(nb::handle x_, nb::handle largest_) {
  const Array<float> x(x_, "x", false), largest(largest_, "largest", true);
  const std::size_t cs = largest.size();
  if (cs == 0 || x.size() % cs != 0) {
    refuse("largest: need one value per channel, that divides " + std::to_string(x.size()) + ", got " +
           std::to_string(cs));
  }
  largest.require_apart_from(x);
  nb::gil_scoped_release release;
  largest_by_channel(x.data(), largest.data(), x.size() / cs, static_cast<int>(cs));
}

// The float32 side of an exchange of weights: (outs, kernel height, kernel width, in) for the engine's `inside`.
template <typename T>
struct WeightShape {
  WeightShape(const Array<T>& inside, const Py_ssize_t* shape, nb::handle outside_, bool writable)
      : outs(outs_of(outside_)),
        depth(std::int64_t(shape[0]) * shape[1] * shape[2]),
        stride(static_cast<int>(shape[3])),
        outside(outside_, "outside", writable, {outs, shape[0], shape[1], shape[2]}) {
    if (stride != channel_stride(static_cast<int>(outs))) {
      refuse(inside.name() + ": has room for " + std::to_string(stride) + " channels, outside has " +
             std::to_string(outs) + ", which need " + std::to_string(channel_stride(static_cast<int>(outs))));
    }
    outside.require_apart_from(inside);
  }

  static Py_ssize_t outs_of(nb::handle object) {
    const Array<float> any(object, "outside", false);
    if (any.ndim() != 4) refuse("outside: need 4 dimensions (outs, kernel height, kernel width, in)");
    return any.shape()[0];
  }

  const Py_ssize_t outs;
  const std::int64_t depth;
  const int stride;
  const Array<float> outside;
};

template <typename T>
const Py_ssize_t* require_4d(const Array<T>& inside) {
  if (inside.ndim() != 4) refuse(inside.name() + ": need 4 dimensions (kernel height, kernel width, in, stride)");
  return inside.shape();
}

void bound_round_weights(Engine& engine, nb::handle outside_, nb::handle out_, nb::handle inverse_,
                         std::uint32_t seed) {
  const Array<std::int8_t> out(out_, "out", true);
  const WeightShape<std::int8_t> s(out, require_4d(out), outside_, false);
  const Array<float> inverse(inverse_, "inverse", false, {s.stride});
  out.require_apart_from(inverse), channels_of(inverse, out);
  nb::gil_scoped_release release;
  round_weights(engine.path, engine.pool, s.outside.data(), out.data(), static_cast<int>(s.outs), s.depth, s.stride,
                inverse.data(), seed);
}

void bound_export_gradient(Engine& engine, nb::handle gradient_, nb::handle outside_, nb::handle scale_) {
  const Array<std::int32_t> gradient(gradient_, "gradient", false);
  const WeightShape<std::int32_t> s(gradient, require_4d(gradient), outside_, true);
  const Array<float> scale(scale_, "scale", false, {s.stride});
  s.outside.require_apart_from(scale), channels_of(scale, gradient);
  nb::gil_scoped_release release;
  export_gradient(engine.pool, gradient.data(), s.outside.data(), static_cast<int>(s.outs), s.depth, s.stride, scale.data());
}

float bound_max_magnitude(nb::handle x_) {
  const Array<float> x(x_, "x", false);
  nb::gil_scoped_release release;
  return max_magnitude(x.data(), x.size());
}

void bound_softmax_gradient(nb::handle logits_, int exponent, nb::handle labels_, nb::handle out_, int classes,
                            int rounding) {
  if (classes < 1) refuse("classes: need at least 1, got " + std::to_string(classes));
  if (exponent < -1000 || exponent > 1000) refuse("exponent: need -1000 to 1000, got " + std::to_string(exponent));
  const Array<std::int32_t> labels(labels_, "labels", false);
  const auto batch = static_cast<Py_ssize_t>(labels.size());
  const Array<std::int8_t> logits(logits_, "logits", false, {1, 1, batch, channel_stride(classes)});
  const Array<std::int8_t> out(out_, "out", true, {1, 1, batch, channel_stride(classes)});
  out.require_apart_from(logits), out.require_apart_from(labels);
  for (Py_ssize_t n = 0; n < batch; ++n) {
    if (labels.data()[n] < 0 || labels.data()[n] >= classes) {
      refuse("labels[" + std::to_string(n) + "] = " + std::to_string(labels.data()[n]) + ", need 0 to " +
             std::to_string(classes - 1));
    }
  }
  const Requantise how = how_to(4, rounding, false);
  nb::gil_scoped_release release;
  reference::softmax_gradient(logits.data(), exponent, labels.data(), out.data(), static_cast<int>(batch), classes,
                              how.rounding);
}

void bound_gemm(Engine& engine, nb::handle lhs_, nb::handle rhs_, nb::handle out_, int rows, int cols, int depth,
                bool activations) {
  if (rows < 1 || cols < 1 || depth < 1) refuse("rows, cols and depth must be at least 1");
  if (depth > kMaxExactDepth) {
    refuse("depth " + std::to_string(depth) + ": a sum of so many products of int8 may leave int32; at most " +
           std::to_string(kMaxExactDepth) + " are exact");
  }
  const Array<std::int8_t> lhs(lhs_, "lhs", false, {rows, depth}), rhs(rhs_, "rhs", false, {cols, depth});
  const Array<std::int32_t> out(out_, "out", true, {rows, cols});
  out.require_apart_from(lhs), out.require_apart_from(rhs);
  if (activations) require_activations(lhs);
  nb::gil_scoped_release release;
  // Not a vector, which would write zeros to all of it first.
  const std::unique_ptr<std::uint8_t[]> workspace(
      new std::uint8_t[gemm_workspace_bytes(engine.path, rows, cols, depth)]);
  gemm(engine.path, engine.pool, lhs.data(), activations, rhs.data(), out.data(), rows, cols, depth, workspace.get());
}

}  // namespace

NB_MODULE(_int8, m) {
  // Modules that hold an engine may be alive when the interpreter ends.
  nb::set_leak_warnings(false);
  m.doc() = "Integer training kernels. Layouts: native/int8/shape.h. Values lie in -127..127.";
  m.def("channel_stride", &channel_stride, nb::arg("channels"), "Channels rounded up to the block of 16.");
  m.attr("MAX_EXACT_DEPTH") = kMaxExactDepth;
  m.def("compiled_kernels", [] {
    int count = 0;
    const char* const* names = compiled_path_names(&count);
    return std::vector<std::string>(names, names + count);
  }, "Names of the kernel paths in this build, whether or not this machine can run them.");
  m.def("available_kernels", [] {
    std::vector<std::string> names;
    const Paths paths = available_paths();
    for (int i = 0; i < paths.count; ++i) names.emplace_back(paths.begin[i]->name);
    return names;
  }, "Names of the kernel paths that this machine can run, best last.");

  nb::class_<Engine>(m, "Engine", "A kernel path that has passed its self-test, and threads to run it.")
      .def(nb::init<int, const std::vector<int>&, const std::string&>(), nb::arg("num_threads") = 1,
           nb::arg("cores") = std::vector<int>{}, nb::arg("kernel") = "")
      .def_prop_ro("kernel", [](const Engine& engine) { return std::string(engine.path.name); })
      .def_prop_ro("num_threads", [](const Engine& engine) { return engine.pool.size(); });

  nb::class_<BoundConvolution>(m, "Convolution")
      .def("__init__",
           [](BoundConvolution* self, int batch, int in_h, int in_w, int in_c, int out_c, int kernel_h, int kernel_w,
              int stride_h, int stride_w, int pad_h, int pad_w, int groups, int batch_block,
              const std::string& algorithm, int dilation_h, int dilation_w) {
             new (self) BoundConvolution(ConvShape{batch, in_h, in_w, in_c, out_c, kernel_h, kernel_w, stride_h,
                                                   stride_w, pad_h, pad_w, groups, dilation_h, dilation_w},
                                         batch_block, algorithm_named(algorithm));
           },
           nb::arg("batch"), nb::arg("in_h"), nb::arg("in_w"), nb::arg("in_c"), nb::arg("out_c"), nb::arg("kernel_h"),
           nb::arg("kernel_w"), nb::arg("stride_h") = 1, nb::arg("stride_w") = 1, nb::arg("pad_h") = 0,
           nb::arg("pad_w") = 0, nb::arg("groups") = 1, nb::arg("batch_block") = 0,
           nb::arg("algorithm") = "auto", nb::arg("dilation_h") = 1, nb::arg("dilation_w") = 1)
      .def("algorithm", &BoundConvolution::algorithm, nb::arg("engine"), nb::arg("function"),
           "'direct' or 'winograd': how \"forward\", \"input_gradient\" or \"weight_gradient\" is computed.")
      .def_prop_ro("input_shape", [](const BoundConvolution& self) {
        const ConvShape& s = self.shape();
        return nb::make_tuple(s.in_h, s.in_w, s.batch, self.in_cs());
      })
      .def_prop_ro("output_shape", [](const BoundConvolution& self) {
        const ConvShape& s = self.shape();
        return nb::make_tuple(s.out_h(), s.out_w(), s.batch, self.out_cs());
      })
      .def_prop_ro("weight_shape", [](const BoundConvolution& self) {
        const ConvShape& s = self.shape();
        return nb::make_tuple(s.kernel_h, s.kernel_w, s.group_in_c(), channel_stride(s.out_c));
      })
      .def("workspace_bytes", [](const BoundConvolution& self, const Engine& e) { return self.workspace_bytes(e.path, e.pool.size()); },
           nb::arg("engine"))
      .def("forward", &BoundConvolution::forward, nb::arg("engine"), nb::arg("x"), nb::arg("weight"),
           nb::arg("bias").none(), nb::arg("out"), nb::arg("workspace"), nb::arg("activations") = false,
           nb::arg("shift") = 0, nb::arg("rounding") = 0, nb::arg("relu") = false,
           nb::arg("accumulators").none() = nb::none())
      .def("input_gradient", &BoundConvolution::input_gradient, nb::arg("engine"), nb::arg("dy"), nb::arg("weight"),
           nb::arg("out"), nb::arg("workspace"), nb::arg("shift") = 0, nb::arg("rounding") = 0,
           nb::arg("mask").none() = nb::none())
      .def("weight_gradient", &BoundConvolution::weight_gradient, nb::arg("engine"), nb::arg("x"), nb::arg("dy"),
           nb::arg("out"), nb::arg("workspace"), nb::arg("activations") = false);

  nb::class_<BoundPooling>(m, "Pooling")
      .def("__init__",
           [](BoundPooling* self, int batch, int in_h, int in_w, int channels, int kernel_h, int kernel_w,
              int stride_h, int stride_w, int pad_h, int pad_w) {
             new (self) BoundPooling(PoolShape{batch, in_h, in_w, channels, kernel_h, kernel_w, stride_h, stride_w,
                                               pad_h, pad_w});
           },
           nb::arg("batch"), nb::arg("in_h"), nb::arg("in_w"), nb::arg("channels"), nb::arg("kernel_h"),
           nb::arg("kernel_w"), nb::arg("stride_h"), nb::arg("stride_w"), nb::arg("pad_h") = 0, nb::arg("pad_w") = 0)
      .def_prop_ro("overlapping", &BoundPooling::overlapping)
      .def("max", &BoundPooling::max, nb::arg("engine"), nb::arg("x"), nb::arg("out"), nb::arg("argmax"))
      .def("max_gradient", &BoundPooling::max_gradient, nb::arg("engine"), nb::arg("dy"), nb::arg("argmax"),
           nb::arg("out").none(), nb::arg("shift") = 0, nb::arg("rounding") = 0, nb::arg("mask").none() = nb::none())
      .def("average", &BoundPooling::average, nb::arg("engine"), nb::arg("x"), nb::arg("multiplier"),
           nb::arg("out").none(), nb::arg("shift") = 0, nb::arg("rounding") = 0)
      .def("average_gradient", &BoundPooling::average_gradient, nb::arg("engine"), nb::arg("dy"),
           nb::arg("multiplier"), nb::arg("out").none(), nb::arg("shift") = 0, nb::arg("rounding") = 0,
           nb::arg("mask").none() = nb::none());

  m.def("requantise", &bound_requantise, nb::arg("engine"), nb::arg("acc"), nb::arg("out").none(),
        nb::arg("shift") = 0, nb::arg("rounding") = 0, nb::arg("relu") = false, nb::arg("mask").none() = nb::none());
  m.def("add", &bound_add, nb::arg("engine"), nb::arg("a"), nb::arg("shift_a"), nb::arg("b"), nb::arg("shift_b"),
        nb::arg("out").none(), nb::arg("shift") = 0, nb::arg("rounding") = 0, nb::arg("relu") = false,
        nb::arg("mask").none() = nb::none());
  m.def("affine", &bound_affine, nb::arg("engine"), nb::arg("x"), nb::arg("scale"), nb::arg("offset"),
        nb::arg("out").none(), nb::arg("shift") = 0, nb::arg("rounding") = 0, nb::arg("relu") = false);
  m.def("affine_gradient", &bound_affine_gradient, nb::arg("engine"), nb::arg("dy"), nb::arg("x"),
        nb::arg("gate").none(), nb::arg("scale_dy"), nb::arg("scale_x"), nb::arg("offset"), nb::arg("out").none(),
        nb::arg("shift") = 0, nb::arg("rounding") = 0, nb::arg("relu") = false, nb::arg("mask").none() = nb::none());
  m.def("affine_gradient_at_random", &bound_affine_gradient_at_random, nb::arg("engine"), nb::arg("dy"), nb::arg("x"),
        nb::arg("gate").none(), nb::arg("scale_dy"), nb::arg("scale_x"), nb::arg("offset"), nb::arg("out").none(),
        nb::arg("shift"), nb::arg("seed"), nb::arg("batch"), nb::arg("total"), nb::arg("first"),
        "affine_gradient, rounded at random without bias; an element's number depends on its place in the batch.");
  m.def("affine_real", &bound_affine_real, nb::arg("engine"), nb::arg("acc"), nb::arg("by_image"), nb::arg("scale"),
        nb::arg("offset"), nb::arg("other").none(), nb::arg("other_by_image").none(), nb::arg("out").none(),
        nb::arg("inverse").none(), nb::arg("largest").none(), nb::arg("relu") = false,
        "Int8 of (acc * by_image) * scale[c] + offset[c] + other * other_by_image, in float32.");
  m.def("channel_largest", &bound_channel_largest, nb::arg("engine"), nb::arg("a"), nb::arg("gate").none(),
        nb::arg("largest"), "Largest |a| of each channel, where gate is positive; a is int8, or int32 without a gate.");
  m.def("normalise", &bound_normalise, nb::arg("engine"), nb::arg("acc"), nb::arg("own_scale"), nb::arg("own_offset"),
        nb::arg("scale"), nb::arg("offset"), nb::arg("inverse"), nb::arg("x"), nb::arg("out"), nb::arg("relu") = false,
        "Two int8 of acc: acc * own_scale[c] + own_offset[c], and (acc * scale[c] + offset[c]) * inverse, in float32.");
  m.def("channel_moments", &bound_channel_moments, nb::arg("engine"), nb::arg("acc"), nb::arg("shift"),
        nb::arg("sum"), nb::arg("squares"), nb::arg("least"), nb::arg("most"),
        "Of each channel: sum and sum of squares of acc / 2^shift, rounded; least and largest acc.");
  m.def("channel_sums", &bound_channel_sums, nb::arg("engine"), nb::arg("a"), nb::arg("b"), nb::arg("gate").none(),
        nb::arg("sum_a"), nb::arg("sum_ab"));
  nb::class_<BoundProducts>(m, "MatrixProducts")
      .def(nb::init<int, int, int, int, int, const std::string&>(), nb::arg("batches"), nb::arg("samples"),
           nb::arg("rows"), nb::arg("cols"), nb::arg("depth"), nb::arg("transposed") = "neither")
      .def("workspace_bytes", [](const BoundProducts& self, const Engine& e) {
        return matrix_products_bytes(e.path, self, e.pool.size());
      }, nb::arg("engine"))
      .def("multiply", &BoundProducts::multiply, nb::arg("engine"), nb::arg("left"), nb::arg("right"), nb::arg("out"),
           nb::arg("workspace"));

  m.def("row_sums", &bound_row_sums, nb::arg("engine"), nb::arg("a"), nb::arg("b"), nb::arg("weight"),
        nb::arg("sum_a"), nb::arg("sum_ab"));
  m.def("row_affine", &bound_row_affine, nb::arg("engine"), nb::arg("x"), nb::arg("gamma"), nb::arg("beta"),
        nb::arg("slope"), nb::arg("mean"), nb::arg("out").none(), nb::arg("shift") = 0, nb::arg("rounding") = 0);
  m.def("row_affine_gradient", &bound_row_affine_gradient, nb::arg("engine"), nb::arg("dy"), nb::arg("x"),
        nb::arg("gamma"), nb::arg("counted"), nb::arg("gain"), nb::arg("scale_x"), nb::arg("offset"),
        nb::arg("out").none(), nb::arg("shift") = 0, nb::arg("rounding") = 0, nb::arg("mask").none() = nb::none());
  m.def("row_scale_gradient", &bound_row_scale_gradient, nb::arg("engine"), nb::arg("dy"), nb::arg("x"),
        nb::arg("slope"), nb::arg("mean"), nb::arg("terms"), nb::arg("sum_dy"));
  m.def("softmax", &bound_softmax, nb::arg("engine"), nb::arg("x"), nb::arg("powers"), nb::arg("channels"),
        nb::arg("out").none(), nb::arg("shift") = 0, nb::arg("rounding") = 0);
  m.def("softmax_input_gradient_largest", &bound_softmax_gradient_largest, nb::arg("engine"), nb::arg("p"),
        nb::arg("dy"), nb::arg("channels"), nb::arg("up"), nb::arg("factor"));
  m.def("softmax_input_gradient", &bound_softmax_input_gradient, nb::arg("engine"), nb::arg("p"), nb::arg("dy"),
        nb::arg("channels"), nb::arg("up"), nb::arg("factor"), nb::arg("drop"), nb::arg("out").none(),
        nb::arg("shift") = 0, nb::arg("rounding") = 0, nb::arg("mask").none() = nb::none());
  m.def("scale_sums", &bound_scale_sums, nb::arg("engine"), nb::arg("acc"), nb::arg("factor"), nb::arg("drop"));
  m.def("largest_by_image", &bound_largest_by_image, nb::arg("values"), nb::arg("largest"));
  m.def("round_by_image", &bound_round_by_image, nb::arg("engine"), nb::arg("values"), nb::arg("inverse"),
        nb::arg("out"));
  m.def("look_up", &bound_look_up, nb::arg("engine"), nb::arg("x"), nb::arg("table"), nb::arg("out"));
  m.def("bytes_seen", &bound_bytes_seen, nb::arg("x"), nb::arg("channels"), nb::arg("seen"));
  m.def("table_gradient", &bound_table_gradient, nb::arg("engine"), nb::arg("dy"), nb::arg("x"), nb::arg("table"),
        nb::arg("out").none(), nb::arg("shift") = 0, nb::arg("rounding") = 0, nb::arg("mask").none() = nb::none());
  m.def("update_weight", &bound_update_weight, nb::arg("engine"), nb::arg("weight"), nb::arg("gradient"),
        nb::arg("shift"), nb::arg("rounding") = 0);
  m.def("descend", &bound_descend, nb::arg("engine"), nb::arg("values"), nb::arg("velocity").none(),
        nb::arg("gradient"), nb::arg("scale"), nb::arg("inverse"), nb::arg("learning_rate"), nb::arg("momentum") = 0.0f,
        nb::arg("weight_decay") = 0.0f, nb::arg("out").none() = nb::none(), nb::arg("exponent") = 0,
        "Step of SGD; returns the largest magnitude. out: nearest int8 of the new values / 2^exponent.");
  m.def("quantise_images", &bound_quantise_images, nb::arg("engine"), nb::arg("x"), nb::arg("out"), nb::arg("batch"),
        nb::arg("channels"), nb::arg("height"), nb::arg("width"), nb::arg("exponent"));
  m.def("quantise_patches", &bound_quantise_patches, nb::arg("engine"), nb::arg("convolution"), nb::arg("x"),
        nb::arg("out"), nb::arg("workspace"), nb::arg("exponent"),
        "The patches of a first convolution, for a pointwise one over taps * in_c channels.");
  m.def("patch_images_bytes", [](const BoundConvolution& c) { return patch_images_bytes(c.shape()); },
        nb::arg("convolution"));
  m.def("quantise", &bound_quantise, nb::arg("engine"), nb::arg("x"), nb::arg("out"), nb::arg("exponent"),
        "Nearest int8 of x / 2^exponent, half to even, saturated at +-127.");
  m.def("quantise_by_channel", &bound_quantise_by_channel, nb::arg("engine"), nb::arg("x"), nb::arg("inverse"),
        nb::arg("out"), "Nearest int8 of x * inverse[channel], half to even, saturated at +-127.");
  m.def("round_by_channel_at_random", &bound_round_by_channel_at_random, nb::arg("engine"), nb::arg("acc"),
        nb::arg("inverse"), nb::arg("out"), nb::arg("seed"), nb::arg("batch"), nb::arg("total"), nb::arg("first"),
        "Int8 of acc * inverse[channel], up or down at random without bias.");
  m.def("round_elements", &bound_round_elements, nb::arg("engine"), nb::arg("x"), nb::arg("mantissa_bits"),
        "In place: numbers with so many mantissa and 2 exponent bits, each group of pixels at a scale of its own.");
  m.def("round_elements_at_random", &bound_round_elements_at_random, nb::arg("engine"), nb::arg("x"),
        nb::arg("mantissa_bits"), nb::arg("seed"), nb::arg("total"), nb::arg("first"),
        "round_elements, up or down at random without bias; an element's number depends on its place in the batch.");
  m.def("largest_by_channel", &bound_largest_by_channel, nb::arg("x"), nb::arg("largest"),
        "Largest |x| of each channel; infinity if any of the channel is not finite.");
  m.def("round_weights", &bound_round_weights, nb::arg("engine"), nb::arg("outside"), nb::arg("out"),
        nb::arg("inverse"), nb::arg("seed"),
        "Int8 of outside * inverse[channel], up or down at random without bias.");
  m.def("export_gradient", &bound_export_gradient, nb::arg("engine"), nb::arg("gradient"), nb::arg("outside"),
        nb::arg("scale"), "outside = gradient * scale[channel], from the engine's layout to that of channels-last weights.");
  m.def("sum_of_magnitudes", &bound_sum_of_magnitudes, nb::arg("x"), "Sum of |x| of int8 or int32.");
  m.def("max_magnitude", &bound_max_magnitude, nb::arg("x"), "Largest |x|; infinity if any is not finite.");
  m.def("softmax_gradient", &bound_softmax_gradient, nb::arg("logits"), nb::arg("exponent"), nb::arg("labels"),
        nb::arg("out"), nb::arg("classes"), nb::arg("rounding") = 0);
  m.def("gemm", &bound_gemm, nb::arg("engine"), nb::arg("lhs"), nb::arg("rhs"), nb::arg("out"), nb::arg("rows"),
        nb::arg("cols"), nb::arg("depth"), nb::arg("activations") = false);
}
