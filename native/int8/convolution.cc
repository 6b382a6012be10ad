#include "convolution.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>

#include "arena.h"

namespace socflower::int8 {
namespace {

// A packed right operand that is walked again and again should stay in the second-level cache, one panel of
// the weight gradient's in the first-level cache, beside the left operand that streams past.
constexpr std::size_t kPanelGroupBytes = 256 * 1024;
constexpr std::size_t kGradientPanelBytes = 16 * 1024;
// Where every pixel is met once, no more of the weight gradient's operands is packed than stays in the second-level
// cache until it is multiplied.
constexpr std::size_t kGradientBytes = 256 * 1024;
constexpr int kMaxPatchChannels = 4;
constexpr int kMaxRows = 16, kMaxCols = 64;  // of any block
// Results of several blocks go out at once; they stay in the first-level cache.
constexpr int kTileSize = 2048;
static_assert(kTileSize >= kMaxRows * kMaxCols);

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
int divide_up(int value, int divisor) { return (value + divisor - 1) / divisor; }

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("convolution: " + what); }

const ConvShape& checked(const ConvShape& s) {
  const auto text = [](int value) { return std::to_string(value); };
  if (s.batch < 1 || s.in_h < 1 || s.in_w < 1 || s.in_c < 1 || s.out_c < 1 || s.kernel_h < 1 || s.kernel_w < 1 ||
      s.stride_h < 1 || s.stride_w < 1 || s.pad_h < 0 || s.pad_w < 0 || s.groups < 1) {
    refuse("sizes, strides and groups must be at least 1 and padding at least 0");
  }
  if (std::max({s.batch, s.in_h, s.in_w, s.in_c, s.out_c, s.kernel_h, s.kernel_w, s.stride_h, s.stride_w, s.pad_h,
                s.pad_w}) > kMostPerDimension) {
    refuse("sizes, strides and padding must be at most " + text(kMostPerDimension));
  }
  if (s.in_c % s.groups != 0 || s.out_c % s.groups != 0) {
    refuse(text(s.in_c) + " input and " + text(s.out_c) + " output channels cannot be split into " +
           text(s.groups) + " groups");
  }
  if (s.in_h + 2 * s.pad_h < s.kernel_h || s.in_w + 2 * s.pad_w < s.kernel_w) {
    refuse("a kernel of " + text(s.kernel_h) + "x" + text(s.kernel_w) + " does not fit into an input of " +
           text(s.in_h) + "x" + text(s.in_w) + " with padding " + text(s.pad_h) + "x" + text(s.pad_w));
  }
  constexpr double kMostElements = 1e12;
  if (double(s.in_h) * s.in_w * s.batch * s.in_c > kMostElements ||
      double(s.out_h()) * s.out_w() * s.batch * s.out_c > kMostElements ||
      double(s.in_h) * s.in_w > 1e8 || double(s.out_h()) * s.out_w() > 1e8 || double(s.taps()) > 1e6) {
    refuse("the tensors would have more elements than any machine here can hold");
  }
  const std::int64_t forward = std::int64_t(s.taps()) * s.group_in_c();
  const std::int64_t backward = std::int64_t(s.taps()) * s.group_out_c();
  if (std::max(forward, backward) > kMaxExactDepth) {
    refuse("a sum of " + std::to_string(std::max(forward, backward)) + " products of int8 may leave int32; at most " +
           std::to_string(kMaxExactDepth) + " are exact");
  }
  return s;
}

bool wants_patches(const ConvShape& s) { return s.groups == 1 && s.in_c <= kMaxPatchChannels && s.taps() > 1; }

ConvShape inner_shape(const ConvShape& s) {
  ConvShape inner = s;
  if (wants_patches(s)) {
    return {s.batch, s.out_h(), s.out_w(), s.taps() * s.in_c, s.out_c, 1, 1, 1, 1, 0, 0, 1};
  }
  if (!s.depthwise()) inner.groups = 1;
  return inner;
}

// A right operand: for every tap, panels of `product.cols` columns, k-groups side by side.
struct Packed {
  int k_groups = 0, panels = 0, cols = 0;
  std::size_t panel_bytes = 0, tap_bytes = 0;
  std::uint8_t* bytes = nullptr;
  std::int32_t* column_sums = nullptr;  // (taps, panels * cols), times 128; only beside offset left operands

  const std::uint8_t* at(int tap, int panel) const { return bytes + tap * tap_bytes + panel * panel_bytes; }
};

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

// Images by channels, pixel after pixel: as the product wants them (`ready`), or (where a kernel of one tap meets
// every pixel once) as int8, to be converted a block of images at a time into `converted`, which each thread has.
struct LeftOperand {
  const std::uint8_t* ready;
  const std::int8_t* source;
  std::uint8_t* converted;
  int channels;  // with padding
};

void convert(const Path& path, const Product& product, const std::int8_t* from, std::uint8_t* to, std::size_t size) {
  if (product.lhs == Element::kInt16) {
    path.widen(from, reinterpret_cast<std::int16_t*>(to), size);
  } else {
    path.offset(from, to, size);
  }
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

// weight: (taps, in_c, out_cs). Forward: depth in_c, columns out_c. Backward: depth out_c, columns in_c.
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

// Forward and input gradient: for every result pixel and image, bias + sum over its meetings.
std::uint32_t multiply(const Path& path, ThreadPool& pool, const Product& product, const Meetings& meetings,
                       const LeftOperand& left, const Packed& right, const std::int32_t* bias, int batch,
                       int batch_block, int out_cs, const Destination& to) {
  const int pixels = static_cast<int>(meetings.begin.size()) - 1;
  const int taps_bytes = static_cast<int>(right.panel_bytes);
  int most = 1;
  for (int p = 0; p < pixels; ++p) most = std::max(most, meetings.begin[p + 1] - meetings.begin[p]);
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
      const Meetings::Pair* pairs = meetings.pairs.data() + meetings.begin[pixel];
      const int segments = meetings.begin[pixel + 1] - meetings.begin[pixel];
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

// An input gradient of few channels would leave most columns of a block empty. So its channels become the rows and
// its images the columns: the weight, (taps, in_c, out_cs), is the left operand as it is, dy is packed, and the
// results are transposed on their way out.
bool few_channels(const Product& product, const ConvShape& s) {
  return product.lhs != Element::kOffsetUint8 && s.in_c <= product.rows && 2 * product.rows <= product.cols &&
         s.batch >= product.cols;
}

struct FewBuffers {
  std::uint8_t* weight;
  Packed dy;  // a "tap" is a pixel here
};

FewBuffers carve_few(Arena& arena, const Product& product, const ConvShape& s) {
  FewBuffers buffers{};
  buffers.weight = arena.take<std::uint8_t>(s.weight_size() * product.lhs_bytes());
  buffers.dy = carve_packed(arena, product, s.out_h() * s.out_w(), s.out_c, s.batch);
  return buffers;
}

std::uint32_t multiply_few(const Path& path, ThreadPool& pool, const Product& product, const Meetings& meetings,
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
    const Meetings::Pair* pairs = meetings.pairs.data() + meetings.begin[pixel];
    const int segments = meetings.begin[pixel + 1] - meetings.begin[pixel];
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

// Every output pixel's patch, (pixels, batch, stride of taps * in_c): the input channels under every tap.
void gather_patches(ThreadPool& pool, const ConvShape& s, const Meetings& by_output, const std::int8_t* x,
                    std::int8_t* patches) {
  const int in_cs = channel_stride(s.in_c), stride = channel_stride(s.taps() * s.in_c);
  pool.run(s.out_h() * s.out_w(), [&](int pixel, int) {
    std::int8_t* out = patches + std::size_t(pixel) * s.batch * stride;
    std::memset(out, 0, std::size_t(s.batch) * stride);
    for (int i = by_output.begin[pixel]; i < by_output.begin[pixel + 1]; ++i) {
      const std::int8_t* in = x + std::size_t(by_output.pairs[i].from) * s.batch * in_cs;
      std::int8_t* to = out + by_output.pairs[i].to * s.in_c;
      for (int n = 0; n < s.batch; ++n)
        for (int c = 0; c < s.in_c; ++c) to[std::size_t(n) * stride + c] = in[n * in_cs + c];
    }
  });
}

// Block-diagonal weight of one dense convolution that computes all groups: (taps, in_c, out_cs).
void spread_groups(const ConvShape& s, const std::int8_t* weight, std::int8_t* dense) {
  const int out_cs = channel_stride(s.out_c);
  std::memset(dense, 0, std::size_t(s.taps()) * s.in_c * out_cs);
  for (int tap = 0; tap < s.taps(); ++tap)
    for (int c = 0; c < s.group_in_c(); ++c)
      for (int oc = 0; oc < s.out_c; ++oc) {
        const int ic = oc / s.group_out_c() * s.group_in_c() + c;
        dense[(std::size_t(tap) * s.in_c + ic) * out_cs + oc] =
            weight[(std::size_t(tap) * s.group_in_c() + c) * out_cs + oc];
      }
}

std::uint32_t collect_groups(const ConvShape& s, const std::int32_t* dense, std::int32_t* gradient) {
  const int out_cs = channel_stride(s.out_c);
  std::uint32_t largest = 0;
  for (int tap = 0; tap < s.taps(); ++tap)
    for (int c = 0; c < s.group_in_c(); ++c)
      for (int oc = 0; oc < out_cs; ++oc) {
        const int ic = std::min(oc, s.out_c - 1) / s.group_out_c() * s.group_in_c() + c;
        const std::int32_t value = oc < s.out_c ? dense[(std::size_t(tap) * s.in_c + ic) * out_cs + oc] : 0;
        gradient[(std::size_t(tap) * s.group_in_c() + c) * out_cs + oc] = value;
        largest = std::max(largest, value < 0 ? 0u - std::uint32_t(value) : std::uint32_t(value));
      }
  return largest;
}

std::uint32_t depthwise_multiply(const Path& path, ThreadPool& pool, const Meetings& meetings, const std::int8_t* x,
                                 const std::int8_t* weight, const std::int32_t* bias, int batch, int cs,
                                 const Destination& to) {
  constexpr int kTile = 4096;
  const int pixels = static_cast<int>(meetings.begin.size()) - 1;
  const int rows_at_once = std::clamp(kTile / cs, 1, batch);
  std::atomic<std::uint32_t> largest{0};
  pool.run(pixels, [&](int pixel, int) {
    thread_local std::vector<const std::int8_t*> xs, ws;
    thread_local std::vector<std::int32_t> tile;
    const Meetings::Pair* pairs = meetings.pairs.data() + meetings.begin[pixel];
    const int taps = meetings.begin[pixel + 1] - meetings.begin[pixel];
    xs.resize(taps + 1), ws.resize(taps + 1);
    tile.resize(std::size_t(rows_at_once) * cs);
    for (int s = 0; s < taps; ++s) ws[s] = weight + std::size_t(pairs[s].to) * cs;
    std::uint32_t seen = 0;
    for (int row = 0; row < batch; row += rows_at_once) {
      const int rows = std::min(rows_at_once, batch - row);
      for (int s = 0; s < taps; ++s) xs[s] = x + (std::size_t(pairs[s].from) * batch + row) * cs;
      path.depthwise(xs.data(), ws.data(), taps, bias, tile.data(), rows, cs);
      const std::size_t at = (std::size_t(pixel) * batch + row) * cs;
      seen = std::max(seen, deliver(path, tile.data(), cs, to, at, cs, rows, cs));
    }
    raise_to(largest, seen);
  });
  return largest;
}

std::uint32_t magnitude_of(const std::int32_t* values, std::size_t size) {
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < size; ++i) {
    largest = std::max(largest, values[i] < 0 ? 0u - std::uint32_t(values[i]) : std::uint32_t(values[i]));
  }
  return largest;
}

// The weight gradient of one tap is a product of the images: left (channels x images) by right (images x channels).
// Left is x and right dy or, where blocks fit better, the other way around, and the result is transposed.
struct GradientPlan {
  Product product;
  bool swapped;
  int left_c, right_c;
  int left_pixels, right_pixels;  // that are packed at a time
  int chunk_pixels;               // output pixels of one right panel that stay in the first-level cache
};

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

// Both operands: for every pixel, panels of `product.rows` or `product.cols` channels by k-groups of images.
struct GradientBuffers {
  int k_groups, left_panels, right_panels;
  std::size_t left_panel_bytes, left_pixel_bytes, right_panel_bytes, right_pixel_bytes;
  std::uint8_t *left, *right;
  std::int32_t* right_sums;  // (pixels, right_panels * cols): sums over the images, only beside offset operands
  std::int32_t* transposed;  // (taps, left channels, stride of right channels), only where the roles are swapped
};

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

// pairs: of input and output pixel, one for each pixel of the plan; or null, and all pixels are packed in order.
void pack_gradient(const Path& path, ThreadPool& pool, const GradientPlan& plan, const Meetings::Pair* pairs,
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
      std::fill(sums, sums + b.right_panels * product.cols, 0);
      for (int n = 0; n < rows; ++n)
        for (int c = 0; c < plan.right_c; ++c) sums[c] += from[std::size_t(n) * right_cs + c];
    }
  });
}

// acc (taps, left channels, stride of right channels) = or += sum over the packed images, tap by tap. The pixels
// are taken in chunks: a chunk of one right panel stays in the first-level cache while all left panels and all
// taps meet it.
std::uint32_t multiply_gradient(const Path& path, ThreadPool& pool, const GradientPlan& plan, int pixels,
                                const Meetings& taps, const GradientBuffers& b, bool add, std::int32_t* acc) {
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
        const auto by_output = [](const Meetings::Pair& pair, int pixel) { return pair.to < pixel; };
        const Meetings::Pair* tap_begin = taps.pairs.data() + taps.begin[tap];
        const Meetings::Pair* tap_end = taps.pairs.data() + taps.begin[tap + 1];
        const Meetings::Pair* from = std::lower_bound(tap_begin, tap_end, chunk * chunk_pixels, by_output);
        const Meetings::Pair* to = std::lower_bound(from, tap_end, (chunk + 1) * chunk_pixels, by_output);
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

// The same for a kernel of one tap, with the packing, a few pixels at a time.
std::uint32_t multiply_pointwise_gradient(const Path& path, ThreadPool& pool, const GradientPlan& plan,
                                          const std::vector<Meetings::Pair>& pairs, const std::int8_t* x,
                                          const std::int8_t* dy, int batch, int first_row, int rows,
                                          const GradientBuffers& b, std::int32_t* acc) {
  thread_local Meetings packed;  // which packed pixels meet: each its own
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

// (taps, left channels, stride of right channels) to (taps, right channels, stride of left channels).
void transpose_taps(const std::int32_t* from, int taps, int left_c, int right_c, std::int32_t* to) {
  const int from_stride = channel_stride(right_c), to_stride = channel_stride(left_c);
  std::memset(to, 0, std::size_t(taps) * right_c * to_stride * sizeof(std::int32_t));
  for (int tap = 0; tap < taps; ++tap, from += std::size_t(left_c) * from_stride)
    for (int r = 0; r < right_c; ++r, to += to_stride)
      for (int l = 0; l < left_c; ++l) to[l] = from[std::size_t(l) * from_stride + r];
}

// Where more products meet than fit the worst case, the values decide: |sum| <= 127 * sum |dy| of a channel.
void require_exact_sum(const ConvShape& s, const std::int8_t* dy) {
  const std::int64_t depth = std::int64_t(s.out_h()) * s.out_w() * s.batch;
  if (depth <= kMaxExactDepth) return;
  const int cs = channel_stride(s.out_c);
  std::vector<std::int64_t> sums(cs, 0);
  for (std::int64_t row = 0; row < depth; ++row)
    for (int c = 0; c < cs; ++c) sums[c] += std::abs(int(dy[row * cs + c]));
  const std::int64_t worst = 127 * *std::max_element(sums.begin(), sums.end());
  if (worst <= std::int64_t{0x7fffffff}) return;
  throw std::overflow_error("weight gradient: a sum of " + std::to_string(depth) + " products may reach " +
                            std::to_string(worst) + ", beyond int32; use a smaller batch (" +
                            std::to_string(kMaxExactDepth / (std::int64_t(s.out_h()) * s.out_w())) +
                            " images are always exact here)");
}

struct ForwardBuffers {
  std::int8_t *patches = nullptr, *dense = nullptr;
  LeftOperand left;
  Packed right;
};

ForwardBuffers carve_forward(Arena& arena, const Product& product, const ConvShape& s, int batch_block, int threads,
                             bool patches, bool dense) {
  ForwardBuffers buffers{};
  if (patches) buffers.patches = arena.take<std::int8_t>(s.input_size());
  if (dense) buffers.dense = arena.take<std::int8_t>(s.weight_size());
  buffers.left = carve_left(arena, product, s.in_h * s.in_w, s.batch, s.in_c, s.taps(), batch_block, threads);
  buffers.right = carve_packed(arena, product, s.taps(), s.in_c, s.out_c);
  return buffers;
}

ForwardBuffers carve_backward(Arena& arena, const Product& product, const ConvShape& s, int batch_block, int threads,
                              bool dense) {
  ForwardBuffers buffers{};
  if (dense) buffers.dense = arena.take<std::int8_t>(s.weight_size());
  buffers.left = carve_left(arena, product, s.out_h() * s.out_w(), s.batch, s.out_c, s.taps(), batch_block, threads);
  buffers.right = carve_packed(arena, product, s.taps(), s.out_c, s.in_c);
  return buffers;
}

}  // namespace

Convolution::Convolution(const ConvShape& shape, int batch_block, Algorithm algorithm)
    : shape_(checked(shape)),
      batch_block_(batch_block == 0 ? shape.batch : batch_block),
      algorithm_(algorithm),
      patches_(wants_patches(shape)),
      dense_groups_(shape.groups > 1 && !shape.depthwise()),
      inner_(inner_shape(shape)),
      forward_(meetings(shape, By::kOutput)),
      backward_(meetings(shape, By::kInput)),
      taps_(meetings(inner_, By::kTap)) {
  if (batch_block < 0 || batch_block > shape.batch) {
    refuse("batch_block must be 0 to " + std::to_string(shape.batch) + ", got " + std::to_string(batch_block));
  }
  if (algorithm == Algorithm::kWinograd && !winograd::possible(shape)) {
    const auto text = [](int value) { return std::to_string(value); };
    refuse("Winograd needs a 3x3 kernel, stride 1, groups 1 and at most " + text(winograd::kMaxChannels) +
           " channels, got a " + text(shape.kernel_h) + "x" + text(shape.kernel_w) + " kernel, stride " +
           text(shape.stride_h) + "x" + text(shape.stride_w) + ", groups " + text(shape.groups) + ", " +
           text(shape.in_c) + " and " + text(shape.out_c) + " channels");
  }
}

bool Convolution::uses_winograd(const Path& path, winograd::Function function) const {
  if (algorithm_ != Algorithm::kAutomatic) return algorithm_ == Algorithm::kWinograd;
  return winograd::pays(path, shape_, function);
}

std::size_t Convolution::workspace_bytes(const Path& path, int threads) const {
  if (shape_.depthwise()) return 64;
  std::size_t most = 0;
  using winograd::Function;
  for (const Function function : {Function::kForward, Function::kInputGradient, Function::kWeightGradient}) {
    if (uses_winograd(path, function)) {
      most = std::max(most, winograd::workspace_bytes(path, shape_, function, threads));
    }
  }
  for (const Product* product : {&path.general, &path.activations}) {
    Arena forward, gradient;
    if (!uses_winograd(path, Function::kForward)) {
      carve_forward(forward, *product, inner_, batch_block_, threads, patches_, dense_groups_);
    }
    if (!uses_winograd(path, Function::kWeightGradient)) {
      if (patches_) gradient.take<std::int8_t>(inner_.input_size());
      if (dense_groups_) gradient.take<std::int32_t>(inner_.weight_size());
      carve_gradient(gradient, plan_gradient(path, inner_, product == &path.activations, batch_block_),
                     inner_.taps(), batch_block_);
    }
    most = std::max({most, forward.bytes(), gradient.bytes()});
  }
  if (uses_winograd(path, Function::kInputGradient)) return most;
  ConvShape dense = shape_;
  dense.groups = 1;
  Arena backward;
  if (shape_.groups == 1 && few_channels(path.general, shape_)) {
    carve_few(backward, path.general, shape_);
    return std::max(most, backward.bytes());
  }
  carve_backward(backward, path.general, dense, batch_block_, threads, dense_groups_);
  return std::max(most, backward.bytes());
}

std::uint32_t Convolution::forward(const Path& path, ThreadPool& pool, const std::int8_t* x, bool activations,
                                   const std::int8_t* weight, const std::int32_t* bias, const Destination& to,
                                   void* workspace) const {
  if (uses_winograd(path, winograd::Function::kForward)) {
    return winograd::forward(path, pool, shape_, x, weight, bias, to, workspace);
  }
  const int out_cs = channel_stride(shape_.out_c);
  if (shape_.depthwise()) {
    return depthwise_multiply(path, pool, forward_, x, weight, bias, shape_.batch, out_cs, to);
  }
  const Product& product = activations ? path.activations : path.general;
  Arena arena(workspace);
  const ForwardBuffers buffers = carve_forward(arena, product, inner_, batch_block_, pool.size(), patches_,
                                              dense_groups_);
  if (patches_) {
    gather_patches(pool, shape_, forward_, x, buffers.patches);
    x = buffers.patches;
  }
  if (dense_groups_) {
    spread_groups(shape_, weight, buffers.dense);
    weight = buffers.dense;
  }
  const LeftOperand left = prepare_left(path, pool, product, x, inner_.input_size(), inner_.taps(), buffers.left);
  pack_weight(path, pool, product, weight, inner_.taps(), inner_.in_c, inner_.out_c, false, buffers.right);
  if (!patches_) {
    return multiply(path, pool, product, forward_, left, buffers.right, bias, shape_.batch, batch_block_, out_cs,
                    to);
  }
  thread_local Meetings pointwise;
  const int pixels = inner_.in_h * inner_.in_w;
  pointwise.begin.resize(pixels + 1), pointwise.pairs.resize(pixels);
  for (int p = 0; p < pixels; ++p) pointwise.begin[p + 1] = p + 1, pointwise.pairs[p] = {p, 0};
  pointwise.begin[0] = 0;
  return multiply(path, pool, product, pointwise, left, buffers.right, bias, shape_.batch, batch_block_, out_cs, to);
}

std::uint32_t Convolution::input_gradient(const Path& path, ThreadPool& pool, const std::int8_t* dy,
                                          const std::int8_t* weight, const Destination& to, void* workspace) const {
  if (uses_winograd(path, winograd::Function::kInputGradient)) {
    return winograd::input_gradient(path, pool, shape_, dy, weight, to, workspace);
  }
  const int in_cs = channel_stride(shape_.in_c);
  if (shape_.depthwise()) {
    return depthwise_multiply(path, pool, backward_, dy, weight, nullptr, shape_.batch, in_cs, to);
  }
  ConvShape dense = shape_;
  dense.groups = 1;
  Arena arena(workspace);
  if (shape_.groups == 1 && few_channels(path.general, shape_)) {
    return multiply_few(path, pool, path.general, backward_, shape_, dy, weight,
                        carve_few(arena, path.general, shape_), to);
  }
  const ForwardBuffers buffers = carve_backward(arena, path.general, dense, batch_block_, pool.size(), dense_groups_);
  if (dense_groups_) {
    spread_groups(shape_, weight, buffers.dense);
    weight = buffers.dense;
  }
  const LeftOperand left =
      prepare_left(path, pool, path.general, dy, shape_.output_size(), dense.taps(), buffers.left);
  pack_weight(path, pool, path.general, weight, dense.taps(), dense.in_c, dense.out_c, true, buffers.right);
  return multiply(path, pool, path.general, backward_, left, buffers.right, nullptr, shape_.batch, batch_block_, in_cs,
                  to);
}

std::uint32_t Convolution::weight_gradient(const Path& path, ThreadPool& pool, const std::int8_t* x, bool activations,
                                           const std::int8_t* dy, std::int32_t* acc, void* workspace) const {
  require_exact_sum(shape_, dy);
  if (uses_winograd(path, winograd::Function::kWeightGradient)) {
    return winograd::weight_gradient(path, pool, shape_, x, dy, acc, workspace);
  }
  if (shape_.depthwise()) {
    const int cs = channel_stride(shape_.in_c);
    std::memset(acc, 0, shape_.weight_size() * sizeof(std::int32_t));
    pool.run(shape_.taps(), [&](int tap, int) {
      for (int i = taps_.begin[tap]; i < taps_.begin[tap + 1]; ++i) {
        path.depthwise_weight_gradient(x + std::size_t(taps_.pairs[i].from) * shape_.batch * cs,
                                       dy + std::size_t(taps_.pairs[i].to) * shape_.batch * cs, shape_.batch, cs,
                                       acc + std::size_t(tap) * cs);
      }
    });
    return magnitude_of(acc, shape_.weight_size());
  }
  const GradientPlan plan = plan_gradient(path, inner_, activations, batch_block_);
  Arena arena(workspace);
  if (patches_) {
    auto* patches = arena.take<std::int8_t>(inner_.input_size());
    gather_patches(pool, shape_, forward_, x, patches);
    x = patches;
  }
  std::int32_t* into = dense_groups_ ? arena.take<std::int32_t>(inner_.weight_size()) : acc;
  std::uint32_t largest = 0;
  for (int row = 0; row < shape_.batch; row += batch_block_) {
    const int images = std::min(batch_block_, shape_.batch - row);
    Arena block = arena;
    const GradientBuffers buffers = carve_gradient(block, plan, inner_.taps(), images);
    std::int32_t* sums = plan.swapped ? buffers.transposed : into;
    if (inner_.taps() > 1) {
      pack_gradient(path, pool, plan, nullptr, x, dy, shape_.batch, row, images, buffers);
      largest = multiply_gradient(path, pool, plan, inner_.out_h() * inner_.out_w(), taps_, buffers, row > 0, sums);
    } else {
      largest = multiply_pointwise_gradient(path, pool, plan, taps_.pairs, x, dy, shape_.batch, row, images, buffers,
                                            sums);
    }
    if (plan.swapped && row + images == shape_.batch) {
      transpose_taps(sums, inner_.taps(), plan.left_c, plan.right_c, into);
    }
  }
  return dense_groups_ ? collect_groups(shape_, into, acc) : largest;
}

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
