"""Asks real torchruns how they report each way in which a rank can end, and which options they take.

python tools/torchrun_reports.py TORCHRUN... > docs/behaviour/torchrun.toml     one TORCHRUN for each release of torch
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# How rank 1 ends; what the severity table has to make of the report.
WAYS = {
    "sys.exit(3)": "exited_abnormally",
    "sys.exit(2)": "configuration_error",
    "sys.exit(1)": "application_error",
    "os._exit(127)": "configuration_error",
    "os.kill(os.getpid(), 9)": "killed_from_outside",
    "os.kill(os.getpid(), 15)": "killed_from_outside",
    "os.kill(os.getpid(), 11)": "exited_abnormally",
    "os.abort()": "exited_abnormally",
    "import no_such_module": "configuration_error",
    "raise ValueError('no such layer: 7')": "application_error",
    "record(fail)(ValueError('no such layer: 7'))": "application_error",
    "record(fail)(OSError(28, 'No space left on device', 'a.pt'))": "disk_full",
    "fail(OSError(116, 'Stale file handle', 'a.pt'))": "file_system_error",
    "fail(MemoryError())": "host_out_of_memory",
    "os.kill(os.getppid(), 15); time.sleep(60)": "killed_from_outside",
}
# The other rank says so when torchrun ends it.
SCRIPT = """import os, signal, sys, time
from torch.distributed.elastic.multiprocessing.errors import record

def fail(error=None):
    raise error

def asked(number, frame):
    print(f"received signal {number}", file=sys.stderr)
    sys.exit(143)

if os.environ["RANK"] == "1":
    time.sleep(1)
    WAY
signal.signal(signal.SIGTERM, asked)
time.sleep(60)
"""
HEAD = """# Made by tools/torchrun_reports.py with each release's real torchrun. Rank 1 ends as `way` says; `cause` is
# what the severity table has to make of it. Releases that differ in numbers and in their own frames share a text.
"""
OPTIONS = """import torch
from torch.distributed.run import get_args_parser
print(torch.__version__.partition("+")[0])
for one in get_args_parser()._actions:
    if one.option_strings and one.dest != "help":
        print(" ".join(sorted(one.option_strings)) + (" VALUE" if one.nargs != 0 else ""))
"""


def report(torchrun: str, way: str) -> str:
    """What torchrun writes, without what stands before a rank's end."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT.replace("WAY", way))
        command = [torchrun, "--standalone", "--nproc-per-node", "2", "train.py"]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
        text = re.sub(r"/tmp/torchelastic_[^/]*/[^/]*/", "/tmp/torchelastic/", ended.stderr)
        text = text.replace(folder, "/job").replace(str(Path(torchrun).parent.parent), "/env")
    return "\n".join(line for line in text.splitlines() if "torch/distributed/run.py:" not in line) + "\n"


def shape(text: str) -> str:
    """The text without what differs from run to run, and between releases and Pythons that say the same."""
    text = re.sub(r"\n +(File .*/torch/|[~^]+\n|\w+\(|return |raise |sys\.exit|f\(|result = ).*(?=\n)", "", text)
    text = re.sub(r"\d{4}-\d\d-\d\d_[\d:]+|:\d+\]| +(?=\n)|(?<=python)3(?:\.\d+)?", "", text)
    return re.sub(r"=+|-{9,}", "-", re.sub(r"\d+", "0", text))


def main(torchruns: list[str]) -> int:
    """Writes the file; returns the exit status."""
    if not torchruns:
        print(__doc__, file=sys.stderr)
        return 2
    print(HEAD)
    print("[options]")
    releases = {}
    for torchrun in torchruns:
        python = str(Path(torchrun).parent / "python")
        release, *options = subprocess.check_output([python, "-c", OPTIONS], text=True).splitlines()
        releases[release] = str(Path(torchrun).absolute())
        print(f'"{release}" = [\n' + "".join(f"    {json.dumps(option)},\n" for option in options) + "]")
    for way, cause in WAYS.items():
        seen: dict[str, tuple[str, list[str]]] = {}
        for release, torchrun in releases.items():
            text = report(torchrun, way)
            seen.setdefault(shape(text), (text, []))[1].append(release)
        for text, same in seen.values():
            print(f"\n[[report]]\nway = {json.dumps(way)}\ncause = {json.dumps(cause)}\nreleases = {json.dumps(same)}")
            print(f"text = '''\n{text}'''")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
