#include "tap_index.h"

namespace socflower::int8 {
namespace {

// Visits (input pixel, tap, output pixel) in the order of output pixels, then taps.
template <typename Visit>
void for_each_tap_pair(const ConvShape& s, Visit visit) {
  for (int oh = 0; oh < s.out_h(); ++oh)
    for (int ow = 0; ow < s.out_w(); ++ow)
      for (int tap = 0; tap < s.taps(); ++tap) {
        const int ih = oh * s.stride_h - s.pad_h + tap / s.kernel_w * s.dilation_h;
        const int iw = ow * s.stride_w - s.pad_w + tap % s.kernel_w * s.dilation_w;
        if (ih < 0 || ih >= s.in_h || iw < 0 || iw >= s.in_w) continue;
        visit(ih * s.in_w + iw, tap, oh * s.out_w() + ow);
      }
}

}  // namespace

TapIndex tap_index(const ConvShape& s, By by) {
  const auto group_of = [by](int in, int tap, int out) {
    return by == By::kOutput ? out : by == By::kInput ? in : tap;
  };
  const int groups = by == By::kOutput ? s.out_h() * s.out_w() : by == By::kInput ? s.in_h * s.in_w : s.taps();
  TapIndex result;
  result.begin.assign(groups + 1, 0);
  for_each_tap_pair(s, [&](int in, int tap, int out) { ++result.begin[group_of(in, tap, out) + 1]; });
  for (int g = 0; g < groups; ++g) result.begin[g + 1] += result.begin[g];
  result.pairs.resize(result.begin[groups]);
  std::vector<std::int32_t> next(result.begin.begin(), result.begin.end() - 1);
  for_each_tap_pair(s, [&](int in, int tap, int out) {
    auto& pair = result.pairs[next[group_of(in, tap, out)]++];
    pair = by == By::kOutput ? TapIndex::Pair{in, tap} : by == By::kInput ? TapIndex::Pair{out, tap}
                                                                         : TapIndex::Pair{in, out};
  });
  return result;
}

}  // namespace socflower::int8
