"""One baseline, then one server with gears, for as many tests as possible: a start takes 30 to 90 s here."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sdsie_sglang.demo import DemoCheckpoints, compose
from sdsie_sglang.eval.chat import chat_ids
from sdsie_sglang.eval.prompts import timed_prompts
from sdsie_sglang.eval.server import Server
from sdsie_sglang.gears.cost_table import Cell, Conditions, CostTable

TOKENS = 40
# What depends on every token before: natural end of text, at most TOKENS.
CONSTRAINTS = (
    {"min_new_tokens": 30},
    {"frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"repetition_penalty": 1.3},
)
CONTEXT = ["--context-length", "2048", "--max-total-tokens", "8192"]


@dataclass(frozen=True)
class Answers:
    """Token ids and meta_info of one answer a prompt, in the order of the prompts.

    `constrained`: of the baseline alone, ids of the last prompt's answer under each of CONSTRAINTS.
    """

    ids: list[list[int]]
    meta: list[dict]
    constrained: tuple[list[int], ...] = ()


def ask_all(server: Server, prompts: list[list[int]], *, at_once: bool = False, **options) -> Answers:
    """Greedy answers of a fixed length, each prompt sent to a server that knows no prefix of it."""
    server.flush_cache()
    options = {"max_new_tokens": TOKENS, "ignore_eos": True, **options}
    with ThreadPoolExecutor(4 if at_once else 1) as pool:
        done = list(pool.map(lambda ids: server.generate(ids, **options), prompts))
    return Answers([d["output_ids"] for d in done], [d["meta_info"] for d in done])


def install_plugin(folder: Path, source: Path) -> str:
    """Installs a module with `register` as an SGLang plugin under `folder`; returns the PYTHONPATH that finds it."""
    (folder / source.name).write_text(source.read_text())
    info = folder / f"{source.stem}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {source.stem.replace('_', '-')}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nsaboteur = {source.stem}:register\n")
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="session")
def models() -> DemoCheckpoints:
    return compose()


@pytest.fixture(scope="session")
def prompts(models) -> list[list[int]]:
    """The three reference prompts and a short one, as token ids."""
    texts = [prompt.text for prompt in timed_prompts(["reference"])] + ["Say hello."]
    return [chat_ids(str(models.target), text) for text in texts]


@pytest.fixture(scope="session")
def baseline(models, prompts) -> Answers:
    """SGLang as shipped: no plugin, no speculation."""
    with Server.start(["--model-path", str(models.target), "--sdsie-off", *CONTEXT]) as server:
        assert server.info()["internal_states"][0].get("sdsie") is None
        constrained = [server.generate(prompts[-1], max_new_tokens=TOKENS, **c)["output_ids"] for c in CONSTRAINTS]
        return replace(ask_all(server, prompts), constrained=tuple(constrained))


@pytest.fixture(scope="session")
def trace_path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("trace") / "cycles.jsonl"


@pytest.fixture(scope="session")
def draft(models) -> str:
    """The trained draft; until there is one, the target drafts for itself."""
    return str(models.draft or models.target)


@pytest.fixture(scope="session")
def cost_table(tmp_path_factory) -> Path:
    """Made by hand so that the cost gate uses several gears here; it says that it was measured on another machine."""
    cells = [Cell(k=k, batch=1, ms=ms) for k, ms in {0: 10.0, 1: 13.0, 3: 17.0, 5: 21.0}.items()]
    conditions = Conditions(
        target="target", target_config="0", draft="draft", draft_config="0", hardware="an abacus",
        dtype="float32", attention_backend="intel_amx", tp_size=1,
    )  # fmt: skip
    table = CostTable(models="m", where="w", method="by hand", cells=tuple(cells), conditions=conditions)
    path = tmp_path_factory.mktemp("costs") / "table.json"
    path.write_text(table.model_dump_json())
    return path


@pytest.fixture(scope="session")
def gears(baseline, models, draft, trace_path, cost_table):
    """A server with every gear, overlap scheduling and metrics on. Started after the baseline ended."""
    arguments = ["--model-path", str(models.target), "--speculative-draft-model-path", draft, *CONTEXT]
    arguments += ["--sdsie-policy", "fixed", "--sdsie-cost-table", str(cost_table)]
    with Server.start([*arguments, "--sdsie-trace", str(trace_path), "--enable-metrics"]) as server:
        yield server


@pytest.fixture
def cycles_of(gears, trace_path, prompts):
    """Runs the prompts under a policy and returns the cycles that the server traced meanwhile."""

    def traced():
        """All lines, once there is one for each cycle that the server launched."""
        for _ in range(100):
            lines = trace_path.read_text().splitlines()
            if len(lines) == gears.sdsie()["gate"]["cycles"]:
                return lines
            time.sleep(0.1)
        raise AssertionError("cycles were launched that never came to the trace")

    def run(**policy):
        gears.set_policy(**policy)
        before = len(traced())
        answers = ask_all(gears, prompts)
        return answers, [json.loads(line) for line in traced()[before:]]

    return run
