#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/torch_venv.sh RELEASE: prints the folder build/venv-torch-RELEASE, a virtual environment with that
# torch (2.11: the newest 2.11.x; 2.12.1: that one) and what builds ringattn. It is made if it is not there.
# The active environment lends its Python and stays as it is. For scripts/test_torch.sh and
# scripts/build_wheel.sh; with --tested it prints the releases that the package is tested with.

set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  -h | --help) sed -n '4,7s/^# \{0,1\}//p' "$0" && exit ;;
  --tested)
    python3 -c 'import runpy; print(*runpy.run_path("python/ringattn/_torch_releases.py")["TESTED"])'
    exit
    ;;
esac
if [ $# -ne 1 ] || [[ ! "$1" =~ ^[0-9]+\.[0-9]+(\.[0-9]+)?$ ]]; then
  echo "torch_venv: torch must be a release as 2.11 or a version as 2.12.1, got ${*:-none}" >&2
  exit 2
fi

version="$1"
[[ "$version" == *.*.* ]] || version="$version.*"
venv="$PWD/build/venv-torch-$1"
if [ ! -e "$venv/ready" ]; then
  echo "torch_venv: installing torch $version into build/venv-torch-$1 (about 5 GB)" >&2
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip --quiet --disable-pip-version-check install \
    "torch==$version" 'scikit-build-core>=0.10' ninja 'cmake>=3.25' >&2
  touch "$venv/ready"
fi
echo "$venv"
