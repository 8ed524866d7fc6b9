#!/bin/sh
# The root file system of one image for operator, agent and (with torch from elsewhere) trainer, built without Docker:
# tools/image-rootfs.sh BASE FOLDER      BASE: a Debian root with Python of the same minor version as .venv's
#
# For clusters on one's own machine only (make test-e2e); what is shipped is built by the Dockerfiles.
set -eu

if [ $# -ne 2 ]; then
    sed -n '3s/^# //p' "$0" >&2
    exit 2
fi
base=$1 folder=$2
root=$(cd "$(dirname "$0")/.." && pwd)
minor=$("$root/.venv/bin/python" -c 'import sys; print("3.%d" % sys.version_info[1])')
[ -x "$base/usr/bin/python$minor" ] || { echo "$base has no /usr/bin/python$minor, which .venv is made of" >&2; exit 1; }

rm -rf "$folder"
cp -a "$base" "$folder"
packages=$folder/usr/local/lib/python$minor/dist-packages # where Debian's own python3 looks
export VIRTUAL_ENV="$root/.venv"
install() { "$root/.venv/bin/uv" pip install --quiet --compile-bytecode --target "$packages" "$@"; }
install --require-hashes -r "$root/requirements/operator.txt"
install --require-hashes -r "$root/requirements/agent.txt"
# From a copy: setuptools would leave its build folder in the checkout, and reuse what an older build left there.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -a "$root/LICENSE" "$root/operator" "$root/trainer_image" "$copy/"
rm -rf "$copy"/*/packages/*/build
install --no-deps --no-build-isolation "$copy"/trainer_image/packages/* "$copy/operator/packages/core" "$copy/operator/packages/operator"
rm -rf "$packages/bin"
for entry in "concertina-operator concertina.controller.operator main" "concertina-agent concertina_agent.main main" \
    "torchrun torch.distributed.run main"; do
    # shellcheck disable=SC2086  # three words
    set -- $entry
    printf '#!/usr/bin/python3\nimport sys\nfrom %s import %s\nsys.exit(%s())\n' "$2" "$3" "$3" > "$folder/usr/local/bin/$1"
    chmod 755 "$folder/usr/local/bin/$1"
done
