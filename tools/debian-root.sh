#!/usr/bin/env bash
# debian-root.sh SUITE COMMAND...: runs COMMAND in a copy of this checkout on another Debian release (bookworm, trixie, sid).
# The first call makes the system with debootstrap, in $DEBIAN_ROOTS/SUITE (default: .roots/SUITE here); later calls use it
# again and bring the copy up to date, but keep its virtual environments. As root; all mounts end with the command.
set -euo pipefail
suite=${1:?usage: debian-root.sh SUITE COMMAND...}
shift
cd "$(dirname "$0")/.."
root=${DEBIAN_ROOTS:-$PWD/.roots}/$suite
export PATH="$PATH:/usr/sbin:/sbin"

if [ "$(id -u)" -ne 0 ]; then
    echo "unicron: debian-root.sh makes a system of its own and mounts into it: run it as root" >&2
    exit 1
fi
if [ -z "${UNICRON_IN_NAMESPACE:-}" ]; then # what is mounted below is seen by the command alone, and gone with it
    exec unshare --mount --propagation private env UNICRON_IN_NAMESPACE=1 "$0" "$suite" "$@"
fi
unset UNICRON_IN_NAMESPACE

command -v debootstrap >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends debootstrap >/dev/null
# A second command would take the copy away under the first.
mkdir -p "$(dirname "$root")"
exec 9>"$root.lock"
flock -n 9 || {
    echo "unicron: another command runs in $root: wait for its end" >&2
    exit 1
}
if [ ! -e "$root/.complete" ]; then
    echo "unicron: making a Debian $suite in $root"
    rm -rf --one-file-system "$root"
    mkdir -p "$root"
    debootstrap --variant=minbase --include=ca-certificates,make,python3,procps "$suite" "$root" >"$root.log" 2>&1 || {
        tail -n 20 "$root.log" >&2
        echo "unicron: debootstrap could not make $suite; its log is $root.log" >&2
        exit 1
    }
    # The lists of sid may be older on a mirror than apt takes for current.
    echo 'Acquire::Check-Valid-Until "false";' >"$root/etc/apt/apt.conf.d/90unicron"
    touch "$root/.complete"
fi

mount --bind "$root" "$root" # `ip netns exec` mounts /sys anew, for which the root has to be a mount point
cd "$root"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs tmpfs run
cp -L /etc/resolv.conf etc/resolv.conf
cp -L /etc/hosts etc/hosts
[ -z "${PIP_CERT:-}" ] || install -D -m 644 "$PIP_CERT" ".$PIP_CERT"

here=$OLDPWD
mkdir -p srv/unicron
find srv/unicron -mindepth 1 -maxdepth 1 ! -name '.venv*' -exec rm -rf {} +
# The releases of a cell of the matrix are a file that git ignores.
(cd "$here" && { git ls-files --cached --others --exclude-standard -z; find .matrix -type f -print0 2>/dev/null || :; } | tar --null --files-from=- --ignore-failed-read -cf -) | tar -C srv/unicron -xf -
# In a chroot Apptainer refuses to start, so this system becomes the root of the namespace. This shell holds the lock until the
# command ends; no daemon that outlives the command does.
cd "$root"
pivot_root . .
/bin/sh -c 'umount -l . && cd /srv/unicron && exec "$@"' sh "$@" 9>&-
