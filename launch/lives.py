"""One agent, many lives of its rank: how a supervisor hears that one is over, and asks for the next.

A pair of sockets joins them for as long as both live:

    agent -> supervisor   `ended 137`         this life is over, with the code that the agent would exit with
    supervisor -> agent   `again` and a log   the next life, which writes there

In between the agent rests. It ends with its parent, at a signal, or after RESTING_S. Where nobody gave it a socket it
has one life, and exits with it. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence

SOCKET_VARIABLE = "BATON_LIVES_SOCKET"
"""The number of the agent's end."""

PRELOAD_VARIABLE = "BATON_PRELOAD"
"""The modules that the agent imports once for all lives."""

RESTING_S = 120.0
"""How long an agent waits to be asked for another life; a supervisor asks within 30 s (`launch.restart`)."""

_ENDED, _AGAIN = b"ended ", b"again"


class ToAgent:
    """The supervisor's end. `agents_end` is inherited by the agent alone and closed here once it is."""

    def __init__(self) -> None:
        self._socket, self.agents_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)

    def environment(self, preload: Sequence[str]) -> dict[str, str]:
        return {SOCKET_VARIABLE: str(self.agents_end.fileno()), PRELOAD_VARIABLE: " ".join(preload)}

    def fileno(self) -> int:
        """Readable once a life is over; -1 when the agent has hung up."""
        return self._socket.fileno()

    def ended(self) -> int | None:
        """The code of the present life, once; None while it runs, and for an agent that has ended itself."""
        try:
            message = self._socket.recv(64)
        except BlockingIOError:
            return None
        except OSError:
            message = b""
        if not message:
            self.close()
            return None
        return int(message.removeprefix(_ENDED))

    def again(self, log: int) -> bool:
        """Asks for the next life, its output in the open file `log`; False when nobody is there."""
        try:
            return socket.send_fds(self._socket, [_AGAIN], [log]) > 0
        except OSError:
            return False

    def close(self) -> None:
        self._socket.close()


class ToSupervisor:
    """The agent's end. `preload` names what it is to import."""

    def __init__(self, line: socket.socket, preload: Sequence[str]) -> None:
        self._socket, self.preload = line, tuple(preload)

    @classmethod
    def inherited(cls, environment: MutableMapping[str, str]) -> ToSupervisor | None:
        """The one that the environment names; it is taken out of there, and no child of the caller gets it."""
        number, preload = environment.pop(SOCKET_VARIABLE, ""), environment.pop(PRELOAD_VARIABLE, "")
        if not number.isdigit():
            return None
        line = socket.socket(fileno=int(number))
        line.set_inheritable(False)
        return cls(line, preload.split())

    def another(self, code: int, timeout_s: float = RESTING_S) -> bool:
        """Says how this life ended, and rests. True when another one is asked for: then standard output and error are
        its log. False when the supervisor is gone, or silent for `timeout_s`."""
        with contextlib.suppress(OSError):
            self._socket.send(_ENDED + str(code).encode())
            self._socket.settimeout(timeout_s)
            message, logs, _, _ = socket.recv_fds(self._socket, 64, 1)
            if message == _AGAIN and logs:
                sys.stdout.flush()
                sys.stderr.flush()
                for stream in (1, 2):
                    os.dup2(logs[0], stream)
                os.close(logs[0])
                return True
        return False

    def passed_on(self) -> Mapping[str, str]:
        """What `inherited` finds in a program that takes this process over by exec."""
        self._socket.set_inheritable(True)
        return {SOCKET_VARIABLE: str(self._socket.fileno()), PRELOAD_VARIABLE: " ".join(self.preload)}
