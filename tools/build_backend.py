"""setuptools, except for an editable install: a .pth file with the source roots. setuptools itself would have each
start of Python load an import hook, which takes half as long again. Source: PEP 660."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the other hooks)


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Makes an editable wheel whose .pth file lists the source roots; returns its name."""
    roots = sorted({path.parent.parent.resolve() for path in Path().glob("*/unicron*/__init__.py")})
    settings = {**(config_settings or {}), "editable_mode": "compat"}  # one .pth file, no hook
    name = build_meta.build_editable(wheel_directory, settings, metadata_directory)
    wheel = Path(wheel_directory, name)
    with zipfile.ZipFile(wheel) as archive:
        files = {each: archive.read(each) for each in archive.namelist()}
    (pth,) = (each for each in files if each.endswith(".pth"))
    (record,) = (each for each in files if each.endswith(".dist-info/RECORD"))
    files[pth] = "".join(f"{root}\n" for root in roots).encode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(files[pth]).digest()).rstrip(b"=").decode()
    lines = [line for line in files[record].decode().splitlines() if not line.startswith(f"{pth},")]
    files[record] = "\n".join([*lines, f"{pth},sha256={digest},{len(files[pth])}", ""]).encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for each, content in files.items():
            archive.writestr(each, content)
    return name
