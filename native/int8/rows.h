// Functions over rows of channels that have numbers of their own, on the chosen kernel path, with threads. Each does
// what the one of its name in reference.h does. A row has `cs` channels; those of padding are zero in every operand.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "row_operands.h"
#include "shape.h"
#include "thread_pool.h"

namespace socflower::int8 {

void row_sums(const Path& path, ThreadPool& pool, const std::int8_t* a, const std::int8_t* b, const double* weight,
              double* sum_a, double* sum_ab, std::size_t rows, int cs);
std::uint32_t row_affine(const Path& path, ThreadPool& pool, const std::int8_t* x, const RowAffine& by,
                         std::int8_t* out, std::size_t rows, int cs, const Requantise& how);
std::uint32_t row_affine_gradient(const Path& path, ThreadPool& pool, const std::int8_t* dy, const std::int8_t* x,
                                  const RowAffineGradient& by, std::int8_t* out, std::size_t rows, int cs,
                                  const Requantise& how);
void row_scale_gradient(const Path& path, ThreadPool& pool, const std::int8_t* dy, const std::int8_t* x,
                        const double* slope, const double* mean, std::int64_t* terms, std::int64_t* sum_dy,
                        std::size_t rows, int cs);
std::uint32_t softmax(const Path& path, ThreadPool& pool, const std::int8_t* x, const std::int32_t* powers,
                      std::int8_t* out, std::size_t rows, int channels, const Requantise& how);
double softmax_gradient_largest(const Path& path, ThreadPool& pool, const std::int8_t* p, const std::int8_t* dy,
                                const SoftmaxGradient& by, std::size_t rows, int cs);
std::uint32_t softmax_gradient(const Path& path, ThreadPool& pool, const std::int8_t* p, const std::int8_t* dy,
                               const SoftmaxGradient& by, std::int8_t* out, std::size_t rows, int cs,
                               const Requantise& how);

void scale_sums(const Path& path, ThreadPool& pool, std::int32_t* acc, std::size_t size, int factor, int drop);

// Of float64 (pixels, batch, channels): the largest magnitude of each image, as float32; and the nearest int8 of each
// value times inverse[image], half to even, saturated at +-127, in `out` (pixels, batch, stride of channels).
void largest_by_image(const double* values, float* largest, std::size_t pixels, int batch, int channels);
void round_by_image(ThreadPool& pool, const double* values, const float* inverse, std::int8_t* out, std::size_t pixels,
                    int batch, int channels);

// out[i] = table[x[i] as uint8]; out may be x. Returns nothing to round: a table of int8 is rounded before.
void look_up(ThreadPool& pool, const std::int8_t* x, const std::int8_t* table, std::int8_t* out, std::size_t size);
// seen[v] = 1 for every byte v among the first `channels` of each row, else 0; 256 of them.
void bytes_seen(const std::int8_t* x, std::uint8_t* seen, std::size_t rows, int channels, int cs);
std::uint32_t table_gradient(const Path& path, ThreadPool& pool, const std::int8_t* dy, const std::int8_t* x,
                             const std::int32_t* table, std::int8_t* out, std::size_t size, const Requantise& how);

}  // namespace socflower::int8
