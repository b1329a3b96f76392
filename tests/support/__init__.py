"""What the process and Slurm tiers and the benchmarks share; there is one copy of everything here.

processes    waiting, processes, the environment outside Slurm, `unicronctl`
controller   :class:`Controller`: a real unicrond with a folder of its own
jobs         :class:`Agent`, :class:`Job`: real agents with real ranks; :class:`World`: a controller with such a job
scripted     :class:`ScriptedAgent` and :class:`FakeController`: one side of the protocol in the test's own hands
rank_harness :class:`Ranks`: real ranks under a minimal agent and controller in one loop
warm         :class:`Warm`: the product's zygote without an agent; those ranks are its forks
proof        what must hold of any run, by what the ranks have written
tiny_gpt, tiny_plain, plain_train   the programs that the ranks run; `fault_points` where they fail, `moments` when
"""
