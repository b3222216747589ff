#!/bin/sh
# Download wheels of dependencies that an offline GPU machine may lack, at the versions of constraints.txt.
#
#     sh scripts/gpu-wheels.sh [DIR] [PYTHON_VERSION]        (default: build/wheels 3.12)
#     sh scripts/gpu-wheels.sh DIR PYTHON_VERSION rivals     also what benchmarks/finetune_gpu.py compares with
#
# On the GPU machine:
#        python3 -m pip install --no-index --no-deps --target /tmp/site DIR/*.whl
#        PYTHONPATH=/tmp/site:src python3 benchmarks/gpu.py
# The list has the packages that images with PyTorch and transformers lack. pydantic-core is compiled, so its wheel must
# match the Python version of that machine. The rivals take 48 MB, nearly all of it for bitsandbytes, which galore-torch
# and apollo-torch import.
set -eu
cd "$(dirname "$0")/.."

folder=${1:-build/wheels}
names="pydantic pydantic-core annotated-types typing-inspection datasets dill multiprocess came-pytorch"
rivals=
if [ "${3:-}" = rivals ]; then
    names="$names peft accelerate psutil"
    rivals="torchao==0.18.0 flashoptim==0.1.4 galore-torch==1.0 apollo-torch==1.0.3 bitsandbytes==0.50.2"
fi

pins=
for name in $names; do
    pin=$(tr _ - < constraints.txt | grep "^$name==") || { echo "gpu-wheels: $name is not in constraints.txt" >&2; exit 1; }
    pins="$pins $pin"
done
mkdir -p "$folder"
# shellcheck disable=SC2086  # one word per package
${PYTHON:-python3} -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
    --python-version "${2:-3.12}" --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 \
    --platform manylinux2014_x86_64 \
    --dest "$folder" $pins $rivals
du -ch "$folder"/*.whl
