#!/usr/bin/env bash
# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
#
# The runs behind benchmarks/long-context.md: text to tokens, seven trainings, their measurements, tables and plots.
#
#   bash scripts/long_context.sh TEXT_FOLDER OUTPUT_FOLDER [SECONDS]
#
# All GPUs that are visible work at once, each on a run of its own. After SECONDS checkpoints are saved, and the same
# command goes on from there. The results are in OUTPUT_FOLDER/runs.
set -euo pipefail
text=$1 output=$2 limit=${3:-}
scripts=$(dirname "${BASH_SOURCE[0]}")
python=${PYTHON:-python3}

"$python" "$scripts/prepare_data.py" --source "$text" --output "$output/data"
stop=()
if [ -n "$limit" ]; then
    stop=(--stop-after $((limit > SECONDS ? limit - SECONDS : 1)))
fi
"$python" "$scripts/ablate.py" "$scripts/configs/long_context.yaml" \
    --data "$output/data" --output "$output/runs" "${stop[@]}"
