// Many products of small matrices that lie in activations, as of attention: exactly, on the chosen kernel path, with
// threads, each product on one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "thread_pool.h"

namespace socflower::int8 {

// Which operand a product takes transposed: with the left matrix A and the right matrix B,
// kNeither: A B, kRight: A B^T, kLeft: A^T B.
enum class Transposed : int { kNeither = 0, kRight = 1, kLeft = 2 };

// `batches` products for each of `samples` samples. Matrix (b, s) of an operand has its rows in pixels
// b * rows .. (b + 1) * rows - 1 of sample s, and its columns in the channels, of an array (pixels, samples, stride).
struct MatrixProducts {
  int batches, samples;
  int rows, cols, depth;  // of the result, and how many products are added: 0 < depth <= kMaxExactDepth
  Transposed transposed;

  int left_rows() const { return transposed == Transposed::kLeft ? depth : rows; }
  int left_cols() const { return transposed == Transposed::kLeft ? rows : depth; }
  int right_rows() const { return transposed == Transposed::kRight ? cols : depth; }
  int right_cols() const { return transposed == Transposed::kRight ? depth : cols; }
};

// Writes int32 accumulators (batches * rows, samples, stride of cols), zeros for channels of padding; returns the
// largest magnitude. workspace: matrix_products_bytes.
std::uint32_t multiply(const Path& path, ThreadPool& pool, const MatrixProducts& shape, const std::int8_t* left,
                       const std::int8_t* right, std::int32_t* out, void* workspace);
std::size_t matrix_products_bytes(const Path& path, const MatrixProducts& shape, int threads);

}  // namespace socflower::int8
