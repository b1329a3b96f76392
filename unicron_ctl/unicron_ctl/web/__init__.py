"""`unicronctl web`: a read-only page. A process of its own asks the controller once for all who look at it."""

from unicron_ctl.shared.commands.table import Command

COMMANDS = {
    "web": Command("unicron_ctl.web.web_command:command", "Serve a read-only page, or print a link to it."),
}
