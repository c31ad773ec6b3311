#!/usr/bin/env bash
# One worker for each device behind the frontend of NVIDIA Dynamo, which sends a prompt to the worker that has most of it cached.
#     pip install ai-dynamo==1.4.2        into the environment of vmmkv
#     deploy/dynamo.sh smollm2-135m "cuda:0 cuda:1" --kv-budget 60GiB       MODEL, DEVICES, options of vmmkv serve for the engine
# The frontend listens at $HOST:$PORT (127.0.0.1:8000). The workers' KV events, which hold the prompts, come from any free ports of 127.0.0.1.
set -euo pipefail
usage="usage: deploy/dynamo.sh MODEL \"DEVICE ...\" [options of vmmkv serve]"
model=${1:?$usage} devices=${2:?$usage} port=${PORT:-8000}
shift 2

files=$(mktemp --directory)
export DYN_DISCOVERY_BACKEND=file DYN_FILE_KV=$files
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -r "$files"' EXIT
trap 'exit 0' INT TERM

for device in $devices; do
    python "$(dirname "$0")/dynamo_worker.py" --model "$model" --device "$device" --kv-events "tcp://127.0.0.1:*" "$@" &
done
# A conversation that names itself in X-Session-ID stays with its worker, until it is idle for an hour.
python -m dynamo.frontend --http-host "${HOST:-127.0.0.1}" --http-port "$port" --router-mode kv \
    --router-session-affinity-ttl-secs 3600 &
wait $!
