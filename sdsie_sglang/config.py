"""This project's settings, and the only place that reads SDSIE_* variables.

SGLang starts its scheduler and detokenizer as fresh processes. Settings reach them through one
variable, SDSIE_CONFIG (JSON), which the launcher writes and which a user of `sglang.launch_server`
or `sgl.Engine` may write by hand.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sdsie_sglang.gears.cost_table import load_cost_table
from sdsie_sglang.gears.settings import MAX_K, PolicySettings, first_error
from sdsie_sglang.int4.resolution import parse_layers
from sdsie_sglang.int4.settings import Int4Settings

CONFIG_VARIABLE = "SDSIE_CONFIG"
OFF_VARIABLE = "SDSIE_OFF"
CACHE_VARIABLE = "SDSIE_CACHE"
ALGORITHM = "SDSIE"
# Settings of the server itself, beside the policy's and those of INT4.
OWN = (
    "gears",
    "trace",
    "replica",
    "draft",
    "no_calibrate",
    "calibration_seconds",
    "no_skinny_gemm",
    "no_fused_layer",
    "no_fused_attention",
    "no_draft_graph",
    "draft_stop",
    "check_ranks",
    "check_syncs",
    "resolution_layers",
)
INT4_PREFIX = "int4_"


class ConfigError(ValueError):
    """Settings that cannot be used. Its text is one line, written for the person who gave them."""


class SdsieConfig(BaseModel):
    """What one server is started with.

    Args:
        policy: may be changed while the server runs.
        gears: every K whose resources are built at start; None builds those of `policy` and of its cost
            table, or all of 0 to 7 where they cost nothing (the CPU engine captures no graphs).
        trace: file that receives one JSON line a cycle.
        replica: name of this server among several, as behind a router; its telemetry carries it.
        draft: who drafts: a model of its own, or the target in INT4 on its own KV.
        int4: how INT4 weights are made, of the self-draft or of --quantization sdsie_int4.
        no_calibrate: the launcher measures no cost table, even if it needs one.
        calibration_seconds: what measuring one may take, the start of the server that it needs not counted.
        no_skinny_gemm: leave the unquantised layers of a decode cycle to SGLang.
        no_fused_layer: leave what lies between a layer's products to SGLang.
        no_fused_attention: leave a decode cycle's attention to SGLang.
        no_draft_graph: prepare a cycle's draft passes one by one also where all of them could be one CUDA graph.
        draft_stop: stop drafting, in such a graph, once the product of a chain's probabilities is below this; 0: never.
        check_ranks: tensor-parallel ranks compare every batch before they run it, and each writes a trace.
        check_syncs: waiting for the GPU while a cycle is issued stops the server; for tests.
        resolution_layers: linear layers that multiply by INT4 weights while the policy asks for a gear above 0, in a
            plain decode that nothing verifies (`int4/resolution.py`); None: off.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicySettings = Field(default_factory=PolicySettings)
    gears: tuple[int, ...] | None = None
    trace: str | None = None
    replica: str | None = Field(default=None, min_length=1, max_length=64)
    draft: Literal["model", "self-int4"] = "model"
    int4: Int4Settings = Field(default_factory=Int4Settings)
    no_calibrate: bool = False
    calibration_seconds: float = Field(default=60.0, gt=0.0, le=3600.0)
    no_skinny_gemm: bool = False
    no_fused_layer: bool = False
    no_fused_attention: bool = False
    no_draft_graph: bool = False
    draft_stop: float = Field(default=0.0, ge=0.0, lt=1.0)
    check_ranks: bool = False
    check_syncs: bool = False
    resolution_layers: str | None = None

    @property
    def drafts_itself(self) -> bool:
        """Whether the target is its own draft, in INT4."""
        return self.draft == "self-int4"

    @property
    def needs_draft_model(self) -> bool:
        """Whether a second model has to be named."""
        return not self.drafts_itself and self.resolution_layers is None

    @property
    def wants_draft_graph(self) -> bool:
        """Whether all of a cycle's draft passes are to be one CUDA graph, where this project's kernels serve them."""
        return self.needs_draft_model and not self.no_draft_graph

    @model_validator(mode="after")
    def _check(self) -> "SdsieConfig":
        if self.resolution_layers is not None:
            self._check_resolution(self.resolution_layers)
        if self.draft_stop and not self.wants_draft_graph:
            raise ValueError("draft_stop needs a draft model of its own, and its passes in one graph (no_draft_graph)")
        if self.draft_stop and (self.policy.policy == "cost" or self.policy.cost_table is not None):
            raise ValueError("draft_stop hides from the cost gate how long chains would have been right: leave out one")
        if self.gears is not None:
            if not self.gears or not all(0 <= k <= MAX_K for k in self.gears):
                raise ValueError(f"gears must be from 0 to {MAX_K}")
            self._check_gears(set(self.gears))
        elif self.policy.cost_table is not None:
            self._table_gears()  # raises where the table cannot be used, whatever the policy is for now
        return self

    def _check_resolution(self, layers: str) -> None:
        """Nothing is drafted, so nothing that concerns drafts may be asked for. Raises ValueError."""
        parse_layers(layers)
        alone = "--sdsie-resolution-layers drafts nothing: leave out"
        if self.drafts_itself:
            raise ValueError(f"{alone} --sdsie-draft self-int4, or these layers for the lossless one of the two")
        if self.gears is not None:
            raise ValueError(f"{alone} --sdsie-gears")
        if self.policy.policy == "cost" or self.policy.cost_table is not None:
            raise ValueError(f"{alone} the cost gate, which chooses how many tokens to draft")
        if self.int4.exclude or self.int4.lm_head:
            raise ValueError("--sdsie-resolution-layers names the layers: leave out int4_exclude and int4_lm_head")

    def _check_gears(self, gears: set[int]) -> None:
        """The cost gate chooses among the gears named here, which its table must know; others need all of theirs."""
        if self.policy.policy == "cost":
            unknown = sorted(gears - set(self._table_gears()))
            if unknown:
                raise ValueError(f"gears {unknown} are not in the cost table {self.policy.cost_table}")
            if not gears - {0}:
                raise ValueError("policy cost needs a gear besides 0 to choose from")
            return
        missing = sorted(set(self.policy.gears) - gears)
        if missing:
            raise ValueError(f"gears {sorted(gears)} lack {missing}, which the policy asks for")

    def _table_gears(self) -> tuple[int, ...]:
        return load_cost_table(self.policy.cost_table).gears if self.policy.cost_table is not None else ()

    def built_gears(self, *, graphs: bool) -> tuple[int, ...]:
        """Gears to prepare at start, ascending. Gear 0 is always among them: it is the fallback."""
        if self.gears is not None:
            return tuple(sorted({0, *self.gears}))
        if not graphs or self.resolution_layers is not None:  # every gear above 0 is gear R
            return tuple(range(MAX_K + 1))
        return tuple(sorted({0, *self.policy.gears, *self._table_gears()}))


def parse_config(values: Mapping[str, Any]) -> SdsieConfig:
    """Flat settings (the names of the flags, without `sdsie_`) -> SdsieConfig. Raises ConfigError."""
    values = {setting_name(key): value for key, value in values.items()}
    own = {key: values[key] for key in OWN if key in values}
    if isinstance(own.get("gears"), str):
        own["gears"] = parse_gears(own["gears"])
    int4 = {key.removeprefix(INT4_PREFIX): value for key, value in values.items() if key.startswith(INT4_PREFIX)}
    policy = {key: value for key, value in values.items() if key not in own and not key.startswith(INT4_PREFIX)}
    if own.get("resolution_layers") is not None:
        policy = {"policy": "entropy", **policy}
    try:
        return SdsieConfig(policy=PolicySettings(**policy), int4=Int4Settings(**int4), **own)
    except ValidationError as error:
        raise ConfigError(first_error(error)) from None


def setting_name(key: Any) -> str:
    """`theta-low`, `theta_low` and `--sdsie-theta-low` are one setting."""
    if not isinstance(key, str):
        raise ConfigError(f"{key!r} is no name of a setting")
    return key.removeprefix("--").replace("-", "_").removeprefix("sdsie_")


def parse_gears(text: str) -> tuple[int, ...]:
    """'0,3,5' -> (0, 3, 5). Raises ConfigError."""
    if not all(part.strip().isdigit() for part in text.split(",")):
        raise ConfigError(f"gears must look like 0,3,5, not {text!r}")
    return tuple(int(part) for part in text.split(","))


def parse_policy(values: Any) -> PolicySettings:
    """Settings for a running server, with the cost table that it was started with. Raises ConfigError."""
    if not isinstance(values, dict):
        raise ConfigError(f"policy settings must be an object, not {type(values).__name__}")
    if "cost_table" in values:
        raise ConfigError("cost_table: a running server keeps the one it was started with (--sdsie-cost-table)")
    try:
        return PolicySettings(**values, cost_table=settings_from_env().get("cost_table"))
    except ValidationError as error:
        raise ConfigError(first_error(error)) from None


def load_settings_file(path: str) -> dict[str, Any]:
    """Reads a YAML or JSON settings file into flat settings. Raises ConfigError."""
    import yaml  # here alone: evaluations that need no server run where it is not installed

    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"settings file {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"settings file {path} is neither YAML nor JSON") from None
    if not isinstance(values, dict):
        raise ConfigError(f"settings file {path} must hold names and values")
    return values


def flat(config: SdsieConfig) -> dict[str, Any]:
    """The inverse of `parse_config`."""
    int4 = {f"{INT4_PREFIX}{key}": value for key, value in config.int4.model_dump(mode="json").items()}
    return {**config.policy.model_dump(), **config.model_dump(include=set(OWN)), **int4}


def settings_from_env() -> dict[str, Any]:
    """Flat settings that SDSIE_CONFIG holds, as given; none if it is not set. Raises ConfigError."""
    text = os.environ.get(CONFIG_VARIABLE)
    if not text:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{CONFIG_VARIABLE} is not JSON") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{CONFIG_VARIABLE} must be a JSON object")
    return {setting_name(key): value for key, value in values.items()}


def config_from_env() -> SdsieConfig:
    """What SDSIE_CONFIG says, or the defaults. Raises ConfigError."""
    return parse_config(settings_from_env())


def config_to_env(config: SdsieConfig) -> None:
    """Hands `config` to this process's SGLang and to every process it starts."""
    os.environ[CONFIG_VARIABLE] = json.dumps(flat(config))


def is_off() -> bool:
    """Whether SGLang should run exactly as shipped, this plugin installed or not."""
    return os.environ.get(OFF_VARIABLE) == "1"


def turn_off() -> None:
    """For this process and every process it starts."""
    os.environ[OFF_VARIABLE] = "1"


def cache_dir() -> Path:
    """What is made once and kept: `$SDSIE_CACHE`, else `$XDG_CACHE_HOME/sdsie`, else `~/.cache/sdsie`."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sdsie"
