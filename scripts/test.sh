#!/usr/bin/env bash
# Sets everything up and runs the tests: unit and drift tests (seconds), then end to end (minutes).
# scripts/test.sh --fast leaves the end-to-end tests out. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ "${1:-}" = --fast ]; then
  shift
  exec .venv/bin/python -m pytest tests/unit tests/drift "$@"
fi
.venv/bin/python -m sdsie_sglang.demo
exec .venv/bin/python -m pytest tests "$@"
