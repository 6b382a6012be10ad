// Convolutions of 3x3, stride 1, by exact integer Winograd: F(4x4, 3x3) with 36 products of int16 where the
// direct way takes 144 of int8. Results equal reference.h bit for bit, whatever the values.
//
// Y = A^T [(G g G^T) . (B^T d B)] A at the points 0, 1, -1, 2, -1/2 and infinity has fractions in G only, and
// 30 G is whole. With 30 G the points of int8 weights (at most 15 * 15 * 128) and of int8 input (14 * 14 * 128)
// fit int16. Sums of their products are taken modulo 2^32, where all but a division is exact. 900 = 225 * 4
// times the result is left: multiplied by the inverse of 225 modulo 2^32 and shifted right by 2 it is the
// result, if that lies in [-2^29, 2^29). So a sum over more than 3640 channels is left to the direct way, and
// one over more images and tiles is taken in parts. (The usual points, with -2 for -1/2, leave 576 = 9 * 64 and
// [-2^25, 2^25): three of them are the same modulo 2 where here two are.) The weight gradient is the identity
// transposed, G^T [(B^T d B) . (A dY A^T)] G; A dY A^T is at most 15 * 15 * 128.
#pragma once

#include <cstddef>
#include <cstdint>

#include "destination.h"
#include "kernels.h"
#include "shape.h"
#include "thread_pool.h"

namespace socflower::int8::winograd {

enum class Function { kForward, kInputGradient, kWeightGradient };

constexpr int kMaxChannels = 3640;  // 9 * 3640 * 128 * 128 < 2^29
bool possible(const ConvShape& shape);
// Whether it is possible and quicker than the direct way on this path, as measured.
bool pays(const Path& path, const ConvShape& shape, Function function);

// Of the functions below, which need a shape that is possible.
std::size_t workspace_bytes(const Path& path, const ConvShape& shape, Function function, int threads);

// Contracts of the members of Convolution (convolution.h) with these names.
std::uint32_t forward(const Path& path, ThreadPool& pool, const ConvShape& shape, const std::int8_t* x,
                      const std::int8_t* weight, const std::int32_t* bias, const Destination& to,
                      void* workspace);
std::uint32_t input_gradient(const Path& path, ThreadPool& pool, const ConvShape& shape,
                             const std::int8_t* dy, const std::int8_t* weight, const Destination& to,
                             void* workspace);
std::uint32_t weight_gradient(const Path& path, ThreadPool& pool, const ConvShape& shape, const std::int8_t* x,
                              const std::int8_t* dy, std::int32_t* acc, void* workspace);

}  // namespace socflower::int8::winograd
