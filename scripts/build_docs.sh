#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/build_docs.sh [--out DIR]: builds the documentation, API reference included, as HTML in DIR
# (default: build/docs). Warnings are errors: a link or a reference in a docstring that leads nowhere fails.

set -euo pipefail
cd "$(dirname "$0")/.."

out=build/docs
case "${1:-}" in
  --out) out="${2:?build_docs: --out must be followed by a folder, got none; usage: $(sed -n '4s/^# //p' "$0")}" ;;
  -h | --help) sed -n '4,5s/^# \{0,1\}//p' "$0" && exit ;;
  '') ;;
  *)
    echo "build_docs: options must be of these, got $1; usage: $(sed -n '4s/^# //p' "$0")" >&2
    exit 2
    ;;
esac

# shellcheck source=scripts/setup.sh
. scripts/setup.sh docs
# A fresh environment: Sphinx does not repeat the warnings of pages that it has read before.
python -m sphinx --builder html --conf-dir docs --doctree-dir "$out/.doctrees" \
  --fresh-env --fail-on-warning --keep-going --quiet . "$out"
echo "built $out/docs/README.html"
