#!/bin/sh
# Build the wheel, install it without extras in a clean environment, and run every method there once.
#
#   scripts/wheel.sh            the methods with torch, numpy and safetensors alone
#   scripts/wheel.sh --train    then also a run of the `scantling` command with the extra [train]
set -eu

cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
bin=$folder/venv/bin

rm -rf dist
"$python" -m venv "$folder/venv"
"$bin/python" -m pip install -qq build twine
"$bin/python" -m build --outdir dist .
"$bin/python" -m twine check --strict dist/*

"$python" -m venv --clear "$folder/venv"
echo "wheel: installing without extras"
"$bin/python" -m pip install -qq ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
"$bin/python" -m pip install -qq -c constraints.txt dist/*.whl
"$bin/python" -m pip list --format=freeze | sed 's/^/wheel:   /'
(cd "$folder" && venv/bin/python "$OLDPWD/scripts/smoke.py")
if "$bin/scantling" --version >"$folder/out" 2>&1; then :; fi
grep -q 'scantling\[train\]' "$folder/out" || { cat "$folder/out"; echo "wheel: the command does not name the extra"; exit 1; }

if [ "${1:-}" = --train ]; then
    echo "wheel: installing the extra [train]"
    "$bin/python" -m pip install -qq -c constraints.txt "$(ls dist/*.whl)[train]"
    cp recipes/demo-lean.yaml "$folder/recipe.yaml"
    (cd "$folder" && venv/bin/scantling train recipe.yaml --set train.steps=3 --run-dir run && test -s run/report.html)
fi
echo "wheel: ok"
