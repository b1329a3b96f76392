"""Asks the controller for the page: each question once for all viewers, and only while there are some."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from unicron_ctl.shared.protocol.answer_schema import Explanation, Scenario, Status
from unicron_ctl.shared.protocol.client import as_struct
from unicron_ctl.shared.system.errors import UserError

Ask = Callable[[Mapping[str, Any]], Any]
Answer = TypeVar("Answer")
STATUS = {"kind": "status", "brief": True, "each": True}  # each viewer's view is cut from the answer
# A question that takes long is asked less often, so that it costs the controller at most 2 % of its core.
STATUS_SECONDS, EXPLAIN_SECONDS, SCENARIO_SECONDS, LONGEST_SECONDS = 2.0, 5.0, 20.0, 20.0
TIMES_ITS_LENGTH = 50.0  # from one question to the next, not counting the page's own time for the answer
OLD_SECONDS = 40.0  # an older answer is not shown while a new one is on its way
ANSWER_SECONDS = 8.0  # for the controller to answer
PATIENCE_SECONDS = 9.0  # for the answer to somebody else's question
EXPLAIN_APART = 0.5  # seconds between two questions about jobs
MOST_JOBS = 256  # jobs whose explanations are kept


class Busy(Exception):
    """Too much is asked at once; the text says what to do."""


@dataclass(frozen=True)
class LastAnswer(Generic[Answer]):
    """The last answer to a question."""

    answer: Answer | None
    problem: str  # why there is no newer one, or empty
    number: int  # counts the tries
    every: float  # seconds between two questions
    at: float  # the time of the last question, by the monotonic clock


class AnswerKeeper(Generic[Answer]):
    """Keeps the answer to one question. The first caller after it is due asks; others get the last answer meanwhile."""

    def __init__(self, ask: Callable[[], Answer], seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._seconds, self._clock = ask, seconds, clock
        self._asking = threading.Lock()
        self._seen: LastAnswer[Answer] | None = None
        self._took = 0.0  # the last question

    def latest(self) -> LastAnswer[Answer]:
        """Return the last answer; ask again if it is due. Raises Busy."""
        seen = self._seen
        old = seen is None or self._clock() - seen.at > OLD_SECONDS
        if self._asking.acquire(timeout=PATIENCE_SECONDS if old else 0.0):
            try:
                seen = self._seen
                if seen is None or self._clock() >= seen.at + seen.every:
                    seen = self._seen = self._ask_now(seen)
            finally:
                self._asking.release()
        if seen is None:
            raise Busy("the controller has not answered yet: try again")
        return seen

    def _ask_now(self, before: LastAnswer[Answer] | None) -> LastAnswer[Answer]:
        answer, problem = before.answer if before else None, ""
        began, used = self._clock(), time.thread_time()
        try:
            answer = self._ask()
        except UserError as error:
            problem = str(error)
        took, self._took = self._took, self._clock() - began - (time.thread_time() - used)
        every = max(self._seconds, float(math.ceil(TIMES_ITS_LENGTH * min(took, self._took))))  # one may be bad luck
        return LastAnswer(answer, problem, before.number + 1 if before else 1, min(every, LONGEST_SECONDS), began)


class Source:
    """Asks the controller.

    Parameters
    ----------
    ask
        As `protocol.client.ask_controller`.
    """

    def __init__(self, ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = ask, clock
        self._status = AnswerKeeper(lambda: as_struct(ask(STATUS), Status), STATUS_SECONDS, clock)
        self._scenario = AnswerKeeper(lambda: as_struct(ask({"kind": "scenario"}), Scenario), SCENARIO_SECONDS, clock)
        self._jobs: OrderedDict[str, AnswerKeeper[Explanation]] = OrderedDict()
        self._lock = threading.Lock()
        self._next_job = 0.0

    def status(self) -> LastAnswer[Status]:
        """Return everything at a glance. Raises Busy."""
        return self._status.latest()

    def scenario(self) -> LastAnswer[Scenario]:
        """Return the planner's input. Raises Busy."""
        return self._scenario.latest()

    def explanation(self, job: str) -> LastAnswer[Explanation]:
        """Explain how the job is treated. Raises Busy."""
        with self._lock:
            kept = self._jobs.setdefault(job, AnswerKeeper(lambda: self._explain(job), EXPLAIN_SECONDS, self._clock))
            self._jobs.move_to_end(job)
            if len(self._jobs) > MOST_JOBS:
                self._jobs.popitem(last=False)
        return kept.latest()

    def _explain(self, job: str) -> Explanation:
        with self._lock:
            wait = self._next_job - self._clock()
            if wait > 2.0:
                raise UserError("too many jobs are looked at: try again")
            self._next_job = max(self._next_job, self._clock()) + EXPLAIN_APART
        time.sleep(max(0.0, wait))
        explanation = as_struct(self._ask({"kind": "explain", "job": job}), Explanation)
        if explanation.job != job:  # the id was taken for another job's name
            raise UserError(f"no job has the id {job}")
        return explanation
