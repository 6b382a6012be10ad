// What paths compute through threads, packing, patches and batch splitting: convolution.h and layers.h against
// reference.h.
#include <cmath>
#include <stdexcept>

#include "convolution.h"
#include "gemm.h"
#include "kernel_test.h"
#include "layers.h"

namespace socflower::int8::test {
namespace {

constexpr Rounding kRoundings[] = {Rounding::kNearest, Rounding::kPseudoStochastic};

// (rows, stride of `channels`) with zeros in the channels of padding.
Buffer<std::int8_t> tensor(Random& random, std::size_t rows, int channels, int fill, int low = -127) {
  const int cs = channel_stride(channels);
  const Buffer<std::int8_t> values = filled<std::int8_t>(random, rows * channels, fill, low, 127);
  Buffer<std::int8_t> padded(rows * cs, 0);
  for (std::size_t row = 0; row < rows; ++row)
    for (int c = 0; c < channels; ++c) padded[row * cs + c] = values[row * channels + c];
  return padded;
}

std::size_t pixels_in(const ConvShape& s) { return std::size_t(s.in_h) * s.in_w * s.batch; }
std::size_t pixels_out(const ConvShape& s) { return std::size_t(s.out_h()) * s.out_w() * s.batch; }

std::uint32_t largest_of(const Buffer<std::int32_t>& acc) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < acc.size(); ++i) {
    largest = std::max(largest, static_cast<std::uint32_t>(std::abs(std::int64_t(acc[i]))));
  }
  return largest;
}

// What one convolution reads, and what the reference makes of it; the cases of a shape share it, for the
// reference takes longer than the kernels.
struct Operands {
  const ConvShape& s;
  Buffer<std::int8_t> weight, dy;
  Buffer<std::int32_t> bias;
  struct Pass {
    bool activations;  // none below zero
    Buffer<std::int8_t> x;
    bool biased;
    Buffer<std::int32_t> acc, weight_gradient;
  } passes[2];
  Buffer<std::int32_t> input_gradient;

  Operands(Random& random, const ConvShape& shape, int fill)
      : s(shape),
        weight(tensor(random, std::size_t(s.taps()) * s.group_in_c(), s.out_c, fill)),
        dy(tensor(random, pixels_out(s), s.out_c, fill)),
        bias(channel_stride(s.out_c), 0),
        passes{pass(random, fill, false), pass(random, fill, true)},
        input_gradient(s.input_size()) {
    for (int c = 0; c < s.out_c; ++c) bias[c] = random.between(-1000000, 1000000);
    for (Pass& pass : passes) {
      reference::convolution(s, pass.x.data(), weight.data(), bias_of(pass), pass.acc.data());
      reference::convolution_weight_gradient(s, pass.x.data(), dy.data(), pass.weight_gradient.data());
    }
    reference::convolution_input_gradient(s, dy.data(), weight.data(), input_gradient.data());
  }

  const std::int32_t* bias_of(const Pass& pass) const { return pass.biased ? bias.data() : nullptr; }

 private:
  Pass pass(Random& random, int fill, bool activations) const {
    return {activations, tensor(random, pixels_in(s), s.in_c, fill, activations ? 0 : -127),
            random.next() % 2 != 0, Buffer<std::int32_t>(s.output_size()),
            Buffer<std::int32_t>(s.weight_size())};
  }
};

// One convolution on one path, every function, with what the calls have in common.
struct ConvolutionCase {
  const Path& path;
  ThreadPool& pool;
  Checker& check;
  const ConvShape& s;
  int batch_block;
  Algorithm algorithm;

  Convolution convolution{s, batch_block, algorithm};
  Buffer<std::uint8_t> workspace{convolution.workspace_bytes(path, pool.size()), 0xa5};

  template <typename T>
  void equal(const char* function, const T* expected, const T* got, std::size_t size, int variant) {
    check.equal(function, expected, got, size,
                "batch %d, in %dx%dx%d, out channels %d, kernel %dx%d, stride %dx%d, padding %dx%d, groups %d, "
                "dilation %dx%d, batch block %d, algorithm %d, threads %d, variant %d",
                s.batch, s.in_h, s.in_w, s.in_c, s.out_c, s.kernel_h, s.kernel_w, s.stride_h, s.stride_w,
                s.pad_h, s.pad_w, s.groups, s.dilation_h, s.dilation_w, batch_block, static_cast<int>(algorithm), pool.size(), variant);
  }

  // `run(to)` as int32 and rounded, plain and masked, against the accumulators of the reference.
  template <typename Run>
  void destinations(const char* function, Random& random, const Buffer<std::int32_t>& acc, bool relu, Run run) {
    const Buffer<std::int8_t> mask = filled<std::int8_t>(random, acc.size(), 0);
    const int best = reference::shift_for(largest_of(acc), 7);
    for (int variant = 0; variant < 4; ++variant) {
      Destination to;
      to.how.relu = relu && variant % 2 != 0;
      to.how.mask = !relu && variant % 2 != 0 ? mask.data() : nullptr;
      to.how.shift = variant < 2 ? best : std::max(0, best - 3);  // the second saturates
      to.how.rounding = kRoundings[random.next() % 2];
      Buffer<std::int8_t> expected(acc.size()), got(acc.size(), 99);
      const std::uint32_t largest = reference::requantise(acc.data(), expected.data(), acc.size(), to.how);
      to.out = got.data();
      const std::uint32_t got_largest = run(to);
      equal(function, expected.data(), got.data(), acc.size(), variant);
      equal((std::string(function) + " maximum").c_str(), &largest, &got_largest, 1, variant);

      Buffer<std::int32_t> kept = acc, wide(acc.size(), 99);
      for (std::size_t i = 0; i < acc.size(); ++i) {
        if ((to.how.relu && kept[i] < 0) || (to.how.mask != nullptr && to.how.mask[i] <= 0)) kept[i] = 0;
      }
      to.out = nullptr, to.acc = wide.data();
      const std::uint32_t wide_largest = run(to);
      equal((std::string(function) + " as int32").c_str(), kept.data(), wide.data(), acc.size(), variant);
      equal((std::string(function) + " maximum of int32").c_str(), &largest, &wide_largest, 1, variant);
    }
  }

  void run(Random& random, const Operands& operands) {
    const std::int8_t* const weight = operands.weight.data();
    const std::int8_t* const dy = operands.dy.data();
    for (const Operands::Pass& pass : operands.passes) {
      destinations("forward", random, pass.acc, true, [&](const Destination& to) {
        return convolution.forward(path, pool, pass.x.data(), pass.activations, weight, operands.bias_of(pass), to,
                                   workspace.data());
      });
      const Buffer<std::int32_t>& expected = pass.weight_gradient;
      Buffer<std::int32_t> got(expected.size(), 99);
      const std::uint32_t largest = largest_of(expected);
      const std::uint32_t got_largest = convolution.weight_gradient(path, pool, pass.x.data(), pass.activations, dy,
                                                                    got.data(), workspace.data());
      equal("weight gradient", expected.data(), got.data(), got.size(), pass.activations);
      equal("weight gradient's maximum", &largest, &got_largest, 1, pass.activations);
    }
    destinations("input gradient", random, operands.input_gradient, false, [&](const Destination& to) {
      return convolution.input_gradient(path, pool, dy, weight, to, workspace.data());
    });
  }
};

// Every algorithm that can compute the shape, on 1 and 3 threads, whole and in micro-batches.
void test_convolution(const Path& path, Checker& check, Random& random, ThreadPool* const (&pools)[2],
                      const ConvShape& s, int fill) {
  const Operands operands(random, s, fill);
  for (ThreadPool* pool : pools)
    for (const int batch_block : {0, (s.batch + 1) / 2}) {
      ConvolutionCase{path, *pool, check, s, batch_block, Algorithm::kAutomatic}.run(random, operands);
      if (!winograd::possible(s)) continue;
      ConvolutionCase{path, *pool, check, s, batch_block, Algorithm::kDirect}.run(random, operands);
      ConvolutionCase{path, *pool, check, s, batch_block, Algorithm::kWinograd}.run(random, operands);
    }
}

void convolutions(const Path& path, Checker& check) {
  Random random(11);
  ThreadPool one(1), three(3);
  ThreadPool* const pools[2] = {&one, &three};
  // {batch, in_h, in_w, in_c, out_c, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, groups, dilation_h,
  //  dilation_w}
  const ConvShape chosen[] = {
      {1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1},         // the smallest
      {1, 3, 3, 1, 1, 3, 3, 1, 1, 1, 1, 1},         // narrow
      {2, 5, 4, 1, 17, 3, 2, 1, 2, 1, 0, 1},        // patches of one channel, uneven everything
      {3, 7, 6, 3, 16, 5, 5, 2, 2, 2, 2, 1},        // a first layer
      {2, 4, 4, 4, 8, 3, 3, 1, 1, 1, 1, 1},         // the most channels that are run over patches
      {2, 4, 4, 5, 8, 3, 3, 1, 1, 1, 1, 1},         // one more
      {5, 1, 1, 511, 10, 1, 1, 1, 1, 0, 0, 1},      // linear, deep
      {4, 1, 1, 513, 33, 1, 1, 1, 1, 0, 0, 1},      // linear, deep + 1
      {3, 4, 3, 20, 30, 4, 3, 1, 1, 0, 0, 1},       // linear over an image
      {2, 2, 2, 513, 31, 3, 3, 1, 1, 1, 1, 1},      // deep
      {2, 4, 4, 64, 512, 1, 1, 2, 2, 0, 0, 1},      // wide projection: pixels that no tap reads
      {17, 4, 4, 15, 15, 3, 3, 1, 1, 1, 1, 1},      // around a channel block
      {16, 5, 5, 16, 16, 3, 3, 2, 2, 1, 1, 1},
      {15, 3, 3, 17, 17, 3, 3, 1, 1, 1, 1, 1},
      {33, 2, 3, 31, 33, 2, 2, 1, 1, 1, 1, 1},
      {1, 9, 9, 32, 48, 3, 3, 1, 1, 1, 1, 1},       // two and a quarter Winograd tiles
      {3, 8, 6, 24, 20, 3, 3, 1, 1, 0, 0, 1},       // no padding
      {2, 5, 5, 8, 8, 3, 3, 1, 1, 4, 5, 1},         // output pixels all of whose taps are padding
      {2, 3, 3, 8, 9, 3, 3, 3, 3, 3, 3, 1},
      {2, 7, 11, 12, 18, 3, 3, 3, 2, 1, 2, 1},      // stride 3
      {3, 6, 6, 8, 12, 3, 3, 1, 1, 1, 1, 2},        // groups
      {2, 6, 5, 64, 32, 3, 3, 2, 1, 1, 1, 4},
      {3, 5, 5, 34, 34, 3, 3, 1, 1, 1, 1, 34},      // depthwise
      {4, 6, 6, 16, 16, 3, 3, 2, 2, 1, 1, 16},
      {2, 5, 4, 15, 15, 5, 3, 1, 2, 2, 1, 15},
      {2, 5, 5, 6, 12, 3, 3, 1, 1, 1, 1, 6},        // depthwise of multiplier 2
      {3, 4, 4, 2, 2, 3, 3, 1, 1, 1, 1, 2},
      {1, 130, 2, 8, 8, 3, 1, 1, 1, 1, 0, 1},       // a tall image
      {2, 9, 8, 17, 18, 3, 3, 1, 1, 2, 2, 1, 2, 2},  // dilation
      {3, 9, 7, 3, 16, 3, 3, 2, 1, 2, 0, 1, 3, 2},   // dilation of a first layer
      {2, 8, 8, 20, 20, 3, 3, 1, 1, 2, 2, 20, 2, 2}, // dilation, depthwise
      {2, 7, 7, 8, 12, 2, 3, 2, 3, 2, 2, 4, 4, 2},   // dilation beyond the stride, groups
  };
  for (const ConvShape& s : chosen) test_convolution(path, check, random, pools, s, 0);
  const ConvShape extremes[] = {
      {9, 5, 5, 33, 18, 3, 3, 1, 1, 1, 1, 1}, {5, 6, 6, 3, 20, 5, 5, 1, 1, 2, 2, 1},
      {6, 4, 4, 20, 20, 3, 3, 1, 1, 1, 1, 20}, {4, 1, 1, 600, 12, 1, 1, 1, 1, 0, 0, 1},
      {3, 4, 4, 8, 16, 3, 3, 1, 1, 1, 1, 4},   {7, 2, 2, 520, 17, 3, 3, 1, 1, 1, 1, 1},
  };
  for (const ConvShape& s : extremes)
    for (int fill = 1; fill < kFills; ++fill) test_convolution(path, check, random, pools, s, fill);
  for (int index = 0; index < 60; ++index) {
    const int groups = index % 4 == 0 ? 1 << random.between(0, 2) : 1;
    ConvShape s{random.between(1, 20), random.between(1, 8), random.between(1, 8),
                groups * random.between(1, 40), groups * random.between(1, 40), random.between(1, 4),
                random.between(1, 4), random.between(1, 3), random.between(1, 3), random.between(0, 3),
                random.between(0, 3), groups};
    if (index % 3 == 0) s.kernel_h = s.kernel_w = 3, s.stride_h = s.stride_w = 1;
    if (index % 7 == 0) s.groups = s.out_c = s.in_c;
    s.kernel_h = std::min(s.kernel_h, s.in_h + 2 * s.pad_h);
    s.kernel_w = std::min(s.kernel_w, s.in_w + 2 * s.pad_w);
    if (index % 4 == 1) s.dilation_h = random.between(1, 3), s.dilation_w = random.between(1, 3);
    while (s.span_h() > s.in_h + 2 * s.pad_h) --s.dilation_h;
    while (s.span_w() > s.in_w + 2 * s.pad_w) --s.dilation_w;
    test_convolution(path, check, random, pools, s, index % 5 == 4 ? 4 : 0);
  }
}

// A weight gradient that is deeper than int32 is exact where the values allow it, and refused where not.
void deep_weight_gradients(const Path& path, Checker& check) {
  Random random(12);
  ThreadPool pool(2);
  const ConvShape s{24, 128, 48, 5, 7, 1, 1, 1, 1, 0, 0, 1};  // 147,456 products per sum
  const Convolution convolution(s);
  Buffer<std::uint8_t> workspace(convolution.workspace_bytes(path, pool.size()));
  const Buffer<std::int8_t> x = tensor(random, pixels_in(s), s.in_c, 0);
  Buffer<std::int8_t> dy = tensor(random, pixels_out(s), s.out_c, 5);
  Buffer<std::int32_t> expected(s.weight_size()), got(s.weight_size(), 99);
  reference::convolution_weight_gradient(s, x.data(), dy.data(), expected.data());
  convolution.weight_gradient(path, pool, x.data(), false, dy.data(), got.data(), workspace.data());
  check.equal("deep weight gradient", expected.data(), got.data(), got.size(), "batch %d", s.batch);

  dy = tensor(random, pixels_out(s), s.out_c, 2);
  bool refused = false, refusal = true;
  try {
    convolution.weight_gradient(path, pool, x.data(), false, dy.data(), got.data(), workspace.data());
  } catch (const std::overflow_error&) {
    refused = true;
  }
  check.equal("refusal of a deep weight gradient", &refusal, &refused, 1, "batch %d", s.batch);
}

void gemms(const Path& path, Checker& check) {
  Random random(13);
  ThreadPool one(1), three(3);
  struct Size {
    int rows, cols, depth;
  };
  const Size sizes[] = {{1, 1, 1},    {1, 17, 31},  {15, 16, 17}, {16, 15, 64}, {33, 31, 65},    {7, 100, 511},
                        {64, 64, 64}, {65, 1, 127}, {2, 3, 4097}, {1, 1, 65537}, {3, 2, 131071}};
  for (ThreadPool* pool : {&one, &three})
    for (const auto& [rows, cols, depth] : sizes)
      for (int fill = 0; fill < kFills; ++fill)
        for (const bool activations : {false, true}) {
          const Buffer<std::int8_t> lhs =
              filled<std::int8_t>(random, std::size_t(rows) * depth, fill, activations ? 0 : -127, 127);
          const Buffer<std::int8_t> rhs = filled<std::int8_t>(random, std::size_t(cols) * depth, fill);
          Buffer<std::int32_t> expected(std::size_t(rows) * cols), got(expected.size(), 99);
          Buffer<std::uint8_t> workspace(gemm_workspace_bytes(path, rows, cols, depth));
          reference::gemm(lhs.data(), rhs.data(), expected.data(), rows, cols, depth);
          gemm(path, *pool, lhs.data(), activations, rhs.data(), got.data(), rows, cols, depth,
               workspace.data());
          check.equal("gemm", expected.data(), got.data(), got.size(),
                      "rows %d, cols %d, depth %d, fill %d, activations %d, threads %d", rows, cols, depth,
                      fill, activations, pool->size());
        }
}

// `run(out)` against what the reference wrote and returned, and the same again without an output.
template <typename Run>
void check_layer(Checker& check, const char* function, std::uint32_t largest,
                 const Buffer<std::int8_t>& expected, Run run) {
  Buffer<std::int8_t> got(expected.size(), 99);
  const std::uint32_t written = run(got.data()), searched = run(nullptr);
  check.equal(function, expected.data(), got.data(), got.size(), "size %zu", got.size());
  check.equal(function, &largest, &written, 1, "maximum, size %zu", got.size());
  check.equal(function, &largest, &searched, 1, "maximum without output, size %zu", got.size());
}

void poolings(const Path& path, Checker& check) {
  Random random(14);
  ThreadPool one(1), three(3);
  // {batch, in_h, in_w, channels, kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w}
  const PoolShape shapes[] = {
      {1, 1, 1, 1, 1, 1, 1, 1, 0, 0},  {3, 4, 4, 16, 2, 2, 2, 2, 0, 0},   {2, 5, 7, 17, 2, 3, 2, 3, 0, 0},
      {4, 7, 6, 33, 3, 3, 2, 2, 1, 1}, {2, 6, 6, 15, 3, 3, 1, 1, 1, 1},   {2, 5, 5, 64, 5, 5, 1, 1, 0, 0},
      {1, 9, 4, 8, 2, 1, 4, 3, 1, 0},  {2, 16, 16, 20, 16, 16, 1, 1, 8, 8}, {17, 3, 3, 31, 2, 2, 1, 1, 1, 1},
  };
  for (ThreadPool* pool : {&one, &three})
    for (const PoolShape& s : shapes)
      for (int fill = 0; fill < kFills; ++fill) {
        const Pooling pooling(s);
        const Buffer<std::int8_t> x = tensor(random, std::size_t(s.in_h) * s.in_w * s.batch, s.channels, fill);
        Buffer<std::int8_t> y(pooling.output_size()), got_y(y.size(), 99);
        Buffer<std::uint8_t> argmax(y.size()), got_argmax(y.size(), 99);
        reference::max_pool(s, x.data(), y.data(), argmax.data());
        pooling.max(path, *pool, x.data(), got_y.data(), got_argmax.data());
        const char* sizes = "batch %d, in %dx%dx%d, kernel %dx%d, fill %d";
        check.equal("max pooling", y.data(), got_y.data(), y.size(), sizes, s.batch, s.in_h, s.in_w, s.channels,
                    s.kernel_h, s.kernel_w, fill);
        check.equal("max pooling's argmax", argmax.data(), got_argmax.data(), y.size(), sizes, s.batch, s.in_h,
                    s.in_w, s.channels, s.kernel_h, s.kernel_w, fill);

        const Buffer<std::int8_t> dy =
            tensor(random, std::size_t(s.out_h()) * s.out_w() * s.batch, s.channels, fill);
        const Buffer<std::int8_t> mask = filled<std::int8_t>(random, x.size(), 0);
        const Requantise how{random.between(0, 4), kRoundings[random.next() % 2], false,
                             random.next() % 2 != 0 ? mask.data() : nullptr};
        Requantise mean = how;
        const int multiplier = random.between(0, 0x7fffffff / (128 * s.kernel_h * s.kernel_w));
        mean.shift = random.between(10, 24);
        Buffer<std::int8_t> dx(x.size());
        std::uint32_t largest = reference::max_pool_gradient(s, dy.data(), argmax.data(), dx.data(), how);
        check_layer(check, "max pooling gradient", largest, dx, [&](std::int8_t* out) {
          return pooling.max_gradient(path, *pool, dy.data(), argmax.data(), out, how);
        });
        largest = reference::average_pool_gradient(s, dy.data(), multiplier, dx.data(), mean);
        check_layer(check, "average pooling gradient", largest, dx, [&](std::int8_t* out) {
          return pooling.average_gradient(path, *pool, dy.data(), multiplier, out, mean);
        });
        mean.mask = nullptr;  // of the input's shape
        largest = reference::average_pool(s, x.data(), multiplier, y.data(), mean);
        check_layer(check, "average pooling", largest, y, [&](std::int8_t* out) {
          return pooling.average(path, *pool, x.data(), multiplier, out, mean);
        });
      }
}

// Sizes around the chunks (32 Ki elements) that are shared out among threads.
void layers(const Path& path, Checker& check) {
  Random random(15);
  ThreadPool one(1), three(3);
  struct Size {
    int rows, cs;
  };
  const Size sizes[] = {{1, 16},    {3, 48},    {683, 48},  {2048, 16},
                        {2049, 16}, {1, 32768}, {1, 32784}, {131, 1008}};
  for (ThreadPool* pool : {&one, &three})
    for (const auto& [rows, cs] : sizes)
      for (int fill = 0; fill < kFills; ++fill) {
        const std::size_t size = std::size_t(rows) * cs;
        const Buffer<std::int8_t> a = filled<std::int8_t>(random, size, fill);
        const Buffer<std::int8_t> b = filled<std::int8_t>(random, size, 0);
        const Buffer<std::int8_t> gate = filled<std::int8_t>(random, size, 0);
        const std::int8_t* const maybe_gate = random.next() % 2 != 0 ? gate.data() : nullptr;
        const Requantise how{random.between(0, 24), kRoundings[random.next() % 2], random.next() % 2 != 0,
                             maybe_gate};
        Buffer<std::int8_t> expected(size);

        const Buffer<std::int32_t> acc = accumulators(random, size);
        std::uint32_t largest = reference::requantise(acc.data(), expected.data(), size, how);
        check_layer(check, "requantise", largest, expected, [&](std::int8_t* out) {
          return requantise(path, *pool, acc.data(), out, size, how);
        });
        const int shift_a = random.between(0, 20), shift_b = random.between(0, 20);
        largest = reference::add(a.data(), shift_a, b.data(), shift_b, expected.data(), size, how);
        check_layer(check, "add", largest, expected, [&](std::int8_t* out) {
          return add(path, *pool, a.data(), shift_a, b.data(), shift_b, out, size, how);
        });

        Buffer<std::int32_t> scale(cs), other(cs), offset(cs);
        for (int c = 0; c < cs; ++c) {
          scale[c] = random.between(-4194303, 4194303), other[c] = random.between(-4194303, 4194303);
          offset[c] = random.between(-536870911, 536870911);
        }
        largest = reference::affine(a.data(), scale.data(), offset.data(), expected.data(), rows, cs, how);
        check_layer(check, "affine", largest, expected, [&](std::int8_t* out) {
          return affine(path, *pool, a.data(), scale.data(), offset.data(), out, rows, cs, how);
        });
        largest = reference::affine_gradient(a.data(), b.data(), maybe_gate, scale.data(), other.data(),
                                             offset.data(), expected.data(), rows, cs, how);
        check_layer(check, "affine gradient", largest, expected, [&](std::int8_t* out) {
          return affine_gradient(path, *pool, a.data(), b.data(), maybe_gate, scale.data(), other.data(),
                                 offset.data(), out, rows, cs, how);
        });

        Buffer<std::int64_t> sum_a(cs), sum_ab(cs), got_a(cs, 99), got_ab(cs, 99);
        Buffer<std::int64_t> sums(channel_sums_size(*pool, cs), 99);
        reference::channel_sums(a.data(), b.data(), maybe_gate, sum_a.data(), sum_ab.data(), rows, cs);
        channel_sums(path, *pool, a.data(), b.data(), maybe_gate, got_a.data(), got_ab.data(), rows, cs,
                     sums.data());
        check.equal("channel_sums a", sum_a.data(), got_a.data(), cs, "rows %d, cs %d", rows, cs);
        check.equal("channel_sums ab", sum_ab.data(), got_ab.data(), cs, "rows %d, cs %d", rows, cs);

        Buffer<std::int8_t> weight = b, got_weight = b;
        reference::update_weight(weight.data(), acc.data(), size, how.shift, how.rounding);
        update_weight(path, *pool, got_weight.data(), acc.data(), size, how.shift, how.rounding);
        check.equal("update_weight", weight.data(), got_weight.data(), size, "size %zu, shift %d", size,
                    how.shift);
      }
}

Buffer<float> images_of(Random& random, std::size_t size) {
  Buffer<float> values(size);
  for (float& v : values) {
    v = static_cast<float>(random.between(-600, 600)) / 2.0f;  // halves: ties at exponent 0
    if (random.next() % 16 == 0) v *= 1e30f;
  }
  return values;
}

void images(const Path& path, Checker& check) {
  Random random(16);
  ThreadPool one(1), three(3);
  const ConvShape shapes[] = {
      {1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1},   {2, 5, 7, 1, 8, 3, 3, 1, 1, 1, 1, 1},
      {3, 8, 8, 3, 8, 5, 5, 1, 1, 2, 2, 1},   {4, 9, 6, 2, 8, 3, 3, 2, 2, 1, 1, 1},
      {2, 24, 23, 3, 8, 7, 7, 2, 2, 3, 3, 1}, {5, 6, 6, 4, 8, 4, 4, 4, 4, 0, 0, 1},
      {1, 3, 3, 1, 8, 3, 3, 1, 1, 4, 4, 1},   {3, 30, 18, 17, 8, 2, 3, 1, 3, 0, 2, 1},
      {2, 4, 4, 8, 8, 1, 1, 1, 1, 0, 0, 1},
  };
  for (ThreadPool* pool : {&one, &three})
    for (const ConvShape& s : shapes)
      for (const int exponent : {0, -3, 2}) {
        const Buffer<float> x = images_of(random, std::size_t(s.batch) * s.in_c * s.in_h * s.in_w);
        Buffer<std::int8_t> expected(s.input_size()), got(s.input_size(), 99);
        reference::quantise_images(x.data(), expected.data(), s.batch, s.in_c, s.in_h, s.in_w, exponent);
        quantise_images(path, *pool, x.data(), got.data(), s.batch, s.in_c, s.in_h, s.in_w, exponent);
        const char* sizes = "batch %d, in %dx%dx%d, kernel %dx%d, exponent %d";
        check.equal("quantise_images", expected.data(), got.data(), got.size(), sizes, s.batch, s.in_h, s.in_w,
                    s.in_c, s.kernel_h, s.kernel_w, exponent);

        const int in_cs = channel_stride(s.in_c), stride = channel_stride(s.taps() * s.in_c);
        Buffer<std::int8_t> patches(pixels_out(s) * stride, 0), got_patches(patches.size(), 99);
        for (int oh = 0; oh < s.out_h(); ++oh)
          for (int ow = 0; ow < s.out_w(); ++ow)
            for (int tap = 0; tap < s.taps(); ++tap) {
              const int ih = oh * s.stride_h - s.pad_h + tap / s.kernel_w;
              const int iw = ow * s.stride_w - s.pad_w + tap % s.kernel_w;
              if (ih < 0 || ih >= s.in_h || iw < 0 || iw >= s.in_w) continue;
              for (int n = 0; n < s.batch; ++n)
                for (int c = 0; c < s.in_c; ++c) {
                  patches[((std::size_t(oh) * s.out_w() + ow) * s.batch + n) * stride + tap * s.in_c + c] =
                      expected[((std::size_t(ih) * s.in_w + iw) * s.batch + n) * in_cs + c];
                }
            }
        Buffer<std::int8_t> workspace(patch_images_bytes(s), 99);
        quantise_patches(path, *pool, s, x.data(), got_patches.data(), exponent, workspace.data());
        check.equal("quantise_patches", patches.data(), got_patches.data(), patches.size(), sizes, s.batch,
                    s.in_h, s.in_w, s.in_c, s.kernel_h, s.kernel_w, exponent);

        // One image of one pixel per value is quantise() with a channel of padding stripped.
        Buffer<float> flat(x.size() / 16 * 16);
        std::copy(x.data(), x.data() + flat.size(), flat.begin());
        Buffer<std::int8_t> rounded(flat.size() * 16), got_flat(flat.size(), 99), expected_flat(flat.size());
        if (flat.size() == 0) continue;
        const int num_values = static_cast<int>(flat.size());
        reference::quantise_images(flat.data(), rounded.data(), num_values, 1, 1, 1, exponent);
        for (std::size_t i = 0; i < flat.size(); ++i) expected_flat[i] = rounded[i * 16];
        quantise(path, *pool, flat.data(), got_flat.data(), flat.size(), exponent);
        check.equal("quantise", expected_flat.data(), got_flat.data(), flat.size(), sizes, s.batch, s.in_h,
                    s.in_w, s.in_c, s.kernel_h, s.kernel_w, exponent);
      }
}

const Register kConvolutions(convolutions), kDeep(deep_weight_gradients), kGemms(gemms), kPoolings(poolings);
const Register kLayers(layers), kImages(images);

}  // namespace
}  // namespace socflower::int8::test
