#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/test.sh [part...]: builds what changed and runs every test, or only the parts named.
#   lint    clang-format, ruff, mypy, and the rule who includes what
#   cpp     the C++ tests (Catch2), CUDA kernels compiled where nvcc is
#   spills  registers and spills of every CUDA kernel
#   tidy    clang-tidy (minutes; only when named)
#   python  pytest; what follows `--` goes to it: scripts/test.sh python -- -k partition
# JUnit files go to build/test-results.

set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

parts=()
while [ $# -gt 0 ]; do
  case "$1" in
    lint | cpp | spills | tidy | python) parts+=("$1") ;;
    --) shift && break ;;
    -h | --help) sed -n '4,10s/^# \{0,1\}//p' "$0" && exit ;;
    *)
      echo "test: part must be of lint, cpp, spills, tidy, python, got $1; usage: scripts/test.sh [part...]" >&2
      exit 2
      ;;
  esac
  shift
done
[ ${#parts[@]} -eq 0 ] && parts=(lint cpp spills python)
pytest_arguments=("$@")

extras="test"
[[ " ${parts[*]} " == *" lint "* ]] && extras="test,lint"
# shellcheck source=scripts/setup.sh
. scripts/setup.sh "$extras" || exit 1
build="$(ringattn_build_dir)"
results="$PWD/build/test-results"
mkdir -p "$results"

run_lint() { scripts/lint.sh; }

run_cpp() {
  local log=build/cpp.log
  if ! { cmake -S . -B "$build" -DRINGATTN_BUILD_TESTS=ON && cmake --build "$build"; } >"$log" 2>&1; then
    tail -n 60 "$log"
    return 1
  fi
  ctest --test-dir "$build" --output-on-failure --output-junit "$results/cpp.xml"
}

run_spills() { python scripts/check_spills.py "$build"; }

run_tidy() { scripts/lint.sh clang-tidy; }

run_python() {
  python -m pytest --junit-xml="$results/python.xml" ${pytest_arguments[@]+"${pytest_arguments[@]}"}
}

failed=()
for part in "${parts[@]}"; do
  echo "== $part"
  start=$SECONDS
  if "run_$part"; then outcome=ok; else outcome=FAILED && failed+=("$part"); fi
  # pytest ends with its own line of results and time: nothing is printed after it when all is well.
  if [ "$part" != python ] || [ ${#failed[@]} -gt 0 ]; then
    echo "== $part: $outcome, $((SECONDS - start)) s"
  fi
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "test: failed: ${failed[*]}" >&2
  exit 1
fi
