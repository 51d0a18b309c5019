"""The one way to start a server here: tests, demo and benchmarks all use it.

with Server.start(["--model-path", target, ...]) as server:
    server.generate("Hello", max_new_tokens=16)
"""

import contextlib
import json
import os
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

import requests

from sdsie_sglang.patches.internal_state import encode_update

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0


class ServerFailed(RuntimeError):
    """The server did not start, died, or is not the one it should be."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running server; stop it, or use it as a context manager.

    Args:
        process: its process group is its own, so that all of it can be ended.
        log: everything that it prints.
        startup_s: from its launch until it was healthy.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, startup_s: float) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.startup_s = startup_s

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
        port = free_port()
        if log is None:
            log = Path(tempfile.mkstemp(prefix="sdsie-server-", suffix=".log")[1])
        command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port), *arguments]
        started = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **(env or {})},
            )  # fmt: skip
        server = cls(process, port, log, 0.0)
        try:
            while not server._is_healthy():
                waited_s = time.monotonic() - started
                if process.poll() is not None:
                    raise ServerFailed(f"the server exited with {process.returncode}:\n{server.log_tail()}")
                if waited_s > timeout_s:
                    raise ServerFailed(f"the server was not healthy in {timeout_s:.0f} s:\n{server.log_tail()}")
                if on_wait is not None:
                    on_wait(waited_s, server.log_tail(1))
                time.sleep(1.0)
        except BaseException:
            server.stop()
            raise
        server.startup_s = time.monotonic() - started
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the server and every process it started."""
        for how, patience_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, STOP_TIMEOUT_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        # A child may outlive the leader of its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def log_tail(self, lines: int = 25) -> str:
        text = self.log.read_bytes().decode(errors="replace").strip()
        return "\n".join(text.splitlines()[-lines:])

    def _is_healthy(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=5).status_code == 200
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

    def sdsie(self) -> dict[str, Any]:
        """What is live of this project. Raises ServerFailed if nothing is."""
        live = self.info()["internal_states"][0].get("sdsie")
        if not live or not live.get("hooks"):
            raise ServerFailed("this server runs SGLang without sdsie")
        return live

    def set_policy(self, **settings: Any) -> None:
        """Changes the policy of the running server. Raises requests.HTTPError with the reason."""
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
