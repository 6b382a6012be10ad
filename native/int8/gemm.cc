#include "gemm.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "products.h"

namespace socflower::int8 {
namespace {

struct GemmBuffers {
  int stride;  // elements between the rows of the left copy
  std::uint8_t* left;
  Packed right;
};

GemmBuffers carve_gemm(Arena& arena, const Product& product, int rows, int cols, int depth) {
  GemmBuffers buffers{};
  buffers.stride = round_up(depth, kChannelBlock);
  buffers.left = arena.take<std::uint8_t>(std::size_t(rows) * buffers.stride * product.lhs_bytes());
  buffers.right = carve_packed(arena, product, 1, depth, cols);
  return buffers;
}

}  // namespace

std::size_t gemm_workspace_bytes(const Path& path, int rows, int cols, int depth) {
  Arena general, activations;
  carve_gemm(general, path.general, rows, cols, depth);
  carve_gemm(activations, path.activations, rows, cols, depth);
  return std::max(general.bytes(), activations.bytes());
}

void gemm(const Path& path, ThreadPool& pool, const std::int8_t* lhs, bool activations, const std::int8_t* rhs,
          std::int32_t* out, int rows, int cols, int depth, void* workspace) {
  const Product& product = activations ? path.activations : path.general;
  Arena arena(workspace);
  const GemmBuffers buffers = carve_gemm(arena, product, rows, cols, depth);
  const Packed& right = buffers.right;
  // Rows of any length are not multiples of a k-group, so the left operand is copied to a padded stride.
  const int whole = depth / kChannelBlock * kChannelBlock;
  pool.run(divide_up(rows, product.rows), [&](int index, int) {
    for (int row = index * product.rows; row < std::min(rows, (index + 1) * product.rows); ++row) {
      alignas(16) std::int8_t tail[kChannelBlock] = {};
      const std::int8_t* from = lhs + std::size_t(row) * depth;
      std::uint8_t* to = buffers.left + std::size_t(row) * buffers.stride * product.lhs_bytes();
      std::memcpy(tail, from + whole, depth - whole);
      for (const auto& [part, at, size] : {std::tuple<const std::int8_t*, int, int>{from, 0, whole},
                                           {tail, whole, buffers.stride - whole}}) {
        if (product.lhs == Element::kInt16) {
          path.widen(part, reinterpret_cast<std::int16_t*>(to) + at, size);
        } else if (product.lhs == Element::kOffsetUint8) {
          path.offset(part, to + at, size);
        } else {
          std::memcpy(to + at, part, size);
        }
      }
    }
  });
  pool.run(right.panels, [&](int panel, int) {
    const int first = panel * product.cols;
    void* dst = right.bytes + panel * right.panel_bytes;
    path.pack_rows(rhs + std::size_t(first) * depth, depth, depth, std::min(product.cols, cols - first), product.cols,
                   product.group, product.rhs, dst);
    if (right.column_sums == nullptr) return;
    for (int c = 0; c < product.cols; ++c) {
      std::int32_t sum = 0;
      for (int k = 0; first + c < cols && k < depth; ++k) sum += rhs[std::size_t(first + c) * depth + k];
      right.column_sums[first + c] = 128 * sum;
    }
  });
  const int row_blocks = divide_up(rows, product.rows);
  // A run of rows stays in the second-level cache while all panels meet it.
  const std::size_t left_bytes = std::size_t(rows) * buffers.stride * product.lhs_bytes();
  const int cached = static_cast<int>((left_bytes + kPanelGroupBytes - 1) / kPanelGroupBytes);
  const int runs = std::min(row_blocks, std::max(cached, pool.size() == 1 ? 1 : 4 * pool.size()));
  pool.run(right.panels * runs, [&](int index, int) {
    alignas(64) std::int32_t tile[kMaxRows * kMaxCols];
    alignas(64) std::int32_t init[kMaxCols];
    const int panel = index % right.panels, run = index / right.panels, first = panel * product.cols;
    const void* left = nullptr;
    const void* packed = right.at(0, panel);
    BlockArgs args{1, &left, &packed, right.k_groups,
                   static_cast<std::ptrdiff_t>(buffers.stride) * product.lhs_bytes(),
                   product.group * product.lhs_bytes(), nullptr, tile, product.cols};
    if (right.column_sums != nullptr) {
      for (int c = 0; c < product.cols; ++c) init[c] = -right.column_sums[first + c];
      args.init = init;
    }
    for (int block = row_blocks * run / runs; block < row_blocks * (run + 1) / runs; ++block) {
      const int row = block * product.rows, count = std::min(product.rows, rows - row);
      left = buffers.left + std::size_t(row) * args.lhs_row_stride;
      product.block(args, count);
      const std::size_t width = std::min(product.cols, cols - first);
      for (int r = 0; r < count; ++r) {
        std::memcpy(out + std::size_t(row + r) * cols + first, tile + r * product.cols, width * sizeof(std::int32_t));
      }
    }
  });
}

}  // namespace socflower::int8
