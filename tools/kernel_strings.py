"""Makes the lists of what drivers of the Linux kernel can print: docs/behaviour/kernel/strings/DRIVER.txt.

Debian's kernels are taken from its archive, the format strings from their modules and from vmlinux. Kept are those that
speak of an error. Needs apt, dpkg-deb, xz, zstd, gzip, and 1 GB in FOLDER. It is not a part of CI.

    python tools/kernel_strings.py FOLDER
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

THERE = Path(__file__).parents[1] / "docs" / "behaviour" / "kernel"
RELEASES = {"a": "bookworm", "b": "trixie", "c": "sid"}
ARCHITECTURES = ("amd64", "arm64")
TOOL = "tools/kernel_strings.py"
LONGEST = 400
# The level of printk, or the text's own end, tells what is printed from the other texts of a module.
_TEXT = re.compile(rb"(?:\x01[0-7c])?[\t\n\x20-\x7e]{8,%d}(?=\x00)" % LONGEST)
_CODE = re.compile(r"\s*(drm_)?WARN|.*(->|==|&&|\|\|)")  # the condition of a WARN_ON
_OF_AN_ERROR = re.compile(
    r"fail|error|fatal|time-?d? ?-?out|reset|\bhang|hung|stuck|\blost|gone|dead\b|respond|correct|\becc\b|\bras\b"
    r"|poison|corrupt|shut(ting)? ?down|abort|broken|critical|recover|fault|threshold|temperature|health|crash|assert"
    r"|syndrome|wedged|giving up|retir|degrad|lockup|remov|blocked",
    re.IGNORECASE,
)
# A compute node has no display: what the two Intel drivers say of one is left out.
_DISPLAY = re.compile(
    r"CRTC|CONNECTOR|ENCODER|PLANE|PLL|\bDSI\b|HDCP|\bPHY\b|VBT|DPCD|\bAUX\b|transcoder|\bDP\b|PSR|[Pp]ipe\b|eDP"
)
_PACKED = {b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"\x1f\x8b\x08": "gzip"}
_CONFIG = """APT::Architecture "{arch}"; APT::Architectures {{ "{arch}"; }}; APT::Sandbox::User "root";
Dir::Etc "{home}"; Dir::State "{home}/state"; Dir::State::status "{home}/status"; Dir::Cache "{home}/cache";
Acquire::Languages "none"; Acquire::Check-Valid-Until "false";
"""


def fetch(suite: str, arch: str, folder: Path) -> tuple[Path, str]:
    """Unpacks a suite's kernel of the day; returns where, and its version."""
    home = folder / f"{suite}-{arch}"
    (home / "state" / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (home / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    (home / "status").touch()
    (home / "apt.conf").write_text(_CONFIG.format(arch=arch, home=home))
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (home / "sources.list").write_text(f"deb [signed-by={key}] http://deb.debian.org/debian {suite} main\n")

    def apt(*words: str) -> str:
        command = ["env", f"APT_CONFIG={home}/apt.conf", *words]
        return subprocess.run(command, cwd=home, check=True, capture_output=True, text=True).stdout

    apt("apt-get", "-q", "update")
    depends = re.compile(r"Depends: (linux-(?:image|modules|binary)-\d\S+)")
    image = depends.findall(apt("apt-cache", "depends", f"linux-image-{arch}"))[0]
    names = [image, *depends.findall(apt("apt-cache", "depends", image))]
    apt("apt-get", "-q", "download", *names)
    for package in home.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, home / "root"], check=True)
    version = re.search(r"^Version: (\S+)", apt("apt-cache", "show", image), re.MULTILINE)
    return home / "root", version.group(1) if version else "?"


def unpack(data: bytes) -> bytes:
    """The largest packed part of a file; the file itself if it has none."""
    for mark, program in _PACKED.items():
        at = data.find(mark)
        while at >= 0:
            out = subprocess.run([program, "-dc"], input=data[at:], capture_output=True, check=False).stdout
            if len(out) > len(data):
                return out
            at = data.find(mark, at + 1)
    return data


def printed(data: bytes, bare: bool) -> Iterator[str]:
    """What looks like a format string of printk, without level and line feed. bare: the driver's own functions add
    both, so that its strings have neither."""
    for hit in _TEXT.finditer(data):
        text = hit.group().decode()
        if text.startswith("\x017") or " " not in text or _CODE.match(text):
            continue
        if bare or text[0] == "\x01" or text.endswith("\n"):
            yield re.sub(r"^\x01.", "", text).strip().split("\n")[0].replace("\t", " ")


def strings_of(driver: dict, root: Path) -> set[str]:
    """The strings of a driver that are kept."""
    if "modules" in driver:
        files = [file for name in driver["modules"] for file in root.glob(f"**/kernel/**/{name}.ko*")]
    else:
        files = list(root.glob("**/vmlinuz*"))
    only = re.compile(driver["only"], re.IGNORECASE) if "only" in driver else _OF_AN_ERROR
    found = {text for file in files for text in printed(unpack(file.read_bytes()), driver.get("bare", False))}
    heads = re.compile(r"(amdgpu: |\[drm\] (\*ERROR\* )?)+")  # the tests' heads have it again
    found = {heads.sub("", text) if heads.match(text) else text for text in found}
    display = driver.get("modules") == ["i915", "xe"]
    return {text for text in found if only.search(text) and not (display and _DISPLAY.search(text))}


def main(folder: Path) -> int:
    told = tomllib.loads((THERE / "drivers.toml").read_text())
    drivers = {name: driver for name, driver in told.items() if "by_hand" not in driver}
    where: dict[str, defaultdict[str, set[str]]] = {name: defaultdict(set) for name in drivers}
    versions: dict[str, str] = {}
    for sign, suite in RELEASES.items():
        for arch in ARCHITECTURES:
            root, versions[sign] = fetch(suite, arch, folder)
            for name, driver in drivers.items():
                for text in strings_of(driver, root):
                    where[name][text].add(sign)
    releases = ", ".join(f"{sign} {version}" for sign, version in versions.items())
    (THERE / "strings").mkdir(exist_ok=True)
    for name, found in where.items():
        head = f"# {name} in Debian's linux, {' and '.join(ARCHITECTURES)}: {releases}. Made by {TOOL}\n"
        lines = [f"{''.join(sorted(signs))}\t{text}\n" for text, signs in sorted(found.items())]
        (THERE / "strings" / f"{name}.txt").write_text(head + "".join(lines))
        print(f"{name}: {len(lines)} strings")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
