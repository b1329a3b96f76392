"""The files of a process's own control groups, in version 1 and 2 and where both are mounted.

Source: Linux Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst, cgroups(7).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def own_files(controller: str, v1: str, v2: str, pid: int | str = "self", proc: Path = Path("/proc")) -> Iterator[Path]:
    """Yield where a file of the process's own groups would be: in that controller's version 1, then in version 2."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
        mounts = [line.split() for line in (proc / "self" / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    paths = {}
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        paths.update(dict.fromkeys(controllers.split(","), path))
    for wanted, kind, name in ((controller, "cgroup", v1), ("", "cgroup2", v2)):
        if wanted not in paths:
            continue
        for fields in mounts:
            # ID PARENT MAJ:MIN ROOT MOUNTPOINT OPTIONS [TAGS] - TYPE SOURCE SUPER-OPTIONS, see proc(5)
            rest = fields[fields.index("-") + 1 :] if "-" in fields else []
            if len(rest) < 3 or rest[0] != kind or (wanted and wanted not in rest[2].split(",")):
                continue
            root, path = fields[3].rstrip("/"), paths[wanted]
            inside = path.removeprefix(root) if path == root or path.startswith(f"{root}/") else path
            yield Path(fields[4] + inside) / name
