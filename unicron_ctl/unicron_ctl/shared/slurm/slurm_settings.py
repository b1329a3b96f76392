"""Reads Slurm's settings from `scontrol show config`; slurm.conf itself need not be on this disk (configless)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

NO_LIMIT = 65534.0  # seconds: Slurm's number for a time-out that never comes
_LINE = re.compile(r"^([A-Za-z_]\w*)(?:\[\d+\])?\s*=[ \t]*(.*?)\s*$", re.MULTILINE)
_USER = re.compile(r"([^()]*)\((\d+)\)")
_NOTHING = ("(null)", "(null type)", "n/a", "none")


@dataclass(frozen=True)
class SlurmSettings:
    """The settings of slurmctld: name -> text, as Slurm prints it. The texts of a name that is printed several times
    (SlurmctldHost[0], Prolog[1]) are joined by commas."""

    texts: Mapping[str, str] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Return a setting; "" if it is not set or unknown to Slurm."""
        found = self.texts.get(name, "")
        return "" if found.lower() in _NOTHING else found

    def words(self, name: str) -> tuple[str, ...]:
        """Return the words of a setting that is a list with commas."""
        return tuple(word.strip() for word in self.text(name).split(",") if word.strip())

    def seconds(self, name: str) -> float | None:
        """Return the number that begins a setting such as "10 sec" or "6818-6820"; None without one."""
        found = re.match(r"\d+(?:\.\d+)?", self.text(name))
        return float(found[0]) if found else None

    def option(self, name: str, key: str) -> str:
        """Return the value of key=value in a list such as AuthInfo; "" without it."""
        return next((word.partition("=")[2] for word in self.words(name) if word.startswith(f"{key}=")), "")

    def user(self) -> tuple[str, int | None]:
        """Return SlurmUser's name and number."""
        found = _USER.fullmatch(self.text("SlurmUser"))
        return (found[1], int(found[2])) if found else (self.text("SlurmUser"), None)

    def head_hosts(self) -> list[str]:
        """Return the hosts of slurmctld, the first one first, without their addresses."""
        return [word.partition("(")[0] for word in self.words("SlurmctldHost")]

    @property
    def release(self) -> str:
        """Slurm's release, such as "22.05.8"."""
        return self.text("SLURM_VERSION")


def parse_settings(text: str) -> SlurmSettings:
    """Read the output of `scontrol show config`."""
    found: dict[str, str] = {}
    for name, value in _LINE.findall(text):
        found[name] = f"{found[name]},{value}" if name in found else value
    return SlurmSettings(found)
