#include "kernel_choice.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <vector>

#include "convolution.h"
#include "layers.h"
#include "paths/registry.h"
#include "reference.h"

namespace socflower::int8 {
namespace {

std::vector<std::int8_t> random_tensor(std::mt19937& random, std::size_t rows, int channels, int low, int high) {
  const int cs = channel_stride(channels);
  std::vector<std::int8_t> values(rows * cs, 0);
  for (std::size_t row = 0; row < rows; ++row)
    for (int c = 0; c < channels; ++c) {
      values[row * cs + c] = static_cast<std::int8_t>(low + int(random() % unsigned(high - low + 1)));
    }
  return values;
}

std::string check_convolution(const Path& path, std::mt19937& random, const ConvShape& s, int batch_block,
                              Algorithm algorithm) {
  ThreadPool pool(1);
  const Convolution convolution(s, batch_block, algorithm);
  std::vector<std::uint8_t> workspace(convolution.workspace_bytes(path, pool.size()));
  const std::size_t in_rows = std::size_t(s.in_h) * s.in_w * s.batch;
  const std::size_t out_rows = std::size_t(s.out_h()) * s.out_w() * s.batch;
  const auto weight = random_tensor(random, std::size_t(s.taps()) * s.group_in_c(), s.out_c, -127, 127);
  const auto dy = random_tensor(random, out_rows, s.out_c, -127, 127);
  for (const bool activations : {false, true}) {
    const auto x = random_tensor(random, in_rows, s.in_c, activations ? 0 : -127, 127);
    std::vector<std::int32_t> want(s.output_size()), got(s.output_size());
    Destination to;
    to.acc = got.data();
    reference::convolution(s, x.data(), weight.data(), nullptr, want.data());
    convolution.forward(path, pool, x.data(), activations, weight.data(), nullptr, to, workspace.data());
    if (want != got) return "convolution";

    std::vector<std::int32_t> want_dw(s.weight_size()), got_dw(s.weight_size());
    reference::convolution_weight_gradient(s, x.data(), dy.data(), want_dw.data());
    convolution.weight_gradient(path, pool, x.data(), activations, dy.data(), got_dw.data(), workspace.data());
    if (want_dw != got_dw) return "weight gradient";
  }
  std::vector<std::int32_t> want(s.input_size());
  std::vector<std::int8_t> want_dx(s.input_size()), got_dx(s.input_size());
  reference::convolution_input_gradient(s, dy.data(), weight.data(), want.data());
  Destination to;
  to.out = got_dx.data();
  to.how.shift = 9, to.how.rounding = Rounding::kPseudoStochastic;
  reference::requantise(want.data(), want_dx.data(), want.size(), to.how);
  convolution.input_gradient(path, pool, dy.data(), weight.data(), to, workspace.data());
  return want_dx == got_dx ? "" : "input gradient";
}

std::string check_elementwise(const Path& path, std::mt19937& random) {
  constexpr int kRows = 37, kCs = 48;
  const auto a = random_tensor(random, kRows, kCs, -127, 127), b = random_tensor(random, kRows, kCs, -127, 127);
  std::vector<std::int32_t> scale(kCs), offset(kCs);
  for (int c = 0; c < kCs; ++c) {
    scale[c] = int(random() % 8000000) - 4000000;
    offset[c] = int(random() % 100000000) - 50000000;
  }
  std::vector<std::int8_t> want(a.size()), got(a.size());
  for (const Rounding rounding : {Rounding::kNearest, Rounding::kPseudoStochastic}) {
    Requantise how{3, rounding, true, nullptr};
    reference::add(a.data(), 2, b.data(), 5, want.data(), want.size(), how);
    path.add(a.data(), 2, b.data(), 5, got.data(), got.size(), how);
    if (want != got) return "addition";
    how = {22, rounding, false, b.data()};
    reference::affine(a.data(), scale.data(), offset.data(), want.data(), kRows, kCs, how);
    path.affine(a.data(), scale.data(), offset.data(), got.data(), kRows, kCs, how);
    if (want != got) return "affine";
    how = {23, rounding, false, nullptr};
    reference::affine_gradient(a.data(), b.data(), a.data(), scale.data(), scale.data(), offset.data(), want.data(),
                               kRows, kCs, how);
    path.affine_gradient(a.data(), b.data(), a.data(), scale.data(), scale.data(), offset.data(), got.data(), kRows,
                         kCs, how);
    if (want != got) return "affine gradient";
  }
  constexpr int kBatch = 5;
  const Dither dither{12345, kBatch, 8, 2};
  reference::affine_gradient_at_random(a.data(), b.data(), a.data(), scale.data(), scale.data(), offset.data(),
                                       want.data(), kRows, kCs, 21, dither, 3);
  path.affine_gradient_at_random(a.data(), b.data(), a.data(), scale.data(), scale.data(), offset.data(), got.data(),
                                 kRows, kCs, 21, dither, 3);
  if (want != got) return "affine gradient at random";
  std::vector<std::int32_t> acc(a.size());
  for (auto& value : acc) value = int(random() % 60000000) - 30000000;
  std::vector<float> factor(kCs), shift(kCs), by_image(kBatch), want_most(kBatch), got_most(kBatch * kChannelBlock);
  for (int c = 0; c < kCs; ++c) factor[c] = 1e-6f * float(c + 1), shift[c] = 0.3f * float(c) - 5.0f;
  for (int image = 0; image < kBatch; ++image) by_image[image] = 0.7f + 0.1f * float(image);
  reference::affine_real(acc.data(), by_image.data(), factor.data(), shift.data(), b.data(), by_image.data(),
                         want.data(), by_image.data(), want_most.data(), kRows, kCs, kBatch, true);
  path.affine_real32(acc.data(), by_image.data(), factor.data(), shift.data(), b.data(), by_image.data(), got.data(),
                   by_image.data(), got_most.data(), kRows, kCs, kBatch, 0, true);
  for (int image = 0; image < kBatch; ++image) {
    const auto own = got_most.begin() + image * kChannelBlock;
    if (*std::max_element(own, own + kChannelBlock) != want_most[image]) return "affine real, largest";
  }
  if (want != got) return "affine real";
  reference::affine_real<std::int8_t>(a.data(), by_image.data(), shift.data(), shift.data(), nullptr, nullptr,
                                      want.data(), by_image.data(), nullptr, kRows, kCs, kBatch, false);
  path.affine_real8(a.data(), by_image.data(), shift.data(), shift.data(), nullptr, nullptr, got.data(),
                    by_image.data(), nullptr, kRows, kCs, kBatch, 0, false);
  if (want != got) return "affine real of int8";
  std::vector<std::int8_t> want_own(a.size()), got_own(a.size());
  const Normalisation normalisation{factor.data(), shift.data(), factor.data(), shift.data(), 0.6f};
  reference::normalise(acc.data(), normalisation, want_own.data(), want.data(), kRows, kCs, true);
  path.normalise(acc.data(), normalisation, got_own.data(), got.data(), kRows, kCs, true);
  if (want != got || want_own != got_own) return "normalisation";
  reference::round_at_random(acc.data(), factor.data(), want.data(), kRows, kCs, dither, 3);
  path.round_at_random(acc.data(), factor.data(), got.data(), kRows, kCs, dither, 3);
  if (want != got) return "rounding at random";
  const std::vector<float> by_channel(kCs, 1e-3f);
  for (const float momentum : {0.0f, 0.9f}) {
    std::vector<float> want_values(factor), want_velocity(shift), got_values(factor), got_velocity(shift);
    const Descent by{0.125f, 0.05f, momentum, momentum == 0.0f ? 0.0f : 5e-4f, 9.0f};
    float* const none = nullptr;
    const float want_largest = reference::descend(
        want_values.data(), momentum == 0.0f ? none : want_velocity.data(), acc.data(), by_channel.data(), 1, kCs, by);
    const float got_largest =
        path.descend(got_values.data(), momentum == 0.0f ? none : got_velocity.data(), acc.data(), by_channel.data(),
                     got.data(), 1, kCs, by);
    path.quantise(want_values.data(), want.data(), kCs, by.out_scale);
    if (!std::equal(want.begin(), want.begin() + kCs, got.begin())) return "int8 of a descent";
    if (want_values != got_values || want_velocity != got_velocity || want_largest != got_largest) return "descent";
  }
  std::vector<std::int64_t> want_a(kCs), want_ab(kCs), got_a(kCs), got_ab(kCs);
  reference::channel_sums(a.data(), b.data(), b.data(), want_a.data(), want_ab.data(), kRows, kCs);
  path.channel_sums(a.data(), b.data(), b.data(), got_a.data(), got_ab.data(), kRows, kCs);
  if (want_a != got_a || want_ab != got_ab) return "channel sums";
  std::vector<std::int32_t> want_ends(2 * kCs), got_ends(2 * kCs);
  reference::channel_moments(acc.data(), 5, {want_a.data(), want_ab.data(), want_ends.data(), want_ends.data() + kCs},
                             kRows, kCs);
  path.channel_moments(acc.data(), 5, {got_a.data(), got_ab.data(), got_ends.data(), got_ends.data() + kCs}, kRows,
                       kCs);
  if (want_a != got_a || want_ab != got_ab || want_ends != got_ends) return "channel moments";
  reference::channel_largest(a.data(), b.data(), want_ends.data(), kRows, kCs);
  path.channel_largest(a.data(), b.data(), got_ends.data(), kRows, kCs);
  if (want_ends != got_ends) return "channel largest";
  reference::channel_largest32(acc.data(), want_ends.data(), kRows, kCs);
  path.channel_largest32(acc.data(), got_ends.data(), kRows, kCs);
  return want_ends == got_ends ? "" : "channel largest of accumulators";
}

std::string check_rows(const Path& path, std::mt19937& random) {
  constexpr int kRows = 21, kChannels = 41, kCs = 48;
  const auto a = random_tensor(random, kRows, kChannels, -127, 127);
  const auto b = random_tensor(random, kRows, kChannels, -127, 127);
  const auto p = random_tensor(random, kRows, kChannels, 0, 127);
  const auto numbers = [&](int size, double unit) {
    std::vector<double> made(size);
    for (double& one : made) one = unit * (double(random() % 2000001) - 1000000.0) / 1000000.0;
    return made;
  };
  const auto whole = [](std::vector<double> made) {
    for (double& one : made) one = std::nearbyint(one);
    return made;
  };
  auto gamma = numbers(kCs, 1.5), beta = numbers(kCs, 1e8);
  std::vector<double> counted(kCs, 1.0);
  for (int c = kChannels; c < kCs; ++c) gamma[c] = beta[c] = counted[c] = 0.0;
  const auto slope = numbers(kRows, 1e6), mean = numbers(kRows, 100.0), offset = whole(numbers(kRows, 1e8));
  const auto weight = whole(numbers(kCs, 1e6)), scale_x = whole(slope);
  std::vector<double> want_a(kRows), want_ab(kRows), got_a(kRows), got_ab(kRows);
  reference::row_sums(a.data(), b.data(), weight.data(), want_a.data(), want_ab.data(), kRows, kCs);
  path.row_sums(a.data(), b.data(), weight.data(), got_a.data(), got_ab.data(), kRows, kCs);
  if (want_a != got_a || want_ab != got_ab) return "row sums";
  std::vector<std::int8_t> want(a.size()), got(a.size());
  std::vector<std::int32_t> powers(255), table(256), scratch(kCs);
  for (int d = 0; d < 255; ++d) powers[d] = static_cast<std::int32_t>(std::ldexp(std::exp(-0.05 * d), 20));
  for (auto& one : table) one = int(random() % 4000000) - 2000000;
  const RowAffine by{gamma.data(), beta.data(), slope.data(), mean.data()};
  const RowAffineGradient gradient{gamma.data(), counted.data(), slope.data(), scale_x.data(), offset.data()};
  for (const Rounding rounding : {Rounding::kNearest, Rounding::kPseudoStochastic}) {
    Requantise how{22, rounding, false, b.data()};
    reference::row_affine(a.data(), by, want.data(), kRows, kCs, how);
    path.row_affine(a.data(), by, got.data(), kRows, kCs, how);
    if (want != got) return "row affine";
    reference::row_affine_gradient(a.data(), b.data(), gradient, want.data(), kRows, kCs, how);
    path.row_affine_gradient(a.data(), b.data(), gradient, got.data(), kRows, kCs, how);
    if (want != got) return "row affine gradient";
    reference::table_gradient(a.data(), b.data(), table.data(), want.data(), want.size(), how);
    path.table_gradient(a.data(), b.data(), table.data(), got.data(), got.size(), how);
    if (want != got) return "table gradient";
    how.shift = 7;
    reference::softmax(a.data(), powers.data(), want.data(), kRows, kChannels, how);
    path.softmax(a.data(), powers.data(), got.data(), kRows, kChannels, kCs, scratch.data(), how);
    if (want != got) return "softmax";
    const SoftmaxGradient of_softmax{13, 23170, 14};
    if (reference::softmax_gradient_largest(p.data(), b.data(), of_softmax, kRows, kCs) !=
        path.softmax_gradient_largest(p.data(), b.data(), of_softmax, kRows, kCs)) {
      return "softmax gradient, largest";
    }
    how.shift = 22;
    reference::softmax_gradient(p.data(), b.data(), of_softmax, want.data(), kRows, kCs, how);
    path.softmax_gradient(p.data(), b.data(), of_softmax, got.data(), kRows, kCs, how);
    if (want != got) return "softmax gradient";
  }
  std::vector<std::int32_t> want_sums(kRows * kCs), got_sums;
  for (auto& one : want_sums) one = int(random() % 4000000000u - 2000000000u);
  got_sums = want_sums;
  reference::scale_sums(want_sums.data(), want_sums.size(), 777777, 21);
  path.scale_sums(got_sums.data(), got_sums.size(), 777777, 21);
  if (want_sums != got_sums) return "scale sums";
  std::vector<std::int64_t> want_terms(kCs), want_dy(kCs);
  std::vector<double> terms(kCs), sum_dy(kCs);
  reference::row_scale_gradient(a.data(), b.data(), slope.data(), mean.data(), want_terms.data(), want_dy.data(), kRows,
                                kCs);
  path.row_scale_gradient(a.data(), b.data(), slope.data(), mean.data(), terms.data(), sum_dy.data(), kRows, kCs);
  const auto differ = [](const std::vector<std::int64_t>& wanted, const std::vector<double>& found) {
    return !std::equal(found.begin(), found.end(), wanted.begin());
  };
  return differ(want_terms, terms) || differ(want_dy, sum_dy) ? "row scale gradient" : "";
}

std::string check_pooling(const Path& path, std::mt19937& random) {
  ThreadPool pool(1);
  const PoolShape s{3, 5, 5, 20, 3, 3, 2, 2, 1, 1};
  const Pooling pooling(s);
  const auto x = random_tensor(random, std::size_t(s.in_h) * s.in_w * s.batch, s.channels, -127, 127);
  std::vector<std::int8_t> want(pooling.output_size()), got(pooling.output_size());
  std::vector<std::uint8_t> want_arg(want.size()), got_arg(want.size());
  reference::max_pool(s, x.data(), want.data(), want_arg.data());
  pooling.max(path, pool, x.data(), got.data(), got_arg.data());
  if (want != got || want_arg != got_arg) return "max pooling";
  std::vector<std::int8_t> want_dx(x.size()), got_dx(x.size());
  const Requantise how{1, Rounding::kNearest, false, nullptr};
  reference::max_pool_gradient(s, got.data(), got_arg.data(), want_dx.data(), how);
  pooling.max_gradient(path, pool, got.data(), got_arg.data(), got_dx.data(), how);
  if (want_dx != got_dx) return "max pooling gradient";
  const Requantise mean{14, Rounding::kNearest, false, nullptr};
  reference::average_pool(s, x.data(), 1820, want.data(), mean);
  pooling.average(path, pool, x.data(), 1820, got.data(), mean);
  return want == got ? "" : "average pooling";
}

std::string list_of_paths() {
  std::string names;
  const Paths paths = available_paths();
  for (int i = 0; i < paths.count; ++i) names += std::string(i == 0 ? "" : ", ") + paths.begin[i]->name;
  return names;
}

}  // namespace

std::string self_test(const Path& path) {
  std::mt19937 random(17);
  const struct {
    ConvShape shape;
    int batch_block;
    Algorithm algorithm = Algorithm::kDirect;
  } cases[] = {
      {{7, 6, 5, 19, 37, 3, 3, 1, 1, 1, 1, 1}, 0},   {{9, 7, 7, 3, 18, 5, 5, 2, 2, 2, 2, 1}, 0},
      {{5, 5, 4, 34, 34, 3, 3, 2, 2, 1, 1, 34}, 0},  {{13, 1, 1, 45, 10, 1, 1, 1, 1, 0, 0, 1}, 6},
      {{6, 6, 6, 8, 12, 3, 3, 1, 1, 0, 0, 2}, 4},    {{18, 3, 3, 66, 70, 3, 3, 1, 1, 1, 1, 1}, 5},
      {{7, 5, 9, 19, 37, 3, 3, 1, 1, 1, 1, 1}, 0, Algorithm::kWinograd},
      {{21, 4, 4, 34, 66, 3, 3, 1, 1, 0, 2, 1}, 0, Algorithm::kWinograd},
  };
  for (const auto& one : cases) {
    const std::string differs = check_convolution(path, random, one.shape, one.batch_block, one.algorithm);
    if (!differs.empty()) return differs;
  }
  for (const auto check : {check_elementwise, check_rows, check_pooling}) {
    const std::string differs = check(path, random);
    if (!differs.empty()) return differs;
  }
  return "";
}

const Path& choose_path(const std::string& name) {
  static std::mutex mutex;
  static std::map<const Path*, std::string> tested;

  std::string wanted = name;
  std::string source = "kernel";
  if (wanted.empty()) {
    const char* environment = std::getenv("SOCFLOWER_KERNEL");
    if (environment != nullptr) wanted = environment, source = "SOCFLOWER_KERNEL";
  }
  const Paths paths = available_paths();
  const Path* chosen = wanted.empty() ? paths.begin[paths.count - 1] : nullptr;
  for (int i = 0; i < paths.count; ++i) {
    if (wanted == paths.begin[i]->name) chosen = paths.begin[i];
  }
  if (chosen == nullptr) {
    throw std::invalid_argument(source + ": this machine has no kernel path '" + wanted + "'; it has " +
                                list_of_paths());
  }
  std::lock_guard<std::mutex> lock(mutex);
  const auto known = tested.find(chosen);
  const std::string differs = known == tested.end() ? tested[chosen] = self_test(*chosen) : known->second;
  if (!differs.empty()) {
    throw std::runtime_error(std::string("kernel path ") + chosen->name + " fails its self-test (" + differs +
                             " differs from the reference); choose another with SOCFLOWER_KERNEL");
  }
  return *chosen;
}

}  // namespace socflower::int8
