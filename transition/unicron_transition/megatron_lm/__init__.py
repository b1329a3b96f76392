"""Runs NVIDIA's Megatron-LM unchanged: its own programs (`pretrain_gpt.py`) are healed within the iteration.

    python -m unicron.transition.megatron_lm pretrain_gpt.py ARGUMENTS

imports `megatron.training`, checks that its release is known, replaces its parts that wait for other ranks
(:mod:`.world`, :mod:`.data`) and the step of its loop (:mod:`.loop`), and runs the program. The agent puts it in front
of a program of Megatron-LM by itself.
"""
