"""Sets up an installation, and finds what is wrong with one. Facts are collected first and judged afterwards."""

from unicron_ctl.shared.commands.table import Command

COMMANDS = {
    "doctor": Command(
        "unicron_ctl.doctor.doctor_command:command", "Find what is wrong with the installation, on one host or all."
    ),
    "setup": Command(
        "unicron_ctl.doctor.setup_command:command", "Write unicron.toml, and say what else an installation takes."
    ),
}
SCHEMAS = {"doctor": "unicron_ctl.doctor.doctor_command:DoctorReport"}
