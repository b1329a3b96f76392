"""Admission checks of a node: quick, time-boxed, each with a kill-switch, "bad" only on proof.

Ranks read memory limits with modules of this folder, so this file imports nothing: the checks need msgspec.
"""
