// A step of SGD on FP32 weights.
#pragma once

namespace socflower::int8 {

// The mean gradient is an int32 times the scale of its channel times `inverse`, in float32.
struct Descent {
  float inverse, learning_rate, momentum, weight_decay;
};

}  // namespace socflower::int8
