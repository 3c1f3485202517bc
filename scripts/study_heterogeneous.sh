#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/study_heterogeneous.sh [--seconds N] [--out FOLDER] [--transport NAME] [--ranks-per-gpu N]
#
# The study of unequal ranks, whole, in order of importance: four ranks with one and two slow ones, two ranks with
# one (beside an even contiguous split: ranks2_even), speeds that change, whole layers, another position, 90 %; then
# what takes longer: every split, every position, three slow ranks, all lengths. On GPUs under MPS, one for each rank
# unless N are to share one; without room for two ranks small, on the CPU. What is not done after N seconds (3600
# unless told) is left out, and the same command goes on from there. Results: FOLDER (build/study unless told). The
# exit status says whether a part failed. Needs an installed ringattn (scripts/setup.sh study).

set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

refuse() {
  echo "study: $1; usage: $(sed -n '4s/^# //p' "$0")" >&2
  exit 2
}

limit=3600 out=build/study transport=auto per_gpu=1
while [ $# -gt 0 ]; do
  case "$1" in
    --seconds | --out | --transport | --ranks-per-gpu)
      [ -n "${2:-}" ] || refuse "$1 must be followed by a value, got none"
      ;;&
    --seconds) limit="$2" ;;
    --out) out="$2" ;;
    --transport) transport="$2" ;;
    --ranks-per-gpu) per_gpu="$2" ;;
    -h | --help) sed -n '4,11s/^# \{0,1\}//p' "$0" && exit ;;
    *) refuse "options must be of these, got $1" ;;
  esac
  shift 2
done
[[ "$limit" =~ ^[1-9][0-9]*$ ]] || refuse "--seconds must be a number from 1 on, got $limit"
[[ "$per_gpu" =~ ^[1-9][0-9]*$ ]] || refuse "--ranks-per-gpu must be a number from 1 on, got $per_gpu"
mkdir -p "$out" || exit 1

gpus="$(python3 -c 'try:
    import matplotlib, ringattn, torch, tqdm
except ImportError as error:
    raise SystemExit(f"study: python3 must have what scripts/setup.sh study installs, got: {error}")
print(torch.cuda.device_count())')" || exit 1
ranks=$((gpus * per_gpu)) # that have a GPU, or a part of one
if [ "$ranks" -ge 2 ]; then
  options=(--device cuda --ranks-per-gpu "$per_gpu" --warmup 0 --cell-seconds 6 --settle-seconds 0.5)
  short=16384 long=65536 longest=131072 middle=32768 more=4096,8192,32768,131072
else
  options=(--device cpu --cell-seconds 8 --settle-seconds 0.5 --heads 8 --kv-heads 2)
  short=1024 long=4096 longest=8192 middle=2048 more=2048
fi
options+=(--transport "$transport")
# Without the splits of an earlier study, which take as long again: those are in stems of their own.
main=(--strategies "even_zigzag,planned,rebalanced")

# part STEM ARGUMENTS...: one more study of the next command.
parts=()
part() {
  local stem="$1" study="$2"
  shift 2
  [ ${#parts[@]} -gt 0 ] && parts+=(--then)
  parts+=("$study" "$@" "${options[@]}" --out "$out/$stem")
}
four() {
  [ "$ranks" -lt 4 ] || part ranks4 sweep --ranks 4 "${main[@]}" "$@"
}
two() { part ranks2 sweep "${main[@]}" "$@"; }
# As many requests as beliefs average are watched first: what is made of profiles is no change of speed.
changing() { part rebalance rebalance --seq-lens "$middle" --scenarios "$1" --watched 40; }

# measure NAME: the parts so far, within the time that is left. Told to end, a command writes its tables.
failed=()
measure() {
  local left=$((limit - SECONDS)) status=0
  if [ "$left" -le 0 ]; then
    echo "study: $1 left out, no time is left"
  else
    timeout -k 60 "$left" python3 benchmarks/heterogeneous.py "${parts[@]}" || status=$?
    if [ "$status" -eq 124 ]; then # its time was over, which is no failure
      echo "study: $1 is not complete" >&2
    elif [ "$status" -ne 0 ]; then
      failed+=("$1")
    fi
  fi
  parts=()
}

# Cells of the same ranks share a start, which is where the first of them stands. Equal ranks are in every sweep.
four --sets "100,100,100,50" --seq-lens "$short,$long,$longest"
two --sets "100,10" --seq-lens "$short,$long"
part ranks2_even sweep --strategies "even,even_zigzag,planned,rebalanced" --sets "100,10" --seq-lens "$long"
four --sets "100,100,100,10;100,100,50,50" --seq-lens "$short,$long"
changing drift,steady
two --sets "100,10" --what layer --seq-lens "$middle"
two --sets "100,50" --seq-lens "$short,$long"
four --sets "100,100,100,25;100,100,25,25" --seq-lens "$short,$long"
two --sets "100,25" --seq-lens "$short,$long"
four --sets "50,100,100,100" --seq-lens "$short"
two --sets "100,90" --seq-lens "$short,$long"
measure "what decides"

four --sets "100,100,100,90;100,100,10,10;100,50,50,50;100,10,10,10" --seq-lens "$short,$long"
four --sets "100,100,100,25;100,100,100,10;100,100,50,50;100,50,50,50" --seq-lens "$longest"
changing flapping,hiccups
two --percentages 90,50,25,10 --what layer --seq-lens "$short,$long"
two --percentages 90,50,25,10 --seq-lens "$more"
two --percentages 90,50,25,10 --positions every --seq-lens "$short,$long"
four --percentages 50,10 --positions every --seq-lens "$short,$long"
part splits2 sweep --percentages 10,50,25,90 --seq-lens "$middle,$long"
[ "$ranks" -lt 4 ] || part splits4 sweep --ranks 4 --slow-ranks 1,2,3 --percentages 50,10 --seq-lens "$short,$long"
measure "the rest"

for stem in ranks2 ranks2_even ranks4 splits2 splits4; do
  if [ -f "$out/$stem.csv" ]; then
    python3 benchmarks/plot.py "$out/$stem.csv" --out "$out/figures/$stem" || failed+=("figures of $stem")
  fi
done
if [ -f "$out/rebalance.csv" ]; then
  python3 benchmarks/plot.py --trace "$out/rebalance.csv" --out "$out/figures" || failed+=("figures of rebalance")
fi
for name in ${failed[@]+"${failed[@]}"}; do
  echo "study: $name failed" >&2
done
[ ${#failed[@]} -eq 0 ]
