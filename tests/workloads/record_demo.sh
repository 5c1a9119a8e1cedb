#!/usr/bin/env bash
# Record the bundled demo on a host with two GPUs: the load of two_gpu_phases.py, opusmon beside it, and nvidia-smi
# for comparison. Usage: record_demo.sh OUT_FOLDER [SCALE]; needs torch with CUDA; changes no setting of the GPUs.
set -euo pipefail
out=$1 scale=${2:-1}
here=$(cd "$(dirname "$0")" && pwd)
python3 -m opusmon record -o "$out/h200x2.opusmon" &
recorder=$!
nvidia-smi --query-gpu=timestamp,index,memory.used,power.draw,temperature.gpu,clocks.sm,utilization.gpu,utilization.memory \
  --format=csv,noheader,nounits -l 5 > "$out/nvidia-smi.csv" &
smi=$!
sleep 2
python3 "$here/two_gpu_phases.py" --out "$out/truth.json" --scale "$scale"
kill "$smi" || true
kill -TERM "$recorder"
wait "$recorder"
