"""The week's report, and a bundle about one job for support."""

from unicron_ctl.shared.commands.table import Command

COMMANDS = {
    "report": Command(
        "unicron_ctl.reports.report_command:command", "Sum up a week, or pack a bundle about a job for support."
    ),
}
SCHEMAS = {
    "report week": "unicron_ctl.shared.protocol.answer_schema:Report",
}
