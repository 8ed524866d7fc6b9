#!/bin/sh
# Builds the images by the unmodified Dockerfiles, without Docker and without a registry:
# tools/build-images.sh FOLDER PREFIX [TARGET ...]      PREFIX: a Python 3.13 of this machine; TARGET: operator, agent, trainer
#
# FOLDER keeps buildah's storage. The base that the Dockerfiles name is not pulled: one is made under its name, of Debian
# by mmdebstrap, the Python of PREFIX in /usr/local, and this machine's certificates. For tests only. STORAGE_DRIVER=vfs
# is for machines that can't mount an overlay, such as most containers. It takes several times the disk.
set -eu

if [ $# -lt 2 ]; then
    sed -n '3s/^# //p' "$0" >&2
    exit 2
fi
folder=$1 prefix=$2
shift 2
for program in buildah mmdebstrap; do
    command -v $program > /dev/null || { echo "there is no $program: apt-get install $program" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "only root can make the base" >&2; exit 1; }
root=$(cd "$(dirname "$0")/.." && pwd)
base=docker.io/library/python:3.13-slim-trixie
mkdir -p "$folder"
export STORAGE_DRIVER="${STORAGE_DRIVER:-overlay}" BUILDAH_ISOLATION=chroot BUILDAH_FORMAT=oci
in_folder() { buildah --root "$folder/storage" --runroot "$folder/run" "$@"; }

if ! in_folder inspect --type image "$base" > /dev/null 2>&1; then
    codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
    packages=ca-certificates,libbz2-1.0,libffi8,liblzma5,libsqlite3-0,libssl3,zlib1g
    mmdebstrap --variant=minbase --include="$packages" "$codename" "$folder/base.tar"
    container=$(in_folder from scratch)
    in_folder add --quiet "$container" "$folder/base.tar" /
    rm "$folder/base.tar"
    mkdir -p "$folder/python/bin" "$folder/python/lib"
    cp -a "$prefix"/bin/python3* "$folder/python/bin/"
    cp -a "$prefix"/lib/python3.13 "$prefix"/lib/libpython3* "$folder/python/lib/"
    in_folder copy --quiet "$container" "$folder/python" /usr/local
    in_folder copy --quiet "$container" /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
    in_folder run "$container" -- ldconfig
    in_folder config --env SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
        --env PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin --cmd python3 "$container"
    in_folder commit --quiet --rm "$container" "$base"
    rm -rf "$folder/python"
fi

[ $# -gt 0 ] || set -- operator agent
for target in "$@"; do
    case $target in
        trainer) set -- --file "$root/trainer_image/Dockerfile" ;;
        *) set -- --file "$root/Dockerfile" --target "$target" ;;
    esac
    in_folder build --pull=never --network host --quiet --build-arg VERSION=test "$@" --tag "localhost/concertina/$target:test" "$root"
done
