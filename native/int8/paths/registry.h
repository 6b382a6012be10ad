#pragma once

namespace socflower::int8 {

// Names of the paths compiled into this build, runnable on this machine or not, in the order of
// available_paths() (kernels.h).
const char* const* compiled_path_names(int* count);

}  // namespace socflower::int8
