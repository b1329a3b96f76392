"""Lets a job's agents choose the next plan while the controller is away, by single-decree Paxos for each generation.

The code is pure. Agents run it; the controller shares :mod:`survivors_plan`, which makes the plan.
"""
