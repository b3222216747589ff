#!/bin/sh
# Update constraints.txt from a fresh environment to the newest versions that pyproject.toml allows, torch as pinned.
#
#   scripts/constraints.sh [TORCH_VERSION]
set -eu

cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
torch=${1:-$(sed -n 's/^torch==//p' constraints.txt)}
[ -n "$torch" ] || { echo "constraints: error: no torch version is pinned; give one: scripts/constraints.sh 2.13.0" >&2; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

echo "constraints: fresh environment with torch $torch in $folder"
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$torch"
"$folder/venv/bin/python" -m pip install -qq "torch==$torch" ".[test]"
{
    echo "# The exact set that CI installs: everything that \`pip install .[test]\` brings, on $("$python" --version)."
    echo "# Regenerate with \`make constraints\`; torch stays as pinned here, TORCH=X.Y.Z moves it."
    # Drop local tags (+cpu), which name one build of a version, and the CUDA packages, which depend on torch's build.
    "$folder/venv/bin/python" -m pip freeze --exclude scantling --exclude setuptools |
        sed -E 's/ @ .*//; s/\+[a-z0-9.]+$//' | grep -v -E '^(nvidia-|triton==)'
} >"$folder/constraints.txt"
mv "$folder/constraints.txt" constraints.txt
echo "constraints: wrote $(grep -c == constraints.txt) pins"
