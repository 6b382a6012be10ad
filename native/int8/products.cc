#include "products.h"

#include <algorithm>
#include <atomic>
#include <vector>

namespace socflower::int8 {
namespace {

// Results of several blocks go out at once; they stay in the first-level cache.
constexpr int kTileSize = 2048;
static_assert(kTileSize >= kMaxRows * kMaxCols);

void convert(const Path& path, const Product& product, const std::int8_t* from, std::uint8_t* to, std::size_t size) {
  if (product.lhs == Element::kInt16) {
    path.widen(from, reinterpret_cast<std::int16_t*>(to), size);
  } else {
    path.offset(from, to, size);
  }
}

}  // namespace

Packed carve_packed(Arena& arena, const Product& product, int taps, int depth, int cols) {
  Packed packed;
  packed.k_groups = divide_up(depth, product.group);
  packed.panels = divide_up(cols, product.cols);
  packed.cols = cols;
  packed.panel_bytes = std::size_t(packed.k_groups) * product.cols * product.group * product.rhs_bytes();
  packed.tap_bytes = packed.panel_bytes * packed.panels;
  packed.bytes = arena.take<std::uint8_t>(packed.tap_bytes * taps);
  if (product.lhs == Element::kOffsetUint8) {
    packed.column_sums = arena.take<std::int32_t>(std::size_t(taps) * packed.panels * product.cols);
  }
  return packed;
}

LeftOperand carve_left(Arena& arena, const Product& product, int pixels, int batch, int channels, int taps,
                       int batch_block, int threads) {
  LeftOperand left{nullptr, nullptr, nullptr, channel_stride(channels)};
  if (product.lhs == Element::kInt8) return left;
  const std::size_t images = taps == 1 ? std::size_t(threads) * batch_block : std::size_t(pixels) * batch;
  left.converted = arena.take<std::uint8_t>(images * left.channels * product.lhs_bytes());
  return left;
}

LeftOperand prepare_left(const Path& path, ThreadPool& pool, const Product& product, const std::int8_t* x,
                         std::size_t size, int taps, LeftOperand left) {
  left.source = x;
  if (product.lhs == Element::kInt8) {
    left.ready = reinterpret_cast<const std::uint8_t*>(x);
  } else if (taps > 1) {
    constexpr std::size_t kChunk = 64 * 1024;
    pool.run(static_cast<int>((size + kChunk - 1) / kChunk), [&](int index, int) {
      const std::size_t from = index * kChunk;
      convert(path, product, x + from, left.converted + from * product.lhs_bytes(), std::min(kChunk, size - from));
    });
    left.ready = left.converted;
  }
  return left;
}

void pack_weight(const Path& path, ThreadPool& pool, const Product& product, const std::int8_t* weight, int taps,
                 int in_c, int out_c, bool backward, const Packed& packed) {
  const int out_cs = channel_stride(out_c);
  const std::size_t tap_size = std::size_t(in_c) * out_cs;
  // A task is one panel of one tap, so that a linear layer (one tap) is packed by all threads too.
  pool.run(taps * packed.panels, [&](int index, int) {
    const int tap = index / packed.panels, panel = index % packed.panels;
    const int first = panel * product.cols;
    const int cols = std::min(product.cols, (backward ? in_c : out_c) - first);
    void* dst = packed.bytes + tap * packed.tap_bytes + panel * packed.panel_bytes;
    const std::int8_t* src = weight + tap * tap_size;
    if (backward) {
      path.pack_rows(src + std::size_t(first) * out_cs, out_cs, out_c, cols, product.cols, product.group, product.rhs,
                     dst);
    } else {
      path.pack_columns(src + first, out_cs, in_c, cols, product.cols, product.group, product.rhs, dst);
    }
    if (packed.column_sums != nullptr) {
      std::int32_t* sums = packed.column_sums + std::size_t(tap) * packed.panels * product.cols + first;
      std::fill(sums, sums + product.cols, 0);
      const auto* stored = static_cast<const std::int8_t*>(dst);
      for (int k = 0; k < packed.k_groups; ++k)
        for (int c = 0; c < product.cols; ++c)
          for (int e = 0; e < product.group; ++e) sums[c] += stored[(k * product.cols + c) * product.group + e];
      for (int c = 0; c < product.cols; ++c) sums[c] *= 128;
    }
  });
}

std::uint32_t multiply(const Path& path, ThreadPool& pool, const Product& product, const TapIndex& tap_index,
                       const LeftOperand& left, const Packed& right, const std::int32_t* bias, int batch,
                       int batch_block, int out_cs, const Destination& to) {
  const int pixels = static_cast<int>(tap_index.begin.size()) - 1;
  const int taps_bytes = static_cast<int>(right.panel_bytes);
  int most = 1;
  for (int p = 0; p < pixels; ++p) most = std::max(most, tap_index.begin[p + 1] - tap_index.begin[p]);
  int group_panels = static_cast<int>(
      std::clamp<std::size_t>(kPanelGroupBytes / (std::size_t(most) * taps_bytes + 1), 1, right.panels));
  if (pixels == 1) group_panels = std::min(group_panels, divide_up(right.panels, 2 * pool.size()));
  const int groups = divide_up(right.panels, group_panels);
  const int chunks = pool.size() == 1 ? 1 : std::min(pixels, 4 * pool.size());
  const int blocks = divide_up(batch, batch_block);
  const std::size_t row_bytes = std::size_t(left.channels) * product.lhs_bytes(), pixel_bytes = batch * row_bytes;
  const bool narrow = product.narrow != nullptr && right.cols <= 8 &&
                      (bias == nullptr || std::all_of(bias + 8, bias + out_cs, [](std::int32_t b) { return b == 0; }));
  const auto multiply_block = narrow ? product.narrow : product.block;
  const int block_rows = narrow ? product.narrow_rows : product.rows;
  const int tile_rows = std::max(1, kTileSize / product.cols / block_rows) * block_rows;
  std::atomic<std::uint32_t> largest{0};

  pool.run(blocks * groups * chunks, [&](int index, int thread) {
    thread_local std::vector<const void*> lhs, rhs;
    alignas(64) std::int32_t tile[kTileSize];
    alignas(64) std::int32_t init[kMaxCols];
    const int chunk = index % chunks, group = index / chunks % groups, block = index / chunks / groups;
    const int first_pixel = int(std::int64_t(pixels) * chunk / chunks);
    const int last_pixel = int(std::int64_t(pixels) * (chunk + 1) / chunks);
    const int first_panel = group * group_panels, last_panel = std::min(right.panels, first_panel + group_panels);
    const int first_row = block * batch_block, last_row = std::min(batch, first_row + batch_block);
    std::uint32_t seen = 0;
    BlockArgs args{};
    args.k_groups = right.k_groups;
    args.lhs_row_stride = static_cast<std::ptrdiff_t>(row_bytes);
    args.lhs_k_stride = product.group * product.lhs_bytes();
    args.out_stride = product.cols;
    for (int pixel = first_pixel; pixel < last_pixel; ++pixel) {
      const TapIndex::Pair* pairs = tap_index.pairs.data() + tap_index.begin[pixel];
      const int segments = tap_index.begin[pixel + 1] - tap_index.begin[pixel];
      lhs.resize(segments + 1), rhs.resize(segments + 1);
      args.num_segments = segments, args.lhs = lhs.data(), args.rhs = rhs.data();
      std::uint8_t* converted = nullptr;
      if (left.ready == nullptr && segments > 0) {
        const std::size_t images = last_row - first_row;
        converted = left.converted + thread * batch_block * row_bytes;
        convert(path, product, left.source + (std::size_t(pairs[0].from) * batch + first_row) * left.channels,
                converted, images * left.channels);
      }
      for (int panel = first_panel; panel < last_panel; ++panel) {
        const int column = panel * product.cols;
        const int cols = std::min(product.cols, out_cs - column);
        args.init = nullptr;
        if (bias != nullptr || right.column_sums != nullptr) {
          for (int c = 0; c < product.cols; ++c) init[c] = bias != nullptr && c < cols ? bias[column + c] : 0;
          for (int s = 0; right.column_sums != nullptr && s < segments; ++s) {
            const std::int32_t* sums =
                right.column_sums + std::size_t(pairs[s].to) * right.panels * product.cols + column;
            for (int c = 0; c < product.cols; ++c) init[c] -= sums[c];
          }
          args.init = init;
        }
        for (int s = 0; s < segments; ++s) rhs[s] = right.at(pairs[s].to, panel);
        for (int row = first_row; row < last_row; row += tile_rows) {
          const int rows = std::min(tile_rows, last_row - row);
          for (int s = 0; s < segments; ++s) {
            lhs[s] = converted != nullptr ? converted + (row - first_row) * row_bytes
                                          : left.ready + pairs[s].from * pixel_bytes + row * row_bytes;
          }
          for (int r = 0; r < rows; r += block_rows) {
            args.out = tile + r * product.cols;
            multiply_block(args, std::min(block_rows, rows - r));
            for (int s = 0; s < segments; ++s) lhs[s] = static_cast<const char*>(lhs[s]) + block_rows * row_bytes;
          }
          const std::size_t at = (std::size_t(pixel) * batch + row) * out_cs + column;
          seen = std::max(seen, deliver(path, tile, product.cols, to, at, out_cs, rows, cols));
        }
      }
    }
    raise_to(largest, seen);
  });
  return largest;
}

bool few_channels(const Product& product, const ConvShape& s) {
  return product.lhs != Element::kOffsetUint8 && s.in_c <= product.rows && 2 * product.rows <= product.cols &&
         s.batch >= product.cols;
}

FewBuffers carve_few(Arena& arena, const Product& product, const ConvShape& s) {
  FewBuffers buffers{};
  buffers.weight = arena.take<std::uint8_t>(s.weight_size() * product.lhs_bytes());
  buffers.dy = carve_packed(arena, product, s.out_h() * s.out_w(), s.out_c, s.batch);
  return buffers;
}

std::uint32_t multiply_few(const Path& path, ThreadPool& pool, const Product& product, const TapIndex& tap_index,
                           const ConvShape& s, const std::int8_t* dy, const std::int8_t* weight,
                           const FewBuffers& buffers, const Destination& to) {
  const Packed& right = buffers.dy;
  const int out_cs = channel_stride(s.out_c), in_cs = channel_stride(s.in_c);
  const std::size_t tap_bytes = std::size_t(s.in_c) * out_cs * product.lhs_bytes();
  const auto* left = reinterpret_cast<const std::uint8_t*>(weight);
  if (product.lhs == Element::kInt16) {
    path.widen(weight, reinterpret_cast<std::int16_t*>(buffers.weight), s.weight_size());
    left = buffers.weight;
  }
  pool.run(s.out_h() * s.out_w(), [&](int pixel, int) {
    path.pack_rows(dy + std::size_t(pixel) * s.batch * out_cs, out_cs, s.out_c, s.batch, product.cols, product.group,
                   product.rhs, right.bytes + pixel * right.tap_bytes);
  });
  const int panels_at_once = kTileSize / (in_cs * product.cols);
  std::atomic<std::uint32_t> largest{0};
  pool.run(s.in_h * s.in_w, [&](int pixel, int) {
    thread_local std::vector<const void*> lhs, rhs;
    alignas(64) std::int32_t tile[kMaxRows * kMaxCols];
    alignas(64) std::int32_t turned[kTileSize] = {};
    const TapIndex::Pair* pairs = tap_index.pairs.data() + tap_index.begin[pixel];
    const int segments = tap_index.begin[pixel + 1] - tap_index.begin[pixel];
    lhs.resize(segments + 1), rhs.resize(segments + 1);
    for (int i = 0; i < segments; ++i) lhs[i] = left + pairs[i].to * tap_bytes;
    const BlockArgs args{segments,
                         lhs.data(),
                         rhs.data(),
                         right.k_groups,
                         static_cast<std::ptrdiff_t>(out_cs) * product.lhs_bytes(),
                         product.group * product.lhs_bytes(),
                         nullptr,
                         tile,
                         product.cols};
    for (int first = 0; first < right.panels; first += panels_at_once) {
      const int image = first * product.cols, images = std::min(panels_at_once * product.cols, s.batch - image);
      for (int panel = first; panel * product.cols < image + images; ++panel) {
        for (int i = 0; i < segments; ++i) rhs[i] = right.at(pairs[i].from, panel);
        product.block(args, s.in_c);
        std::int32_t* out = turned + (panel - first) * product.cols * in_cs;
        for (int n = 0; n < product.cols; ++n, out += in_cs)
          for (int c = 0; c < s.in_c; ++c) out[c] = tile[c * product.cols + n];
      }
      const std::size_t at = (std::size_t(pixel) * s.batch + image) * in_cs;
      raise_to(largest, deliver(path, turned, in_cs, to, at, in_cs, images, in_cs));
    }
  });
  return largest;
}

}  // namespace socflower::int8
