"""Modules that unicrond loads: its memory and its start pay for each."""

from __future__ import annotations

import subprocess
import sys

UNUSED = ("prometheus_client", "wsgiref", "http", "ssl", "smtplib", "urllib.request")


def test_what_metrics_and_notices_need_is_loaded_by_those_who_want_them() -> None:
    """Defect: each unicrond loaded a web server, a mail client and TLS."""
    code = f"import sys, unicron_ctl.controller.unicrond; print([m for m in {UNUSED} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_the_medians_of_iteration_times_load_nothing_while_ranks_train() -> None:
    """Defect: the first one loaded `numpy.ma`, for which the loop stood still for 50 ms."""
    code = "import sys, unicron_ctl.controller.unicrond; print('numpy.ma' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"


def test_a_start_looks_for_no_garbage_among_what_it_loads() -> None:
    """Defect: a seventh of each start went into it."""
    code = (
        "import gc; looks = []; gc.callbacks.append(lambda phase, info: looks.append(info['generation']));"
        "import unicron_ctl.controller.unicrond; print(len(looks) // 2, gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    looks, enabled = done.stdout.split()
    assert int(looks) < 100 and enabled == "True"
