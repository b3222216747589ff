#!/bin/sh
# Create .venv with the pinned packages and this package in editable mode.
#
# Environment: PYTHON (default python3), TORCH_INDEX (a package index for torch alone, such as that of its CPU builds);
# pip's own PIP_* variables and configuration apply as usual. A second call does nothing until pyproject.toml,
# constraints.txt, this script, TORCH_INDEX or the Python changes.
set -eu

cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=.venv
quiet=-qq
[ ! -t 1 ] || quiet=
say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

command -v "$python" >/dev/null 2>&1 ||
    die "$python not found; install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python3"
version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$python is Python $version; 3.11 or newer is needed: make setup PYTHON=/path/to/python3"

# The environment contains absolute paths, so it is valid for one Python and one folder only.
home="$version $(pwd)"
wanted="$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum) ${TORCH_INDEX:-}"
if [ "$(cat $venv/.home 2>/dev/null)" = "$home" ] && $venv/bin/python -c '' 2>/dev/null; then
    if [ "$(cat $venv/.installed 2>/dev/null)" = "$wanted" ]; then
        say "$venv is up to date (Python $version)"
        exit 0
    fi
else
    say "making $venv with Python $version"
    "$python" -m venv --clear $venv || die "cannot make $venv; on Debian and Ubuntu: apt-get install python3-venv"
    printf '%s\n' "$home" >$venv/.home
fi

# Install torch first and alone, so that later packages cannot pull in another build of it.
torch=$(grep '^torch==' constraints.txt)
say "installing $torch${TORCH_INDEX:+ from $TORCH_INDEX} (a download of some minutes the first time)"
$venv/bin/python -m pip install $quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
say "installing scantling with the versions of constraints.txt"
$venv/bin/python -m pip install $quiet -c constraints.txt -e '.[test]'
printf '%s\n' "$wanted" >$venv/.installed
say "done; activate it with: . $venv/bin/activate"
