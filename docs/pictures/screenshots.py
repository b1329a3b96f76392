"""Takes the screenshots of docs/web.md with Chromium: `python -m docs.pictures.screenshots`.

The cluster in them is simulated, and so are its failures; the page, its server and the controller's core are real.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.support.browser import PHONE, Browser
from tests.support.web_page import Site, busy_world, hurt

HERE = Path(__file__).resolve().parent
NODES, JOBS = 320, 5
FAILURES = (
    ("4200", 3, "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    ("4202", 7, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
    ("4200", 9, "RuntimeError: NCCL communicator was aborted on rank 9."),
    ("4201", 1, "ValueError: not enough values to unpack (expected 2, got 1)"),
)


def main() -> None:
    world = busy_world(NODES, JOBS, 1, names=("llama-70b", "moe-8x22b", "vision-2b"))
    for job, element, line in FAILURES:
        hurt(world, job, element, line, 12)
    with tempfile.TemporaryDirectory(prefix="unicron-pictures-") as folder:
        site = Site(world, Path(folder), viewers=False)
        try:
            browser = Browser()
            try:
                browser.open(f"http://{site.host}/")
                browser.wait("document.querySelectorAll('#jobs .job').length")
                browser.js("document.querySelector('#jobs summary').click()")
                browser.wait("document.querySelector('#jobs .line i')")
                browser.picture(HERE / "web-desktop.png")
                browser.js("document.querySelector('#jobs summary').click()")
                browser.resize(PHONE)
                browser.wait(f"document.documentElement.scrollWidth <= {PHONE[0]}")
                browser.picture(HERE / "web-phone.png")
            finally:
                browser.close()
        finally:
            site.close()


if __name__ == "__main__":
    main()
