"""Tools for checkpoints, the state folder, pairs of nodes and simulations. None of them is needed for healing."""

from unicron_ctl.shared.commands.table import Command

COMMANDS = {
    "backup": Command("unicron_ctl.tools.backup:command", "Copy unicrond's state folder into a file."),
    "check-folder": Command(
        "unicron_ctl.tools.check_folder:command", "Say whether two hosts can share a state folder."
    ),
    "checkpoint": Command("unicron_ctl.tools.checkpoint:command", "Show, convert and verify checkpoints."),
    "pair-test": Command("unicron_ctl.tools.pair_test:command", "Find the bad node by tests between pairs of nodes."),
    "restore": Command("unicron_ctl.tools.backup:restore", "Put a backup into unicrond's state folder."),
    "simulate": Command("unicron_ctl.tools.simulate:command", "Replay a failure trace under several policies."),
}
SCHEMAS = {
    "checkpoint show": "unicron_ctl.tools.checkpoint:CheckpointReport",
    "pair-test": "unicron_ctl.tools.pair_test:PairReport",
    "simulate": "unicron_ctl.tools.simulate:PolicyResults",
}
