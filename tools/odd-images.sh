#!/bin/sh
# Root file systems of images that are unlike ours, built without Docker, for `make test-e2e`:
# tools/odd-images.sh BASE FOLDER      BASE: a Debian root with Python; makes FOLDER/no-python and FOLDER/bare-python
#
# no-python: busybox alone (the machine's, statically linked). bare-python: a Python in /opt/python with the libraries
# that it needs and nothing else: no shell, no /tmp, no /etc/passwd, nothing on the PATH.
set -eu

if [ $# -ne 2 ]; then
    sed -n '3s/^# //p' "$0" >&2
    exit 2
fi
base=$1 folder=$2
python=$(basename "$(readlink -f "$base/usr/bin/python3")")
busybox=$(command -v busybox) || { echo "there is no busybox: install busybox-static" >&2; exit 1; }

rm -rf "$folder"
mkdir -p "$folder/no-python/bin" "$folder/bare-python/opt/python/bin" "$folder/bare-python/opt/python/lib"
cp "$busybox" "$folder/no-python/bin/busybox"
for name in sh ls sleep; do ln -s busybox "$folder/no-python/bin/$name"; done

bare=$folder/bare-python
cp "$base/usr/bin/$python" "$bare/opt/python/bin/python3"
cp -a "$base/usr/lib/$python" "$bare/opt/python/lib/"
chroot "$base" ldd "/usr/bin/$python" $(cd "$base" && echo usr/lib/"$python"/lib-dynload/*.so) | sed -n 's|.*[[:space:]]\(/[^ ]*\) (0x.*|\1|p' | sort -u |
    while read -r library; do
        mkdir -p "$bare$(dirname "$library")"
        cp -L "$base$library" "$bare$library"
    done
