#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/demo_heterogeneous.sh [--ranks W] [options of examples/heterogeneous_demo.py]
#
# What unequal ranks cost, and what planning gives back, in under two minutes: a ring over all GPUs
# (without at least two: over two CPU processes) whose last rank is slowed down, under the even, uneven,
# lut, formula, planned and rebalanced splits. Prints a table, draws build/heterogeneous_demo.png.

set -euo pipefail
cd "$(dirname "$0")/.."

ranks=
while [ $# -gt 0 ]; do
  case "$1" in
    --ranks) ranks="${2:-none}" && shift $(($# > 1 ? 2 : 1)) ;;
    -h | --help) sed -n '4,8s/^# \{0,1\}//p' "$0" && exit ;;
    *) break ;;
  esac
done

if [[ -n "$ranks" && ! "$ranks" =~ ^[1-9][0-9]*$ ]]; then
  echo "demo_heterogeneous: --ranks must be a number from 1 on, got $ranks; usage: $(sed -n '4s/^# //p' "$0")" >&2
  exit 2
fi

# shellcheck source=scripts/setup.sh
. scripts/setup.sh study library-here
if [ -z "$ranks" ]; then
  gpus="$(python -c 'import torch, ringattn._library as lib
print(torch.cuda.device_count() if "cuda" in lib.DEVICES else 0)')"
  ranks=$((gpus > 1 ? gpus : 2))
fi
# CPU ranks share the cores; torchrun would give each a single thread.
threads=$(($(nproc) / ranks))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"

mkdir -p build
python -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
  examples/heterogeneous_demo.py --figure build/heterogeneous_demo.png "$@"
