"""Single-decree Paxos for each generation of a job: while the controller is away, the agents choose the next plan.

The code is pure and has no sockets. Agents run it; the controller shares :mod:`survivors_plan`, which makes the plan.
"""
