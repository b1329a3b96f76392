"""A private Slurm cluster on one machine, the demo on it, and faults made on purpose."""

from unicron_ctl.shared.commands.table import Command

COMMANDS = {
    "cluster": Command("unicron_ctl.lab.commands.cluster:command", "Run a private Slurm cluster on this machine."),
    "demo": Command("unicron_ctl.lab.commands.demo:command", "Train two jobs, break them, watch them heal."),
    "inject": Command(
        "unicron_ctl.lab.commands.inject:command", "Break a rank on purpose, where the configuration allows it."
    ),
    "punish": Command("unicron_ctl.lab.commands.inject:punish", "Break ranks at random until the time is up."),
}
SCHEMAS = {
    "inject": "unicron_ctl.shared.protocol.answer_schema:Injection",
    "punish": "unicron_ctl.shared.protocol.answer_schema:Injection",
    "cluster status": "unicron_ctl.lab.cluster.cluster_status:ClusterStatus",
    "demo": "unicron_ctl.lab.demo.report:DemoResult",
}
