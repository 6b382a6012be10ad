// What the functions over rows of channels (rows.h) take beside their tensors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace socflower::int8 {

// What channel_moments finds, a number for each channel.
struct ChannelMoments {
  std::int64_t *sum, *squares;
  std::int32_t *least, *most;
};

// Two functions of an accumulator in channel c, both int8 in the end: acc * own_scale[c] + own_offset[c], and
// (acc * scale[c] + offset[c]) * inverse.
struct Normalisation {
  const float *own_scale, *own_offset, *scale, *offset;
  float inverse;
};

// Normalisation of each row by numbers of its own, as of a LayerNorm. gamma and beta: one for each of cs channels, 0
// for those of padding. slope and mean: one for each row.
struct RowAffine {
  const double *gamma, *beta, *slope, *mean;

  RowAffine from_row(std::size_t row) const { return {gamma, beta, slope + row, mean + row}; }
};

// Its gradient. gamma and counted: for each channel; counted is 0 for those of padding, else 1. The others: one for
// each row, scale_x and offset whole numbers.
struct RowAffineGradient {
  const double *gamma, *counted, *gain, *scale_x, *offset;

  RowAffineGradient from_row(std::size_t row) const {
    return {gamma, counted, gain + row, scale_x + row, offset + row};
  }
};

// The gradient of a softmax in units of p * p * dy / factor, where dy has `up` bits less than p * dy. Its integers of
// up to 44 bits lose `drop` bits, rounded half away from zero.
struct SoftmaxGradient {
  int up, factor, drop;
};

}  // namespace socflower::int8
