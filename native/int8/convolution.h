// Convolutions of any stride, padding and groups (and so linear layers) on the chosen kernel path, with
// threads. Results equal reference.h bit for bit, whichever algorithm computes them.
//
// Most convolutions of 3x3 with stride 1 run by Winograd (winograd.h), all others directly. Direct forward and
// input gradient are the same computation: for every pixel of the result, a sum over kernel taps of
// (images x channels) times (channels x channels), in which taps that fall into the padding are left out.
// The weight gradient is, for every tap, a sum over pixels of (channels x images) times (images x channels);
// both operands are packed once, with the images of one k-group side by side, and serve all taps (with a single
// tap, only as many pixels at a time as stay in the cache). x or dy is on the left, whichever fills blocks better.
// A first layer of few channels is run as a pointwise convolution over patches, which are gathered first. Groups other
// than depthwise run as one dense convolution with zero blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "destination.h"
#include "kernels.h"
#include "tap_index.h"
#include "shape.h"
#include "thread_pool.h"
#include "winograd.h"

namespace socflower::int8 {

enum class Algorithm { kAutomatic, kDirect, kWinograd };

class Convolution {
 public:
  // batch_block: how many images the direct algorithm works on at a time (batch splitting); 0 means all.
  // Throws std::invalid_argument, with the numbers, on a shape that cannot be or cannot be summed exactly, or
  // that Winograd cannot do if it is asked for.
  Convolution(const ConvShape& shape, int batch_block = 0, Algorithm algorithm = Algorithm::kAutomatic);

  const ConvShape& shape() const { return shape_; }
  int batch_block() const { return batch_block_; }

  // Whether `function` is computed by Winograd on `path`: where it was asked for, or pays (winograd.h).
  bool uses_winograd(const Path& path, winograd::Function function) const;

  // Bytes of workspace that any of the three functions needs on `path` with so many threads; contents need not
  // be kept.
  std::size_t workspace_bytes(const Path& path, int threads) const;

  // Each returns the largest magnitude that was stored, before rounding. `activations` says that x lies in
  // 0..127 (it follows a ReLU), which has quicker kernels. bias: out_cs values at accumulator scale, or null.
  std::uint32_t forward(const Path& path, ThreadPool& pool, const std::int8_t* x, bool activations,
                        const std::int8_t* weight, const std::int32_t* bias, const Destination& to,
                        void* workspace) const;
  std::uint32_t input_gradient(const Path& path, ThreadPool& pool, const std::int8_t* dy, const std::int8_t* weight,
                               const Destination& to, void* workspace) const;
  // acc (taps, in_c/groups, out_cs) is overwritten. Throws std::overflow_error where more than kMaxExactDepth
  // products meet in one sum and the values do not rule out that it leaves int32.
  std::uint32_t weight_gradient(const Path& path, ThreadPool& pool, const std::int8_t* x, bool activations,
                                const std::int8_t* dy, std::int32_t* acc, void* workspace) const;

 private:
  const ConvShape shape_;
  const int batch_block_;
  const Algorithm algorithm_;
  const bool patches_, dense_groups_;
  const ConvShape inner_;         // what the products see: pointwise over patches, or without groups
  TapIndex forward_, backward_;   // by output and by input pixel
  TapIndex taps_;                 // of inner_, by tap
};

}  // namespace socflower::int8
