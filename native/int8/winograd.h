// Convolutions of 3x3, stride 1, by exact integer Winograd: F(4x4, 3x3) with 36 products of int16 where the
// direct way takes 144 of int8. Results equal reference.h bit for bit, whatever the values.
//
// Y = A^T [(G g G^T) . (B^T d B)] A has fractions in G only: 24 G is whole. So the points of the weights are
// taken 24 times too large in each dimension (12 at the last point, which A makes up for); points of weights and
// of input then fit int16. Their products are summed modulo 2^32, where everything but the division is exact;
// 576 = 9 * 64 times the result is left, which is multiplied by the inverse of 9 modulo 2^32 and shifted right
// by 6. That is the result as long as it lies within +-2^25, so a sum is taken in parts that cannot be larger:
// over some of the channels (forward, input gradient), over some of the tiles and images (weight gradient).
// The parts are added as int32. The weight gradient is the same identity transposed,
// G^T [(B^T d B) . (A dY A^T)] G.
#pragma once

#include <cstddef>
#include <cstdint>

#include "destination.h"
#include "kernels.h"
#include "shape.h"
#include "thread_pool.h"

namespace socflower::int8::winograd {

enum class Function { kForward, kInputGradient, kWeightGradient };

bool possible(const ConvShape& shape);
// Whether it is quicker than the direct way on this path, as measured.
bool pays(const Path& path, const ConvShape& shape, Function function);

std::size_t workspace_bytes(const Path& path, const ConvShape& shape, Function function, int threads);

// Contracts of the members of Convolution (convolution.h) with these names.
std::uint32_t forward(const Path& path, ThreadPool& pool, const ConvShape& shape, const std::int8_t* x,
                      const std::int8_t* weight, const std::int32_t* bias, const Destination& to, void* workspace);
std::uint32_t input_gradient(const Path& path, ThreadPool& pool, const ConvShape& shape, const std::int8_t* dy,
                             const std::int8_t* weight, const Destination& to, void* workspace);
std::uint32_t weight_gradient(const Path& path, ThreadPool& pool, const ConvShape& shape, const std::int8_t* x,
                              const std::int8_t* dy, std::int32_t* acc, void* workspace);

}  // namespace socflower::int8::winograd
