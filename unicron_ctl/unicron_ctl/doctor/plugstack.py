"""plugstack.conf: the plugin's line, and what lies where it points (spank(8))."""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from unicron_ctl.doctor.facts import PluginFacts
from unicron_ctl.shared.settings.places import PACKAGED_AGENT, PACKAGED_PLUGIN

PLUGIN = "unicron.so"
CONTAINER_PLUGINS = re.compile(r"pyxis|enroot|container")  # they put the task into a container
MOST_BYTES = 8 << 20  # of unicron.so
DEEPEST = 8  # files that include others
_BUILD_TEXT = re.compile(rb"unicron (\S+), built for Slurm (\d+(?:\.\d+)*)")  # plugin_release in spank/plugin.c


class Line(NamedTuple):
    """One plugin: required or optional, its file, its arguments."""

    kind: str
    path: str
    arguments: list[str]

    def __str__(self) -> str:
        return " ".join([self.kind, self.path, *self.arguments])


def lines_of(path: Path, depth: int = 0) -> Iterator[Line]:
    """The plugins of plugstack.conf and of the files that it includes, in Slurm's order. A file that cannot be read has
    none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if len(words) > 1 and words[0] == "include" and depth < DEEPEST:
            for found in sorted(glob.glob(os.path.join(path.parent, words[1]))):
                yield from lines_of(Path(found), depth + 1)
        elif len(words) > 1 and words[0] in ("required", "optional"):
            yield Line(words[0], words[1], words[2:])


def candidates(setting: str, slurm_conf: str, spool: str) -> list[str]:
    """Return where plugstack.conf may be: where Slurm's setting says, beside this host's slurm.conf, and in the caches
    of a host whose slurm.conf comes from slurmctld (configless)."""
    found = [setting] if setting else []
    found += [os.path.join(os.path.dirname(slurm_conf), "plugstack.conf")] if slurm_conf else []
    found += ["/run/slurm/conf/plugstack.conf"]
    found += [os.path.join(spool, "conf-cache", "plugstack.conf")] if spool and "%" not in spool else []
    return list(dict.fromkeys([*found, "/etc/slurm/plugstack.conf"]))


def plugin_facts(files: Sequence[str], plugin_dir: str) -> tuple[PluginFacts, str]:
    """The plugin on this host, and the agent's path in its line ("" without one)."""
    plugstack = next((file for file in files if os.path.isfile(file)), "")
    found = list(lines_of(Path(plugstack))) if plugstack else []
    place = next((i for i, line in enumerate(found) if os.path.basename(line.path) == PLUGIN), None)
    if place is None:
        return PluginFacts(plugstack=plugstack), ""
    line = found[place]
    path = in_plugin_dir(plugin_dir, line.path)
    told = dict(word.split("=", 1) for word in line.arguments if "=" in word)
    release, slurm = built_for(path)
    facts = PluginFacts(
        plugstack=plugstack,
        line=str(line),
        path=path,
        is_there=os.path.isfile(path),
        required=line.kind == "required",
        release=release,
        slurm=slurm,
        controller=told.get("controller", ""),
        config=told.get("config", ""),
        late=[each.path for each in found[place + 1 :] if CONTAINER_PLUGINS.search(os.path.basename(each.path))],
    )
    return facts, told.get("agent", "")


def in_plugin_dir(plugin_dir: str, name: str) -> str:
    """Return where Slurm looks for a plugin of this name: in the folders of PluginDir, which has colons between them,
    in their order. An absolute name stands for itself."""
    folders = [folder for folder in plugin_dir.split(":") if folder] or ["/usr/lib/slurm"]
    places = [os.path.join(folder, name) for folder in folders]
    return next((path for path in places if os.path.isfile(path)), places[0])


def built_for(path: str) -> tuple[str, str]:
    """The plugin's release and that of the Slurm that it was built for; "" where the file does not say."""
    try:
        with open(path, "rb") as file:
            found = _BUILD_TEXT.search(file.read(MOST_BYTES))
    except OSError:
        return "", ""
    return (found[1].decode(errors="replace"), found[2].decode()) if found else ("", "")


def installed_plugin(plugin_dir: str) -> str:
    """Return where unicron.so is on this host, or where the package puts it."""
    places = [
        PACKAGED_PLUGIN,
        in_plugin_dir(plugin_dir, PLUGIN),
        "/usr/local/lib/unicron/unicron.so",
    ]
    return next((path for path in places if os.path.isfile(path)), PACKAGED_PLUGIN)


def installed_agent() -> str:
    """Return where the agent is on this host, or where the package puts it."""
    places = [PACKAGED_AGENT, os.path.join(sysconfig.get_path("scripts"), "unicron-agent")]
    return next((path for path in places if os.path.isfile(path)), PACKAGED_AGENT)
