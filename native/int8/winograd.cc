#include "winograd.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "arena.h"
#include "tap_index.h"

namespace socflower::int8::winograd {
namespace {

constexpr int kPoints = 36, kTaps = 9, kOutputs = 16;
constexpr int kMaxTileRows = 2046;  // in one sum of the weight gradient: 16 * 2046 * 128 * 128 < 2^29
constexpr int kPackDepth = 64;  // depth of a weight panel that is packed before it is transformed

// Sizes of blocks, chosen by measurement; times change little around them. A thread's products at 36 points
// (block rows x block columns) and the points of one operand should stay in the second-level cache.
constexpr int kBlockRows = 24, kBlockCols = 32;
constexpr int kMaxCols = 64;  // of any product's block
constexpr int kTasks = 4;     // for every thread, at least, where there are enough of the smallest
constexpr std::size_t kSlabBytes = 448 * 1024;
constexpr std::size_t kChunkBytes = 1024 * 1024;
constexpr int kChunkRows = 128, kChunkImages = 128;

int divide_up(int value, int divisor) { return (value + divisor - 1) / divisor; }
int round_up(int value, int multiple) { return divide_up(value, multiple) * multiple; }

// A distance between points at which they do not share few sets of a cache: an odd number of its lines.
std::ptrdiff_t spread(std::size_t elements, std::size_t element_bytes) {
  const std::size_t lines = (elements * element_bytes + 63) / 64;
  return static_cast<std::ptrdiff_t>((lines | 1) * 64 / element_bytes);
}

// ------------------------------------------------------------------------- forward and input gradient

// A correlation of 3x3, stride 1. Backward: the weight is taken with channels exchanged and taps turned.
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

// Sizes and strides, in elements. Rows are tiles x images. V: the input's points, (36, rows, depth stride). U:
// the weight's, for every group of panels (panel, 36, k-group, column, 2). M: their products (36, rows, width).
struct Blocks {
  int tiles_w, rows, depth_stride, out_stride;
  int k_groups, panels, group_panels, groups, width;
  int slab_rows;   // rows whose V is made at once
  int block_rows;  // rows that are multiplied and transformed back at once
  // Which operand streams past the other. Many weights, few rows: V of all rows is made first, and a thread
  // makes the U of a group where it uses it. Else U is made first, and a thread makes the V of a slab.
  bool fused;
  std::ptrdiff_t v_point, u_point, m_point, y_pixel;
};

Blocks blocks_of(const Path& path, const Pass& pass, int threads) {
  const Product& product = path.wide;
  Blocks b{};
  b.tiles_w = divide_up(pass.out_w, 4);
  b.rows = divide_up(pass.out_h, 4) * b.tiles_w * pass.batch;
  b.depth_stride = channel_stride(pass.depth);
  b.out_stride = channel_stride(pass.cols);
  b.k_groups = divide_up(pass.depth, 2);
  b.panels = divide_up(pass.cols, product.cols);
  b.group_panels = std::min(b.panels, std::max(1, kBlockCols / product.cols));
  if (threads > 1) b.group_panels = std::clamp(b.panels / (kTasks * threads), 1, b.group_panels);
  b.groups = divide_up(b.panels, b.group_panels);
  b.width = b.group_panels * product.cols;
  b.block_rows = std::min(b.rows, round_up(kBlockRows, product.rows));
  const std::size_t row_bytes = kPoints * sizeof(std::int16_t) * b.depth_stride;
  const std::size_t u_bytes = row_bytes * b.panels * product.cols;
  b.fused = b.rows * row_bytes <= u_bytes;
  const std::size_t slab = std::max(kSlabBytes, u_bytes / 8) / row_bytes;
  const int share = threads > 1 ? divide_up(b.rows, kTasks * threads) : b.rows;
  b.slab_rows = b.fused ? b.rows : std::min(b.rows, round_up(std::min(int(slab), share), b.block_rows));
  b.v_point = spread(std::size_t(b.slab_rows) * b.depth_stride, sizeof(std::int16_t));
  b.u_point = spread(std::size_t(b.k_groups) * product.cols * 2, sizeof(std::int16_t));
  b.m_point = spread(std::size_t(b.block_rows) * b.width, sizeof(std::int32_t));
  b.y_pixel = std::ptrdiff_t(b.block_rows) * b.width;
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
    const auto moved = [&](auto* part) {
      return reinterpret_cast<decltype(part)>(reinterpret_cast<std::uint8_t*>(part) + thread * scratch_bytes);
    };
    return {v != nullptr ? v : moved(first.v), u != nullptr ? u : moved(first.u), moved(first.m),
            moved(first.y), moved(first.taps)};
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
void transform_weights(const Path& path, const Pass& pass, const Blocks& b, const std::int8_t* weight,
                       int first, int count, std::int16_t* u, std::int8_t* taps) {
  const Product& product = path.wide;
  const int in_c = pass.backward ? pass.cols : pass.depth;
  const int cs = channel_stride(pass.backward ? pass.depth : pass.cols);
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
          path.pack_rows(from + std::size_t(column) * cs + k, cs, depth, cols, product.cols, 2, Element::kInt8,
                         to);
          packed[kTaps - 1 - tap] = to;
        } else {
          path.pack_columns(from + std::size_t(k) * cs + column, cs, depth, cols, product.cols, 2,
                            Element::kInt8, to);
          packed[tap] = to;
        }
      }
      path.winograd_weight(packed, size, u + p * kPoints * b.u_point + std::size_t(k) * product.cols,
                           b.u_point);
    }
  }
}

// Calls part(tile, first image, images, first row) for the tiles of the rows [first, first + count).
template <typename Part>
void by_tile(int first, int count, int batch, Part&& part) {
  for (int row = first; row < first + count;) {
    const int tile = row / batch, image = row % batch, images = std::min(batch - image, first + count - row);
    part(tile, image, images, row);
    row += images;
  }
}

// V of the rows [first, first + count), at v as its rows [at, at + count).
void transform_input(const Path& path, const Pass& pass, const Blocks& b, const std::int8_t* x, int first,
                     int count, std::int16_t* v, int at) {
  by_tile(first, count, pass.batch, [&](int tile, int image, int images, int row) {
    const int top = tile / b.tiles_w * 4 - pass.pad_h, left = tile % b.tiles_w * 4 - pass.pad_w;
    const std::int8_t* pixels[kPoints];
    for (int i = 0; i < kPoints; ++i) {
      const int h = top + i / 6, w = left + i % 6;
      const bool inside = h >= 0 && h < pass.in_h && w >= 0 && w < pass.in_w;
      const std::size_t pixel = std::size_t(h) * pass.in_w + w;
      pixels[i] = inside ? x + (pixel * pass.batch + image) * b.depth_stride : nullptr;
    }
    path.winograd_input(pixels, std::size_t(images) * b.depth_stride,
                        v + std::size_t(row - first + at) * b.depth_stride, b.v_point);
  });
}

// Multiplies the rows [at, at + count) of V with a group's u and delivers them as the rows from `first` on.
std::uint32_t multiply(const Path& path, const Pass& pass, const Blocks& b, int at, const std::int16_t* u,
                       int group, int first, int count, const std::int32_t* bias, const Destination& to,
                       const Scratch& scratch) {
  const Product& product = path.wide;
  const int first_panel = group * b.group_panels, panels = std::min(b.group_panels, b.panels - first_panel);
  const int column = first_panel * product.cols, cols = std::min(b.width, b.out_stride - column);
  std::int32_t init[kMaxCols] = {};
  if (bias != nullptr) std::copy_n(bias + column, cols, init);
  const void *lhs, *rhs;
  BlockArgs args{1, &lhs, &rhs, b.k_groups, std::ptrdiff_t(b.depth_stride) * 2, 4, nullptr, nullptr, b.width};
  for (int p = 0; p < kPoints; ++p)
    for (int row = 0; row < count; row += product.rows) {
      lhs = scratch.v + p * b.v_point + std::size_t(at + row) * b.depth_stride;
      for (int panel = 0; panel < panels; ++panel) {
        rhs = u + (panel * kPoints + p) * b.u_point;
        args.out = scratch.m + p * b.m_point + std::size_t(row) * b.width + panel * product.cols;
        product.block(args, std::min(product.rows, count - row));
      }
    }
  path.winograd_output(scratch.m, b.m_point, count, b.width, bias != nullptr ? init : nullptr, scratch.y,
                       b.y_pixel);
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
  const Blocks b = blocks_of(path, pass, pool.size());
  Arena arena(workspace);
  const Buffers buffers = carve(arena, path, b, pool.size());
  const std::size_t u_group = kPoints * b.u_point * b.group_panels;
  std::atomic<std::uint32_t> largest{0};
  const auto weights = [&](int group, const Scratch& scratch, std::int16_t* u) {
    const int first = group * b.group_panels, panels = std::min(b.group_panels, b.panels - first);
    transform_weights(path, pass, b, weight, first, panels, u, scratch.taps);
  };
  const auto multiply_slab = [&](int group, int slab, const Scratch& scratch, const std::int16_t* u) {
    std::uint32_t seen = 0;
    for (int row = slab; row < std::min(b.rows, slab + b.slab_rows); row += b.block_rows) {
      const int count = std::min({b.block_rows, b.rows - row, slab + b.slab_rows - row});
      seen = std::max(seen, multiply(path, pass, b, row - slab, u, group, row, count, bias, to, scratch));
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
  pool.run(b.groups, [&](int group, int thread) {
    weights(group, buffers.of(thread), buffers.u + group * u_group);
  });
  pool.run(divide_up(b.rows, b.slab_rows), [&](int index, int thread) {
    const Scratch scratch = buffers.of(thread);
    const int row = index * b.slab_rows;
    transform_input(path, pass, b, x, row, std::min(b.slab_rows, b.rows - row), scratch.v, 0);
    for (int group = 0; group < b.groups; ++group) {
      multiply_slab(group, row, scratch, buffers.u + group * u_group);
    }
  });
  return largest;
}

// ------------------------------------------------------------------------------------- weight gradient

// Sizes and strides, in elements. A block of images and a chunk of tiles are worked on at a time. Both operands
// are packed pixel by pixel as the product wants them, with images as the depth, and transformed as they lie:
// (36, tile, panel, k-group, channel, 2). Their products: (36, channels of x, channels of dy).
struct GradientBlocks {
  int tiles_w, tiles, chunk_tiles, k_groups;
  int x_panels, x_group, x_groups, dy_panels, dy_group, dy_groups;  // panels, panels in a group, groups
  int rows, width;                                                  // of a group's products
  std::size_t x_panel, x_tile, dy_panel, dy_tile;
  std::ptrdiff_t x_point, dy_point, m_point;
};

// Images that are worked on at a time, and the rows (tiles x images) of a chunk: as many as keep the points of
// both operands near, and no more than are exact.
int gradient_images(const ConvShape& s) { return divide_up(s.batch, divide_up(s.batch, kChunkImages)); }

int gradient_rows(const ConvShape& s) {
  const int channels = channel_stride(s.in_c) + channel_stride(s.out_c);
  const std::size_t row_bytes = kPoints * sizeof(std::int16_t) * channels;
  return int(std::clamp<std::size_t>(kChunkBytes / row_bytes, kChunkRows, kMaxTileRows));
}

GradientBlocks gradient_blocks_of(const Path& path, const ConvShape& s, int images, int threads) {
  const Product& product = path.wide;
  GradientBlocks b{};
  b.tiles_w = divide_up(s.out_w(), 4);
  b.tiles = divide_up(s.out_h(), 4) * b.tiles_w;
  b.chunk_tiles = std::min(b.tiles, gradient_rows(s) / round_up(gradient_images(s), 2));
  b.k_groups = divide_up(images, 2);
  b.x_panels = divide_up(s.in_c, product.rows);
  b.dy_panels = divide_up(s.out_c, product.cols);
  b.x_group = std::min(b.x_panels, kBlockRows / product.rows);
  b.dy_group = std::min(b.dy_panels, std::max(1, kBlockCols / product.cols));
  b.dy_groups = divide_up(b.dy_panels, b.dy_group);
  if (threads > 1) b.x_group = std::clamp(b.x_panels * b.dy_groups / (kTasks * threads), 1, b.x_group);
  b.x_groups = divide_up(b.x_panels, b.x_group);
  b.rows = b.x_group * product.rows;
  b.width = b.dy_group * product.cols;
  b.x_panel = std::size_t(b.k_groups) * product.rows * 2;
  b.dy_panel = std::size_t(b.k_groups) * product.cols * 2;
  b.x_tile = (b.x_panels * b.x_panel + 15) / 16 * 16;
  b.dy_tile = b.dy_panels * b.dy_panel;
  b.x_point = spread(b.chunk_tiles * b.x_tile, sizeof(std::int16_t));
  b.dy_point = spread(b.chunk_tiles * b.dy_tile, sizeof(std::int16_t));
  b.m_point = spread(std::size_t(b.rows) * b.width, sizeof(std::int32_t));
  return b;
}

struct GradientBuffers {
  std::int8_t *x, *dy;              // packed: (pixel, x_tile), (pixel, dy_tile)
  std::int16_t *x_points, *dy_points;
  std::int32_t *m, *gradient;       // of the first thread
  std::size_t scratch_size;         // from one thread to the next
};

GradientBuffers carve_gradient(Arena& arena, const ConvShape& s, const GradientBlocks& b, int threads) {
  GradientBuffers buffers{};
  buffers.x = arena.take<std::int8_t>(std::size_t(s.in_h) * s.in_w * b.x_tile);
  buffers.dy = arena.take<std::int8_t>(std::size_t(s.out_h()) * s.out_w() * b.dy_tile);
  buffers.x_points = arena.take<std::int16_t>(kPoints * b.x_point);
  buffers.dy_points = arena.take<std::int16_t>(kPoints * b.dy_point);
  const std::size_t gradient_at = kPoints * b.m_point;
  buffers.scratch_size = gradient_at + spread(kTaps * std::size_t(b.rows) * b.width, sizeof(std::int32_t));
  buffers.m = arena.take<std::int32_t>(buffers.scratch_size * threads);
  buffers.gradient = buffers.m == nullptr ? nullptr : buffers.m + gradient_at;
  return buffers;
}

// Images [first, first + images) of every pixel, side by side in pairs.
void pack_images(const Path& path, ThreadPool& pool, const ConvShape& s, const GradientBlocks& b,
                 const std::int8_t* x, const std::int8_t* dy, int first, int images,
                 const GradientBuffers& buffers) {
  const Product& product = path.wide;
  const int in_cs = channel_stride(s.in_c), out_cs = channel_stride(s.out_c);
  const int in_pixels = s.in_h * s.in_w, out_pixels = s.out_h() * s.out_w();
  pool.run(in_pixels + out_pixels, [&](int index, int) {
    if (index < in_pixels) {
      path.pack_columns(x + (std::size_t(index) * s.batch + first) * in_cs, in_cs, images, s.in_c, product.rows,
                        2, Element::kInt8, buffers.x + index * b.x_tile);
      return;
    }
    const int pixel = index - in_pixels;
    path.pack_columns(dy + (std::size_t(pixel) * s.batch + first) * out_cs, out_cs, images, s.out_c,
                      product.cols, 2, Element::kInt8, buffers.dy + pixel * b.dy_tile);
  });
}

// Points of the tiles [first, first + tiles).
void transform_tiles(const Path& path, ThreadPool& pool, const ConvShape& s, const GradientBlocks& b, int first,
                     int tiles, const GradientBuffers& buffers) {
  pool.run(2 * tiles, [&](int index, int) {
    const int at = index / 2, top = (first + at) / b.tiles_w * 4, left = (first + at) % b.tiles_w * 4;
    const std::int8_t* list[kPoints];
    const auto gather = [&](const std::int8_t* packed, std::size_t size, int from_h, int from_w, int height,
                            int width, int side) {
      for (int i = 0; i < side * side; ++i) {
        const int h = from_h + i / side, w = from_w + i % side;
        const bool inside = h >= 0 && h < height && w >= 0 && w < width;
        list[i] = inside ? packed + (std::size_t(h) * width + w) * size : nullptr;
      }
    };
    if (index % 2 == 0) {
      gather(buffers.x, b.x_tile, top - s.pad_h, left - s.pad_w, s.in_h, s.in_w, 6);
      path.winograd_input(list, b.x_tile, buffers.x_points + at * b.x_tile, b.x_point);
    } else {
      gather(buffers.dy, b.dy_tile, top, left, s.out_h(), s.out_w(), 4);
      path.winograd_output_gradient(list, b.dy_tile, buffers.dy_points + at * b.dy_tile,
                                    b.dy_point);
    }
  });
}

// acc = or += what `tiles` transformed tiles contribute.
std::uint32_t multiply_tiles(const Path& path, ThreadPool& pool, const ConvShape& s, const GradientBlocks& b,
                             int tiles, const GradientBuffers& buffers, bool add, std::int32_t* acc) {
  const Product& product = path.wide;
  const int out_cs = channel_stride(s.out_c);
  std::atomic<std::uint32_t> largest{0};
  pool.run(b.x_groups * b.dy_groups, [&](int index, int thread) {
    const void *lhs[kMaxTileRows / 2], *rhs[kMaxTileRows / 2];
    std::int32_t* const m = buffers.m + thread * buffers.scratch_size;
    std::int32_t* const gradient = buffers.gradient + thread * buffers.scratch_size;
    const int x_first = index % b.x_groups * b.x_group, x_last = std::min(b.x_panels, x_first + b.x_group);
    const int dy_first = index / b.x_groups * b.dy_group;
    const int dy_last = std::min(b.dy_panels, dy_first + b.dy_group);
    const int row = x_first * product.rows, rows = std::min(s.in_c, x_last * product.rows) - row;
    const int column = dy_first * product.cols, cols = std::min(out_cs, dy_last * product.cols) - column;
    BlockArgs args{tiles, lhs, rhs, b.k_groups, 4, std::ptrdiff_t(product.rows) * 4, nullptr, nullptr, b.width};
    for (int p = 0; p < kPoints; ++p)
      for (int x_panel = x_first; x_panel < x_last; ++x_panel) {
        const int at = x_panel * product.rows;
        for (int t = 0; t < tiles; ++t) {
          lhs[t] = buffers.x_points + p * b.x_point + t * b.x_tile + x_panel * b.x_panel;
        }
        for (int dy_panel = dy_first; dy_panel < dy_last; ++dy_panel) {
          for (int t = 0; t < tiles; ++t) {
            rhs[t] = buffers.dy_points + p * b.dy_point + t * b.dy_tile + dy_panel * b.dy_panel;
          }
          args.out = m + p * b.m_point + std::size_t(at - row) * b.width + (dy_panel - dy_first) * product.cols;
          product.block(args, std::min(product.rows, s.in_c - at));
        }
      }
    const std::ptrdiff_t tap_size = std::ptrdiff_t(b.rows) * b.width;
    path.winograd_weight_gradient(m, b.m_point, rows, b.width, nullptr, gradient,
                                  tap_size);
    std::uint32_t seen = 0;
    for (int tap = 0; tap < kTaps; ++tap) {
      std::int32_t* out = acc + (std::size_t(tap) * s.in_c + row) * out_cs + column;
      const std::int32_t* tile = gradient + tap * tap_size;
      seen = std::max(seen, add ? path.add_tile(tile, b.width, out, out_cs, rows, cols)
                                : path.store_tile(tile, b.width, out, out_cs, rows, cols, false, nullptr, 0));
    }
    raise_to(largest, seen);
  });
  return largest;
}

// Pairs of an output position and a tap of three that do not fall into the padding.
int taps_inside(int in, int out, int pad) {
  int count = 0;
  for (int at = -pad; at < out - pad; ++at) count += std::max(0, std::min(in, at + 3) - std::max(0, at));
  return count;
}

}  // namespace

bool possible(const ConvShape& s) {
  return s.kernel_h == 3 && s.kernel_w == 3 && s.stride_h == 1 && s.stride_w == 1 && s.groups == 1 && !s.dilated() &&
         std::max(s.in_c, s.out_c) <= kMaxChannels;
}

bool pays(const Path& path, const ConvShape& s, Function function) {
  // How many times fewer products Winograd needs to be the quicker one, by function. Measured with 16 to 512
  // channels; a path that is not listed has not been measured.
  static constexpr struct {
    const char* path;
    double fewer[3];
  } kWorth[] = {
      {"portable", {2.0, 2.0, 2.0}},
      {"avx2", {1.6, 1.3, 1.6}},
      {"avx-vnni", {2.7, 2.4, 2.7}},
      {"avx512-vnni", {3.5, 2.4, 3.3}},
  };
  constexpr int kFewestChannels = 16;
  if (!possible(s) || std::min(s.in_c, s.out_c) < kFewestChannels) return false;
  for (const auto& worth : kWorth) {
    if (std::strcmp(worth.path, path.name) != 0) continue;
    const double rows = taps_inside(s.in_h, s.out_h(), s.pad_h);
    const double columns = taps_inside(s.in_w, s.out_w(), s.pad_w);
    const double tiles = double(divide_up(s.out_h(), 4)) * divide_up(s.out_w(), 4);
    return rows * columns >= worth.fewer[static_cast<int>(function)] * kPoints * tiles;
  }
  return false;
}

std::size_t workspace_bytes(const Path& path, const ConvShape& shape, Function function, int threads) {
  Arena arena;
  if (function == Function::kWeightGradient) {
    carve_gradient(arena, shape, gradient_blocks_of(path, shape, gradient_images(shape), threads), threads);
    return arena.bytes();
  }
  const Pass pass = function == Function::kForward ? forward_pass(shape) : backward_pass(shape);
  carve(arena, path, blocks_of(path, pass, threads), threads);
  return arena.bytes();
}

std::uint32_t forward(const Path& path, ThreadPool& pool, const ConvShape& shape, const std::int8_t* x,
                      const std::int8_t* weight, const std::int32_t* bias, const Destination& to,
                      void* workspace) {
  return run(path, pool, forward_pass(shape), x, weight, bias, to, workspace);
}

std::uint32_t input_gradient(const Path& path, ThreadPool& pool, const ConvShape& shape, const std::int8_t* dy,
                             const std::int8_t* weight, const Destination& to, void* workspace) {
  return run(path, pool, backward_pass(shape), dy, weight, nullptr, to, workspace);
}

std::uint32_t weight_gradient(const Path& path, ThreadPool& pool, const ConvShape& shape, const std::int8_t* x,
                              const std::int8_t* dy, std::int32_t* acc, void* workspace) {
  const int at_once = gradient_images(shape);
  Arena arena(workspace);
  const GradientBuffers buffers =
      carve_gradient(arena, shape, gradient_blocks_of(path, shape, at_once, pool.size()), pool.size());
  std::uint32_t largest = 0;
  for (int image = 0; image < shape.batch; image += at_once) {
    const int images = std::min(at_once, shape.batch - image);
    const GradientBlocks b = gradient_blocks_of(path, shape, images, pool.size());
    pack_images(path, pool, shape, b, x, dy, image, images, buffers);
    for (int tile = 0; tile < b.tiles; tile += b.chunk_tiles) {
      const int tiles = std::min(b.chunk_tiles, b.tiles - tile);
      transform_tiles(path, pool, shape, b, tile, tiles, buffers);
      largest = multiply_tiles(path, pool, shape, b, tiles, buffers, image + tile > 0, acc);
    }
  }
  return largest;
}

}  // namespace socflower::int8::winograd
