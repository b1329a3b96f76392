#!/usr/bin/env bash
# build-rpm.sh [FOLDER]: builds the four RPMs for this system and its Slurm, into FOLDER (build/rpm). PIP_ARGS is handed to pip.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-build/rpm}")
version=$(sed -n 's/^version = //p' setup.cfg)
top=$PWD/build/rpm-tree
rm -rf "$top"
mkdir -p "$top/SOURCES" "$out"
git ls-files --cached --others --exclude-standard -z |
    tar --null --files-from=- --ignore-failed-read --transform "s,^,unicron-$version/,S" -czf "$top/SOURCES/unicron-$version.tar.gz"
# Debian's rpmbuild knows no packages of Debian's, so what is needed is not looked up there.
options=()
[ ! -e /etc/debian_version ] || options+=(--nodeps)
log=$out/build.log
if ! rpmbuild -bb "${options[@]}" --define "_topdir $top" --define "unicron_version $version" --define "unicron_pip_args ${PIP_ARGS:-%{nil}}" \
    --define "unicron_python $(readlink -f /usr/bin/python3)" packaging/rpm/unicron.spec >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    echo "unicron: the RPMs could not be built; all of it is in $log" >&2
    exit 1
fi
mv "$top"/RPMS/*/*.rpm "$out/"
echo "unicron: in $out:"
cd "$out" && ls -1 unicron-*.rpm
