// Block kernels and packing against loops over their contract in kernels.h.
#include "kernel_test.h"

namespace socflower::int8::test {
namespace {

// Reads element i of an operand at its type.
int element_at(Element element, const std::uint8_t* at) {
  if (element == Element::kOffsetUint8) return *at;
  if (element == Element::kInt8) return static_cast<std::int8_t>(*at);
  std::int16_t wide;
  std::memcpy(&wide, at, 2);
  return wide;
}

int bytes_of(Element element) { return element == Element::kInt16 ? 2 : 1; }

void fill_operand(Random& random, Element element, int low, int high, int fill, Buffer<std::uint8_t>& operand) {
  if (element == Element::kInt16) {
    const Buffer<std::int16_t> values = filled<std::int16_t>(random, operand.size() / 2, fill, low, high);
    std::memcpy(operand.data(), values.data(), operand.size());
  } else {
    const int offset = element == Element::kOffsetUint8 ? 128 : 0;
    const Buffer<std::uint8_t> values =
        filled<std::uint8_t>(random, operand.size(), fill, low + offset, high + offset);
    std::memcpy(operand.data(), values.data(), operand.size());
  }
}

struct BlockCase {
  const char* name;
  const Product& product;
  int lhs_low, lhs_high, rhs_low, rhs_high;
};

void test_block(Checker& check, Random& random, const BlockCase& which, int rows, int segments, int k_groups,
                bool packed_lhs, int fill) {
  const Product& p = which.product;
  const std::ptrdiff_t unit = p.group * p.lhs_bytes(), odd = 3 * p.lhs_bytes();
  BlockArgs args{};
  args.num_segments = segments;
  args.k_groups = k_groups;
  args.lhs_k_stride = packed_lhs ? p.rows * unit : unit;
  args.lhs_row_stride = packed_lhs ? unit : k_groups * unit + odd;
  args.out_stride = p.cols + (fill == 0 ? 5 : 0);
  const std::size_t lhs_size = (rows - 1) * args.lhs_row_stride + (k_groups - 1) * args.lhs_k_stride + unit;
  const std::size_t rhs_size = std::size_t(k_groups) * p.cols * p.group * p.rhs_bytes();
  std::vector<Buffer<std::uint8_t>> lhs(segments, Buffer<std::uint8_t>(lhs_size));
  std::vector<Buffer<std::uint8_t>> rhs(segments, Buffer<std::uint8_t>(rhs_size));
  std::vector<const void*> lhs_at, rhs_at;
  for (int s = 0; s < segments; ++s) {
    fill_operand(random, p.lhs, which.lhs_low, which.lhs_high, fill, lhs[s]);
    fill_operand(random, p.rhs, which.rhs_low, which.rhs_high, fill, rhs[s]);
    lhs_at.push_back(lhs[s].data());
    rhs_at.push_back(rhs[s].data());
  }
  const Buffer<std::int32_t> init = accumulators(random, p.cols);
  const bool has_init = random.next() % 2 != 0;
  args.lhs = lhs_at.data();
  args.rhs = rhs_at.data();
  args.init = has_init ? init.data() : nullptr;
  const std::size_t out_size = (rows - 1) * args.out_stride + p.cols;
  Buffer<std::int32_t> expected(out_size, 77), got(out_size, 77);
  args.out = got.data();
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < p.cols; ++c) {
      std::uint32_t sum = has_init ? static_cast<std::uint32_t>(init[c]) : 0;
      for (int s = 0; s < segments; ++s)
        for (int k = 0; k < k_groups; ++k)
          for (int e = 0; e < p.group; ++e) {
            const int a = element_at(p.lhs, lhs[s].data() + r * args.lhs_row_stride + k * args.lhs_k_stride +
                                                e * p.lhs_bytes());
            const int b = element_at(p.rhs, rhs[s].data() + (std::size_t(k * p.cols + c) * p.group + e) *
                                                                p.rhs_bytes());
            sum += static_cast<std::uint32_t>(a) * static_cast<std::uint32_t>(b);
          }
      expected[r * args.out_stride + c] = static_cast<std::int32_t>(sum);
    }
  p.block(args, rows);
  check.equal(which.name, expected.data(), got.data(), out_size,
              "rows %d, cols %d, segments %d, k_groups %d, packed lhs %d, init %d, fill %d", rows, p.cols,
              segments, k_groups, packed_lhs, has_init, fill);
}

void blocks(const Path& path, Checker& check) {
  Random random(1);
  const BlockCase cases[] = {
      {"general", path.general, -127, 127, -127, 127},
      {"activations", path.activations, 0, 127, -127, 127},
      {"wide", path.wide, -32768, 32767, -32768, 32767},
  };
  for (const BlockCase& which : cases)
    for (int rows = 1; rows <= which.product.rows; ++rows)
      for (const int segments : {0, 1, 2, 9})
        for (const int k_groups : {1, 2, 3, 8, 37})
          for (const bool packed_lhs : {false, true})
            for (int fill = 0; fill < (segments == 1 ? kFills : 1); ++fill) {
              test_block(check, random, which, rows, segments, k_groups, packed_lhs, fill);
            }
  for (const BlockCase& which : cases) {
    test_block(check, random, which, which.product.rows, 1, 2048, false, 4);
    test_block(check, random, which, which.product.rows, 64, 33, true, 1);
  }
}

void test_pack(const Path& path, Checker& check, Random& random, bool along_columns, Element element, int group,
               int width, int depth, int cols) {
  const int src_rows = along_columns ? cols : depth, src_cols = along_columns ? depth : cols;
  const std::ptrdiff_t stride = src_cols + static_cast<int>(random.next() % 3) * 7;
  const Buffer<std::int8_t> src = filled<std::int8_t>(random, (src_rows - 1) * stride + src_cols, 0, -128, 127);
  const int panels = (cols + width - 1) / width, k_groups = (depth + group - 1) / group;
  const std::size_t size = std::size_t(panels) * k_groups * width * group * bytes_of(element);
  Buffer<std::uint8_t> expected(size), got(size, 0xa5);
  std::uint8_t* to = expected.data();
  for (int panel = 0; panel < panels; ++panel)
    for (int k = 0; k < k_groups; ++k)
      for (int c = panel * width; c < (panel + 1) * width; ++c)
        for (int d = k * group; d < (k + 1) * group; ++d, to += bytes_of(element)) {
          const bool inside = d < depth && c < cols;
          const std::int16_t x = inside ? src[along_columns ? c * stride + d : d * stride + c] : 0;
          if (element == Element::kInt16) std::memcpy(to, &x, 2);
          else *to = static_cast<std::uint8_t>(element == Element::kInt8 ? x : x + 128);
        }
  (along_columns ? path.pack_rows : path.pack_columns)(src.data(), stride, depth, cols, width, group, element,
                                                       got.data());
  check.equal(along_columns ? "pack_rows" : "pack_columns", expected.data(), got.data(), size,
              "depth %d, cols %d, width %d, group %d, element %d", depth, cols, width, group,
              static_cast<int>(element));
}

void packs(const Path& path, Checker& check) {
  Random random(2);
  struct Kind {
    Element element;
    int group;
  };
  const Kind kinds[] = {{Element::kInt8, 4},        {Element::kInt8, 8},        {Element::kOffsetUint8, 4},
                        {Element::kInt16, 2},       {Element::kInt8, 2},        {Element::kInt16, 4},
                        {Element::kOffsetUint8, 8}, {Element::kOffsetUint8, 2}, {Element::kInt16, 8},
                        {Element::kInt8, 1},        {Element::kInt8, 3},        {Element::kInt8, 16}};
  for (const bool along_columns : {false, true})
    for (const Kind& kind : kinds)
      for (const int width : {1, 4, 5, 6, 8, 12, 16, 20, 24, 32, 48, 56, 64})
        for (const int depth : {1, 3, 8, 9, 16, 17, 31, 66, 130})
          for (const int cols : {1, 6, 16, 17, 32, 48, 80}) {
            test_pack(path, check, random, along_columns, kind.element, kind.group, width, depth, cols);
          }
}

const Register kBlocks(blocks), kPacks(packs);

}  // namespace
}  // namespace socflower::int8::test
