#include "winograd.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "arena.h"
#include "meetings.h"

namespace socflower::int8::winograd {
namespace {

constexpr int kPoints = 36, kTaps = 9, kOutputs = 16;
// Largest parts of a sum that stay below 2^25: 9 * 226 * 128 * 128, and 16 * 128 * 127 * 127.
constexpr int kMaxDepth = 226, kMaxTileRows = 128;
constexpr int kPackDepth = 64;  // depth of a weight panel that is packed before it is transformed

int env(const char* n, int d) { const char* v = getenv(n); return v ? atoi(v) : d; }

int divide_up(int value, int divisor) { return (value + divisor - 1) / divisor; }
int round_up(int value, int multiple) { return divide_up(value, multiple) * multiple; }

// A distance between points at which they do not share few sets of a cache: an odd number of its lines.
std::size_t spread(std::size_t elements, std::size_t element_bytes) {
  const std::size_t lines = (elements * element_bytes + 63) / 64;
  return (lines | 1) * 64 / element_bytes;
}

// ------------------------------------------------------------------------- forward and input gradient

// A correlation of 3x3, stride 1. Backward: the weight is taken with its channels exchanged and its taps turned.
struct Pass {
  int batch, in_h, in_w, depth, out_h, out_w, cols, pad_h, pad_w;
  bool backward;
};

Pass forward_pass(const ConvShape& s) {
  return {s.batch, s.in_h, s.in_w, s.in_c, s.out_h(), s.out_w(), s.out_c, s.pad_h, s.pad_w, false};
}

Pass backward_pass(const ConvShape& s) {
  return {s.batch, s.out_h(), s.out_w(), s.out_c, s.in_h, s.in_w, s.in_c, 2 - s.pad_h, 2 - s.pad_w, true};
}

// Sizes and strides, in elements. Rows are tiles x images. V: the input's points, (36, rows, depth stride); U: the
// weight's, for every group of panels (panel, 36, k-group, column, 2); M: their products, (36, rows, width).
struct Blocks {
  int tiles_w, rows, depth_stride, out_stride;
  int k_groups, k_step;  // of all of the depth, and of a part that is exact
  int panels, group_panels, groups, width;
  int slab_rows;   // rows whose V is made at once
  int block_rows;  // rows that are multiplied and transformed back at once
  bool fused;      // all rows are one slab, shared by all threads, and a thread makes the U of its groups itself
  std::size_t v_point, u_point, m_point, y_pixel;
};

Blocks blocks_of(const Path& path, const Pass& pass) {
  const Product& product = path.wide;
  Blocks b{};
  b.tiles_w = divide_up(pass.out_w, 4);
  b.rows = divide_up(pass.out_h, 4) * b.tiles_w * pass.batch;
  b.depth_stride = channel_stride(pass.depth);
  b.out_stride = channel_stride(pass.cols);
  b.k_groups = divide_up(pass.depth, 2);
  b.k_step = divide_up(b.k_groups, divide_up(pass.depth, env("KMAX", kMaxDepth)));
  b.panels = divide_up(pass.cols, product.cols);
  b.group_panels = std::min(b.panels, std::max(1, env("WIDTH", 32) / product.cols));
  b.groups = divide_up(b.panels, b.group_panels);
  b.width = b.group_panels * product.cols;
  b.block_rows = std::min(b.rows, round_up(env("BROWS", 48), product.rows));
  b.fused = b.rows <= env("FUSED", 128);
  b.slab_rows = b.fused ? b.rows : std::min(b.rows, round_up(env("SLAB", 96), b.block_rows));
  b.v_point = spread(std::size_t(b.slab_rows) * b.depth_stride, sizeof(std::int16_t));
  b.u_point = spread(std::size_t(b.k_groups) * product.cols * 2, sizeof(std::int16_t));
  b.m_point = spread(std::size_t(b.block_rows) * b.width, sizeof(std::int32_t));
  b.y_pixel = std::size_t(b.block_rows) * b.width;
  return b;
}

struct Scratch {
  std::int16_t *v, *u;
  std::int32_t *m, *y;
  std::int8_t* taps;
};

struct Buffers {
  std::int16_t *v = nullptr, *u = nullptr;  // shared by the threads, or part of every thread's scratch
  Scratch first{};
  std::size_t scratch_bytes = 0;

  Scratch of(int thread) const {
    const auto moved = [&](auto* pointer) {
      return reinterpret_cast<decltype(pointer)>(reinterpret_cast<std::uint8_t*>(pointer) + thread * scratch_bytes);
    };
    return {v != nullptr ? v : moved(first.v), u != nullptr ? u : moved(first.u), moved(first.m), moved(first.y),
            moved(first.taps)};
  }
};

Buffers carve(Arena& arena, const Path& path, const Blocks& b, int threads) {
  const std::size_t v_size = kPoints * b.v_point, u_size = kPoints * b.u_point * b.group_panels;
  Buffers buffers;
  if (b.fused) buffers.v = arena.take<std::int16_t>(v_size);
  else buffers.u = arena.take<std::int16_t>(u_size * b.groups);
  for (int t = 0; t < threads; ++t) {
    const std::size_t before = arena.bytes();
    Scratch scratch{};
    if (b.fused) scratch.u = arena.take<std::int16_t>(u_size);
    else scratch.v = arena.take<std::int16_t>(v_size);
    scratch.m = arena.take<std::int32_t>(kPoints * b.m_point);
    scratch.y = arena.take<std::int32_t>(kOutputs * b.y_pixel);
    scratch.taps = arena.take<std::int8_t>(std::size_t(kTaps) * kPackDepth * path.wide.cols);
    if (t == 0) buffers.first = scratch;
    buffers.scratch_bytes = arena.bytes() - before;
  }
  return buffers;
}

// U of the panels [first, first + count).
void transform_weights(const Path& path, const Pass& pass, const Blocks& b, const std::int8_t* weight, int first,
                       int count, std::int16_t* u, std::int8_t* taps) {
  const Product& product = path.wide;
  const int in_c = pass.backward ? pass.cols : pass.depth, cs = channel_stride(pass.backward ? pass.depth : pass.cols);
  for (int k = 0; k < pass.depth; k += kPackDepth) {
    const int depth = std::min(kPackDepth, pass.depth - k);
    const std::size_t size = std::size_t(divide_up(depth, 2)) * product.cols * 2;
    for (int p = 0; p < count; ++p) {
      const int column = (first + p) * product.cols, cols = std::min(product.cols, pass.cols - column);
      const std::int8_t* packed[kTaps];
      for (int tap = 0; tap < kTaps; ++tap) {
        const std::int8_t* from = weight + std::size_t(tap) * in_c * cs;
        std::int8_t* to = taps + tap * size;
        if (pass.backward) {
          path.pack_rows(from + std::size_t(column) * cs + k, cs, depth, cols, product.cols, 2, Element::kInt8, to);
          packed[kTaps - 1 - tap] = to;
        } else {
          path.pack_columns(from + std::size_t(k) * cs + column, cs, depth, cols, product.cols, 2, Element::kInt8, to);
          packed[tap] = to;
        }
      }
      path.winograd_weight(packed, size, u + p * kPoints * b.u_point + std::size_t(k) * product.cols,
                           static_cast<std::ptrdiff_t>(b.u_point));
    }
  }
}

// Calls part(tile, first image, images, first row) for the tiles that the rows [first, first + count) belong to.
template <typename Part>
void by_tile(int first, int count, int batch, Part&& part) {
  for (int row = first; row < first + count;) {
    const int tile = row / batch, image = row % batch, images = std::min(batch - image, first + count - row);
    part(tile, image, images, row);
    row += images;
  }
}

// V of the rows [first, first + count), at v as its rows [at, at + count).
void transform_input(const Path& path, const Pass& pass, const Blocks& b, const std::int8_t* x, int first, int count,
                     std::int16_t* v, int at) {
  by_tile(first, count, pass.batch, [&](int tile, int image, int images, int row) {
    const int top = tile / b.tiles_w * 4 - pass.pad_h, left = tile % b.tiles_w * 4 - pass.pad_w;
    const std::int8_t* pixels[kPoints];
    for (int i = 0; i < kPoints; ++i) {
      const int h = top + i / 6, w = left + i % 6;
      const bool inside = h >= 0 && h < pass.in_h && w >= 0 && w < pass.in_w;
      pixels[i] = inside ? x + ((std::size_t(h) * pass.in_w + w) * pass.batch + image) * b.depth_stride : nullptr;
    }
    path.winograd_input(pixels, std::size_t(images) * b.depth_stride,
                        v + std::size_t(row - first + at) * b.depth_stride, static_cast<std::ptrdiff_t>(b.v_point));
  });
}

// Multiplies the rows [at, at + count) of v with a group's u and delivers them as the rows from `first` on.
std::uint32_t multiply(const Path& path, const Pass& pass, const Blocks& b, const std::int16_t* v, int at,
                       const std::int16_t* u, int group, int first, int count, const std::int32_t* bias,
                       const Destination& to, const Scratch& scratch) {
  const Product& product = path.wide;
  const int first_panel = group * b.group_panels, panels = std::min(b.group_panels, b.panels - first_panel);
  const int column = first_panel * product.cols, cols = std::min(b.width, b.out_stride - column);
  const void *lhs, *rhs;
  BlockArgs args{1, &lhs, &rhs, 0, std::ptrdiff_t(b.depth_stride) * 2, 4, nullptr, nullptr, b.width};
  for (int k = 0; k < b.k_groups; k += b.k_step) {
    args.k_groups = std::min(b.k_step, b.k_groups - k);
    for (int p = 0; p < kPoints; ++p)
      for (int row = 0; row < count; row += product.rows) {
        lhs = v + p * b.v_point + std::size_t(at + row) * b.depth_stride + 2 * k;
        for (int panel = 0; panel < panels; ++panel) {
          rhs = u + (panel * kPoints + p) * b.u_point + std::size_t(k) * product.cols * 2;
          args.out = scratch.m + p * b.m_point + std::size_t(row) * b.width + panel * product.cols;
          product.block(args, std::min(product.rows, count - row));
        }
      }
    path.winograd_output(scratch.m, static_cast<std::ptrdiff_t>(b.m_point), count, b.width, nullptr, k > 0, scratch.y,
                         static_cast<std::ptrdiff_t>(b.y_pixel));
  }
  (void)bias;
  std::uint32_t seen = 0;
  by_tile(first, count, pass.batch, [&](int tile, int image, int images, int row) {
    const int top = tile / b.tiles_w * 4, left = tile % b.tiles_w * 4;
    for (int i = 0; i < kOutputs; ++i) {
      const int h = top + i / 4, w = left + i % 4;
      if (h >= pass.out_h || w >= pass.out_w) continue;
      const std::size_t out = ((std::size_t(h) * pass.out_w + w) * pass.batch + image) * b.out_stride + column;
      const std::int32_t* tile_rows = scratch.y + i * b.y_pixel + std::size_t(row - first) * b.width;
      seen = std::max(seen, deliver(path, tile_rows, b.width, to, out, b.out_stride, images, cols));
    }
  });
  return seen;
}

std::uint32_t run(const Path& path, ThreadPool& pool, const Pass& pass, const std::int8_t* x,
                  const std::int8_t* weight, const std::int32_t* bias, const Destination& to, void* workspace) {
  const Blocks b = blocks_of(path, pass);
  Arena arena(workspace);
  const Buffers buffers = carve(arena, path, b, pool.size());
  const std::size_t u_group = kPoints * b.u_point * b.group_panels;
  std::atomic<std::uint32_t> largest{0};
  const auto weights = [&](int group, const Scratch& scratch, std::int16_t* u) {
    const int first = group * b.group_panels;
    transform_weights(path, pass, b, weight, first, std::min(b.group_panels, b.panels - first), u, scratch.taps);
  };
  const auto multiply_slab = [&](int group, int slab, const Scratch& scratch, const std::int16_t* u) {
    std::uint32_t seen = 0;
    for (int row = slab; row < std::min(b.rows, slab + b.slab_rows); row += b.block_rows) {
      const int count = std::min({b.block_rows, b.rows - row, slab + b.slab_rows - row});
      seen = std::max(seen, multiply(path, pass, b, scratch.v, row - slab, u, group, row, count, bias, to, scratch));
    }
    raise_to(largest, seen);
  };
  if (b.fused) {
    const int step = std::min(b.rows, 16);
    pool.run(divide_up(b.rows, step), [&](int index, int) {
      const int row = index * step;
      transform_input(path, pass, b, x, row, std::min(step, b.rows - row), buffers.v, row);
    });
    pool.run(b.groups, [&](int group, int thread) {
      const Scratch scratch = buffers.of(thread);
      weights(group, scratch, scratch.u);
      multiply_slab(group, 0, scratch, scratch.u);
    });
    return largest;
  }
  pool.run(b.groups, [&](int group, int thread) { weights(group, buffers.of(thread), buffers.u + group * u_group); });
  pool.run(divide_up(b.rows, b.slab_rows), [&](int index, int thread) {
    const Scratch scratch = buffers.of(thread);
    const int row = index * b.slab_rows;
    transform_input(path, pass, b, x, row, std::min(b.slab_rows, b.rows - row), scratch.v, 0);
    for (int group = 0; group < b.groups; ++group) multiply_slab(group, row, scratch, buffers.u + group * u_group);
  });
  return largest;
}

}  // namespace

bool possible(const ConvShape& s) {
  return s.kernel_h == 3 && s.kernel_w == 3 && s.stride_h == 1 && s.stride_w == 1 && s.groups == 1;
}

bool pays(const Path&, const ConvShape& s, Function) {
  return possible(s) && s.in_c >= 16 && s.out_c >= 16 && s.out_h() > 2 && s.out_w() > 2;
}

std::size_t workspace_bytes(const Path& path, const ConvShape& shape, Function function, int threads) {
  Arena arena;
  if (function == Function::kWeightGradient) return 64;
  carve(arena, path, blocks_of(path, function == Function::kForward ? forward_pass(shape) : backward_pass(shape)),
        threads);
  return arena.bytes();
}

std::uint32_t forward(const Path& path, ThreadPool& pool, const ConvShape& shape, const std::int8_t* x,
                      const std::int8_t* weight, const std::int32_t* bias, const Destination& to, void* workspace) {
  return run(path, pool, forward_pass(shape), x, weight, bias, to, workspace);
}

std::uint32_t input_gradient(const Path& path, ThreadPool& pool, const ConvShape& shape, const std::int8_t* dy,
                             const std::int8_t* weight, const Destination& to, void* workspace) {
  return run(path, pool, backward_pass(shape), dy, weight, nullptr, to, workspace);
}

}  // namespace socflower::int8::winograd
