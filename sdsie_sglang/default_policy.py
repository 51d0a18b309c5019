"""What is served where the user names no policy: the cost gate, with costs measured once on this machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdsie_sglang.arguments import gives
from sdsie_sglang.calibration import cache
from sdsie_sglang.calibration.first_start import ON_CPU, ON_GPU, Bursts, NotMeasured, check_measurable, measure, say
from sdsie_sglang.config import ConfigError, SdsieConfig, config_to_env, parse_config
from sdsie_sglang.eval.energy import Gpu, NoEnergy
from sdsie_sglang.gears.cost_table import Conditions, CostTable, load_cost_table
from sdsie_sglang.gears.settings import SAVES, PolicySettings

GEARS = (0, 1, 2, 3, 5, 7)
"""Measured and prepared unless --sdsie-gears names others: each costs start-up time and memory on a GPU."""
FALLBACK_K = 5
SELF_FALLBACK_K = 2
"""For the self-draft, whose passes cost half a target's and more: K = 5 earned 1.03 of plain where K = 2 earned 1.27
(eval/results/int4/model_h200.json)."""
DEFAULT_DRAFT = "self-int4"
"""--sdsie-draft where no draft model is named: lossless, up to a third faster (the same record), for a quarter more
memory of weights. Whether it is used at all is the cost gate's to say."""
DRAFT_FLAGS = ("--speculative-draft-model-path", "--speculative-draft-model")
OF_THE_COST_GATE = frozenset({"cost_table", "objective", "explore", "seed"})


def completed(settings: Mapping[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """Settings as given, with what they stand for: a cost table for the cost gate, no draft for the target itself.

    Args:
        arguments: for SGLang, which name the draft model if there is one.
    """
    complete = dict(settings)
    if settings.get("cost_table") is not None:
        complete.setdefault("policy", "cost")
    if settings.get("resolution_layers") is None and not any(gives(arguments, flag) for flag in DRAFT_FLAGS):
        complete.setdefault("draft", DEFAULT_DRAFT)
    if complete.get("draft") == DEFAULT_DRAFT and complete.get("policy") in ("fixed", "entropy"):
        complete.setdefault("k", SELF_FALLBACK_K)
    return complete


def leaves_open(settings: Mapping[str, Any]) -> bool:
    """Whether a policy, or the table of the cost gate, is to be found: a setting of another policy (K, thresholds …)
    says that none is; so do layers of the Resolution Gear, which drafts nothing, and chains that the draft stops."""
    if settings.get("resolution_layers") is not None or settings.get("draft_stop"):
        return False
    if settings.get("policy") == "cost":
        return settings.get("cost_table") is None
    return not settings.keys() & (PolicySettings.model_fields.keys() - (OF_THE_COST_GATE - {"cost_table"}))


def undecided(settings: Mapping[str, Any]) -> SdsieConfig:
    """Settings to resolve SGLang's arguments by, and to measure by, before the policy is chosen. Raises ConfigError."""
    return parse_config({"gears": GEARS, **settings, "policy": "plain", "trace": None})


def choose(
    settings: Mapping[str, Any], args: Any, conditions: Conditions, arguments: Sequence[str], *, unasked: bool = False
) -> SdsieConfig:
    """Decides, measures if it must, and says in one line what it chose and why.

    Args:
        settings: as given; `leaves_open` holds for them.
        args: SGLang's, resolved under `undecided`; conditions: theirs.
        arguments: those that they were parsed from.
        unasked: the target drafts for itself because no draft was named: without a table, it had better not.

    Raises:
        ConfigError: what was asked for cannot be had on this machine.
    """
    wanted = undecided(settings)
    gears = wanted.built_gears(graphs=True)
    try:
        if wanted.no_calibrate:
            raise NotMeasured("--sdsie-no-calibrate")
        if gears == (0,):
            raise NotMeasured("--sdsie-gears leaves gear 0 alone")
        check_measurable(args)
        bursts = (ON_CPU if args.device == "cpu" else ON_GPU).up_to(args.max_running_requests)
        path, fresh = _table_path(wanted, conditions, gears, arguments, bursts)
    except NotMeasured as error:
        if settings.get("policy") == "cost":
            raise ConfigError(f"policy cost has no cost table ({error}): give one with --sdsie-cost-table") from None
        widest = 0 if unasked else SELF_FALLBACK_K if wanted.drafts_itself else FALLBACK_K
        return _fallback(settings, gears, str(error), widest)
    config = parse_config({**settings, "policy": "cost", "cost_table": str(path)})
    say(_sentence(config.policy, load_cost_table(path), path, fresh=fresh))
    return config


def _table_path(
    wanted: SdsieConfig, conditions: Conditions, gears: Sequence[int], arguments: Sequence[str], bursts: Bursts
) -> tuple[Path, bool]:
    """Where the table lies, and whether it was measured just now. Raises NotMeasured, ConfigError."""
    gpu = _gpu() if wanted.policy.objective == "energy" else None
    path = cache.path_for(conditions, gears, energies=gpu is not None)
    if cache.read(path) is not None:
        return path, False
    say(
        f"measuring what each gear costs here, once: a server is started for it, then about "
        f"{wanted.calibration_seconds:.0f} s (--sdsie-no-calibrate skips this)"
    )
    config_to_env(wanted)
    table = measure(arguments, conditions, gears, bursts, wanted.calibration_seconds, gpu)
    try:
        cache.write(path, table)
    except OSError as error:
        raise NotMeasured(f"{path} cannot be written: {error.strerror}") from None
    return path, True


def _gpu() -> Gpu:
    try:
        return Gpu()
    except (NoEnergy, ImportError) as error:
        raise ConfigError(f"--sdsie-objective energy: {error}") from None


def _fallback(settings: Mapping[str, Any], gears: Sequence[int], why: str, widest: int) -> SdsieConfig:
    """Fixed K of the widest prepared gear up to `widest`, or what there is; plain decoding if that is 0."""
    drafting = sorted(gear for gear in gears if gear) if widest else []
    k = max((gear for gear in drafting if gear <= widest), default=drafting[0] if drafting else 0)
    kept = {name: value for name, value in settings.items() if name not in OF_THE_COST_GATE}
    if k == 0:
        say(f"plain decoding: no cost table ({why})")
        return parse_config({**kept, "policy": "plain"})
    say(f"fixed K = {k}: the cost gate has no cost table ({why})")
    return parse_config({**kept, "policy": "fixed", "k": k})


def _sentence(policy: PolicySettings, table: CostTable, path: Path, *, fresh: bool) -> str:
    """What was chosen and why."""
    costs, _ = table.at(table.batches[0]).of(SAVES[policy.objective])
    unit = "ms" if policy.objective == "speed" else "J"
    source = f"costs measured just now, kept in {path}" if fresh else f"costs of {table.date} from {path}"
    chosen = f"cost gate for {policy.objective}, gears {' '.join(map(str, table.gears))}: {source}"
    pays = {k: cost / costs[0] for k, cost in costs.items() if k and cost < (k + 1) * costs[0]}
    if not pays:
        return f"{chosen}; no draft can pay at these costs (gear 0 {costs[0]:.2f} {unit}), so expect gear 0"
    k = min(pays, key=lambda k: pays[k] / (k + 1))
    return (
        f"{chosen}; a cycle costs {costs[0]:.2f} {unit} in gear 0 and {costs[k]:.2f} at K = {k}, which pays from "
        f"{pays[k]:.2f} tokens a cycle on"
    )
