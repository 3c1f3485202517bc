#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/demo.sh [--ranks W] [--bytes N] [options of `python -m ringattn generate`]
#
# The main job, whole: a long text is split over all GPUs (without any: over two CPU processes), goes through
# the ring, and is continued by the small language model that comes with the package. Shows who owned which
# tokens, the time to the first token and for each token, what every ring step cost, and that one rank
# alone writes the same; the exit status says whether it did.

set -euo pipefail
cd "$(dirname "$0")/.."

ranks=
bytes=6000
while [ $# -gt 0 ]; do
  case "$1" in
    --ranks) ranks="${2:-none}" && shift $(($# > 1 ? 2 : 1)) ;;
    --bytes) bytes="${2:-none}" && shift $(($# > 1 ? 2 : 1)) ;;
    -h | --help) sed -n '4,9s/^# \{0,1\}//p' "$0" && exit ;;
    *) break ;;
  esac
done

if [[ -n "$ranks" && ! "$ranks" =~ ^[1-9][0-9]*$ ]]; then
  echo "demo: --ranks must be a number from 1 on, got $ranks; usage: $(sed -n '4s/^# //p' "$0")" >&2
  exit 2
fi
if [[ ! "$bytes" =~ ^[1-9][0-9]*$ ]]; then
  echo "demo: --bytes must be a number from 1 on, got $bytes; usage: $(sed -n '4s/^# //p' "$0")" >&2
  exit 2
fi

# shellcheck source=scripts/setup.sh
. scripts/setup.sh none library-here
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python examples/demo_prompt.py --bytes "$bytes" >"$folder/prompt.txt"

if [ -z "$ranks" ]; then
  gpus="$(python -c 'import torch, ringattn._library as lib
print(torch.cuda.device_count() if "cuda" in lib.DEVICES else 0)')"
  ranks=$((gpus > 0 ? gpus : 2))
fi
# CPU ranks share the cores; torchrun would give each a single thread.
threads=$(($(nproc) / ranks))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"

echo "demo: $ranks ranks, a text of $(wc -c <"$folder/prompt.txt") bytes"
python -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m ringattn generate \
  --prompt-file "$folder/prompt.txt" --warmup 1 --compare --json "$folder/result.json" "$@"

python - "$folder/result.json" <<'PYTHON'
import json, sys
result = json.load(open(sys.argv[1]))
print("\nthe prompt's way through the ring, all layers together, in ms:")
print("rank  step  block of rank  attention  transfer    wait")
for rank in result["ranks"]:
    for number, step in enumerate(rank["steps"]):
        times = (step[f"{name}_ms"] for name in ("attention", "transfer", "wait"))
        print(f"{rank['rank']:4}  {number:4}  {step['source']:13}  {{:9.1f}}  {{:8.1f}}  {{:6.1f}}".format(*times))
PYTHON
