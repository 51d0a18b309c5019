"""A fake GPU behind pynvml's names, on a clock that only moves when it is told to; fake servers and records."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import pynvml

from sdsie_sglang.eval.energy import Gpu, Recorder
from sdsie_sglang.eval.plan import Ask, Config, Datapoint
from sdsie_sglang.eval.prompts import timed_prompts
from sdsie_sglang.eval.record import Record, Request, Stretch, WarmUpReading


@dataclass
class FakeGpu:
    """A GPU with the original's thermal time constant and a counter that moves every 100 ms.

    Args:
        load_w: power at `reference_c` as a function of time; each degree above adds `leak` of it.
        noise: standard deviation of a power reading, as a share.
        processes: how many unnamed processes compute on it, beside those of `pids`.
    """

    load_w: Callable[[float], float] = lambda t: 400.0
    tick_s: float = 0.1
    start_c: float = 60.0
    c_per_w: float = 0.1
    ambient_c: float = 20.0
    time_constant_s: float = 40.0
    leak: float = 0.002
    reference_c: float = 60.0
    noise: float = 0.0
    throttle: int = 0
    processes: int = 1
    pids: set[int] = field(default_factory=set)
    memory_gib: float = 2.0
    now_s: float = 0.0
    energy_j: float = 0.0
    shown_j: float = 0.0
    temperature_c: float = field(init=False)

    def __post_init__(self) -> None:
        self.temperature_c = self.start_c
        self.random = random.Random(1)

    @property
    def power_w(self) -> float:
        return self.load_w(self.now_s) * (1 + self.leak * (self.temperature_c - self.reference_c))

    def advance(self, seconds: float) -> None:
        """Moves the clock, heats, and lets the counter tick."""
        end = self.now_s + seconds
        while self.now_s < end - 1e-9:
            step = min(0.01, end - self.now_s)
            self.energy_j += self.power_w * step
            settled_c = self.ambient_c + self.c_per_w * self.power_w
            self.temperature_c += (settled_c - self.temperature_c) * step / self.time_constant_s
            before, self.now_s = self.now_s, self.now_s + step
            if int(before / self.tick_s + 1e-6) != int(self.now_s / self.tick_s + 1e-6):
                self.shown_j = self.energy_j

    def clock(self) -> float:
        return self.now_s

    def nvml(self) -> SimpleNamespace:
        """What is used of `pynvml`, with its signatures and with this GPU as index 0."""
        answers = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByIndex": lambda index: "gpu",
            "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: round(self.shown_j * 1000),
            "nvmlDeviceGetPowerUsage": lambda gpu: round(self.power_w * self.random.gauss(1, self.noise) * 1000),
            "nvmlDeviceGetTemperature": lambda gpu, sensor: round(self.temperature_c),
            "nvmlDeviceGetClockInfo": lambda gpu, kind: 1980,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: self.throttle,
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=self.memory_gib * 2**30),
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
                SimpleNamespace(pid=pid) for pid in (*range(1, self.processes + 1), *self.pids)
            ],
        }
        functions = {
            name: mock.create_autospec(getattr(pynvml, name), side_effect=answer) for name, answer in answers.items()
        }
        names = ("NVMLError", "NVML_TEMPERATURE_GPU", "NVML_CLOCK_SM")
        return SimpleNamespace(**functions, **{name: getattr(pynvml, name) for name in names})


class Lab:
    """A recorder on a fake GPU, sampled by hand every `step_s` while time passes."""

    def __init__(self, gpu: FakeGpu, step_s: float = 0.01) -> None:
        self.gpu = gpu
        self.step_s = step_s
        self.recorder = Recorder(Gpu(0, gpu.nvml()), gpu.clock)
        self.readings = self.recorder.readings

    def run(self, seconds: float) -> Stretch:
        start_s = self.gpu.now_s
        for _ in range(round(seconds / self.step_s)):
            self.gpu.advance(self.step_s)
            self.recorder.sample()
        return Stretch(start_s=start_s, end_s=self.gpu.now_s)


class FakeServer:
    """Streams `tokens` ids a request at `tok_per_s`, in a lab's time if it has one."""

    def __init__(self, lab: Lab | None = None, tok_per_s: float = 100.0, finish: str = "length") -> None:
        self.lab, self.tok_per_s, self.finish = lab, tok_per_s, finish
        self.asked: list[list[int]] = []

    def stream(self, prompt, **sampling):
        self.asked.append(prompt)
        tokens = sampling["max_new_tokens"]
        for n in sorted({1, tokens}):
            if self.lab is not None:
                self.lab.run((n if n == 1 else tokens - 1) / self.tok_per_s)
            yield {
                "output_ids": list(range(n)),
                "meta_info": {"id": "r", "finish_reason": {"type": self.finish} if n == tokens else None},
            }


def config(**changes) -> Config:
    values = {"name": "fake", "parts": {"all": ("draft-k5",)}, "warm_up": {"min_s": 0}}
    return Config(**{**values, **changes})


def fake_request(ask: Ask, start_s: float, *, tok_per_s: float = 100.0, tokens: int = 100, **changes) -> Request:
    end_s = start_s + tokens / tok_per_s
    values = {
        "key": ask.key,
        "prompt": ask.prompt.id,
        "category": ask.prompt.category,
        "is_code": ask.prompt.is_code,
        "phase": 0,
        "input_tokens": 20,
        "input_ids_sha": ask.key,
        "output_ids": list(range(tokens)),
        "start_s": start_s,
        "first_token_s": start_s + 0.02,
        "end_s": end_s,
        "finish": "length",
    }
    return Request(**{**values, **changes})


def fake_record(
    role: str = "method",
    method: str = "draft-k5",
    *,
    repetition: int = 0,
    tok_per_s: float = 100.0,
    speeds: Callable[[str], float] = lambda prompt: 1.0,
    accept: float | None = None,
    gpu: FakeGpu | None = None,
    settings: Config | None = None,
    position: int = 1,
    tokens: int = 100,
    **changes,
) -> Record:
    """A record of all 27 prompts; with a GPU, its readings of that time."""
    settings = settings or config()
    requests, now_s = [], 5.0
    lab = Lab(gpu, 0.02) if gpu is not None else None
    if lab is not None:
        lab.run(now_s)
    for prompt in timed_prompts():
        ask = Ask(f"{prompt.id}/0", prompt, prompt.text)
        request = fake_request(ask, now_s, tok_per_s=tok_per_s * speeds(prompt.id), tokens=tokens)
        if accept is not None:
            request.verify_count = round(tokens / accept)
        if lab is not None:
            lab.run(request.end_s - now_s)
            request.end_s = lab.gpu.now_s
        now_s = request.end_s
        requests.append(request)
    if lab is not None:
        lab.run(0.3)
    warm = [WarmUpReading(label="warmup-1", start_s=0.0, end_s=4.0, tokens=10)]
    values = {
        "datapoint": Datapoint(part="all", repetition=repetition, position=position, role=role, method=method),
        "config": settings,
        "config_digest": settings.digest(),
        "run": "r1",
        "date": "2026-01-01",
        "machine": {"cpu": "fake", "cores": 2, "commit": "c", "packages": {}, "gpus": []},
        "program": "python -m sdsie_sglang.eval.run fake",
        "command": ["python"],
        "server_info": {},
        "live": None,
        "startup_s": 1.0,
        "before": None,
        "idle": None,
        "warm_up": warm,
        "warm_up_settled": None,
        "phases": [Stretch(start_s=5.0, end_s=now_s)],
        "prefill": None,
        "prefill_requests": 0,
        "prefill_tokens": 0,
        "requests": requests,
        "readings": lab.readings if lab is not None else None,
    }
    return Record(**{**values, **changes})
