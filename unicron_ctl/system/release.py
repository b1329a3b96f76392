"""The release of this installation."""

from __future__ import annotations

import functools

DISTRIBUTION = "unicron-slurm"
NOT_INSTALLED = "not installed"


@functools.cache
def own_release() -> str:
    """Unicron's release, such as "0.1.0"; "not installed" where the code was copied without its package's data."""
    return release_of(DISTRIBUTION) or NOT_INSTALLED


def release_of(distribution: str) -> str:
    """The release of an installed distribution, "" without one. Nothing of it is imported."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and seldom wanted

    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
