// Which kernel path runs: the best that this machine has, unless SOCFLOWER_KERNEL names another.
#pragma once

#include <string>

#include "kernels.h"

namespace socflower::int8 {

// The path of that name, or for "" the one that SOCFLOWER_KERNEL names, or else the best. Its self-test has
// passed: it runs once per path and process. Throws std::invalid_argument, listing the paths there are, on a
// name that this build or machine lacks, and std::runtime_error when the self-test fails.
const Path& choose_path(const std::string& name);

// Compares the path with reference.h on small shapes of every kind. Returns "" or what differs.
std::string self_test(const Path& path);

}  // namespace socflower::int8
