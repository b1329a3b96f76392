"""Serves the read-only page of `unicronctl web` in a process of its own, which asks the controller once for all
users."""

from unicron_ctl.shared.commands.table import Command

COMMANDS = {
    "web": Command("unicron_ctl.web.web_command:command", "Serve a read-only page, or print a link to it."),
}
