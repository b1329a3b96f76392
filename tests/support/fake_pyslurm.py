"""A pyslurm that only takes notes."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace


def record(number: int, **fields: object) -> SimpleNamespace:
    base = {
        "id": number,
        "array_id": None,
        "array_task_id": None,
        "array_tasks_waiting": None,
        "state": "RUNNING",
        "state_reason": "None",
        "allocated_nodes": "n1",
        "name": "job",
        "user_name": "ann",
        "comment": None,
        "requeue_count": 0,
        "user_id": 1000,
        "submit_time": 86401,
        "account": "lab",
        "qos": None,
        "partition": "main",
        "constraints": ["a100&ib"],
        "gres_per_node": {"gpu:a100": 8},
        "reservation": None,
        "excluded_nodes": "n[1-2]",
        "time_limit": 60,
        "priority": 17,
        "admin_comment": None,
        "start_time": None,
        "scheduled_nodes": None,
    }
    return SimpleNamespace(**(base | fields))


class FakePyslurm(ModuleType):
    """Notes changes. Elements 0 and 2 of array 7 have their own records, 1, 3, 4 share the master's; 9 is plain."""

    def __init__(self) -> None:
        super().__init__("pyslurm")
        self.__version__ = "25.11.2"
        self.notes: list[tuple] = []
        self.slurm_init = lambda path: self.notes.append(("init", path))
        self.refuse: str | None = None
        self.refused = "requeue"
        notes, outer = self.notes, self

        class PyslurmError(Exception):
            pass

        class Job:
            def __init__(self, number: int) -> None:
                self.number = number

            def _note(self, *what: object) -> None:
                if outer.refuse and what[0] == outer.refused:
                    raise PyslurmError(outer.refuse)
                notes.append((self.number, *what))

            def requeue(self, hold: bool = False) -> None:
                self._note("requeue", hold)

            def hold(self) -> None:
                self._note("hold")

            def release(self) -> None:
                self._note("release")

            def modify(self, changes: dict) -> None:
                self._note("modify", changes)

        records = [
            record(8, array_id=7, array_task_id=None),  # pyslurm's way to say element 0
            record(10, array_id=7, array_task_id=2),
            record(7, array_id=7, array_tasks_waiting="1,3-4%2", state="PENDING", allocated_nodes=None),
            record(9),
        ]
        self.PyslurmError, self.Job, self.JobSubmitDescription = PyslurmError, Job, lambda **fields: fields
        self.Jobs = SimpleNamespace(load=lambda: {one.id: one for one in records})
