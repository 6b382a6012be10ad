// Weighted aggregation of float32 models. The contract; bindings.cc checks it.
#pragma once

#include <cstddef>

namespace socflower {

// out[i] = (float) (((0 + weights[0] * inputs[0][i]) + weights[1] * inputs[1][i]) + ...), i in [0, length).
//
// Every product and every sum is one IEEE double operation, in the order of the inputs, and there is one
// rounding to float at the end: the same bits for every vector width, block size and machine. A zero weight
// still multiplies, so a NaN or an infinity in any input reaches the output.
//
// inputs: num_inputs pointers to `length` float32 each, at any byte alignment (they are often views into
// serialised messages); out: `length` float32 at any byte alignment. out must not overlap any input.
// num_inputs = 0 gives zeros. Touches no Python object, so it may run without the interpreter's lock.
void weighted_sum(unsigned char* out, const unsigned char* const* inputs, const double* weights,
                  std::size_t num_inputs, std::size_t length) noexcept;

// Index of the first of `length` float32 (any byte alignment) that is NaN or infinite; `length` if none is.
// Looks at exponent bits only, so no compiler flag can optimise it away and denormals count as finite.
std::size_t first_non_finite(const unsigned char* x, std::size_t length) noexcept;

}  // namespace socflower
