"""What the process and Slurm tiers and the benchmarks share; there is one copy of everything here.

processes    waiting, processes, the environment outside Slurm, `unicronctl`
controller   :class:`controller.Controller`: a real unicrond with a folder of its own
jobs         :class:`jobs.Agent`, :class:`jobs.Job`: real agents with real ranks; :class:`jobs.World`: a controller
             with such a job
scripted     :class:`scripted.ScriptedAgent` and :class:`scripted.FakeController`: one side of the protocol in the
             test's own hands
rank_harness :class:`rank_harness.Ranks`: real ranks under a minimal agent and controller in one loop
warm         :class:`warm.Warm`: the product's zygote without an agent; those ranks are its forks
proof        what must hold of any run, by what the ranks have written
tiny_gpt, tiny_plain, plain_train, memory_train   the programs that the ranks run: Megatron's and torch's models under a
             session, ordinary scripts, scripts with unicron.memory. `fault_points` where they fail, `moments` when
"""
