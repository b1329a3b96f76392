"""Every time-out and limit of the system in one place, and the rules that they must keep among themselves.

What an admin can set is in `settings.config`. What is fixed is listed here by value, for ranks import nothing of
this package, and the controller must not import theirs (torch): a test reads the sources and compares. The rules are
checked together, so that `unicrond --check` can name every contradiction at once. The tables of docs/reference.md are
made of this file by tools/limits_tables.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

DAY = 86400.0


class Range(NamedTuple):
    """What a number in the configuration may be, both ends included; `zero`: 0 is allowed too, and turns it off."""

    low: float
    high: float
    zero: bool = False
    why: str = ""

    def __str__(self) -> str:
        return f"{number(self.low)} to {number(self.high)}" + (", or 0 for none" if self.zero else "")

    def problem(self, name: str, value: float) -> str:
        """What is wrong with the value, or nothing."""
        if self.low <= value <= self.high or (self.zero and value == 0):
            return ""
        return f"{name} = {number(value)} must be {self}" + (f": {self.why}" if self.why else "")


class Limit(NamedTuple):
    """A fixed time-out or limit, in seconds unless its meaning says otherwise. `variable`: the environment variable of
    a job that sets another value."""

    owner: str
    name: str
    value: float
    meaning: str
    variable: str = ""

    @property
    def key(self) -> str:
        """Its name in the rules."""
        return f"{self.owner}.{self.name}"


class Rule(NamedTuple):
    """`low` must be below `high`, or at most as much where they may be `equal`. Each is a sum of names: a field of
    [controller], `lease`, or a limit's key. `slurm`: only where the controller has a Slurm."""

    low: str
    high: str
    why: str
    equal: bool = False
    slurm: bool = False


# Whose limits they are, and the folder or file that has them.
HOMES: dict[str, str] = {
    "controller": "unicron_ctl/controller",
    "agent": "unicron_ctl/agent",
    "rank": "transition",
    "detector": "detector",
    "node": "unicron_ctl/nodes",
    "agreement": "unicron_ctl/consensus",
    "protocol": "unicron_ctl/protocol",
    "process": "unicron_ctl/system/descriptors.py",
    "plugin": "slurm_plugin/spank/notify.c",
    "prolog": "slurm_plugin/prolog.d/50-unicron",
    "health": "slurm_plugin/health/unicron-health",
    "service": "slurm_plugin/systemd/unicrond.service",
    "slurm": "",  # slurm.conf(5): the defaults
}

LIMITS: tuple[Limit, ...] = (
    Limit("controller", "TICK_SECONDS", 0.05, "between two turns of the loop that look at the clock"),
    Limit("controller", "GATHER_SECONDS", 0.002, "from one turn that heard something to the next"),
    Limit("controller", "PAUSE_SECONDS", 0.2, "at most, after a look at the clock that took long, for what has come"),
    Limit("controller", "STALL_SECONDS", 0.5, "a turn that is later than this was the controller's own delay"),
    Limit("controller", "BUSY_SECONDS", 2.0, "for another process's lock on the event log"),
    Limit("controller", "BRIDGED_SECONDS", 3600.0, "that the machine's clock may be put back and timers still run on"),
    Limit("controller", "FRESH_SECONDS", 60.0, "for which one credential tells everybody the controller's key"),
    Limit("controller", "AGAIN_SECONDS", 1.0, "before the next try, when munge could not make one"),
    Limit("controller", "SNAPSHOT_SECONDS", 600.0, "between two snapshots of the state in the event log"),
    Limit("controller", "FORGET_FIRST_SECONDS", 300.0, "after a start no records go yet"),
    Limit("controller", "FORGET_SECONDS", 1.0, "between two pieces of the log that go"),
    Limit("controller", "FORGET_AGAIN_SECONDS", 21600.0, "between two looks for records that may go"),
    Limit("controller", "PROGRESS_SECONDS", 0.2, "between two statuses of an agent that tell of mere progress"),
    Limit("controller", "LOOK_SECONDS", 0.5, "between two looks for overdue actions"),
    Limit("controller", "BLOCKED_SECONDS", 0.1, "between two looks for who waits for a stopped rank of its replica"),
    Limit(
        "controller", "WITNESS_SECONDS", 0.05, "a rank that says something this long after a fault has seen its result"
    ),
    Limit(
        "controller",
        "UNANSWERED_SECONDS",
        0.3,
        "for an agent to answer after peers' ranks stopped; then others are asked",
    ),
    Limit("controller", "TRY_SECONDS", 300.0, "between two tries of an agent's door while all is well"),
    Limit("controller", "PUT_BACK_SECONDS", 1.0, "for a newcomer to acknowledge a Break; then it did not get in"),
    Limit(
        "controller", "HOLD_SECONDS", 1.0, "before a job leaves a node by its kernel's word: others may say the same"
    ),
    Limit("controller", "BEFORE_SECONDS", 10.0, "a rank that ended so long before a node event may have ended by it"),
    Limit("controller", "AFTER_SECONDS", 3.0, "the same for one that ended after it"),
    Limit(
        "controller", "LINK_SECONDS", 60.0, "a collective that breaks so long after a link flap may have broken by it"
    ),
    Limit("controller", "FRESH_PERIODS", 2.5, "periods of metrics_seconds after which a sample is too old"),
    Limit("controller", "EVIDENCE_SECONDS", 600.0, "for which an anomaly that is over still counts as evidence"),
    Limit("controller", "ASK_PERIODS", 1.3, "heartbeat periods of silence after which other agents are asked"),
    Limit(
        "controller", "ANSWER_SECONDS", 1.5, "for an agent that is asked about another one; then a further one is asked"
    ),
    Limit("controller", "ROUND_SECONDS", 2.0, "between two rounds of questions about a silent agent"),
    Limit(
        "controller", "UNREACHED_SECONDS", 6.0, "without a slurmd that answers, after its agent ended: the node is lost"
    ),
    Limit("controller", "STAY_SECONDS", 5.0, "between two looks for elements that Slurm runs without their agents"),
    Limit("controller", "REACHED_SECONDS", 15.0, "until the node of such an element is asked about again"),
    Limit("controller", "MISSING_SECONDS", 0.5, "between two looks for agents that a restarted controller misses"),
    Limit("controller", "TOGETHER_SECONDS", 0.5, "between two counts of the nodes that fell silent together"),
    Limit("controller", "UNSURE_PERIODS", 0.6, "heartbeat periods after which others may have fallen silent, too"),
    Limit("controller", "SAY_SECONDS", 1.0, "of a Break, before it is said that the job waits for its last state"),
    Limit("controller", "SURVEY_SECONDS", 1.5, "for a job's agents to say whether they reach each other"),
    Limit("controller", "ENTER_SECONDS", 2.5, "of entering a generation, after which they are asked that"),
    Limit("controller", "PARTED_SECONDS", 5.0, "between two looks whether a node that was left out is reached again"),
    Limit("controller", "HURRY_SECONDS", 0.1, "until the next poll of Slurm when something has changed"),
    Limit(
        "controller", "RETRY_SECONDS", 5.0, "before an action that Slurm refused is asked for again; then ever longer"
    ),
    Limit("controller", "RECEIVE_SECONDS", 0.03, "of one turn of the loop for messages; strangers have half of it"),
    Limit("controller", "RESULTS_SECONDS", 0.02, "of one turn for what threads have found, credentials among it"),
    Limit("controller", "ANSWERS_SECONDS", 0.02, "of one turn for answers to questions"),
    Limit("controller", "NAME_SECONDS", 1.0, "for the name service to say a user's name"),
    Limit("controller", "RUN_SECONDS", 10.0, "for the actions of one request; then Slurm is listed again"),
    Limit("controller", "GONE_SECONDS", 10.0, "without any element in Slurm; then the job is over"),
    Limit("controller", "REQUEUE_SECONDS", 30.0, "between two requeues of an element whose agent has not come"),
    Limit("controller", "HINT_SECONDS", 0.5, "between two questions to an agent of which hints say that it ended"),
    Limit("controller", "NO_EFFECT_SECONDS", 2.0, "the same for one that Slurm took, and of which nothing has come"),
    Limit("controller", "AWAY_SECONDS", 60.0, "without an answer of Slurm's, after which an admin is called"),
    Limit("controller", "ASKED_SECONDS", 60.0, "after a job's end, for which Slurm is still asked about it"),
    Limit("controller", "LATELY_SECONDS", 3600.0, "the same when the controller starts"),
    Limit("controller", "SETTINGS_SECONDS", 60.0, "between two looks at Slurm's PrivateData and topology"),
    Limit("controller", "CONFIRM_SECONDS", 5.0, "for Slurm to confirm an agent; then its job is healed within itself"),
    Limit("controller", "START_SECONDS", 60.0, "for nodes that come, where a part of the newest state lies in memory"),
    Limit("controller", "CUT_SECONDS", 5.0, "at least between two iterations whose state is copied to other nodes"),
    Limit("controller", "AHEAD_SECONDS", 1.0, "before such an iteration, for the word to reach all ranks"),
    Limit(
        "controller",
        "HEARD_SECONDS",
        1.0,
        "how old the word of what a restart-mode script has saved may be",
    ),
    Limit("controller", "PART_SECONDS", 10.0, "for every part of a cut to be somewhere, once ranks are past it"),
    Limit("controller", "CUT_LIMIT_SECONDS", 120.0, "of a cut, while no byte of a copy moves; then another is tried"),
    Limit(
        "controller", "FETCH_SECONDS", 120.0, "for copies, while no byte moves; then it goes on with what ranks have"
    ),
    Limit("controller", "FETCH_AGAIN_SECONDS", 1.0, "between two orders to get one"),
    Limit("controller", "LISTING_SECONDS", 30.0, "after which a listing of Slurm confirms nobody"),
    Limit("controller", "AFTER_END_SECONDS", 30.0, "after its job's end; an element that is requeued later runs again"),
    Limit("controller", "KICK_SECONDS", 3.0, "until a pinned element that still waits is told to start again"),
    Limit("controller", "PIN_SECONDS", 30.0, "for a pinned element to start; then another node is tried"),
    Limit("controller", "OWN_SECONDS", 1.0, "for a lost process to be there again before a hot spare takes its place"),
    Limit("controller", "STANDING_SECONDS", 1.0, "between two looks at which hot spares are ready"),
    Limit(
        "controller",
        "STEADY_SECONDS",
        600.0,
        "of training after which earlier restarts are forgiven, where nothing is saved",
    ),
    Limit("controller", "REFRESH_SECONDS", 3600.0, "between two records of a health report without news"),
    Limit("controller", "WEEK_SECONDS", 7 * DAY, "between two sums of what acting would have saved"),
    Limit("controller", "SUSPECT_SECONDS", DAY, "for which a suspect is remembered, and its job avoids it"),
    Limit("controller", "DRAIN_SECONDS", 5.0, "for a node to drain itself when its health checks have proven it bad"),
    Limit("controller", "REACH_SECONDS", 5.0, "between two tries to reach the slurmd of a node that was set down"),
    Limit("controller", "BACK_SECONDS", 10.0, "for which that slurmd must have answered; then the node is back"),
    Limit("agent", "RECEIVE_SECONDS", 0.02, "of the loop for what other agents say at once"),
    Limit("agent", "REGISTER_SECONDS", 0.5, "between two tries to register"),
    Limit("agent", "ADDRESS_SECONDS", 1.5, "for one of the controller's addresses to accept, where it has several"),
    Limit("agent", "REDIAL_SECONDS", 2.0, "without a connection, before the controller's other addresses are tried"),
    Limit("agent", "RACE_SECONDS", 1.5, "for one of those to accept"),
    Limit("agent", "DOWN_SECONDS", 1.0, "between two questions for the controller's key while the line is down"),
    Limit(
        "agent",
        "REGISTER_TIMEOUT",
        10.0,
        "to find the controller; then the job runs unprotected",
        "UNICRON_REGISTER_TIMEOUT",
    ),
    Limit("agent", "ORPHAN_SECONDS", 600.0, "without the controller; then an element with a dead rank ends"),
    Limit(
        "agent", "WITHOUT_CONTROLLER_SECONDS", 60.0, "that a finished element waits for others without the controller"
    ),
    Limit("agent", "REACH_SECONDS", 0.7, "for a silent node's address to answer, tried by several connections"),
    Limit("agent", "STOP_SECONDS", 1.0, "between SIGTERM and SIGKILL of a rank after a loss"),
    Limit("agent", "PLANNED_SECONDS", 8.0, "the same in restart mode when nobody is lost: time to save something"),
    Limit("agent", "ENDING_SECONDS", 10.0, "the same when Slurm ends the job"),
    Limit("agent", "YOUNG_SECONDS", 20.0, "age up to which a restart-mode world that breaks may have a broken script"),
    Limit("agent", "OWN_END_SECONDS", 2.0, "for the processes of such a world to end by themselves"),
    Limit("agent", "DUMP_SECONDS", 0.02, "between two looks at stack traces in the making"),
    Limit("agent", "LOOK_SECONDS", 0.05, "between two looks at processes that have to end"),
    Limit("agent", "DOORS_SECONDS", 1.0, "that a restart-mode world waits at most to know which doors answer"),
    Limit("agent", "TICK_SECONDS", 1.0, "between two looks at the memory cgroup and at files that cannot be polled"),
    Limit("agent", "KEPT_SECONDS", 300.0, "for which node events are kept for a controller that was restarted"),
    Limit("agent", "ERROR_SECONDS", 0.02, "of rest after an error of the agent's own"),
    Limit("agent", "THREADS_SECONDS", 5.0, "at most, for the threads that are tried at the start"),
    Limit("agent", "START_SECONDS", 60.0, "for a rank's process to find the descriptors and the memory to start"),
    Limit("agent", "START_AGAIN_SECONDS", 1.0, "between two such tries"),
    Limit("agent", "HOLD_SECONDS", 0.02, "between two looks whether the job's log takes more"),
    Limit("agent", "FLUSH_SECONDS", 2.0, "without progress, for the last lines of the job's log"),
    Limit("agent", "PASS_SECONDS", 2.0, "between two tries of a plain world's doors while the controller is away"),
    Limit("agent", "WATCHDOG_SECONDS", 10.0, "before a watchdog that ended is started again"),
    Limit("agent", "SILENT_PERIODS", 5.0, "periods of metrics_seconds after which a silent sampler is replaced"),
    Limit("agent", "SETTLE_SECONDS", 3.0, "without change in Slurm before a world without the controller starts"),
    Limit("agent", "LIMIT_SECONDS", 60.0, "at most, for that"),
    Limit("agent", "FORGOTTEN_SECONDS", 900.0, "after which training state in memory that no agent holds is removed"),
    Limit(
        "agent", "SILENT_SECONDS", 30.0, "without a byte; then a copy of training state is given up, and tried again"
    ),
    Limit("agent", "PROOF_SECONDS", 5.0, "for the whole proof that somebody may take or give a copy"),
    Limit("agent", "PAUSE_SECONDS", 0.5, "after a connection for a copy that could not be taken"),
    Limit("agent", "AGAIN_SECONDS", 2.0, "before it is tried again"),
    Limit("agent", "FAILING_SECONDS", 300.0, "for which a node that has not given a copy is asked after all others"),
    Limit("agent", "CUT_LOOK_SECONDS", 0.2, "between two looks whether there is state to be copied to other nodes"),
    Limit("agent", "FILE_LOOK_SECONDS", 0.5, "between two looks whether there is state of which a file is to be made"),
    Limit("agent", "MOST_LOOK_SECONDS", 60.0, "at most, between two whether a checkpoint is whole, and older ones go"),
    Limit("agent", "TURN_SECONDS", 5.0, "without a sign that the node before saves a place's state at the job's end"),
    Limit("agent", "FILES_SECONDS", 60.0, "at the end of a training, for files that are still being made"),
    Limit("agent", "SAVE_SECONDS", 600.0, "at the end by an error, for the files of what memory has"),
    Limit("agent", "UNFINISHED_SECONDS", 5.0, "for a file to be left unfinished when the agent ends"),
    Limit("agent", "TOUCH_SECONDS", 10.0, "between two signs of an agent that its folder of shared memory is in use"),
    Limit("agent", "BUSY_SECONDS", 0.05, "before forgotten memory that was held just then is looked at again"),
    Limit("agent", "LOAD_SECONDS", 120.0, "for the imports of the ranks' template; then ranks start cold"),
    Limit("agent", "ANSWER_SECONDS", 2.0, "for the template's next fork; then ranks that wait for theirs start cold"),
    Limit("agent", "HUNG_SECONDS", 10.0, "for the same; then another template is started"),
    Limit("agent", "REST_SECONDS", 1.0, "before a template that died is started again; then twice as long each time"),
    Limit("agent", "STEADY_SECONDS", 600.0, "of a template's life after which earlier deaths are forgiven"),
    Limit("agent", "ORPHANS_SECONDS", 1.0, "between two looks for what ended ranks have left behind"),
    Limit(
        "rank",
        "PLAN_TIMEOUT",
        900.0,
        "that a stopped rank waits for a plan; then it saves its state and its process ends",
        "UNICRON_PLAN_TIMEOUT",
    ),
    Limit("rank", "ENTER_TIMEOUT", 20.0, "for one process group to connect"),
    Limit("rank", "CONNECT_SECONDS", 0.5, "for one try to reach the rendezvous store"),
    Limit("rank", "COLLECTIVE_TIMEOUT", 1800.0, "of a collective in training", "UNICRON_COLLECTIVE_TIMEOUT"),
    Limit("rank", "BOUNDARY_TIMEOUT", DAY, "that a newcomer waits for the end of the iteration"),
    Limit("rank", "DRAIN_SECONDS", 10.0, "for reduces under way to end after a Break"),
    Limit("rank", "UNBLOCK_SECONDS", 0.02, "between two tries to free them"),
    Limit("rank", "TRANSFER_SECONDS", 1.0, "the same while the training state is transferred"),
    Limit("rank", "RETRY_SECONDS", 5.5, "for which packets sent again and again count as progress of a collective"),
    Limit("rank", "KICK_SECONDS", 0.02, "between two tries to free a main thread from a collective"),
    Limit("rank", "POLL_SECONDS", 0.005, "between two looks while groups are connected, or a message is waited for"),
    Limit("rank", "GRACE_SECONDS", 0.3, "for a wait to end by itself when its connection was cut"),
    Limit("rank", "STALE_SECONDS", DAY, "age at which a checkpoint that was never finished is deleted"),
    Limit("controller", "SAVE_SECONDS", 600.0, "for ranks that are to start in another layout to save their state"),
    Limit("controller", "SAVING_LOOK_SECONDS", 0.2, "between two looks whether ranks still save their state"),
    Limit("controller", "STARTING_SECONDS", 1.0, "between two words to systemd while unicrond starts"),
    Limit("controller", "EXTENDED_SECONDS", 30, "for which systemd waits on after each of them"),
    Limit("rank", "TURN_SECONDS", 5.0, "for the member before it, where all ranks are asked to save"),
    Limit("rank", "OTHERS_SECONDS", 10.0, "for others' files at the end of a training, before older ones are removed"),
    Limit("rank", "LOCK_SECONDS", 1800.0, "for another rank to build an index of Megatron-LM's, or what it compiles"),
    Limit("rank", "RESCUE_SECONDS", 60.0, "for the member before it to save the state of a job that nobody leads"),
    Limit("rank", "SENT_SECONDS", 10.0, "for a peer that lives to take the last word before the groups end"),
    Limit("rank", "KEYS_SECONDS", 10.0, "between two looks for old keys in a rendezvous store"),
    Limit("rank", "KEPT_KEYS_SECONDS", 60.0, "for which keys of a generation that is over stay there"),
    Limit("rank", "LOOK_SECONDS", 0.2, "between two looks whether it has"),
    Limit("rank", "FREED_SECONDS", 5.0, "for shared memory that is being freed, once a process first wants it"),
    Limit("rank", "MAKING_SECONDS", 60.0, "for which the room that an image still lacks counts as taken"),
    Limit("detector", "PROGRESS_SECONDS", 0.2, "from a rank's last message until it tells of mere progress"),
    Limit("detector", "QUIET_SECONDS", 0.5, "between two looks at the network of a rank that says nothing"),
    Limit("detector", "STALL_SECONDS", 5.0, "for which a job's log takes nothing before output is dropped"),
    Limit("detector", "ANSWER_SECONDS", 0.5, "for a rank to begin its stack trace"),
    Limit("detector", "SETTLE_SECONDS", 0.05, "without growth; then a stack trace is complete"),
    Limit("detector", "SPY_SECONDS", 1.5, "for py-spy to look at one process"),
    Limit("detector", "CLAIM_SECONDS", 60.0, "for a process to end after the OOM killer chose it"),
    Limit("detector", "REPORT_SECONDS", 3.0, "until an OOM kill that explains no rank's end is reported by itself"),
    Limit("detector", "BURST_SECONDS", 10.0, "within which the same fault of the kernel log is one burst"),
    Limit("detector", "ADOPTED_SECONDS", 2.0, "for the agent to become the parent of a rank that was forked"),
    Limit("detector", "TRIAL_SECONDS", 10.0, "for a process that is forked from a new template to compute something"),
    Limit("detector", "CONNECT_SECONDS", 20.0, "for the two nodes of a pair test to meet"),
    Limit("node", "END_SECONDS", 5.0, "for an srun of a pair test that is ended, and for the rest of its output"),
    Limit("node", "BUDGET_SECONDS", 8.0, "for the admission checks of a node together"),
    Limit("node", "REPORT_SECONDS", 2.0, "for the controller to take their report"),
    Limit("node", "START_SECONDS", 30.0, "for Slurm to start a pair test"),
    Limit(
        "agreement", "ASK_SECONDS", 1.0, "between the controller's answer and the next question while a rank needs it"
    ),
    Limit("agreement", "MINORITY_SECONDS", 20.0, "cut off from the controller and most of a plain world; then it ends"),
    Limit("agreement", "PART_SECONDS", 120.0, "cut off from the controller and some of a plain world; then it ends"),
    Limit("agreement", "MARGIN_SECONDS", 20.0, "more than that a new plain world waits for what fell silent"),
    Limit("agreement", "TELL_SECONDS", 0.25, "without its answer; then the job's other agents are told"),
    Limit("agreement", "AWAY_SECONDS", 0.7, "without its answer; then it is away, and the agents decide"),
    Limit("agreement", "REPEAT_SECONDS", 0.5, "until another of the leading agents is told"),
    Limit("agreement", "LOOK_SECONDS", 0.02, "between two looks at the clock while something is going on"),
    Limit("agreement", "GATHER_SECONDS", 0.3, "for the other agents to answer, once a majority has"),
    Limit("agreement", "RESEND_SECONDS", 0.3, "between two messages to an agent that has not answered"),
    Limit("agreement", "REST_SECONDS", 10.0, "for a rank to stop, or three of its iterations"),
    Limit("agreement", "BALLOT_SECONDS", 15.0, "without a step forward; then an attempt to agree is given up"),
    Limit("agreement", "PAUSE_SECONDS", 2.0, "after an attempt that was given up"),
    Limit("agreement", "ANNOUNCE_SECONDS", 10.0, "for which a plan is announced to agents that do not answer"),
    Limit("protocol", "MERGE_SECONDS", 0.2, "that a rank's report of a step waits for other ranks' and for later ones"),
    Limit("protocol", "KNOWN_SECONDS", 600.0, "without a word; then an agent's connection may be closed for others"),
    Limit("protocol", "HANDSHAKE_SECONDS", 10.0, "for a connection to speak ZeroMQ; then it is closed"),
    Limit("protocol", "UNREAD_SECONDS", 30.0, "for a peer to take what was sent, or to send the rest; then closed"),
    Limit("protocol", "SWEEP_SECONDS", 1.0, "between two looks for connections to close"),
    Limit("protocol", "SAY_AGAIN_SECONDS", 10.0, "between two notes that an agent still speaks by a connection"),
    Limit("protocol", "TELL_AGAIN_SECONDS", 60.0, "between two lines about too many connections"),
    Limit("protocol", "LINGER_SECONDS", 0.2, "for what was sent last to go out when a listener closes"),
    Limit("protocol", "TIME_LIMIT", 3.0, "for one call of munge"),
    Limit("protocol", "HELLO_SECONDS", 0.3, "between two questions for the controller's public key"),
    Limit("protocol", "SLURM_SECONDS", 5.0, "for scontrol to say who SlurmUser is"),
    Limit("protocol", "MAX_BYTES", 4 << 20, "bytes of one message"),
    Limit("protocol", "LEAST_BEAT", 0.01, "shortest heartbeat period that an agent accepts"),
    Limit("protocol", "MOST_BEAT", 60.0, "longest heartbeat period that it accepts, and time for progress"),
    Limit("protocol", "LEAST_PROGRESS", 0.05, "shortest time between two statuses of mere progress that it accepts"),
    Limit("protocol", "MOST_SECONDS", 1e9, "longest duration that a message may tell"),
    Limit("protocol", "MOST_SLOTS", 1 << 20, "members of one plan"),
    Limit("protocol", "MOST_RANKS", 1024, "ranks of one node"),
    Limit("protocol", "AGAIN_SECONDS", 0.1, "between two connections that are tried side by side"),
    Limit("process", "CONNECTIONS", 10000, "connections that the controller is made for"),
    Limit("plugin", "LOOKUP_NANOSECONDS", 0.5e9, "nanoseconds for the look-up of the controller's name"),
    Limit("prolog", "UNICRON_HEALTH_SECONDS", 4.0, "for the admission checks in the prolog (prolog.conf)"),
    Limit("health", "UNICRON_HEALTH_SECONDS", 8.0, "for the admission checks as HealthCheckProgram (health.conf)"),
    Limit("service", "WatchdogSec", 30.0, "without a turn of the controller's loop; then systemd restarts it"),
    Limit("service", "TimeoutStopSec", 10.0, "for the controller to end"),
    Limit("service", "RestartSec", 2.0, "until systemd starts it again"),
    Limit("service", "LimitNOFILE", 65536, "open files of the controller: one for each connection"),
    Limit("slurm", "KillWait", 30.0, "between SIGTERM and SIGKILL of a step"),
    Limit("slurm", "MessageTimeout", 10.0, "for an answer of one daemon to another"),
    Limit("slurm", "BatchStartTimeout", 10.0, "for a batch job to start, its prolog included"),
    Limit("slurm", "HealthCheckProgram", 60.0, "for that program; then slurmd kills it"),
    Limit("slurm", "cred_expire", 120.0, "until a requeued job may start again (AuthInfo)"),
)

HEARTBEATS = Range(0.01, 60.0, why="agents refuse anything else")  # protocol.LEAST_BEAT, MOST_BEAT

RULES: tuple[Rule, ...] = (
    # ---- what an admin can set
    Rule("repeat_seconds", "report_timeout", "a lost message is repeated first"),
    Rule("lease", "enter_timeout", "a lost node is found by its lease first", equal=True),
    Rule("lease", "report_timeout", "a lost node is found by its lease first", equal=True),
    Rule("heartbeat_period", "restart_grace", "agents come back at their next heartbeat", equal=True),
    Rule("report_timeout", "regroup_seconds", "survivors that do not stop are found by that first"),
    Rule("fault_grace", "report_timeout", "the cause of a fault must show before survivors are given up"),
    Rule(
        "slurm_poll_seconds + slurm_timeout",
        "isolate_seconds",
        "one command to Slurm may fail by its time-out and be repeated",
        slurm=True,
    ),
    # ---- against what is fixed in agents and ranks
    Rule("agent.SILENT_SECONDS + agent.AGAIN_SECONDS", "controller.FETCH_SECONDS", "what failed is tried again"),
    Rule("controller.FETCH_SECONDS", "agent.FAILING_SECONDS", "while a job waits who has failed comes last"),
    Rule("controller.CUT_SECONDS", "controller.CUT_LIMIT_SECONDS", "copies take their time"),
    Rule("agent.TOUCH_SECONDS", "agent.FORGOTTEN_SECONDS", "what is in use must not look forgotten"),
    Rule("agent.PLANNED_SECONDS", "report_timeout", "a restart-mode script may take so long to save its state"),
    Rule("restart_grace", "agent.ORPHAN_SECONDS", "agents must still be there when the controller is back"),
    Rule(
        "hang_outside_seconds + report_timeout + enter_timeout + restart_grace",
        "rank.PLAN_TIMEOUT",
        "stopped ranks must not give up while the controller waits for the others, who may be writing a checkpoint",
    ),
    Rule(
        "restart_seconds",
        "rank.PLAN_TIMEOUT",
        "at a job's fewest nodes its stopped ranks wait for the one that is started again",
        equal=True,
    ),
    Rule("hang_outside_seconds", "rank.COLLECTIVE_TIMEOUT", "the others wait in a collective for a rank's checkpoint"),
    Rule("first_iteration_seconds", "rank.COLLECTIVE_TIMEOUT", "the others wait in a collective for a late rank"),
    # ---- among what is fixed
    Rule("agent.REACH_SECONDS", "controller.ANSWER_SECONDS", "a witness has tried by then"),
    Rule("agent.REACH_SECONDS", "controller.SURVEY_SECONDS", "all have tried by then"),
    Rule("controller.ANSWER_SECONDS", "controller.ROUND_SECONDS", "answers come within their round"),
    Rule("agent.REGISTER_SECONDS", "agent.REGISTER_TIMEOUT", "a lost registration is repeated"),
    Rule("controller.CONFIRM_SECONDS", "agent.REGISTER_TIMEOUT", "a Slurm that hangs must not cost protection"),
    Rule(
        "protocol.TIME_LIMIT + protocol.TIME_LIMIT",
        "agent.REGISTER_TIMEOUT",
        "munge on both sides may be slow once",
    ),
    Rule("protocol.MOST_BEAT", "agent.ORPHAN_SECONDS", "a quiet controller is not an absent one"),
    Rule("protocol.LEAST_PROGRESS", "controller.PROGRESS_SECONDS", "agents refuse anything else", equal=True),
    Rule("agent.ENDING_SECONDS", "slurm.KillWait", "the agent has to report the end before Slurm kills it"),
    Rule(
        "agent.OWN_END_SECONDS + agent.STOP_SECONDS", "agent.PLANNED_SECONDS", "a loss is answered quicker than a plan"
    ),
    Rule("agent.ANSWER_SECONDS", "agent.HUNG_SECONDS", "a slow fork is not a dead template"),
    Rule("agreement.TELL_SECONDS", "agreement.AWAY_SECONDS", "all ask the controller before they agree"),
    Rule("controller.STALL_SECONDS", "agreement.AWAY_SECONDS", "a controller knows that it was away"),
    Rule("agreement.RESEND_SECONDS", "agreement.BALLOT_SECONDS", "a lost message is repeated first"),
    Rule("agreement.REST_SECONDS", "rank.PLAN_TIMEOUT", "stopped ranks wait for those that stop late"),
    Rule("rank.CONNECT_SECONDS", "rank.ENTER_TIMEOUT", "several tries"),
    Rule("rank.ENTER_TIMEOUT", "rank.COLLECTIVE_TIMEOUT", "quick to give up while connecting, patient in training"),
    Rule("rank.COLLECTIVE_TIMEOUT", "rank.BOUNDARY_TIMEOUT", "a newcomer waits for a whole iteration"),
    Rule("node.REPORT_SECONDS", "node.BUDGET_SECONDS", "the report is part of the checks' time"),
    Rule("prolog.UNICRON_HEALTH_SECONDS", "slurm.BatchStartTimeout", "a batch job starts after its prolog"),
    Rule("health.UNICRON_HEALTH_SECONDS", "slurm.HealthCheckProgram", "slurmd kills it then"),
    Rule("controller.BUSY_SECONDS", "service.WatchdogSec", "a locked event log is not a stalled loop"),
    Rule("process.CONNECTIONS", "service.LimitNOFILE", "each connection is an open file"),
)


def number(value: float) -> str:
    """As people write it: no exponent, no trailing zeros."""
    return format(value, ".10g")


def fixed(environment: Mapping[str, str]) -> tuple[dict[str, float], list[str]]:
    """The values of LIMITS by key, and what is wrong with those that the environment sets.

    The variables are those of jobs; a site that sets one for all its jobs sets it for unicrond as well.
    """
    values, found = {}, []
    for limit in LIMITS:
        values[limit.key] = limit.value
        if limit.variable and (text := environment.get(limit.variable)):
            try:
                values[limit.key] = float(text)
            except ValueError:
                values[limit.key] = math.nan
            if not 0 <= values[limit.key] < math.inf:
                del values[limit.key]
                found.append(f"{limit.variable} = {text!r} must be a number of seconds, 0 or more")
    return values, found


def contradictions(values: Mapping[str, float], slurm: bool = True) -> list[str]:
    """Every rule that is broken, in one line each. A rule with a name that has no value is left out."""
    found = []
    for rule, low, high in _known(values, slurm):
        if low < high or (rule.equal and low == high):
            continue
        # Whoever reads it wants to know first what to change: a field, and of two fields the larger.
        if _settable(rule.high) or not _settable(rule.low):
            subject, words, other = (rule.high, high), "at least" if rule.equal else "above", (rule.low, low)
        else:
            subject, words, other = (rule.low, low), "at most" if rule.equal else "below", (rule.high, high)
        found.append(f"{_text(*subject)} must be {words} {_text(*other)}: {rule.why}")
    return found


def ladder(values: Mapping[str, float], slurm: bool = True) -> list[str]:
    """The rules with their values, in one line each."""
    return [
        f"{_text(rule.low, low)} {'<=' if rule.equal else '<'} {_text(rule.high, high)}: {rule.why}"
        for rule, low, high in _known(values, slurm)
    ]


def names(side: str) -> list[str]:
    """The names in one side of a rule."""
    return side.split(" + ")


def label(side: str) -> str:
    """One side of a rule as an admin knows it: variables of the environment in place of constants."""
    return " + ".join(_LABELS.get(name, name) for name in names(side))


_LABELS = {
    "lease": "heartbeat_period x lease_periods",
    **{limit.key: limit.variable for limit in LIMITS if limit.variable},
}


def _known(values: Mapping[str, float], slurm: bool) -> Iterable[tuple[Rule, float, float]]:
    for rule in RULES:
        wanted = (*names(rule.low), *names(rule.high))
        if all(name in values for name in wanted) and (slurm or not rule.slurm):
            low, high = (sum(values[name] for name in names(side)) for side in (rule.low, rule.high))
            yield rule, low, high


def _settable(side: str) -> bool:
    return any("." not in name for name in names(side))


def _text(side: str, value: float) -> str:
    return f"{label(side)} = {number(value)}"
