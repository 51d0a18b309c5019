"""Two servers behind SGLang's router, on the CPU engine with random models."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import requests

from sdsie_sglang.eval.server import Server, free_port
from sdsie_sglang.eval.tiny_models import tiny_prompts, write_tiny_models
from tests.e2e.test_parallel import counter

ROUTER = shutil.which("sglang-router", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
PROMPTS = tiny_prompts(4)
TOKENS = 32
PATIENCE_S = 60.0


class Router:
    """The router before these servers, each of them in turn."""

    def __init__(self, servers: list[Server], log: Path) -> None:
        assert ROUTER is not None, "scripts/setup.sh installs SGLang's router"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [ROUTER, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        command += ["--policy", "round_robin", "--worker-urls", *(server.url for server in servers)]
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=log.parent)

    def __enter__(self) -> "Router":
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            try:
                if requests.get(f"{self.url}/readiness", timeout=5).json()["healthy_workers"] == 2:
                    return self
            except (requests.RequestException, KeyError):
                pass
            time.sleep(0.5)
        self.__exit__()
        raise AssertionError("the router did not find both servers")

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def generate(self, ids: list[int], tokens: int = TOKENS) -> requests.Response:
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        return requests.post(f"{self.url}/generate", json={"input_ids": ids, "sampling_params": sampling}, timeout=120)

    def stream(self, ids: list[int], tokens: int) -> tuple[int, bool]:
        """Tokens that arrived, and whether the stream came to its end."""
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        arrived = 0
        try:
            with requests.post(f"{self.url}/generate", json=body, stream=True, timeout=120) as response:
                for line in response.iter_lines():
                    if line == b"data: [DONE]":
                        return arrived, True
                    if line.startswith(b"data: {"):
                        event = json.loads(line.removeprefix(b"data: "))
                        arrived = event.get("meta_info", {}).get("completion_tokens", arrived)
        except requests.RequestException:
            pass
        return arrived, False


def test_two_servers_behind_a_router(tmp_path):
    target, draft = write_tiny_models(tmp_path / "tiny")
    arguments = ["--model-path", str(target), "--speculative-draft-model-path", str(draft), "--context-length", "512"]
    arguments += ["--max-total-tokens", "4096", "--skip-tokenizer-init", "--skip-server-warmup", "--enable-metrics"]
    traces = {name: tmp_path / f"{name}.jsonl" for name in ("first", "second")}
    with ExitStack() as stack:
        servers = {}
        for name, trace in traces.items():
            own = ["--sdsie-policy", "fixed", "--sdsie-replica", name, "--sdsie-trace", str(trace)]
            servers[name] = Server.launch([*arguments, *own], log=tmp_path / f"{name}.log")
            stack.callback(servers[name].stop)
        while not all(server.is_up() for server in servers.values()):
            time.sleep(1)
        router = stack.enter_context(Router(list(servers.values()), tmp_path / "router.log"))

        # Each takes its own policy, at its own address.
        servers["first"].set_policy(policy="fixed", k=2)
        servers["second"].set_policy(policy="plain")
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answered = list(pool.map(router.generate, 2 * PROMPTS))
        assert all(answer.status_code == 200 for answer in answered)
        done = [answer.json() for answer in answered]
        ran = {
            name: [d["meta_info"]["sdsie"] for d in done if d["meta_info"]["sdsie"]["replica"] == name]
            for name in servers
        }
        assert {name: len(stats) for name, stats in ran.items()} == {"first": 4, "second": 4}
        assert {k for stats in ran["first"] for k in stats["cycles"]} == {"2"}
        assert {k for stats in ran["second"] for k in stats["cycles"]} == {"0"}
        for i in range(len(PROMPTS)):
            assert done[i]["output_ids"] == done[i + len(PROMPTS)]["output_ids"]

        # What the router hands on of both, and each server's own, add up to what the clients received.
        handed_on = requests.get(f"{router.url}/engine_metrics", timeout=30).text
        received = len(done) * TOKENS
        assert counter(handed_on, "sglang_generation_tokens_total") == received
        for name, server in servers.items():
            page, own = server.metrics(), {"replica": name}
            assert counter(handed_on, "sdsie_cycles_total", **own) == counter(page, "sdsie:cycles_total", **own)
            assert counter(page, "sdsie:committed_tokens_total", **own) >= len(ran[name]) * (TOKENS - 1)
            lines = [json.loads(line) for line in traces[name].read_text().splitlines()]
            assert {line["replica"] for line in lines} == {name}

        # The router has no route for a change of policy, so none can reach one server alone by chance.
        change = {"server_args": {"sdsie.policy=plain": 1}}
        assert requests.post(f"{router.url}/set_internal_state", json=change, timeout=30).status_code == 404

        # One dies in the middle: its requests are asked again of the other, or fail with a status; the other goes on.
        with ThreadPoolExecutor(len(PROMPTS) + 2) as pool:
            streams = [pool.submit(router.stream, ids, 400) for ids in PROMPTS[:2]]
            asked = [pool.submit(router.generate, ids, 400) for ids in PROMPTS]
            time.sleep(0.7)
            servers["second"].kill()
            began = time.monotonic()
            outcomes = [answer.result() for answer in asked]
            streamed = [stream.result() for stream in streams]
        assert time.monotonic() - began < PATIENCE_S
        # A stream that has begun cannot be asked for again: it is whole, or it breaks off without its end mark.
        assert all((tokens == 400) == ended for tokens, ended in streamed)
        for answer in outcomes:
            assert answer.status_code in (200, 500, 502, 503)
            if answer.status_code == 200:
                assert len(answer.json()["output_ids"]) == 400
        after = [router.generate(ids) for ids in PROMPTS]
        assert {answer.json()["meta_info"]["sdsie"]["replica"] for answer in after if answer.status_code == 200} == {
            "first"
        }
        assert sum(answer.status_code == 200 for answer in after) >= len(after) - 1
