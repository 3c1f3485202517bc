#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains the small LLaMA that ships with ringattn: tools/demo_model/train.sh OUT [option...], over
# RANKS ranks (default: 1). What follows OUT goes to examples/train.py. OUT/run/model is the model;
# its measures are printed and lie in it. RoPE's base is the one default all loaders agree on.

set -euo pipefail
cd "$(dirname "$0")/../.."
out="${1:?usage: tools/demo_model/train.sh OUT [option...]}"
shift

python tools/demo_model/measure.py --write-data "$out/data"
torchrun --standalone --nproc-per-node "${RANKS:-1}" examples/train.py --data "$out/data" --out "$out/run" \
  --layers 5 --width 256 --hidden 512 --heads 8 --kv-heads 2 --tie-heads --rope-base 10000 \
  --tokens 8192 --accumulate 4 --steps 3800 --checkpoint-every 1000 \
  --learning-rate 2e-3 --dropout 0.2 --across-documents "$@"
python tools/demo_model/measure.py --evaluate "$out/run/model"
