"""Makes the answers of the page, without sockets. Viewers get what the controller would tell them."""

from __future__ import annotations

import gzip
import hashlib
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from unicron_ctl.shared.commands.alternative import alternative
from unicron_ctl.shared.protocol.answer_schema import Sharing, Status
from unicron_ctl.shared.protocol.audience import Sight, Viewer
from unicron_ctl.web import page_view
from unicron_ctl.web.page_sessions import Sessions
from unicron_ctl.web.page_source import Busy, LastAnswer, Source

PATIENCE_SECONDS = 4.0  # for an answer that is being made for another viewer
MOST_OF_ONE = 8  # questions of one viewer that wait at the same time
MOST_KEPT = 64
T = TypeVar("T")
HERE = Path(__file__).parent
FILES = {  # path -> the file, its type
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
JSON = "application/json"


class NotFor(Exception):
    """The viewer gets no answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status  # of HTTP


@dataclass(frozen=True)
class Body:
    """An answer."""

    data: bytes
    kind: str  # its media type
    tag: str  # its ETag
    every: float = 0.0  # seconds after which the browser should ask again; 0 for never

    @cached_property
    def packed(self) -> bytes:
        """The data as gzip."""
        return gzip.compress(self.data, 5, mtime=0)


def json_body(data: object, every: float = 0.0, tagged: object = None) -> Body:
    """Encode the data as JSON. tagged: the part by which an answer counts as new; by default all of it."""
    text = msgspec.json.encode(data)
    tag = hashlib.sha256(text if tagged is None else msgspec.json.encode(tagged)).hexdigest()[:32]
    return Body(text, JSON, f'"{tag}"', every)


def file_body(name: str, kind: str) -> Body:
    """Read one of the page's own files."""
    data = (HERE / name).read_bytes()
    return Body(data, kind, f'"{hashlib.sha256(data).hexdigest()[:32]}"')


class Once:
    """Makes one answer at a time, each once for all viewers who may see the same."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, ...], tuple[int, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[object, ...], number: int, make: Callable[[], T]) -> T:
        """Return what was made under this key from the answer with this number, or make it. Raises Busy."""
        if not self._lock.acquire(timeout=PATIENCE_SECONDS):
            raise Busy("too much is asked at once: try again")
        try:
            kept = self._kept.get(key)
            if kept is None or kept[0] != number:
                kept = self._kept[key] = number, make()
            self._kept.move_to_end(key)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            answer: T = kept[1]
            return answer
        finally:
            self._lock.release()


class Page:
    """Answers the page's requests.

    Parameters
    ----------
    source
        The controller's last answers.
    sessions
        None for a single user (auth = "none").
    """

    def __init__(self, source: Source, sessions: Sessions | None) -> None:
        self._source, self.sessions = source, sessions
        self.files = {path: file_body(*file) for path, file in FILES.items()}
        self.questions: dict[str, Callable[[Viewer | None, str], Body]] = {
            "/view": self._view,
            "/job": self._job,
            "/plan": self._plan,
        }
        self._views, self._plans = Once(), Once()
        self._waiting: Counter[Viewer | None] = Counter()
        self._lock = threading.Lock()

    def answer(self, path: str, token: str, argument: str) -> Body:
        """Answer one of `questions`. Raises NotFor, and Busy if too many questions wait."""
        viewer = self.viewer_of(token)
        with self._lock:
            if self._waiting[viewer] >= MOST_OF_ONE:
                raise Busy("you ask for too much at once: try again")
            self._waiting[viewer] += 1
        try:
            return self.questions[path](viewer, argument)
        finally:
            with self._lock:
                self._waiting[viewer] -= 1
                self._waiting = +self._waiting

    def viewer_of(self, token: str) -> Viewer | None:
        """Return the viewer with this token; None for the only user. Raises NotFor."""
        if self.sessions is None:
            return None
        if (viewer := self.sessions.viewer(token)) is None:
            raise NotFor(401, "run `unicronctl web link` and open the link that it prints")
        return viewer

    def _sight(self, viewer: Viewer | None) -> tuple[LastAnswer[Status], Sight]:
        """Return the last status, and the viewer's part of it. Raises NotFor, Busy."""
        seen = self._source.status()
        if seen.answer is None:
            raise NotFor(503, seen.problem)
        sharing = seen.answer.sharing
        if sharing is None:  # the page's own user is no reader, so the answer is for that user alone
            if viewer is None or viewer.uid != os.geteuid():
                why = "this page's own user is not one of [controller] readers or admins, so it serves that user only"
                raise NotFor(403, why)
            sharing = Sharing(auth="munge", uid=os.geteuid(), admins=[], private=[], owners={}, names={})
        elif viewer is None and sharing.auth != "none":
            raise NotFor(403, 'the controller has auth = "munge": give `unicronctl web` its unicron.toml')
        return seen, Sight(seen.answer, sharing, viewer)

    def _view(self, viewer: Viewer | None, _: str) -> Body:
        seen, sight = self._sight(viewer)
        key = ("view", None if sight.reads_all else viewer)

        def make() -> Body:
            status = sight.status()
            data = page_view.overview(status, sight.reads_all)
            data |= {"problem": seen.problem, "session": self.sessions is not None}
            return json_body({**data, "time": status.controller.time}, seen.every, data)

        return self._views.get(key, seen.number, make)

    def _job(self, viewer: Viewer | None, job: str) -> Body:
        _, sight = self._sight(viewer)
        if job not in sight.mine:
            raise NotFor(404, "there is no such job, or it is not yours")
        last = self._source.explanation(job)
        if last.answer is None:
            raise NotFor(503, last.problem)
        answer = last.answer
        second = None if answer.ended else self._alternative(sight, viewer, job)
        return json_body(page_view.job_view(answer, second) | {"problem": last.problem}, last.every)

    def _alternative(self, sight: Sight, viewer: Viewer | None, job: str) -> Any:
        """Return the planner's choice for the job and its second choice; None if it has none."""
        last = self._source.scenario()
        if (whole := last.answer) is None:
            return None
        key = ("alternative", job, None if sight.reads_all else viewer)
        return self._plans.get(key, last.number, lambda: alternative(msgspec.to_builtins(sight.scenario(whole)), job))

    def _plan(self, viewer: Viewer | None, _: str) -> Body:
        from unicron_planner.problem.objective import PlanError
        from unicron_planner.problem.scenario import from_dict
        from unicron_planner.solver.solve import solve

        sight = self._sight(viewer)[1]
        last = self._source.scenario()
        if last.answer is None:
            raise NotFor(503, last.problem)
        scenario, names = sight.scenario(last.answer), {job.job: job.name for job in sight.status().jobs}

        def make() -> page_view.View:
            try:
                return page_view.plan_view(scenario, solve(from_dict(msgspec.to_builtins(scenario))), names)
            except PlanError as error:
                return {"jobs": [], "why": str(error)}

        data = self._plans.get(("plan", None if sight.reads_all else viewer), last.number, make)
        return json_body(data, last.every)
