// Everything between the convolutions, on the chosen kernel path, with threads. Each function does what the
// one of its name in reference.h does; sizes are in elements and multiples of 16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "convolution.h"
#include "kernels.h"
#include "shape.h"
#include "thread_pool.h"

namespace socflower::int8 {

std::uint32_t requantise(const Path& path, ThreadPool& pool, const std::int32_t* acc, std::int8_t* out,
                         std::size_t size, const Requantise& how);
std::uint32_t add(const Path& path, ThreadPool& pool, const std::int8_t* a, int shift_a, const std::int8_t* b,
                  int shift_b, std::int8_t* out, std::size_t size, const Requantise& how);
std::uint32_t affine(const Path& path, ThreadPool& pool, const std::int8_t* x, const std::int32_t* scale,
                     const std::int32_t* offset, std::int8_t* out, std::size_t rows, int cs, const Requantise& how);
std::uint32_t affine_gradient(const Path& path, ThreadPool& pool, const std::int8_t* dy, const std::int8_t* x,
                              const std::int8_t* gate, const std::int32_t* scale_dy, const std::int32_t* scale_x,
                              const std::int32_t* offset, std::int8_t* out, std::size_t rows, int cs,
                              const Requantise& how);
std::uint32_t affine_gradient_at_random(const Path& path, ThreadPool& pool, const std::int8_t* dy,
                                        const std::int8_t* x, const std::int8_t* gate, const std::int32_t* scale_dy,
                                        const std::int32_t* scale_x, const std::int32_t* offset, std::int8_t* out,
                                        std::size_t rows, int cs, int shift, const Dither& dither);
// T is std::int8_t or std::int32_t.
template <typename T>
void affine_real(const Path& path, ThreadPool& pool, const T* acc, const float* by_image,
                 const float* scale, const float* offset, const std::int8_t* other, const float* other_by_image,
                 std::int8_t* out, const float* inverse, float* largest, std::size_t rows, int cs, int batch,
                 bool relu);
// sums: workspace of channel_sums_size(pool, cs) int64.
void channel_sums(const Path& path, ThreadPool& pool, const std::int8_t* a, const std::int8_t* b,
                  const std::int8_t* gate, std::int64_t* sum_a, std::int64_t* sum_ab, std::size_t rows, int cs,
                  std::int64_t* sums);
std::size_t channel_sums_size(const ThreadPool& pool, int cs);
void channel_largest(const Path& path, ThreadPool& pool, const std::int8_t* a, const std::int8_t* gate,
                     std::int32_t* largest, std::size_t rows, int cs);
void channel_largest(const Path& path, ThreadPool& pool, const std::int32_t* acc, std::int32_t* largest,
                     std::size_t rows, int cs);
// sums: as for channel_sums.
void channel_moments(const Path& path, ThreadPool& pool, const std::int32_t* acc, int shift, const ChannelMoments& to,
                     std::size_t rows, int cs, std::int64_t* sums);
void update_weight(const Path& path, ThreadPool& pool, std::int8_t* weight, const std::int32_t* gradient,
                   std::size_t size, int shift, Rounding rounding);

float descend(const Path& path, ThreadPool& pool, float* values, float* velocity, const std::int32_t* gradient,
              const float* scale, std::int8_t* out, std::size_t rows, int cs, const Descent& by);
void normalise(const Path& path, ThreadPool& pool, const std::int32_t* acc, const Normalisation& by, std::int8_t* x,
               std::int8_t* out, std::size_t rows, int cs, bool relu);

// out (h,w,batch,cs) from float32 (batch,channels,h,w).
void quantise_images(const Path& path, ThreadPool& pool, const float* x, std::int8_t* out, int batch, int channels,
                     int h, int w, int exponent);
// The patches that a first convolution multiplies, straight from float32 images: out (out_h, out_w, batch, stride of
// taps * in_c) holds, for every output pixel and image, the rounded input channels under every tap, zeros in the
// padding. With them the layer is a pointwise convolution of taps * in_c channels over the same weight memory.
// images: workspace of patch_images_bytes(shape).
void quantise_patches(const Path& path, ThreadPool& pool, const ConvShape& shape, const float* x, std::int8_t* out,
                      int exponent, std::int8_t* images);
std::size_t patch_images_bytes(const ConvShape& shape);
// out = nearest int8 of x / 2^exponent, half to even, saturated at +-127.
void quantise(const Path& path, ThreadPool& pool, const float* x, std::int8_t* out, std::size_t size, int exponent);
// out = acc * inverse[channel], a product in float32, rounded at random as quantise_at_random, saturated at +-127. The
// number of an element is that of its place in the whole batch (Dither), counted over padded channels.
void round_by_channel_at_random(const Path& path, ThreadPool& pool, const std::int32_t* acc, const float* inverse,
                                std::int8_t* out, std::size_t rows, int cs, const Dither& dither);
// The same of x * inverse[channel], a product in float32.
void quantise_by_channel(const Path& path, ThreadPool& pool, const float* x, const float* inverse, std::int8_t* out,
                         std::size_t rows, int cs);
// Rounds x (pixels, images, cs) in place to numbers with M = mantissa_bits (1 to 4) and 2 exponent bits, each group (the
// pixels of one image and channel) at a scale 2^s of its own: s = bits(largest |x| of the group) - M - 3, within 0 and
// 4 - M. Then |x| loses its drop = max(s, bits(|x|) - M - 1) lowest bits: rounded half to even or, with `dither`, as
// (|x| + n) >> drop << drop, n the leading `drop` bits of the element's number (dither32). Saturated at
// (2^(M + 1) - 1) * 2^(s + 2).
void round_elements(ThreadPool& pool, std::int8_t* x, std::size_t pixels, int images, int cs, int mantissa_bits,
                    const Dither* dither);
// Largest |x| of each channel; infinity if an element of the channel is not finite.
void largest_by_channel(const float* x, float* largest, std::size_t rows, int cs);
// Sum of |x|. T is std::int8_t or std::int32_t.
template <typename T>
std::int64_t sum_of_magnitudes(const T* x, std::size_t size);
// Largest |x|; infinity if an element is not finite.
float max_magnitude(const float* x, std::size_t size);

class Pooling {
 public:
  // Throws std::invalid_argument on a shape that cannot be, or windows of more than 256 taps.
  explicit Pooling(const PoolShape& shape);

  const PoolShape& shape() const { return shape_; }
  std::size_t input_size() const;
  std::size_t output_size() const;
  bool overlapping() const;  // else max_gradient with shift 0 is exact

  void max(const Path& path, ThreadPool& pool, const std::int8_t* x, std::int8_t* y, std::uint8_t* argmax) const;
  std::uint32_t max_gradient(const Path& path, ThreadPool& pool, const std::int8_t* dy, const std::uint8_t* argmax,
                             std::int8_t* dx, const Requantise& how) const;
  std::uint32_t average(const Path& path, ThreadPool& pool, const std::int8_t* x, std::int32_t multiplier,
                        std::int8_t* y, const Requantise& how) const;
  std::uint32_t average_gradient(const Path& path, ThreadPool& pool, const std::int8_t* dy, std::int32_t multiplier,
                                 std::int8_t* dx, const Requantise& how) const;

 private:
  const PoolShape shape_;
  TapIndex by_output_, by_input_;
};

}  // namespace socflower::int8
