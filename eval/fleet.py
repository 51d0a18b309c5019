"""Servers that start side by side and then wait, idle, until each is measured: a start takes a minute, mostly of one
processor core. No start goes on once `ready` has returned, and none outlives the fleet.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from sdsie_sglang.eval.server import START_TIMEOUT_S, Server, ServerFailed, fixed_ports

POLL_S = 0.5


@dataclass(frozen=True)
class Start:
    """One server to be. `must` says that without it the others are of no use."""

    name: str
    arguments: tuple[str, ...]
    must: bool = False


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
                    arguments, module=self.module, env=self.env, port=ports[2 * number], die_with_parent=True
                )
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
        """Waits until every server is up or has failed; those that are up, by index.

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
