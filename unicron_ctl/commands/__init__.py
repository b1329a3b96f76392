"""One module per `unicronctl` command; `unicron_ctl.cli` imports the one that is asked for and no other."""
