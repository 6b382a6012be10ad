#!/bin/sh
# Builds the kernels for ARM with a cross compiler and runs kernel_test in an emulator: once on a processor with
# every extension (all ARM paths are tested), then on models that lack some (the choice at load).
set -eu

cd "$(dirname "$0")/../.."
compiler=aarch64-linux-gnu-g++
emulator=qemu-aarch64

if ! command -v $compiler > /dev/null || ! command -v $emulator > /dev/null; then
  echo "run_arm.sh needs a cross compiler and an emulator: apt-get install g++-aarch64-linux-gnu qemu-user" >&2
  exit 2
fi

cmake -S native -B build/arm -DSOCFLOWER_PYTHON=OFF -DSOCFLOWER_KERNEL_TEST=ON \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$compiler
cmake --build build/arm --target kernel_test --parallel "$(nproc)"

# Outside Debian the cross compiler may keep its C library elsewhere and say where.
root=$($compiler -print-sysroot)
if [ ! -e "$root/lib/ld-linux-aarch64.so.1" ]; then root=/usr/aarch64-linux-gnu; fi

# Every path on a processor that has all extensions, then the best one of those that lack some; one beside the other.
paths=$($emulator -cpu max -L "$root" build/arm/kernel_test --paths)
export emulator root
{
  for path in $paths; do echo "max $path"; done
  echo "cortex-a76 neon-sdot"
  echo "cortex-a53 neon"
} | xargs -L 1 -P "$(nproc)" sh -c '
  found=$($emulator -cpu "$0" -L "$root" build/arm/kernel_test "$1") && status=0 || status=$?
  echo "$0: $found"
  exit $status'
