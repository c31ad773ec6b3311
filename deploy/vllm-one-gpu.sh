#!/usr/bin/env bash
# Several vLLM engines on one GPU: each takes KV memory when it needs it, from those that are idle, and keeps a floor.
#     deploy/vllm-one-gpu.sh 80GiB 8GiB "./Llama-3.1-8B ./Qwen3-8B" --max-model-len 32768
# TOTAL of KV memory, FLOOR of each engine, MODELS, options of vllm serve for all of them. They listen at 127.0.0.1, from $PORT (8000) on.
# Weights and activations come besides: each engine starts if $UTILIZATION (0.2) of the GPU is free.
set -euo pipefail
usage="usage: deploy/vllm-one-gpu.sh TOTAL FLOOR \"MODEL ...\" [options of vllm serve]"
total=${1:?$usage} floor=${2:?$usage} models=${3:?$usage} port=${PORT:-8000}
shift 3

folder=$(mktemp -d) holder='' engines=()
end() { # the holder last, which a terminal's Ctrl-C does not reach
    kill "${engines[@]}" 2>/dev/null || true
    for engine in "${engines[@]}"; do wait "$engine" || true; done
    kill $holder 2>/dev/null || true
    wait
    rm -r "$folder"
}
trap end EXIT
trap 'exit 0' INT TERM

setsid vmmkv hold --socket "$folder/kv.sock" --budget "$total" &
holder=$!
until [ -S "$folder/kv.sock" ]; do kill -0 $holder; sleep 0.1; done

i=0
for model in $models; do # one after the other: each measures how much of the GPU is free
    vllm serve "$model" --host 127.0.0.1 --port $((port + i)) --gpu-memory-utilization "${UTILIZATION:-0.2}" \
        --kv-cache-memory-bytes "${total%iB}" --additional-config "{\"vmmkv_elastic\": {\"arbiter\": \"$folder/kv.sock\", \"floor\": \"$floor\"}}" "$@" &
    engines+=($!)
    until curl --silent --fail --output /dev/null "http://127.0.0.1:$((port + i))/health"; do
        kill -0 "${engines[-1]}" || { echo "An engine has ended; its reason is above." >&2; exit 1; }
        sleep 1
    done
    i=$((i + 1))
done
vmmkv resize "$folder/kv.sock"
wait -n
