#!/usr/bin/env bash
# compute-sanitizer over the INT4 kernels on a GPU: memcheck, then racecheck. Ends with its exit code, 9 for a finding.
#
#   scripts/sanitize_int4.sh [PYTHON]      (default .venv/bin/python)
#
# One-hot cases of every form of the kernel, with one scale a row and with groups, and odd sizes. They run
# once by themselves first: that compiles the kernels, which under the sanitizer would take far longer.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
command -v compute-sanitizer > /dev/null || { echo "compute-sanitizer is not on the PATH: it comes with the CUDA toolkit" >&2; exit 2; }
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "there is no GPU that $python sees" >&2; exit 2; }
cases=(-m pytest -q -p no:cacheprovider tests/gpu/test_int4_gemm.py
  -k "(one_hot and bfloat16 and (0 or 64)) or (one_hot and float16 and 64) or odd_sizes")
"$python" "${cases[@]}"
# Without the caching allocator every tensor is an allocation of its own, whose bounds are known.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for tool in memcheck racecheck; do
  echo "$tool"
  compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all "$python" "${cases[@]}"
done
