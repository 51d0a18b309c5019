#!/usr/bin/env bash
# The demo on a fresh machine: sets up .venv, builds the demo models, starts SGLang and compares plain, fixed
# and entropy-gated answers. About 5 minutes of set-up the first time, then about 4. Arguments: see --help.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # SGLang's CPU engine is slower with threads that fight for two cores
exec .venv/bin/python -m sdsie_sglang.demo.compare "$@"
