"""Servers that start side by side and then wait, paused, until each is measured: a start takes a minute, mostly of one
processor core. No start goes on once `ready` has returned, and none outlives the fleet. Idle is not enough for those
that wait: an idle server still wakes up often enough to slow down the one that is measured.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from sdsie_sglang.eval.server import START_TIMEOUT_S, Server, ServerFailed, fixed_ports

POLL_S = 0.5


@dataclass(frozen=True)
class Start:
    """One server to be.

    Args:
        must: without it the others are of no use.
        env, module: beside and in place of the fleet's. log: as Server.launch takes it.
    """

    name: str
    arguments: tuple[str, ...]
    must: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    module: str | None = None
    log: Path | None = None


@dataclass
class Fleet:
    """Context manager: launches all servers on entry, kills what is left of them at the end.

    Args:
        failed: what each server that did not start said, by its index.
    """

    starts: Sequence[Start]
    env: dict[str, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    module: str = "sdsie_sglang.launch_server"
    _servers: dict[int, Server] = field(default_factory=dict)

    def __enter__(self) -> Self:
        ports = fixed_ports(2 * len(self.starts))
        try:
            for number, start in enumerate(self.starts):
                arguments = [*start.arguments, "--nccl-port", str(ports[2 * number + 1])]
                self._servers[number] = Server.launch(
                    arguments, module=start.module or self.module, env={**self.env, **start.env}, log=start.log,
                    port=ports[2 * number], die_with_parent=True,
                )  # fmt: skip
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_all()

    def ready(
        self, on_wait: Callable[[int], None] = lambda up: None, timeout_s: float = START_TIMEOUT_S
    ) -> "dict[int, Server]":
        """Waits until every server is up or has failed; those that are up, by index, each paused (`take_turn`).

        Args:
            on_wait: called with how many are up.

        Raises:
            ServerFailed: one that must start did not, or none did.
        """
        up: set[int] = set()
        while waiting := set(self._servers) - up:
            for number in sorted(waiting):
                try:
                    if self._servers[number].is_up(timeout_s):
                        up.add(number)
                        self._servers[number].pause()
                except ServerFailed as error:
                    self.failed[number] = f"{self.starts[number].name}: {error}"
                    self.end(number)
                    if self.starts[number].must:
                        raise ServerFailed(self.failed[number]) from None
            on_wait(len(up))
            if up != set(self._servers):
                time.sleep(POLL_S)
        if not up:
            raise ServerFailed(next(iter(self.failed.values())))
        return dict(self._servers)

    def take_turn(self, number: int) -> Server:
        """Lets one server go on; the others stay paused."""
        for other, server in self._servers.items():
            if other != number:
                server.pause()
        self._servers[number].resume()
        return self._servers[number]

    def end(self, number: int, gently: bool = False) -> None:
        """Ends one server; `gently` lets it finish what it writes."""
        server = self._servers.get(number)
        if server is not None:
            server.stop() if gently else server.kill()
            del self._servers[number]

    def waiting(self) -> int:
        """Servers that are alive."""
        return len(self._servers)

    def process_ids(self) -> set[int]:
        """Of all servers that are alive."""
        return {pid for server in self._servers.values() for pid in server.process_ids()}

    def _end_all(self) -> None:
        for server in self._servers.values():  # all at once first: a second interrupt must find none alive
            server.signal_kill()
        for number in list(self._servers):
            self.end(number)


class Turns(Mapping[str, Server]):
    """Servers of a fleet that is ready, by name: the one that was asked for last runs, the others are paused."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._numbers = {start.name: n for n, start in enumerate(fleet.starts) if n not in fleet.failed}

    def __getitem__(self, name: str) -> Server:
        return self._fleet.take_turn(self._numbers[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)
