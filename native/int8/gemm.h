// Matrix products of int8, exactly, on the chosen kernel path, with threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "thread_pool.h"

namespace socflower::int8 {

// out[m,n] = sum_k lhs[m,k] * rhs[n,k], row-major, exactly. 0 < depth <= kMaxExactDepth.
// activations: lhs lies in 0..127.
void gemm(const Path& path, ThreadPool& pool, const std::int8_t* lhs, bool activations, const std::int8_t* rhs,
          std::int32_t* out, int rows, int cols, int depth, void* workspace);
std::size_t gemm_workspace_bytes(const Path& path, int rows, int cols, int depth);

}  // namespace socflower::int8
