#!/bin/sh
# Makes or updates a virtual environment: tools/install-environment.sh FOLDER dev|operator|agent|trainer|cli|docs|build
#
# The Makefile and the Dockerfiles do the same here: everything by hash from requirements/, then distributions of this
# workspace. `dev` holds links to all of them, and pip and uv. Every other kind is an image's: it holds what it runs with
# and no installer. Nothing is done where nothing has changed. PYTHON names the interpreter to use.
set -eu

if [ $# -ne 2 ]; then
    sed -n '2s/^# //p' "$0" >&2
    exit 2
fi
folder=$1 kind=$2
root=$(cd "$(dirname "$0")/.." && pwd)
operator=operator/packages trainer_image=trainer_image/packages
base="$trainer_image/sdk"
case $kind in
    dev) parts=$(cd "$root" && echo $operator/* $trainer_image/*) ;;
    operator) parts="$base $trainer_image/config $operator/core $operator/operator" ;;
    agent) parts="$base $trainer_image/agent" ;;
    trainer) parts="$base $trainer_image/config $trainer_image/trainer $trainer_image/agent" ;;
    cli) parts="$base $trainer_image/config $trainer_image/trainer $operator/core $operator/cli" ;;
    docs | build) parts= ;;
    *)
        echo "there is no environment named $kind: choose dev, operator, agent, trainer, cli, docs or build" >&2
        exit 2
        ;;
esac
lock=$root/requirements/$kind.txt

python=${PYTHON:-$("$root/tools/find-python.sh")}
stamp=$folder/concertina-environment
state=$(
    "$python" -c 'import sys; print(sys.version)'
    echo "$kind $root"
    cat "$root/requirements/build.txt" "$lock"
    for part in $parts; do cat "$root/$part/pyproject.toml"; done
)
state=$(printf '%s' "$state" | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then
    exit 0
fi

started=$(date +%s)
echo "environment $kind: $(grep -c == "$lock") packages into $folder, with $("$python" --version) ..." >&2
install_build_tools() {
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$root/requirements/build.txt"
}
# An image's environment is made anew. So is one that is of another Python, or was cut off before it had pip.
version='import sys; print("%d.%d" % sys.version_info[:2])'
if [ "$kind" != dev ]; then
    "$python" -m venv --clear --without-pip "$folder"
elif [ "$("$folder/bin/python" -c "import pip; $version" 2>/dev/null)" != "$("$python" -c "$version")" ]; then
    "$python" -m venv --clear "$folder"
fi
rm -f "$stamp"
VIRTUAL_ENV=$(cd "$folder" && pwd)
export VIRTUAL_ENV
cd "$root"
# Compiled now: a process that may not write there compiles torch anew at each start, which triples the time it takes.
if [ "$kind" = dev ]; then
    install_build_tools "$VIRTUAL_ENV"
    "$VIRTUAL_ENV/bin/uv" pip install --compile-bytecode --require-hashes -r "$lock"
    # An environment of the time of one distribution has a link that hides the others.
    "$VIRTUAL_ENV/bin/uv" pip uninstall --quiet concertina 2>/dev/null || true
    # compat: plain paths, which mypy and import-linter read, instead of import hooks.
    # shellcheck disable=SC2086,SC2046  # words
    "$VIRTUAL_ENV/bin/uv" pip install --quiet --no-deps --no-build-isolation --config-setting editable_mode=compat \
        $(printf -- '--editable %s ' $parts)
else
    build=$(mktemp -d)
    trap 'rm -rf "$build"' EXIT
    "$python" -m venv "$build/tools"
    install_build_tools "$build/tools"
    uv=$build/tools/bin/uv
    "$uv" pip install --compile-bytecode --require-hashes -r "$lock"
    # From a copy: setuptools would leave its folders in the checkout, and reuse what an older build left there.
    cp -a LICENSE operator trainer_image "$build/"
    rm -rf "$build"/*/packages/*/build
    for part in $parts; do
        (cd "$build" && VIRTUAL_ENV=$build/tools "$uv" build --quiet --wheel --no-build-isolation \
            --python "$build/tools/bin/python" --out-dir "$build/wheels" "$part")
    done
    [ -z "$parts" ] || "$uv" pip install --quiet --compile-bytecode --no-deps --no-index "$build"/wheels/*.whl
fi
printf '%s\n' "$state" > "$VIRTUAL_ENV/concertina-environment"
echo "environment $kind: done in $(($(date +%s) - started)) s" >&2
