#!/bin/sh
# Builds kernel_test for this machine with the address and undefined behaviour sanitizers and runs it.
set -eu

cd "$(dirname "$0")/../.."

cmake -S native -B build/sanitized -DSOCFLOWER_PYTHON=OFF -DSOCFLOWER_KERNEL_TEST=ON -DCMAKE_BUILD_TYPE=Debug \
  -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer" \
  -DSOCFLOWER_OPTIMISATION=-O1
cmake --build build/sanitized --target kernel_test --parallel "$(nproc)"
# The paths one beside the other: each takes a minute or two.
build/sanitized/kernel_test --paths | xargs -n 1 -P "$(nproc)" build/sanitized/kernel_test
