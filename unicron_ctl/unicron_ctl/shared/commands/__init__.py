"""Code that several commands share: options, times, listings, and the table of commands."""
