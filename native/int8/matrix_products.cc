#include "matrix_products.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "products.h"

namespace socflower::int8 {
namespace {

struct Buffers {
  int stride;  // elements between the rows of the left copy
  std::int8_t* plain;
  std::uint8_t* left;  // as the product wants its elements
  Packed right;
};

Buffers carve(Arena& arena, const Product& product, const MatrixProducts& s) {
  Buffers buffers{};
  buffers.stride = round_up(s.depth, kChannelBlock);
  const std::size_t size = std::size_t(s.rows) * buffers.stride;
  buffers.plain = arena.take<std::int8_t>(size);
  buffers.left = product.lhs == Element::kInt8 ? reinterpret_cast<std::uint8_t*>(buffers.plain)
                                               : arena.take<std::uint8_t>(size * product.lhs_bytes());
  buffers.right = carve_packed(arena, product, 1, s.depth, s.cols);
  return buffers;
}

// Rows of the left operand side by side, with zeros up to the stride.
void copy_left(const Path& path, const Product& product, const MatrixProducts& s, const std::int8_t* from,
               std::ptrdiff_t from_stride, const Buffers& to) {
  if (s.transposed == Transposed::kLeft) {
    for (int row = 0; row < s.rows; ++row) {
      std::int8_t* own = to.plain + std::size_t(row) * to.stride;
      for (int k = 0; k < s.depth; ++k) own[k] = from[k * from_stride + row];
      std::memset(own + s.depth, 0, to.stride - s.depth);
    }
  } else {
    for (int row = 0; row < s.rows; ++row) {
      std::int8_t* own = to.plain + std::size_t(row) * to.stride;
      std::memcpy(own, from + row * from_stride, s.depth);
      std::memset(own + s.depth, 0, to.stride - s.depth);
    }
  }
  const std::size_t size = std::size_t(s.rows) * to.stride;
  if (product.lhs == Element::kInt16) {
    path.widen(to.plain, reinterpret_cast<std::int16_t*>(to.left), size);
  } else if (product.lhs == Element::kOffsetUint8) {
    path.offset(to.plain, to.left, size);
  }
}

void pack_right(const Path& path, const Product& product, const MatrixProducts& s, const std::int8_t* from,
                std::ptrdiff_t from_stride, const Packed& to) {
  for (int panel = 0; panel < to.panels; ++panel) {
    const int first = panel * product.cols, cols = std::min(product.cols, s.cols - first);
    void* bytes = to.bytes + panel * to.panel_bytes;
    if (s.transposed == Transposed::kRight) {
      path.pack_rows(from + first * from_stride, from_stride, s.depth, cols, product.cols, product.group, product.rhs,
                     bytes);
    } else {
      path.pack_columns(from + first, from_stride, s.depth, cols, product.cols, product.group, product.rhs, bytes);
    }
    if (to.column_sums == nullptr) continue;
    const auto* stored = static_cast<const std::int8_t*>(bytes);
    std::int32_t* sums = to.column_sums + first;
    std::fill(sums, sums + product.cols, 0);
    for (int k = 0; k < to.k_groups; ++k)
      for (int c = 0; c < product.cols; ++c)
        for (int e = 0; e < product.group; ++e) sums[c] += stored[(k * product.cols + c) * product.group + e];
    for (int c = 0; c < product.cols; ++c) sums[c] *= 128;
  }
}

std::uint32_t multiply_one(const Path& path, const Product& product, const MatrixProducts& s, const Buffers& buffers,
                           std::int32_t* out, std::ptrdiff_t out_stride, int out_cols) {
  alignas(64) std::int32_t tile[kMaxRows * kMaxCols];
  alignas(64) std::int32_t init[kMaxCols];
  std::uint32_t largest = 0;
  for (int panel = 0; panel < buffers.right.panels; ++panel) {
    const int first = panel * product.cols;
    const void* left = nullptr;
    const void* packed = buffers.right.at(0, panel);
    BlockArgs args{1, &left, &packed, buffers.right.k_groups,
                   static_cast<std::ptrdiff_t>(buffers.stride) * product.lhs_bytes(),
                   product.group * product.lhs_bytes(), nullptr, tile, product.cols};
    if (buffers.right.column_sums != nullptr) {
      for (int c = 0; c < product.cols; ++c) init[c] = -buffers.right.column_sums[first + c];
      args.init = init;
    }
    for (int row = 0; row < s.rows; row += product.rows) {
      const int count = std::min(product.rows, s.rows - row);
      left = buffers.left + std::size_t(row) * args.lhs_row_stride;
      product.block(args, count);
      const std::uint32_t most =
          path.store_tile(tile, product.cols, out + row * out_stride + first, out_stride, count,
                          std::min(product.cols, out_cols - first), false, nullptr, 0);
      largest = std::max(largest, most);
    }
  }
  return largest;
}

}  // namespace

std::size_t matrix_products_bytes(const Path& path, const MatrixProducts& shape, int threads) {
  Arena one;
  carve(one, path.general, shape);
  return one.bytes() * threads;
}

std::uint32_t multiply(const Path& path, ThreadPool& pool, const MatrixProducts& s, const std::int8_t* left,
                       const std::int8_t* right, std::int32_t* out, void* workspace) {
  const Product& product = path.general;
  Arena arena;
  carve(arena, product, s);
  const std::size_t per_thread = arena.bytes();
  const int left_cs = channel_stride(s.left_cols()), right_cs = channel_stride(s.right_cols());
  const int out_cs = channel_stride(s.cols);
  std::atomic<std::uint32_t> largest{0};
  pool.run(s.batches * s.samples, [&](int index, int thread) {
    Arena own(static_cast<std::uint8_t*>(workspace) + thread * per_thread);
    const Buffers buffers = carve(own, product, s);
    const std::size_t batch = index / s.samples, sample = index % s.samples;
    const auto matrix = [&](int rows, int cs) { return (batch * rows * s.samples + sample) * cs; };
    copy_left(path, product, s, left + matrix(s.left_rows(), left_cs), std::ptrdiff_t(s.samples) * left_cs, buffers);
    pack_right(path, product, s, right + matrix(s.right_rows(), right_cs), std::ptrdiff_t(s.samples) * right_cs,
               buffers.right);
    raise_to(largest, multiply_one(path, product, s, buffers, out + matrix(s.rows, out_cs),
                                   std::ptrdiff_t(s.samples) * out_cs, out_cs));
  });
  return largest;
}

}  // namespace socflower::int8
