#!/usr/bin/env bash
# Style, types and generated files: what CI, pre-commit and people run.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/python scripts/patches_readme.py --check
