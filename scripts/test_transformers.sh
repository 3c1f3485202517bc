#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/test_transformers.sh VERSION... [-- PYTEST_ARGUMENT...]: the tests of models of Hugging Face transformers
# with other versions of it, on two ranks.
# A version is installed into build/transformers-VERSION, which is made once (about 300 MB) and kept; the
# active environment, where ringattn must be installed, stays as it is. The exit status is 1 if one failed.

set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

usage="usage: $(sed -n '4s/^# //p' "$0")"
versions=()
while [ $# -gt 0 ]; do
  case "$1" in
    --) shift && break ;;
    -h | --help) sed -n '4,7s/^# \{0,1\}//p' "$0" && exit ;;
    [0-9]*.[0-9]*) versions+=("$1") ;;
    *)
      echo "test_transformers: version must be as 5.23.0, got $1; $usage" >&2
      exit 2
      ;;
  esac
  shift
done
if [ ${#versions[@]} -eq 0 ]; then
  echo "test_transformers: versions must be named, got none; $usage" >&2
  exit 2
fi

# transformers needs no torch of its own: pip installs nothing that the environment's torch is shadowed by.
failed=()
for version in "${versions[@]}"; do
  echo "== transformers $version"
  folder="$PWD/build/transformers-$version"
  if [ ! -e "$folder/ready" ]; then
    rm -rf "$folder"
    if ! python -m pip --quiet --disable-pip-version-check install --target "$folder" "transformers==$version"; then
      failed+=("$version") && continue # else pytest would take the version of the environment
    fi
    touch "$folder/ready"
  fi
  PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}" python -m pytest --numprocesses auto \
    -k "not cpu-1 and not cpu-3 and not cpu-4" tests/python/integrations/test_transformers*.py "$@" ||
    failed+=("$version")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "test_transformers: failed: ${failed[*]}" >&2
  exit 1
fi
