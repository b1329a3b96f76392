#!/usr/bin/env bash
# build-deb.sh [FOLDER]: builds the four Debian packages for this Debian and its Slurm, into FOLDER (build/deb).
# What git tracks is built, in a copy. PIP_ARGS is handed to pip. The same commit gives the same bytes.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-build/deb}")
version=$(sed -n 's/^version = //p' setup.cfg)
said=$(sed -n '1s/.*(\(.*\)-[0-9]*).*/\1/p' packaging/debian/changelog)
if [ "$version" != "$said" ]; then
    echo "unicron: setup.cfg says $version and packaging/debian/changelog $said: write a new entry" >&2
    exit 1
fi
. /etc/os-release
# Built for one Debian, and to be replaced by what is built for the next one.
suffix="~deb${VERSION_ID:-sid}"
[ -z "${VERSION_ID:-}" ] || [ "${ID:-debian}" = debian ] || suffix="~$ID$VERSION_ID"

tree=build/deb-tree/unicron-$version
rm -rf build/deb-tree
mkdir -p "$tree" "$out"
if git rev-parse --git-dir >/dev/null 2>&1; then
    git ls-files --cached --others --exclude-standard -z
else
    find . -name .git -prune -o -name '.venv*' -prune -o -name build -prune -o -name __pycache__ -prune -o \( -type f -o -type l \) -printf '%P\0'
fi | tar --null --files-from=- --ignore-failed-read -cf - | tar -C "$tree" -xf -
cp -r packaging/debian "$tree/debian"
for part in packaging/debian-parts/*; do # what several maintainer scripts do alike
    sed -i "/^#PART ${part##*/}\$/{r $part
        d}" "$tree"/debian/*.prerm "$tree"/debian/*.postrm
done
sed -i "1s/)/$suffix)/" "$tree/debian/changelog"
cd "$tree"
log=$out/build.log
# The signing key, the clean tree and the packages of another architecture are a distributor's concern.
if ! dpkg-buildpackage --build=binary --unsigned-changes --unsigned-buildinfo --no-pre-clean >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    echo "unicron: the packages could not be built; all of it is in $log" >&2
    exit 1
fi
mv ../*.deb ../*.buildinfo ../*.changes "$out/"
echo "unicron: in $out:"
cd "$out" && ls -1 unicron-*.deb
