"""Where the clocks of tests begin: at a real date, so that no window of an hour or a day reaches back before it."""

START = 1_760_000_000.0  # seconds since 1970: in October 2025
