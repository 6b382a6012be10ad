#include "weight_gradient.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "products.h"

namespace socflower::int8 {
namespace {

// A right panel should stay in the first-level cache, beside the left operand that streams past.
constexpr std::size_t kGradientPanelBytes = 16 * 1024;
// Where every pixel is met once, no more of the operands is packed than stays in the second-level cache until it is
// multiplied.
constexpr std::size_t kGradientBytes = 256 * 1024;

}  // namespace

GradientPlan plan_gradient(const Path& path, const ConvShape& s, bool activations, int images) {
  const Product& product = activations ? path.activations : path.general;
  const auto padded = [](const Product& p, int left_c, int right_c) {
    return std::int64_t(round_up(left_c, p.rows)) * round_up(right_c, p.cols);
  };
  const std::int64_t plain = padded(product, s.in_c, s.out_c), swapped = padded(path.general, s.out_c, s.in_c);
  const int in_pixels = s.in_h * s.in_w, out_pixels = s.out_h() * s.out_w();
  GradientPlan plan{product, false, s.in_c, s.out_c, in_pixels, out_pixels, 0};
  if (3 * swapped < 2 * plain) plan = {path.general, true, s.out_c, s.in_c, out_pixels, in_pixels, 0};
  const Product& p = plan.product;
  const std::size_t depth = round_up(images, p.group), column_bytes = depth * p.rhs_bytes();
  plan.chunk_pixels =
      static_cast<int>(std::max<std::size_t>(1, kGradientPanelBytes / (column_bytes * p.cols)));
  if (s.taps() == 1) {
    const std::size_t pixel_bytes = depth * p.lhs_bytes() * round_up(plan.left_c, p.rows) +
                                    column_bytes * round_up(plan.right_c, p.cols);
    const int at_once = round_up(static_cast<int>(kGradientBytes / pixel_bytes + 1), plan.chunk_pixels);
    plan.left_pixels = plan.right_pixels = std::min(at_once, out_pixels);
  }
  return plan;
}

GradientBuffers carve_gradient(Arena& arena, const GradientPlan& plan, int taps, int images) {
  const Product& product = plan.product;
  GradientBuffers b{};
  // First, so that it stays where it is when a last block of fewer images divides the rest anew.
  if (plan.swapped) {
    b.transposed = arena.take<std::int32_t>(std::size_t(taps) * plan.left_c * channel_stride(plan.right_c));
  }
  b.left_panels = divide_up(plan.left_c, product.rows);
  b.right_panels = divide_up(plan.right_c, product.cols);
  b.k_groups = divide_up(images, product.group);
  b.left_panel_bytes = std::size_t(b.k_groups) * product.rows * product.group * product.lhs_bytes();
  b.right_panel_bytes = std::size_t(b.k_groups) * product.cols * product.group * product.rhs_bytes();
  b.left_pixel_bytes = b.left_panels * b.left_panel_bytes;
  b.right_pixel_bytes = b.right_panels * b.right_panel_bytes;
  b.left = arena.take<std::uint8_t>(plan.left_pixels * b.left_pixel_bytes);
  b.right = arena.take<std::uint8_t>(plan.right_pixels * b.right_pixel_bytes);
  if (product.lhs == Element::kOffsetUint8) {
    b.right_sums = arena.take<std::int32_t>(std::size_t(plan.right_pixels) * b.right_panels * product.cols);
  }
  return b;
}

void pack_gradient(const Path& path, ThreadPool& pool, const GradientPlan& plan, const TapIndex::Pair* pairs,
                   const std::int8_t* x, const std::int8_t* dy, int batch, int first_row, int rows,
                   const GradientBuffers& b) {
  const Product& product = plan.product;
  const std::int8_t* left = plan.swapped ? dy : x;
  const std::int8_t* right = plan.swapped ? x : dy;
  const auto pixel_of = [&](int index, bool of_dy) {
    return std::size_t(pairs == nullptr ? index : of_dy ? pairs[index].to : pairs[index].from);
  };
  const int left_cs = channel_stride(plan.left_c), right_cs = channel_stride(plan.right_c);
  pool.run(plan.left_pixels + plan.right_pixels, [&](int index, int) {
    if (index < plan.left_pixels) {
      path.pack_columns(left + (pixel_of(index, plan.swapped) * batch + first_row) * left_cs, left_cs, rows,
                        plan.left_c, product.rows, product.group, product.lhs, b.left + index * b.left_pixel_bytes);
      return;
    }
    const int pixel = index - plan.left_pixels;
    const std::int8_t* from = right + (pixel_of(pixel, !plan.swapped) * batch + first_row) * right_cs;
    path.pack_columns(from, right_cs, rows, plan.right_c, product.cols, product.group, product.rhs,
                      b.right + pixel * b.right_pixel_bytes);
    if (b.right_sums != nullptr) {
      std::int32_t* sums = b.right_sums + std::size_t(pixel) * b.right_panels * product.cols;
      std::fill(sums + right_cs, sums + b.right_panels * product.cols, 0);
      path.column_sums(from, right_cs, rows, right_cs, sums);
    }
  });
}

std::uint32_t multiply_gradient(const Path& path, ThreadPool& pool, const GradientPlan& plan, int pixels,
                                const TapIndex& taps, const GradientBuffers& b, bool add, std::int32_t* acc) {
  const Product& product = plan.product;
  const int stride = channel_stride(plan.right_c), num_taps = static_cast<int>(taps.begin.size()) - 1;
  const int chunk_pixels = plan.chunk_pixels, chunks = divide_up(pixels, chunk_pixels);
  // A single thread takes all left panels in one task; more threads share them where there are few right panels.
  const int splits = pool.size() == 1 ? 1 : std::min(b.left_panels, divide_up(4 * pool.size(), b.right_panels));
  std::atomic<std::uint32_t> largest{0};
  pool.run(b.right_panels * splits, [&](int index, int) {
    thread_local std::vector<const void*> lhs, rhs;
    alignas(64) std::int32_t tile[kMaxRows * kMaxCols];
    alignas(64) std::int32_t init[kMaxCols];
    const int right_panel = index / splits, split = index % splits;
    const int first_panel = b.left_panels * split / splits, last_panel = b.left_panels * (split + 1) / splits;
    const int column = right_panel * product.cols;
    const int cols = std::min(product.cols, stride - column);
    std::uint32_t seen = 0;
    BlockArgs args{};
    args.k_groups = b.k_groups;
    args.lhs_row_stride = product.group * product.lhs_bytes();
    args.lhs_k_stride = args.lhs_row_stride * product.rows;
    args.out = tile, args.out_stride = product.cols;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const bool first = chunk == 0 && !add, last = chunk == chunks - 1;
      for (int tap = 0; tap < num_taps; ++tap) {
        const auto by_output = [](const TapIndex::Pair& pair, int pixel) { return pair.to < pixel; };
        const TapIndex::Pair* tap_begin = taps.pairs.data() + taps.begin[tap];
        const TapIndex::Pair* tap_end = taps.pairs.data() + taps.begin[tap + 1];
        const TapIndex::Pair* from = std::lower_bound(tap_begin, tap_end, chunk * chunk_pixels, by_output);
        const TapIndex::Pair* to = std::lower_bound(from, tap_end, (chunk + 1) * chunk_pixels, by_output);
        const int segments = static_cast<int>(to - from);
        if (segments == 0 && !first && !last) continue;
        lhs.resize(segments + 1), rhs.resize(segments + 1);
        args.num_segments = segments, args.lhs = lhs.data(), args.rhs = rhs.data();
        const auto left_pixel = [&](int i) { return std::size_t(plan.swapped ? from[i].to : from[i].from); };
        const auto right_pixel = [&](int i) { return std::size_t(plan.swapped ? from[i].from : from[i].to); };
        args.init = nullptr;
        if (b.right_sums != nullptr) {
          std::fill(init, init + product.cols, 0);
          for (int i = 0; i < segments; ++i) {
            const std::int32_t* sums = b.right_sums + right_pixel(i) * b.right_panels * product.cols + column;
            for (int c = 0; c < product.cols; ++c) init[c] -= 128 * sums[c];
          }
          args.init = init;
        }
        for (int i = 0; i < segments; ++i) {
          rhs[i] = b.right + right_pixel(i) * b.right_pixel_bytes + right_panel * b.right_panel_bytes;
        }
        for (int panel = first_panel; panel < last_panel; ++panel) {
          for (int i = 0; i < segments; ++i) {
            lhs[i] = b.left + left_pixel(i) * b.left_pixel_bytes + panel * b.left_panel_bytes;
          }
          const int row = panel * product.rows, rows = std::min(product.rows, plan.left_c - row);
          product.block(args, rows);
          std::int32_t* out = acc + (std::size_t(tap) * plan.left_c + row) * stride + column;
          const std::uint32_t magnitude =
              first ? path.store_tile(tile, product.cols, out, stride, rows, cols, false, nullptr, 0)
                    : path.add_tile(tile, product.cols, out, stride, rows, cols);
          if (last) seen = std::max(seen, magnitude);
        }
      }
    }
    raise_to(largest, seen);
  });
  return largest;
}

std::uint32_t multiply_pointwise_gradient(const Path& path, ThreadPool& pool, const GradientPlan& plan,
                                          const std::vector<TapIndex::Pair>& pairs, const std::int8_t* x,
                                          const std::int8_t* dy, int batch, int first_row, int rows,
                                          const GradientBuffers& b, std::int32_t* acc) {
  thread_local TapIndex packed;  // which packed pixels meet: each its own
  const int pixels = static_cast<int>(pairs.size());
  std::uint32_t largest = 0;
  for (int first = 0; first == 0 || first < pixels; first += plan.left_pixels) {
    GradientPlan part = plan;
    const int count = part.left_pixels = part.right_pixels = std::min(plan.left_pixels, pixels - first);
    packed.begin.assign({0, count});
    packed.pairs.resize(count);
    for (int i = 0; i < count; ++i) packed.pairs[i] = {i, i};
    pack_gradient(path, pool, part, pairs.data() + first, x, dy, batch, first_row, rows, b);
    largest = multiply_gradient(path, pool, part, std::max(1, count), packed, b, first_row > 0 || first > 0, acc);
  }
  return largest;
}

void transpose_taps(const std::int32_t* from, int taps, int left_c, int right_c, std::int32_t* to) {
  const int from_stride = channel_stride(right_c), to_stride = channel_stride(left_c);
  std::memset(to, 0, std::size_t(taps) * right_c * to_stride * sizeof(std::int32_t));
  for (int tap = 0; tap < taps; ++tap, from += std::size_t(left_c) * from_stride)
    for (int r = 0; r < right_c; ++r, to += to_stride)
      for (int l = 0; l < left_c; ++l) to[l] = from[std::size_t(l) * from_stride + r];
}

}  // namespace socflower::int8
