#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer; where a GPU is, those of
# a build with kernels under compute-sanitizer's memcheck too.

set -euo pipefail
if [ $# -gt 0 ]; then
  case "$1" in -h | --help) sed -n '4,5s/^# \{0,1\}//p' "$0" && exit ;; esac
  echo "usage: scripts/sanitize.sh" >&2
  exit 2
fi
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh none library catch2

build=build/sanitize
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DRINGATTN_CUDA=OFF \
  -DRINGATTN_BUILD_PYTHON=OFF -DRINGATTN_BUILD_TESTS=ON -DRINGATTN_SANITIZE=address,undefined \
  -DPython_EXECUTABLE="$(command -v python)"
cmake --build "$build"
# torch is not instrumented: what it allocates at start and keeps is not ours, and its types seem odd to
# the checks of virtual calls.
ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:strict_init_order=0 \
  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
  ctest --test-dir "$build" --output-on-failure

if ! command -v compute-sanitizer >/dev/null || ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "sanitize: no GPU or no compute-sanitizer here, the CUDA tests were left out"
  exit
fi
build="$(ringattn_build_dir)"
cmake -S . -B "$build" -DRINGATTN_BUILD_TESTS=ON
cmake --build "$build"
while read -r test; do
  compute-sanitizer --tool memcheck --error-exitcode 1 "$test"
done < <(find "$build/tests/cpp" -maxdepth 1 -type f -executable)
