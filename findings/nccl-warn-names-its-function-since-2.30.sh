#!/usr/bin/env bash
# NCCL 2.29.7 and 2.30.7 (PyPI: nvidia-nccl-cu12), Python 3.9 or newer, no GPU needed.
#
# Behaviour: from 2.30 on a warning has the function's name between the place in the source and "NCCL WARN", and an
# INFO line of an error's way up has it, too. Up to 2.29 neither has.
#
# Seen (2026-11-28):
#   2.29.7  [2026-11-28 14:26:43] n1:8963:8963 [0] bootstrap.cc:130 NCCL WARN Bootstrap : no socket interface found
#   2.30.7  [2026-11-28 14:26:43] n1:9031:9031 [0] bootstrap.cc:126 (bootstrapNetInit) NCCL WARN Bootstrap : no socket ...
#
# Why it matters: whoever reads logs by "FILE:LINE NCCL WARN" no longer sees warnings, among them uncorrectable ECC and
# NVLink errors, once torch 2.14 or newer brings its NCCL 2.30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"

warning() {  # RELEASE: what NCCL says where no network interface has the name that it was told
    "$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-cache-dir \
        --target "$folder/$1" "nvidia-nccl-cu12==$1" >&2
    NCCL_DEBUG=WARN NCCL_SOCKET_IFNAME=nosuch timeout 60 "$folder/env/bin/python" - "$folder/$1" <<'PYTHON'
import ctypes, sys
library = ctypes.CDLL(sys.argv[1] + "/nvidia/nccl/lib/libnccl.so.2")
library.ncclGetUniqueId(ctypes.create_string_buffer(128))
PYTHON
}

before=$(warning 2.29.7 | grep 'NCCL WARN')
since=$(warning 2.30.7 | grep 'NCCL WARN')
printf '2.29.7  %s\n2.30.7  %s\n' "$before" "$since"
grep -qE ' \[0\] \S+\.cc:[0-9]+ NCCL WARN ' <<<"$before"
grep -qE ' \[0\] \S+\.cc:[0-9]+ \(bootstrapNetInit\) NCCL WARN ' <<<"$since"
