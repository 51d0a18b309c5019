"""The one way to start a server here: tests, demo and benchmarks all use it.

with Server.start(["--model-path", target, ...]) as server:
    server.generate("Hello", max_new_tokens=16)
"""

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import requests

from sdsie_sglang.eval import paused
from sdsie_sglang.patches.internal_state import encode_update

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
GONE_TIMEOUT_S = 5.0
FIXED_PORTS = range(12000, 20000)
"""Below what systems hand out by themselves: servers that start side by side bind theirs a minute later."""
_PR_SET_PDEATHSIG = 1


class ServerFailed(RuntimeError):
    """The server did not start, died, or is not the one it should be."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fixed_ports(count: int) -> list[int]:
    """Different ports, free now and not handed out to anyone else by the system meanwhile."""
    found: list[int] = []
    for port in random.sample(FIXED_PORTS, len(FIXED_PORTS)):
        if len(found) == count:
            return found
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    raise ServerFailed(f"fewer than {count} ports are free in {FIXED_PORTS}")


@contextlib.contextmanager
def ends_on_signals() -> Iterator[None]:
    """Makes SIGTERM what Ctrl-C is, so that it leaves no server behind either; both also where the caller ignores them,
    as a shell does for what it runs in the background."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with_parent() -> Callable[[], None] | None:
    """To run in a new process: it is killed when the thread that started it ends, however that ends (Linux)."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _policy_of(live: dict[str, Any]) -> Any:
    return (live.get("gate") or {}).get("policy")


class Server:
    """A running server; stop it, or use it as a context manager.

    Args:
        process: its process group is its own, so that all of it can be ended.
        log: everything that it prints.
        startup_s: from its launch until it was healthy.
        paused_s: how long it was paused so far.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, startup_s: float) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.startup_s = startup_s
        self.paused_s = 0.0
        self._paused_at: float | None = None
        self._launched = time.monotonic()

    @classmethod
    def launch(
        cls,
        arguments: Sequence[str],
        *,
        module: str = "sdsie_sglang.launch_server",
        env: dict[str, str] | None = None,
        log: Path | None = None,
        port: int | None = None,
        die_with_parent: bool = False,
    ) -> Self:
        """Launches `python -m module arguments` and returns at once: ask `is_up` until it is.

        Args:
            die_with_parent: kill it should the calling thread end without stopping it.
        """
        port = free_port() if port is None else port
        if log is None:
            log = Path(tempfile.mkstemp(prefix="sdsie-server-", suffix=".log")[1])
        command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port), *arguments]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **(env or {})}, preexec_fn=_die_with_parent() if die_with_parent else None,
            )  # fmt: skip
        return cls(process, port, log, 0.0)

    def is_up(self, timeout_s: float = START_TIMEOUT_S) -> bool:
        """Whether it is healthy by now. Raises ServerFailed: it exited, or takes too long."""
        waited_s = time.monotonic() - self._launched
        if self._is_healthy():
            self.startup_s = self.startup_s or waited_s
            return True
        if self.process.poll() is not None:
            raise ServerFailed(f"the server exited with {self.process.returncode}:\n{self.log_tail()}")
        if waited_s > timeout_s:
            raise ServerFailed(f"the server was not healthy in {timeout_s:.0f} s:\n{self.log_tail()}")
        return False

    @classmethod
    def start(
        cls,
        arguments: Sequence[str],
        *,
        module: str = "sdsie_sglang.launch_server",
        env: dict[str, str] | None = None,
        log: Path | None = None,
        on_wait: Callable[[float, str], None] | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Launches `python -m module arguments` and waits until it is healthy.

        Args:
            on_wait: called about once a second with seconds waited and the log's last line.

        Raises:
            ServerFailed: it exited or was not healthy in time; the message ends with its log's tail.
        """
        server = cls.launch(arguments, module=module, env=env, log=log)
        try:
            while not server.is_up(timeout_s):
                if on_wait is not None:
                    on_wait(time.monotonic() - server._launched, server.log_tail(1))
                time.sleep(1.0)
        except BaseException:
            server.stop()
            raise
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def pause(self) -> None:
        """Stops all its processes where they are: they keep their memory and take no time, on the host either.

        An idle server is meant. It may be ended as ever, and does not outlive the calling program (paused.py)."""
        if self._paused_at is None:
            self._paused_at = time.monotonic()
            paused.stop(self.process.pid)

    def resume(self) -> None:
        """Lets a paused server go on."""
        if self._paused_at is not None:
            paused.go_on(self.process.pid)
            self.paused_s += time.monotonic() - self._paused_at
            self._paused_at = None

    def stop(self) -> None:
        """Ends the server and every process it started."""
        self.resume()  # a stopped process does not hear of SIGTERM
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Ends the server and every process it started, without letting it finish anything."""
        self._signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        # A child may outlive the leader of its group.
        self._signal(signal.SIGKILL)
        end = time.monotonic() + GONE_TIMEOUT_S
        while self.process_ids() and time.monotonic() < end:
            time.sleep(0.05)
        self.resume()  # nothing is left: the account is closed

    def process_ids(self) -> set[int]:
        """Of its group, zombies left out."""
        found = set()
        for process in psutil.process_iter(["status"]):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(process.pid) == self.process.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.add(process.pid)
        return found

    def signal_kill(self) -> None:
        """Asks the system to kill all of it, and does not wait."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        paused.signal_group(self.process.pid, number)

    def log_tail(self, lines: int = 25) -> str:
        text = self.log.read_bytes().decode(errors="replace").strip()
        return "\n".join(text.splitlines()[-lines:])

    def _is_healthy(self, timeout_s: float = 5.0) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=timeout_s).status_code == 200
        except requests.RequestException:
            return False

    # -- requests ---------------------------------------------------------------------------

    def post(self, route: str, body: dict[str, Any], **kwargs: Any) -> requests.Response:
        return requests.post(f"{self.url}{route}", json=body, timeout=kwargs.pop("timeout", 600), **kwargs)

    def generate(self, prompt: str | list[int], *, temperature: float = 0.0, **options: Any) -> dict[str, Any]:
        """SGLang's /generate with a text or token ids. Options that it names go beside
        sampling_params, all others into it. Raises requests.HTTPError."""
        outer = {k: options.pop(k) for k in list(options) if k in ("return_logprob", "rid", "top_logprobs_num")}
        body = {
            "text" if isinstance(prompt, str) else "input_ids": prompt,
            "sampling_params": {"temperature": temperature, **options},
            **outer,
        }
        response = self.post("/generate", body)
        response.raise_for_status()
        return response.json()

    def stream(self, prompt: str | list[int], **sampling: Any) -> Iterator[dict[str, Any]]:
        """As `generate`, each event as it arrives; texts are cumulative."""
        body = {
            "text" if isinstance(prompt, str) else "input_ids": prompt,
            "sampling_params": {"temperature": 0.0, **sampling},
            "stream": True,
        }
        with self.post("/generate", body, stream=True) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                payload = line.removeprefix(b"data: ").strip()
                if payload and payload != b"[DONE]":
                    yield json.loads(payload)

    def info(self) -> dict[str, Any]:
        response = requests.get(f"{self.url}/server_info", timeout=60)
        response.raise_for_status()
        return response.json()

    def metrics(self) -> str:
        """The Prometheus page; needs --enable-metrics."""
        response = requests.get(f"{self.url}/metrics", timeout=60)
        response.raise_for_status()
        return response.text

    def replicas(self) -> list[dict[str, Any]]:
        """What is live of this project in each data-parallel replica, by rank. Raises ServerFailed if one has nothing.

        SGLang lists them as they answer."""
        replicas = [state.get("sdsie") for state in self.info()["internal_states"]]
        if not replicas or not all(live and live.get("hooks") for live in replicas):
            raise ServerFailed("this server runs SGLang without sdsie")
        return sorted(replicas, key=lambda live: live.get("dp_rank", 0))

    def sdsie(self) -> dict[str, Any]:
        """What is live of this project, of the first replica. Raises ServerFailed if nothing is, or if replicas
        run different policies."""
        first, *others = self.replicas()
        for other in others:
            if other["hooks"] != first["hooks"] or _policy_of(other) != _policy_of(first):
                raise ServerFailed("the replicas of this server do not run the same policy")
        return first

    def set_policy(self, **settings: Any) -> None:
        """Changes the policy of the running server, of all its replicas. Raises requests.HTTPError with the reason."""
        response = self.post("/set_internal_state", {"server_args": encode_update(settings)})
        if response.status_code != 200:
            raise requests.HTTPError(response.text, response=response)

    def flush_cache(self) -> None:
        """Forgets every cached prefix; waits until no request is running."""
        for _ in range(50):
            if self.post("/flush_cache", {}).status_code == 200:
                return
            time.sleep(0.1)
        raise ServerFailed("the server's cache could not be flushed: requests are still running")
