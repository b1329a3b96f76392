"""All kinds of records, by subject; this package is the one name for all of them."""

from unicron.ctl.controller.log.records.base import *  # noqa: F403
from unicron.ctl.controller.log.records.codec import *  # noqa: F403
from unicron.ctl.controller.log.records.failure_records import *  # noqa: F403
from unicron.ctl.controller.log.records.generation_records import *  # noqa: F403
from unicron.ctl.controller.log.records.iteration_records import *  # noqa: F403
from unicron.ctl.controller.log.records.job_records import *  # noqa: F403
from unicron.ctl.controller.log.records.node_records import *  # noqa: F403
from unicron.ctl.controller.log.records.slurm_records import *  # noqa: F403
