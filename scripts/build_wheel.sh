#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/build_wheel.sh [--torch RELEASE...] [--out DIR]: one wheel for the python3 that is active.
#   --torch  releases of torch that it serves (2.11 2.12); without it all that the package is tested with
#   --out    where the wheel goes (dist)
# The kernels are compiled once, beside the first release, the glue beside each, in environments that are
# removed afterwards (about 5 GB at a time; one that was there stays). RINGATTN_CUDA=OFF leaves the kernels out.

set -euo pipefail
cd "$(dirname "$0")/.."

usage="usage: $(sed -n '4s/^# \([^:]*\):.*/\1/p' "$0")"
releases=()
out=dist
while [ $# -gt 0 ]; do
  case "$1" in
    --torch)
      shift
      while [ $# -gt 0 ] && [[ "$1" != -* ]]; do releases+=("$1") && shift; done
      ;;
    --out)
      out="${2:-}"
      if [ -z "$out" ]; then
        echo "build_wheel: --out must be followed by a folder, got none; $usage" >&2
        exit 2
      fi
      shift 2
      ;;
    -h | --help) sed -n '4,8s/^# \{0,1\}//p' "$0" && exit ;;
    *)
      echo "build_wheel: options must be of these, got $1; $usage" >&2
      exit 2
      ;;
  esac
done
for release in "${releases[@]}"; do
  if [[ ! "$release" =~ ^[0-9]+\.[0-9]+(\.[0-9]+)?$ ]]; then
    echo "build_wheel: --torch must be followed by releases as 2.12, got $release; $usage" >&2
    exit 2
  fi
done
[ ${#releases[@]} -gt 0 ] || read -ra releases <<<"$(scripts/torch_venv.sh --tested)"

work="$PWD/build/wheel"
files="$work/files/ringattn" # what CMake installs: the wheel's compiled files
kernels="$files/libringattn_kernels.so"
rm -rf "$work/files" "$work/packed"
mkdir -p "$work" "$out"

# Builds and installs below $files what one release of torch needs; kernels that are there are linked.
build_for() (
  venv="$1" cuda="$3" build="$work/cmake-torch-$2"
  export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
  cmake -S . -B "$build" -G Ninja -DPython_EXECUTABLE="$venv/bin/python" -DRINGATTN_CUDA="$cuda" \
    -DRINGATTN_KERNELS="$([ ! -e "$kernels" ] || echo "$kernels")" &&
    cmake --build "$build" &&
    cmake --install "$build" --component python --strip --prefix "$work/files"
)

# Everything is built: only the wheel's metadata and its archive are left to make.
pack() {
  "$1/bin/python" -m pip --quiet --disable-pip-version-check wheel . --no-build-isolation --no-deps \
    --wheel-dir "$work/packed" --config-settings=build-dir="$work/cmake-packed" \
    --config-settings=cmake.define.RINGATTN_PREBUILT="$files"
}

cuda="${RINGATTN_CUDA:-AUTO}"
for release in "${releases[@]}"; do
  kept="$([ ! -d "build/venv-torch-$release" ] || echo yes)"
  venv="$(scripts/torch_venv.sh "$release")"
  echo "build_wheel: building for torch $release"
  if ! build_for "$venv" "$release" "$cuda" >"$work/torch-$release.log" 2>&1; then
    tail -n 60 "$work/torch-$release.log" >&2
    exit 1
  fi
  [ "$release" != "${releases[-1]}" ] || pack "$venv"
  [ -n "$kept" ] || rm -rf "$venv"
  # The first build decides: with kernels for every release, or without for any.
  if [ -e "$kernels" ]; then cuda=ON; else cuda=OFF; fi
done
python3 scripts/check_wheel.py "$work"/packed/*.whl
mv "$work"/packed/*.whl "$out"
echo "build_wheel: the wheel is in $out"
