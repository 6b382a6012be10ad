// A step of SGD on FP32 weights.
#pragma once

namespace socflower::int8 {

// The mean gradient is an int32 times the scale of its channel times `inverse`, in float32. New values become int8 in
// units of 1 / out_scale.
struct Descent {
  float inverse, learning_rate, momentum, weight_decay, out_scale = 1.0f;
};

}  // namespace socflower::int8
