#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/lint.sh [--fix] [tool] [files]: clang-format, ruff (check and format), mypy on the package, the
# include rule and the retired words; every file unless some are named. `scripts/lint.sh clang-tidy` is
# apart: it takes minutes, and needs the compile_commands.json of a build.

set -euo pipefail
cd "$(dirname "$0")/.."

usage="usage: scripts/lint.sh [--fix] [clang-format|ruff|mypy|includes|words|clang-tidy] [files]"
fix=
if [ "${1:-}" = --fix ]; then
  fix=1
  shift
fi
tools=(clang-format ruff mypy includes words)
case "${1:-}" in
  '') ;;
  clang-format | ruff | mypy | includes | words | clang-tidy) tools=("$1") && shift ;;
  -h | --help) echo "$usage" && exit ;;
  *)
    echo "lint: tool must be one of these, got $1; $usage" >&2
    exit 2
    ;;
esac
files=("$@")

# shellcheck source=scripts/setup_tools.sh
. scripts/setup_tools.sh

have() {
  command -v "$1" >/dev/null && return
  echo "lint: $1 is not installed ($2)" >&2
  return 1
}

native_sources() { find csrc tests/cpp benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh'; }

run_clang_format() {
  local program mode=(--dry-run -Werror)
  if ! program="$(ringattn_find_clang_format)"; then
    echo "lint: clang-format 14 is not installed (scripts/test.sh lint installs it)" >&2
    return 1
  fi
  [ -n "$fix" ] && mode=(-i)
  if [ ${#files[@]} -eq 0 ]; then
    mapfile -t files < <(native_sources)
  fi
  # Only where, not what: `scripts/lint.sh --fix clang-format` does the rest.
  "$program" --style=file "${mode[@]}" "${files[@]}" 2>&1 | { grep -o '^[^ ]*: error: .*' || true; }
}

run_ruff() {
  have ruff "scripts/test.sh lint installs it"
  local paths=("${files[@]}")
  [ ${#paths[@]} -eq 0 ] && paths=(.)
  if [ -n "$fix" ]; then
    ruff check --quiet --fix "${paths[@]}"
    ruff format --quiet "${paths[@]}"
  else
    ruff check --quiet "${paths[@]}"
    ruff format --quiet --check "${paths[@]}"
  fi
}

run_mypy() {
  have mypy "scripts/test.sh lint installs it"
  mypy --no-error-summary
}

run_includes() { python3 scripts/check_includes.py; }

run_words() { python3 scripts/check_words.py; }

# A limit on the whole run: a slow machine is no reason to fail.
run_clang_tidy() {
  have clang-tidy "apt install clang-tidy"
  local build status=0
  build="$(dirname "$(find build -maxdepth 2 -name compile_commands.json -print -quit)")"
  [ ${#files[@]} -eq 0 ] && mapfile -t files < <(find csrc -name '*.cpp')
  printf '%s\0' "${files[@]}" |
    timeout "${RINGATTN_TIDY_SECONDS:-900}" xargs -0 -n 1 -P "$(nproc)" clang-tidy --quiet -p "$build" \
      2> >(grep -v 'warnings generated\|Suppressed\|Use -header-filter' >&2) || status=$?
  if [ $status -eq 124 ]; then
    echo "lint: clang-tidy stopped at its time limit" >&2
    status=0
  fi
  return $status
}

failed=()
for tool in "${tools[@]}"; do
  # Note: what is called in a condition, `||` included, runs without `set -e`, a subshell too.
  set +e
  (set -e; "run_${tool//-/_}")
  status=$?
  set -e
  if [ $status -eq 0 ]; then
    echo "lint: $tool ok"
  else
    failed+=("$tool")
  fi
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "lint: failed: ${failed[*]}" >&2
  exit 1
fi
