#!/usr/bin/env bash
# compute-sanitizer over the INT4 kernels on a GPU: memcheck, then racecheck. Ends with its exit code, 9 for a finding.
#
#   scripts/sanitize_int4.sh [PYTHON [TOOL...]]      (default .venv/bin/python memcheck racecheck)
#
# One-hot cases of every form of the kernel (200 x 1288: no multiple of a tile), with one scale a row and with groups, and odd sizes. They run
# once by themselves first, side by side where pytest-xdist is: that compiles the kernels, which under the sanitizer
# would take far longer. Racecheck, which looks at shared memory alone, takes one kind of scales: they don't go there. It is
# spared what ends in cuBLAS (large M, whose own kernels use no shared memory, and references in fp64): on an H200 its driver of
# CUDA 13 fails on cuBLAS's kernels, excluded or not ("failed to handle a hardware exception"), and the process is lost.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
tools=("${@:2}")
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck)
command -v compute-sanitizer > /dev/null || { echo "compute-sanitizer is not on the PATH: it comes with the CUDA toolkit" >&2; exit 2; }
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "there is no GPU that $python sees" >&2; exit 2; }

run=(-m pytest -q -p no:cacheprovider tests/gpu/test_int4_gemm.py -k)
some="one_hot and 64 and asym and not dequant-"  # with a hyphen: the parameter, not the test's own name
all="(one_hot and bfloat16 and (0 or 64)) or (one_hot and float16 and 64) or odd_sizes"
cases=$some
for tool in "${tools[@]}"; do [ "$tool" = racecheck ] || cases=$all; done
side_by_side=()
"$python" -c 'import xdist' 2> /dev/null && side_by_side=(-n 8)
"$python" "${run[@]}" "$cases" "${side_by_side[@]}"
for tool in "${tools[@]}"; do
  echo "$tool"
  cases=$all
  if [ "$tool" = racecheck ]; then
    cases=$some
  else  # Without the caching allocator every tensor is an allocation of its own, whose bounds are known.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  fi
  # Left unchecked: the kernels of PyTorch and cuBLAS, whose names, unlike Triton's, are C++'s or begin thus.
  compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
    --kernel-name-exclude 'regex=^(_Z|nvjet|cutlass|cublas|sm[0-9]+_)' "$python" "${run[@]}" "$cases"
done
