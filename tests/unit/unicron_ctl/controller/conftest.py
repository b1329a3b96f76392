from tests.support.replays import replays  # noqa: F401
