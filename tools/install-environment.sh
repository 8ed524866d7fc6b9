#!/bin/sh
# Makes or updates a virtual environment: tools/install-environment.sh FOLDER dev|operator|agent|trainer|docs
#
# The Makefile and the Dockerfiles do the same here: everything by hash from requirements/, then concertina itself
# (`dev`: as a link to this checkout; `docs`: not at all). Nothing is done where nothing has changed. PYTHON names the interpreter to use.
set -eu

if [ $# -ne 2 ]; then
    sed -n '2s/^# //p' "$0" >&2
    exit 2
fi
folder=$1 kind=$2
root=$(cd "$(dirname "$0")/.." && pwd)
lock=$root/requirements/$kind.txt
if [ ! -f "$lock" ]; then
    echo "there is no environment named $kind: choose dev, operator, agent, trainer or docs" >&2
    exit 2
fi

python=${PYTHON:-$("$root/tools/find-python.sh")}
stamp=$folder/concertina-environment
state=$(
    "$python" -c 'import sys; print(sys.version)'
    echo "$kind $root"
    cat "$root/requirements/uv.txt" "$lock" "$root/pyproject.toml"
)
state=$(printf '%s' "$state" | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then
    exit 0
fi

started=$(date +%s)
echo "environment $kind: $(grep -c == "$lock") packages into $folder, with $("$python" --version) ..." >&2
# One that is of another Python, or was cut off before it had pip, is made anew.
version='import sys; print("%d.%d" % sys.version_info[:2])'
[ "$("$folder/bin/python" -c "import pip; $version" 2>/dev/null)" = "$("$python" -c "$version")" ] ||
    "$python" -m venv --clear "$folder"
rm -f "$stamp"
bin=$(cd "$folder" && pwd)/bin
"$bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$root/requirements/uv.txt"
export VIRTUAL_ENV="${bin%/bin}"
# Compiled now: a process that may not write there compiles torch anew at each start, which triples the time it takes.
"$bin/uv" pip install --compile-bytecode --require-hashes -r "$lock"
case $kind in
    docs) ;;
    dev) "$bin/uv" pip install --quiet --no-deps --no-build-isolation --editable "$root" ;;
    *) "$bin/uv" pip install --quiet --compile-bytecode --no-deps --no-build-isolation "$root" ;;
esac
printf '%s\n' "$state" > "$stamp"
echo "environment $kind: done in $(($(date +%s) - started)) s" >&2
