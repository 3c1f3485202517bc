#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/test_torch.sh RELEASE... [-- PYTEST_ARGUMENT...]: the Python tests with other releases of torch.
#   RELEASE  as 2.12 or 2.12.1; oldest, newest or all of those that the package is tested with
# Builds for the CPU in build/venv-torch-RELEASE, which is made once (about 5 GB) and kept; the active
# environment stays as it is. One closing line for each release; the exit status is 1 if one failed.

set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

usage="usage: $(sed -n '4s/^# //p' "$0")"
read -ra tested <<<"$(scripts/torch_venv.sh --tested)"
releases=()
while [ $# -gt 0 ]; do
  case "$1" in
    --) shift && break ;;
    -h | --help) sed -n '4,7s/^# \{0,1\}//p' "$0" && exit ;;
    oldest) releases+=("${tested[0]}") ;;
    newest) releases+=("${tested[-1]}") ;;
    all) releases+=("${tested[@]}") ;;
    [0-9]*.[0-9]*) releases+=("$1") ;;
    *)
      echo "test_torch: release must be as 2.12, oldest, newest or all, got $1; $usage" >&2
      exit 2
      ;;
  esac
  shift
done
if [ ${#releases[@]} -eq 0 ]; then
  echo "test_torch: releases must be named, got none; $usage" >&2
  exit 2
fi

# In a subshell each, so that nothing of one environment reaches the next.
test_release() (
  release="$1"
  shift
  venv="$(scripts/torch_venv.sh "$release")" || exit 1
  export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH" RINGATTN_CUDA=OFF
  unset PYTHONPATH PYTHONHOME
  log="build/test_torch-$release.log"
  if ! python -m pip --disable-pip-version-check install --no-build-isolation --editable '.[test]' \
    --config-settings=build-dir="build/cmake-torch-$release" \
    --config-settings=cmake.define.CMAKE_UNITY_BUILD=ON >"$log" 2>&1; then # a third of the time
    tail -n 60 "$log"
    exit 1
  fi
  python -m pytest --numprocesses auto "$@" # tests/python/conftest.py chooses the number of workers
)

failed=()
summary=()
for release in "${releases[@]}"; do
  echo "== torch $release"
  start=$SECONDS
  if test_release "$release" "$@"; then outcome=ok; else outcome=FAILED && failed+=("$release"); fi
  summary+=("test_torch: torch $release: $outcome, $((SECONDS - start)) s")
done
printf '%s\n' "${summary[@]}"
[ ${#failed[@]} -eq 0 ]
