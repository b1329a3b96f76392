"""For all tests: Hypothesis tries the same cases on every machine, and a busy one is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unicron", deadline=None, derandomize=True)
settings.load_profile("unicron")
