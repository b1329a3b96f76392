"""How a figure is printed beside the mark that was set for it, in the form that ``benchmarks.run`` collects."""

from __future__ import annotations


def print_figure(what: str, value: float, unit: str, most: float | None = None, least: float | None = None) -> bool:
    """Prints one figure and its mark: `most` or `least` is what it may be. Returns whether the mark is met."""
    met, mark = True, ""
    if most is not None:
        met, mark = value <= most, f"asked: <= {most:g} {unit}"
    elif least is not None:
        met, mark = value >= least, f"asked: >= {least:g} {unit}"
    print(f"{what:<66}{value:>10.5g} {unit:<8}   {mark}".rstrip() + ("" if met else "   MISSED"), flush=True)
    return met
