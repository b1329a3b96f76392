"""All kinds of records, by subject; this package is the one name for all of them."""

# ruff: noqa: F403 - each kind stands in its subject's file, and nowhere else

from unicron_ctl.shared.log.records.base import *
from unicron_ctl.shared.log.records.codec import KINDS as KINDS
from unicron_ctl.shared.log.records.codec import decode as decode
from unicron_ctl.shared.log.records.failure_records import *
from unicron_ctl.shared.log.records.generation_records import *
from unicron_ctl.shared.log.records.iteration_records import *
from unicron_ctl.shared.log.records.job_records import *
from unicron_ctl.shared.log.records.node_records import *
from unicron_ctl.shared.log.records.slurm_records import *
