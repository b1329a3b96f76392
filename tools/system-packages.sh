#!/usr/bin/env bash
# system-packages.sh [venv|all|test|wide|deb]: installs the Debian packages that are missing, and only those; silent when none is.
# Looks for what the packages bring (a program, a header), so a Slurm built from source counts as well.
set -euo pipefail
what=${1:-all}
python=${PYTHON:-python3}
export PATH="$PATH:/usr/sbin:/sbin"
missing=()

need() { missing+=("$@"); }
has() { command -v "$1" >/dev/null 2>&1; }
header() { echo "#include <stdint.h>
#include <$1>" | cc -E -x c - >/dev/null 2>&1; }

case $python in
    python3.*) package=$python ;; # Debian has packages of some releases beside python3's own
    *) package=python3 ;;
esac
if ! has "$python"; then
    need "$package" "$package-venv"
elif ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    need "$package-venv"
fi
# Of Megatron-core there is no wheel for these: pip builds one, without its helpers for data where that fails, and says nothing.
case $python in
    python3.1[4-9])
        has g++ || need g++
        [ -e "/usr/include/$python/Python.h" ] || need "$python-dev"
        ;;
esac
if [ "$what" != venv ]; then
    has slurmctld || need slurmctld
    has slurmd || need slurmd
    has squeue || need slurm-client
    has munged || need munge
    has ip || need iproute2    # ip and nft: for the local cluster with links
    has nft || need nftables
    has make || need make
    has gcc || need gcc libc6-dev
    header slurm/spank.h || need libslurm-dev
    header munge.h || need libmunge-dev
fi
# Accounting: the programs alone, no service of MariaDB's; containers, where Debian has them; man pages.
if [ "$what" = test ] || [ "$what" = wide ]; then
    has slurmdbd || need slurmdbd
    has mariadbd || need mariadb-server-core
    has groff || need groff-base
    has my_print_defaults || need mariadb-client-core
    if grep -qs sid /etc/debian_version; then has apptainer || need apptainer; fi
fi
if [ "$what" = deb ]; then # what builds the packages, of this system's own Python
    has dh || need debhelper
    dpkg -s build-essential >/dev/null 2>&1 || need build-essential
    dpkg -s python3-venv >/dev/null 2>&1 || need python3-venv
fi
prometheus=
if [ "$what" = wide ]; then # a browser for the page of `unicronctl web`; the programs for metrics and alert rules
    has chromium || need chromium fonts-dejavu-core
    has promtool || { need prometheus && prometheus=new; }
fi
[ ${#missing[@]} -gt 0 ] || exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if has sudo && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
        as_root=(sudo)
    else
        echo "unicron: missing Debian packages; ask an administrator for: apt-get install ${missing[*]}" >&2
        exit 1
    fi
fi
if ! has apt-get; then
    echo "unicron: this is not a Debian machine; install what these Debian packages hold: ${missing[*]}" >&2
    exit 1
fi
echo "unicron: installing Debian packages: ${missing[*]}"
if [ -n "$prometheus" ] && [ -d /etc/systemd/system ]; then # the package would start its service at once
    "${as_root[@]}" ln -sfn /dev/null /etc/systemd/system/prometheus.service
fi
log=$(mktemp)
patience=900 # seconds
say_what_is_waited_for() {
    local line
    until line=$(grep -m 1 -o "Could not get lock.*" "$log"); do
        sleep 1
        kill -0 $$ 2>/dev/null || return 0 # the script was killed
    done
    echo "unicron: waits up to $patience s for another program: $line" >&2
}
say_what_is_waited_for & # apt's output is no pipe: services that packages start would keep it open
teller=$!
trap 'kill "$teller" 2>/dev/null || true; rm -f "$log"' EXIT

apt() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive LC_ALL=C \
        apt-get -q -o "DPkg::Lock::Timeout=$patience" "$@" >"$log" 2>&1
}
# Without recommendations: the cluster is private, so mail and accounting packages have no use.
install() { apt install -y --no-install-recommends "${missing[@]}"; }
update() { # apt-get waits for dpkg's lock, not for the one of the lists
    local until=$((SECONDS + patience))
    while ! apt update; do
        grep -q "Could not get lock" "$log" && [ "$SECONDS" -lt "$until" ] || return 1
        sleep 1
    done
}
# A fresh machine has empty package lists, an old one stale ones: refresh only if the first try fails.
if ! install; then
    { ! grep -q "Unable to acquire" "$log" && update && install; } || {
        tail -n 20 "$log" >&2
        echo "unicron: apt-get could not install: ${missing[*]}" >&2
        exit 1
    }
fi
