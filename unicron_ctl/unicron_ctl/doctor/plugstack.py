"""Reads plugstack.conf: the plugin's line, and the file that it names (spank(8))."""

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
CONTAINER_PLUGINS = re.compile(r"pyxis|enroot|container")
MOST_BYTES = 8 << 20  # of unicron.so
DEEPEST = 8  # levels of included files
_BUILD_TEXT = re.compile(rb"unicron (\S+), built for Slurm (\d+(?:\.\d+)*)")  # plugin_release in spank/plugin.c


class Line(NamedTuple):
    """A line about one plugin."""

    kind: str
    """required or optional."""
    path: str
    arguments: list[str]

    def __str__(self) -> str:
        return " ".join([self.kind, self.path, *self.arguments])


def lines_of(path: Path, depth: int = 0) -> Iterator[Line]:
    """Yield the plugins of plugstack.conf and of the files that it includes, in Slurm's order. Files that cannot be
    read are skipped."""
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
    """Return the possible paths of plugstack.conf: Slurm's setting, beside this host's slurm.conf, and the caches of a
    configless host, whose slurm.conf comes from slurmctld."""
    found = [setting] if setting else []
    found += [os.path.join(os.path.dirname(slurm_conf), "plugstack.conf")] if slurm_conf else []
    found += ["/run/slurm/conf/plugstack.conf"]
    found += [os.path.join(spool, "conf-cache", "plugstack.conf")] if spool and "%" not in spool else []
    return list(dict.fromkeys([*found, "/etc/slurm/plugstack.conf"]))


def plugin_facts(files: Sequence[str], plugin_dir: str) -> tuple[PluginFacts, str]:
    """Return the plugin on this host, and the agent's path in its line ("" if there is none)."""
    plugstack = next((file for file in files if os.path.isfile(file)), "")
    found = list(lines_of(Path(plugstack))) if plugstack else []
    place = next((i for i, line in enumerate(found) if os.path.basename(line.path) == PLUGIN), None)
    if place is None:
        return PluginFacts(plugstack=plugstack), ""
    line = found[place]
    path = in_plugin_dir(plugin_dir, line.path)
    arguments = dict(word.split("=", 1) for word in line.arguments if "=" in word)
    release, slurm = built_for(path)
    facts = PluginFacts(
        plugstack=plugstack,
        line=str(line),
        path=path,
        is_there=os.path.isfile(path),
        required=line.kind == "required",
        release=release,
        slurm=slurm,
        controller=arguments.get("controller", ""),
        config=arguments.get("config", ""),
        late=[each.path for each in found[place + 1 :] if CONTAINER_PLUGINS.search(os.path.basename(each.path))],
    )
    return facts, arguments.get("agent", "")


def in_plugin_dir(plugin_dir: str, name: str) -> str:
    """Return the path at which Slurm finds a plugin: the first in the folders of PluginDir, which has colons between
    them. An absolute name is its own path."""
    folders = [folder for folder in plugin_dir.split(":") if folder] or ["/usr/lib/slurm"]
    return _first_file([os.path.join(folder, name) for folder in folders])


def _first_file(paths: Sequence[str]) -> str:
    """Return the first path that is a file, or else the first path."""
    return next((path for path in paths if os.path.isfile(path)), paths[0])


def built_for(path: str) -> tuple[str, str]:
    """Read the plugin's release and that of the Slurm that it was built for; "" if the file does not say."""
    try:
        with open(path, "rb") as file:
            found = _BUILD_TEXT.search(file.read(MOST_BYTES))
    except OSError:
        return "", ""
    return (found[1].decode(errors="replace"), found[2].decode()) if found else ("", "")


def installed_plugin(plugin_dir: str) -> str:
    """Return the path of unicron.so on this host; the package's if there is none."""
    return _first_file([PACKAGED_PLUGIN, in_plugin_dir(plugin_dir, PLUGIN), "/usr/local/lib/unicron/unicron.so"])


def installed_agent() -> str:
    """Return the path of the agent on this host; the package's if there is none."""
    return _first_file([PACKAGED_AGENT, os.path.join(sysconfig.get_path("scripts"), "unicron-agent")])
