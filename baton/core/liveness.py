"""Time limits of the mechanisms that detect a process, rank, connection, thread or step that is lost or hangs, and the
clock on which they count a silence. Pure.

docs/failure-modes.md#liveness says what each mechanism detects and what follows; a test compares the page with this
file. Seconds.
"""

from __future__ import annotations

# 1. The lease of a worker, at the coordinator. Its length is `CoordinatorConfig.lease_s`.
REDIAL_S = 1.5
"""A live worker whose session broke redials within this time: it is longer than its longest pause between two dials. A
dead worker's connections close immediately, so its requests need not wait for the whole lease."""
MAX_LEASE_GAP_S = 0.2
"""1 and 2: leases advance by this per check at most: when checks are late, messages wait unread (decision 0003)."""

# 2. The session, at a worker: the coordinator's silence.
LEASE_CHECK_S = 0.2
KEEP_SEQUENCES_S = 30.0
"""After this silence a worker ends its sequences: the coordinator no longer waits for them."""

# 3. A link, at its prefill worker.
PING_EVERY_S = 1.0
PING_LIMIT_S = 3.0

# 4. A link, at its decode worker. Longer than a ping and its reply may take.
LINK_SILENCE_S = 4.0

MAX_READ_GAP_S = 1.5
"""3 to 6: a gap between two reads counts as at most so much silence: messages may wait unread (decision 0003)."""

# 5. Lockstep: the ranks of one worker watch each other.
RANK_HEARTBEAT_S = 1.0
RANK_SILENCE_S = 4.0
LOADING_SILENCE_S = 60.0
"""While a model is loaded, the control thread may be blocked for a while: one large tensor is read in one call."""
RANK_SEND_LIMIT_S = 4.0
"""A rank whose connection accepts no data for this long is lost."""
RANK_SUM_LIMIT_S = 20.0
"""A sum or gather over ranks: the heartbeats of a rank that does not take part may continue."""

# 6. The agent, for each rank that it started.
AGENT_HEARTBEAT_S = 1.0
"""A rank that has imported its libraries sends a heartbeat to its agent this often, from a thread of its own."""
AGENT_SILENCE_S = 60.0
"""A rank that sends its agent nothing for this long hangs: its interpreter is blocked or stopped."""
KILL_DELAY_S = 5.0
"""Time from the exit of a failed rank until the agent kills the ranks that still run. A healthy rank detects the loss
within 4.5 s (`baton.runtime.worker_ranks`)."""

# 7. The step thread.
STEP_LIMIT_S = 300.0
"""A step that takes longer hangs: the process exits and its supervisor starts another."""

# 8. The event loop of a worker.
LOOP_STALL_S = 1.0
"""A third of the default lease: what blocks the loop for longer is logged."""


class ListeningClock:
    """The clock of a process that receives only while it runs: a silence counts on it.

    A lease ends after a silence. A process that was suspended (stopped, starved, its machine paused) received nothing
    meanwhile, but its peers were not silent: their messages are unread in its sockets. This clock counts such a gap as
    at most `most_s`. Times are seconds of the caller's monotonic clock.
    """

    def __init__(self, now: float, most_s: float) -> None:
        self._most_s = most_s
        self._advanced_at = self._reading = now

    def at(self, now: float) -> float:
        """Returns the clock's reading: monotonic, and never more than `most_s` beyond that of the last `advance`."""
        return self._reading + min(max(now - self._advanced_at, 0.0), self._most_s)

    def advance(self, now: float) -> float:
        """Advances the clock to `now` and returns its reading. Call it regularly, after reading all messages."""
        self._reading, self._advanced_at = self.at(now), max(now, self._advanced_at)
        return self._reading
