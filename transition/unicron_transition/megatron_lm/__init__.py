"""NVIDIA's Megatron-LM as it is: its own programs (`pretrain_gpt.py`) are healed within the iteration, unmodified.

    python -m unicron.transition.megatron_lm pretrain_gpt.py ARGUMENTS

imports `megatron.training`, checks that it is a release whose parts are known (:mod:`.seams`), replaces those that wait
for other ranks (:mod:`.world`, :mod:`.data`, :mod:`.alone`) and the step of its loop (:mod:`.loop`), and runs the
program. `unicron-agent run --session -- python pretrain_gpt.py` puts it in front by itself.
"""
