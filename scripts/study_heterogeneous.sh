#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/study_heterogeneous.sh [--seconds N] [--out FOLDER] [--transport NAME]
#
# The study of unequal ranks, whole: four ranks with one, two and three slow ones, two ranks at 50, 10, 25 and 90 %,
# speeds that change, a slow rank at every position, whole layers; then figures. On GPUs under MPS; without two
# of them small, on the CPU. In order of importance: what is not done after N seconds (3600 unless told) is left
# out, and the same command goes on from there. Results: FOLDER (build/study unless told).
# Needs an installed ringattn (scripts/setup.sh study).

set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

limit=3600 out=build/study transport=auto
while [ $# -gt 0 ]; do
  case "$1" in
    --seconds) limit="$2" && shift 2 ;;
    --out) out="$2" && shift 2 ;;
    --transport) transport="$2" && shift 2 ;;
    *) sed -n '4,10s/^# \{0,1\}//p' "$0" && exit ;;
  esac
done
mkdir -p "$out"

gpus="$(python3 -c 'import torch; print(torch.cuda.device_count())')"
if [ "$gpus" -ge 2 ]; then
  options=(--device cuda --warmup 1 --cell-seconds 5)
  first=8192,32768,65536 more=4096,16384,131072 middle=32768 layers=16384,65536
else
  options=(--device cpu --cell-seconds 8 --settle-seconds 0.5 --heads 8 --kv-heads 2)
  first=1024,4096 more=2048 middle=2048 layers=2048
fi
options+=(--transport "$transport")

# study NAME ARGUMENTS...: one command of the benchmark, within the time that is left.
study() {
  local name="$1" left=$((limit - SECONDS))
  shift
  if [ "$left" -le 0 ]; then
    echo "study: $name left out, no time is left"
    return
  fi
  timeout -k 10 "$left" python3 benchmarks/heterogeneous.py "$@" "${options[@]}" ||
    echo "study: $name is not complete" >&2
}

four=(--ranks 4 --slow-ranks "1,2,3" --percentages "50,10" --seq-lens "16384,65536,131072" --out "$out/ranks4")
[ "$gpus" -ge 4 ] && study "four ranks" sweep "${four[@]}"
study "two ranks" sweep --percentages 50,10,25,90 --seq-lens "$first" --out "$out/ranks2"
study "changing speeds" rebalance --seq-lens "$middle" --out "$out/rebalance"
study "two ranks, all lengths" sweep --percentages 90,50,25,10 --seq-lens "$more" --out "$out/ranks2"
study "two ranks, every position" sweep --positions every --percentages 90,50,25,10 --seq-lens "$first" \
  --out "$out/ranks2"
study "layers" sweep --what layer --percentages 50,10 --seq-lens "$layers" --out "$out/ranks2"

# The tables of everything that is there, then the figures.
python3 benchmarks/heterogeneous.py sweep --report-only --positions every --what attention,layer \
  --percentages 90,50,25,10 --seq-lens "$first,$more" "${options[@]}" --out "$out/ranks2"
[ -f "$out/ranks4.cells.jsonl" ] &&
  python3 benchmarks/heterogeneous.py sweep --report-only "${four[@]}" "${options[@]}"
for stem in ranks2 ranks4; do
  [ -f "$out/$stem.csv" ] && python3 benchmarks/plot.py "$out/$stem.csv" --out "$out/figures/$stem"
done
[ -f "$out/rebalance.csv" ] && python3 benchmarks/plot.py --trace "$out/rebalance.csv" --out "$out/figures"
