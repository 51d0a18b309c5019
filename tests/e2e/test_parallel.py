"""Tensor and data parallelism on the CPU engine: two processes over gloo, random models of a few layers."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests

from sdsie_sglang.eval.server import Server
from sdsie_sglang.eval.tiny_models import tiny_prompts, write_tiny_models
from tests.e2e.conftest import install_plugin

PROMPTS = tiny_prompts(4)
TOKENS = 64
PATIENCE_S = 60.0  # until a broken server has ended
SETTINGS = (
    {"policy": "fixed", "k": 5},
    {"policy": "entropy", "preset": "class"},
    {"policy": "schedule", "schedule": "3x2,0x3,7"},
    {"policy": "plain"},
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    target, draft = write_tiny_models(tmp_path_factory.mktemp("tiny"))
    common = ["--model-path", str(target), "--context-length", "512", "--max-total-tokens", "4096"]
    common += ["--skip-tokenizer-init", "--skip-server-warmup"]
    return common, [*common, "--speculative-draft-model-path", str(draft), "--sdsie-policy", "fixed"]


def answers(server: Server, **options) -> list[list[int]]:
    """All prompts at once, so that batches of several requests occur too."""
    server.flush_cache()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        done = list(pool.map(lambda ids: generate(server, ids, **options), PROMPTS))
    return [d["output_ids"] for d in done]


def generate(server: Server, ids: list[int], **options) -> dict:
    return server.generate(ids, **{"max_new_tokens": TOKENS, "ignore_eos": True, **options})


def in_every_gear(server: Server) -> list[list[list[int]]]:
    runs = []
    for policy in SETTINGS:
        server.set_policy(**policy)
        runs.append(answers(server))
    return runs


@pytest.fixture(scope="module")
def plain(tiny):
    """SGLang as shipped, one process."""
    with Server.start([*tiny[0], "--sdsie-off"]) as server:
        return answers(server)


def schedulers(server: Server) -> list[psutil.Process]:
    """Its scheduler processes, by rank."""
    found = [
        child for child in psutil.Process(server.process.pid).children(recursive=True)
        if "scheduler" in " ".join(child.cmdline())
    ]  # fmt: skip
    return sorted(found, key=lambda process: process.cmdline())


def wait_for_end(server: Server) -> str:
    """What the server logged. Raises subprocess.TimeoutExpired if it did not end."""
    server.process.wait(PATIENCE_S)
    assert server.process.returncode != 0
    return server.log.read_text(errors="replace")


def break_while_answering(server: Server, victim: psutil.Process) -> str:
    """Kills one process in the middle of answers; returns what the server logged when it ended."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = [pool.submit(generate, server, ids, max_new_tokens=450) for ids in PROMPTS]
        time.sleep(0.5)
        victim.kill()
        log = wait_for_end(server)
        for answer in asked:
            assert isinstance(answer.exception(), requests.RequestException), "answered after a rank had died"
    return log


def test_two_ranks_answer_as_one_does_and_decide_alike(tiny, plain, tmp_path):
    with Server.start(tiny[1]) as server:
        alone = in_every_gear(server)
    assert alone == [plain] * len(SETTINGS)
    trace = tmp_path / "trace.jsonl"
    with Server.start([*tiny[1], "--tp-size", "2", "--sdsie-check-ranks", "--sdsie-trace", str(trace)]) as server:
        assert in_every_gear(server) == alone
        server.set_policy(policy="entropy", preset="class")
        sampled = {"temperature": 1.0, "top_k": 20, "ignore_eos": True}
        assert answers(server, **sampled) != plain
        assert server.sdsie()["gate"]["gate_failures"] == 0
        log = break_while_answering(server, schedulers(server)[1])
        # Whoever notices first: the other rank, whose connection breaks, or SGLang's watchdog.
        assert "Connection" in log or "crashed with exit code -9" in log
    first, second = (path.read_text().splitlines() for path in (trace, tmp_path / "trace.jsonl.rank1"))
    shorter = min(len(first), len(second))  # of the cycles in flight when the rank died one may have written more
    assert shorter > 200
    assert first[:shorter] == second[:shorter], "ranks differ in a gear, an entropy's bits or a token"
    assert {json.loads(line)["k"] for line in first} == {0, 3, 5, 7}


def test_a_rank_that_decides_otherwise_stops_the_server(tiny, tmp_path):
    arguments = [*tiny[1], "--tp-size", "2", "--sdsie-check-ranks"]
    saboteur = install_plugin(tmp_path, Path(__file__).parent / "saboteur" / "sdsie_rank_saboteur.py")
    with Server.start(arguments, env={"PYTHONPATH": saboteur}) as server:
        with pytest.raises(requests.RequestException):
            generate(server, PROMPTS[0])
        log = wait_for_end(server)
    assert "sdsie: tensor-parallel ranks disagree, the server stops. They are about to run different things: " in log
    # The number counts SGLang's own health check too.
    assert re.search(r"rank 0 batch (\d+) gear 5, 1 request \w+; rank 1 batch \1 gear 0, 1 request ", log)


def counter(page: str, name: str, **labels: str) -> float:
    """Sum of the Prometheus counter's series that carry `labels`."""
    rows = [row for row in page.splitlines() if row.startswith(f"{name}{{")]
    return sum(
        float(row.rsplit(" ", 1)[1]) for row in rows if all(f'{key}="{value}"' in row for key, value in labels.items())
    )


def traced(trace: Path, server: Server) -> list[dict]:
    """All lines, once there is one for each cycle that was launched."""
    for _ in range(100):
        lines = trace.read_text().splitlines()
        if len(lines) == sum(replica["gate"]["cycles"] for replica in server.replicas()):
            return [json.loads(line) for line in lines]
        time.sleep(0.1)
    raise AssertionError("cycles were launched that never came to the trace")


def test_replicas_shift_on_their_own_and_telemetry_adds_up(tiny, plain, tmp_path):
    trace = tmp_path / "trace.jsonl"
    with Server.start([*tiny[1], "--dp-size", "2", "--enable-metrics", "--sdsie-trace", str(trace)]) as server:
        assert answers(server) == plain
        server.set_policy(policy="entropy", preset="class")
        replicas = server.replicas()
        assert [replica["gate"]["policy"]["policy"] for replica in replicas] == ["entropy", "entropy"]
        bad = server.post("/set_internal_state", {"server_args": {"sdsie.policy=fixed": 1, "sdsie.k": 9}})
        assert bad.status_code == 400
        done = [generate(server, ids) for ids in PROMPTS]
        assert [d["output_ids"] for d in done] == plain
        assert {d["meta_info"]["dp_rank"] for d in done} == {0, 1}

        lines = traced(trace, server)
        replicas, page = server.replicas(), server.metrics()
        assert [replica["gate"]["policy"]["policy"] for replica in replicas] == ["entropy", "entropy"]
        for rank, replica in enumerate(replicas):
            ran = [d["meta_info"]["sdsie"] for d in done if d["meta_info"]["dp_rank"] == rank]
            assert {k for stats in ran for k in stats["cycles"]} == {"0", "5"}
            assert counter(page, "sdsie:cycles_total", dp_rank=str(rank)) == replica["gate"]["cycles"]
        tokens = 2 * len(PROMPTS) * TOKENS
        decoded = tokens - 2 * len(PROMPTS)  # the prefill gives each answer's first
        assert counter(page, "sdsie:committed_tokens_total") >= decoded
        assert counter(page, "sglang:generation_tokens_total") == tokens
        for rank, replica in enumerate(replicas):
            numbers = [line["cycle"] for line in lines if line["dp_rank"] == rank]
            assert numbers == list(range(replica["gate"]["cycles"]))

        log = break_while_answering(server, schedulers(server)[1])
        assert "replica_scheduler_" in log
