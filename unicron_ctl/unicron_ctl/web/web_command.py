"""Serves the page (`unicronctl web`), and prints the link by which a user opens it (`unicronctl web link`)."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
from collections.abc import Collection
from typing import Any

import click

from unicron_ctl.shared.commands.options import controller_option
from unicron_ctl.shared.protocol import claims
from unicron_ctl.shared.settings.config import web_url_problem
from unicron_ctl.shared.settings.config_file import load
from unicron_ctl.shared.system.addresses import is_loopback, split
from unicron_ctl.shared.system.errors import WRONG_USE, UserError
from unicron_ctl.shared.system.printable import print_text

LISTEN = "127.0.0.1:7454"


class Url(click.ParamType[str]):
    """The type of an option that holds the address of a page, without a path."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if problem := web_url_problem(value):
            self.fail(problem.removeprefix("web_url = "), param, ctx)
        return str(value).rstrip("/").lower()


URL = Url()


@click.group(name="web", invoke_without_command=True)
@click.option("--listen", default=LISTEN, show_default=True, metavar="HOST:PORT", help="Where to listen.")
@click.option("--url", type=URL, default="", metavar="URL", help="How browsers know the page [default: web_url].")
@controller_option()
@click.pass_context
def command(ctx: click.Context, listen: str, url: str, controller: str | None) -> None:
    """Serve a read-only page until SIGTERM.

    Users open it by a link that `unicronctl web link` prints. They see what `unicronctl status` tells them.
    """
    if ctx.invoked_subcommand is None:
        _serve(listen, url, controller)


@command.command(name="link")
@click.option("--url", type=URL, default="", metavar="URL", help="Where you open the page [default: web_url].")
def link(url: str) -> None:
    """Print a link to the page. It is for you, works once, and for 5 minutes."""
    from unicron_ctl.shared.protocol.munge import MungeError, make_credential

    origin = url or _configured_url() or f"http://{LISTEN}"
    try:
        credential = make_credential(claims.of_viewer(origin))
    except MungeError as error:
        raise UserError(f"no link without munge: {error}") from None
    print_text(f"{origin}/#{credential}")


def _configured_url() -> str:
    return load().controller.web_url.rstrip("/").lower()


def _serve(listen: str, url: str, controller: str | None) -> None:
    from unicron_ctl.shared.protocol.client import ask_controller
    from unicron_ctl.web.page import Page
    from unicron_ctl.web.page_server import Server
    from unicron_ctl.web.page_sessions import Sessions
    from unicron_ctl.web.page_source import ANSWER_SECONDS, Source

    try:
        host, port = split(listen, listens=True)
    except ValueError:
        host, port = "", 0
    if not host:
        raise UserError(f"--listen {listen}: write HOST:PORT, such as {LISTEN}", WRONG_USE)
    url, one_user = url or _configured_url(), load().controller.auth == "none"
    if not is_loopback(host):
        if one_user:
            raise UserError(f'auth = "none": everybody who reaches {listen} would see all; listen at 127.0.0.1')
        if not url:
            raise UserError(f"--listen {listen}: say with --url how browsers reach the page", WRONG_USE)
        if not url.startswith("https:"):
            print(
                "unicronctl web: sessions cross the network unencrypted: put a proxy with TLS before it",
                file=sys.stderr,
            )
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="unicronctl web: %(message)s")

    def page(origins: Collection[str]) -> Page:
        source = Source(lambda question: ask_controller(question, controller, ANSWER_SECONDS))
        return Page(source, None if one_user else Sessions(origins))

    gc.freeze()  # an answer has a hundred thousand objects, and no cycles
    gc.set_threshold(50_000, 50, 100)
    server = Server(host, port, page, [url] if url else [])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.stop).start())
    shown = url or next(iter(sorted(server.origins)))
    print_text(f"unicronctl web: {shown}" + ("" if one_user else " (open it with the link of `unicronctl web link`)"))
    sys.stdout.flush()
    try:
        server.serve()
    finally:
        server.server_close()
