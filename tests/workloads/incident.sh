#!/usr/bin/env bash
# Record the bundled demo on a host with two H200s: a real server under a rising chat load until its memory is full,
# a bandwidth hog beside it, and planted stalls on the other GPU. As root; needs torch, transformers with its serving
# extra, aiohttp, anthropic, and a llama-server with a Messages endpoint for the canary.
#   tests/workloads/incident.sh OUT_FOLDER LLAMA_SERVER MODEL.gguf
set -euo pipefail
out="$1" llama="$2" gguf="$3" here="$(dirname "$0")"
python3 "$here/make_model.py" /tmp/incident-model
"$llama" -m "$gguf" --port 8081 --metrics -np 4 -c 8192 -t 4 > /dev/null 2>&1 &
CUDA_VISIBLE_DEVICES=0 python3 -m transformers.cli.transformers serve /tmp/incident-model --port 8000 \
  --continuous-batching --cb-use-cuda-graph > /dev/null 2>&1 &
trap 'kill $(jobs -p)' EXIT
until curl -s -m 2 http://127.0.0.1:8000/health > /dev/null; do sleep 1; done
python3 -m opusmon record -o "$out/demo.opusmon" --deep --slo 'ttft_p95<800ms' --proxy http://127.0.0.1:8000 \
  --probe http://127.0.0.1:8081 --probe-model tiny --probe-per-hour 600 --duration 125s &
recorder=$!
sleep 7
python3 "$here/chat_load.py" http://127.0.0.1:8788 /tmp/incident-model --steps 1,4,16,48 --seconds 26 > "$out/chat.jsonl" &
sleep 6
(CUDA_VISIBLE_DEVICES=1 PLANTED_SETTLE_S=3 PLANTED_QUIET_S=21 python3 "$here/planted_stalls.py" > "$out/planted.jsonl") &
sleep 24
python3 "$here/hog.py" 12 > "$out/hog.jsonl" &
wait "$recorder"
python3 "$here/make_incident.py" "$out" "$out/incident.opusmon"
