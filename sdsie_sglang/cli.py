"""The --sdsie-* flags."""

import argparse
from typing import Any

from sdsie_sglang.config import SdsieConfig, load_settings_file, parse_config, setting_name, settings_from_env
from sdsie_sglang.gears.settings import MAX_K, PRESETS
from sdsie_sglang.int4.settings import CALIBRATIONS

PREFIX = "sdsie_"


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, none with a default, so that only what was given is set."""
    presets = ", ".join(f"{name} {v['theta_low']}/{v['theta_high']}" for name, v in PRESETS.items())
    group = parser.add_argument_group("sdsie", "Gears: how many tokens the draft may propose, cycle by cycle")

    def flag(name: str, help: str, **kwargs: Any) -> None:
        group.add_argument(f"--sdsie-{name}", help=help, default=argparse.SUPPRESS, **kwargs)

    flag(
        "policy",
        "plain: gear 0 always. fixed: gear K always. entropy: gear K while the target's entropy is low, else 0. "
        "schedule: a written sequence. cost: the gear that should earn most for what it costs, learned while "
        "serving. Left out: cost, with a cost table that is measured once on this machine",
        metavar="NAME",
    )
    flag("k", f"draft tokens a cycle, 1 to {MAX_K} (default 5)", type=int, metavar="K")
    flag("preset", f"thresholds in bits: {presets} (default tuned)", metavar="NAME")
    flag("theta-low", "engage below this smoothed entropy, bits", type=float, metavar="BITS")
    flag("theta-high", "disengage above this smoothed entropy, bits", type=float, metavar="BITS")
    flag("alpha", "weight of the newest entropy in the moving average, in (0, 1]", type=float, metavar="A")
    flag("smoothing", "ema (default) or window", metavar="NAME")
    flag("window", "width of the moving window (default 3)", type=int, metavar="N")
    flag("fold", "last: one entropy a cycle (default). all: every committed position", metavar="NAME")
    flag(
        "engage-share", "share of a batch's requests that engages the batch (default 0.5)", type=float, metavar="SHARE"
    )
    flag("schedule", "for --sdsie-policy schedule: gear x cycles, for ever, as 5x8,0x8", metavar="TEXT")
    flag("gears", "every K to prepare at start, as 0,3,5 (default: those of the policy)", metavar="LIST")
    flag(
        "cost-table", "for --sdsie-policy cost: what each gear costs, a file written by eval.calibrate", metavar="FILE"
    )
    flag("objective", "what --sdsie-policy cost is after: speed (default) or energy", metavar="NAME")
    flag("explore", "share of the cost that it may spend on exploring (default 0.005)", type=float, metavar="SHARE")
    flag("seed", "of its exploration (default 0)", type=int, metavar="N")
    flag("no-calibrate", "never measure a cost table; without one, fixed K = 5 is served", action="store_true")
    flag(
        "calibration-seconds",
        "what measuring one may take, besides starting a server for it (default 60)",
        type=float,
        metavar="S",
    )
    flag("trace", "append one JSON line a cycle to this file", metavar="FILE")
    flag(
        "replica",
        "this server's name among several behind a router: answers, trace and metrics carry it",
        metavar="NAME",
    )
    flag(
        "draft",
        "model: one of its own (default where it is named). self-int4: the target itself in INT4, on its own KV cache",
        metavar="KIND",
    )
    flag(
        "int4-calibration",
        f"of INT4 weights made while loading: {', '.join(CALIBRATIONS)} (default g128; awq only saved ones)",
        metavar="NAME",
    )
    flag("int4-exclude", "layers that keep full precision, parts of names, as layers.0.,down_proj", metavar="LIST")
    flag("int4-lm-head", "the output head in INT4 as well", action="store_true")
    flag("no-skinny-gemm", "leave a decode cycle's unquantised linear layers to SGLang (cuBLAS)", action="store_true")
    flag("no-fused-layer", "leave norms and activations between those layers to SGLang", action="store_true")
    flag("no-fused-attention", "leave a decode cycle's attention to SGLang's backend", action="store_true")
    flag(
        "no-draft-graph",
        "prepare draft passes one by one also where they could be one CUDA graph (a Llama draft in bf16, one GPU)",
        action="store_true",
    )
    flag(
        "draft-stop",
        "stop a chain, in that graph, once the product of its tokens' probabilities is below this (default 0: never)",
        type=float,
        metavar="P",
    )
    flag(
        "check-ranks",
        "tensor-parallel ranks compare every decision before it runs and stop the server if they disagree",
        action="store_true",
    )
    flag("check-syncs", "stop the server where issuing a cycle waits for the GPU (for tests)", action="store_true")
    flag(
        "resolution-layers",
        "NOT LOSSLESS. Linear layers that run in INT4 while the policy (default here: entropy) engages, unverified and "
        "without drafts: mlp.down_proj@all, @0,7,12-15, @first:4, @middle:4, @last:4 or @spread:4; several joined by ;",
        metavar="SPEC",
    )
    flag("settings", "YAML or JSON file with these names; flags win over it", metavar="FILE")
    flag("off", "serve with SGLang exactly as shipped (the baseline)", action="store_true")


def settings_from_args(args: argparse.Namespace) -> dict[str, Any]:
    """SDSIE_CONFIG, overridden by the settings file, overridden by the flags; only what was given.

    Raises ConfigError.
    """
    given = {key.removeprefix(PREFIX): value for key, value in vars(args).items() if key.startswith(PREFIX)}
    given.pop("off", None)
    path = given.pop("settings", None)
    layers = [settings_from_env(), load_settings_file(path) if path is not None else {}, given]
    return {setting_name(key): value for layer in layers for key, value in layer.items()}


def config_from_args(args: argparse.Namespace) -> SdsieConfig:
    """`settings_from_args`, validated. Raises ConfigError."""
    return parse_config(settings_from_args(args))
