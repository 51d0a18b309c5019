"""The algorithm `SDSIE` as SGLang's registry wants it, and what it refuses at start."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sdsie_sglang.config import ALGORITHM, ConfigError, SdsieConfig, config_from_env
from sdsie_sglang.int4.checks import find_problem
from sdsie_sglang.int4.saved_checks import saved_problem
from sdsie_sglang.lossless import THRESHOLDS, relaxed_thresholds
from sdsie_sglang.telemetry.trace import check_trace_path
from sdsie_sglang.tensor_parallel import split_problem

logger = logging.getLogger(__name__)

INSTEAD = "; leave out --sdsie-draft and name a draft model: --speculative-draft-model-path PATH"
DEFAULT_MAX_RUNNING_REQUESTS = 48  # SGLang's own for draft models


class SdsieAlgorithm(CustomSpecAlgo):
    """Takes STANDALONE's branches in SGLang: a draft that is a complete model of its own."""

    def is_standalone(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    # The four methods that SGLang 0.5.23 calls and its base class for plugins lacks.

    def need_topk(self) -> bool:
        """Nothing of the draft is carried from one cycle to the next but the pending token."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> None:
        return None

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def handle_server_args(self, server_args: Any) -> None:
        """Fills what the gears decide. SGLang sizes its buffers from the widest gear."""
        config = config_from_env()
        widest = max(1, *config.built_gears(graphs=captures_graphs(server_args)))
        if config.resolution_layers is not None:
            widest = 1  # nothing is drafted; SGLang has no speculation without a step
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        server_args.enable_mixed_chunk = False
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_steps = widest
        server_args.speculative_num_draft_tokens = widest + 1


def captures_graphs(server_args: Any) -> bool:
    """Whether decode cycles run as CUDA graphs, of which each gear needs its own."""
    off = server_args.disable_cuda_graph or server_args.cuda_graph_backend_decode == "disabled"
    return server_args.device != "cpu" and not off


def check_server_args(server_args: Any) -> None:
    """Refuses, before any weight is loaded, what the gears cannot serve. Raises ConfigError."""
    config = config_from_env()
    for wrong, sentence in _refusals(server_args, config):
        if wrong:
            raise ConfigError(sentence)
    check_drafting(server_args, config)
    check_split(server_args)
    check_trace_path(config.trace)


def _refusals(args: Any, config: SdsieConfig) -> list[tuple[bool, str]]:
    steps = args.speculative_num_steps
    return [
        (
            (args.speculative_eagle_topk or 1) != 1,
            "gears draft a chain, not a tree: leave out --speculative-eagle-topk or set it to 1",
        ),
        (
            steps is not None and steps != config.policy.k,
            f"--speculative-num-steps {steps} contradicts K={config.policy.k}: use --sdsie-k instead",
        ),
        (
            bool(args.speculative_adaptive),
            "leave out --speculative-adaptive: --sdsie-policy chooses the steps",
        ),
        (
            bool(args.speculative_use_rejection_sampling),
            "leave out --speculative-use-rejection-sampling: sampled text is verified without it",
        ),
        (
            relaxed_thresholds({name: getattr(args, name) for name in THRESHOLDS}) != [],
            "gears never accept what the target would not have said: leave out --speculative-accept-threshold-single "
            "and --speculative-accept-threshold-acc",
        ),
        (
            args.pp_size > 1,
            "gears do not run with pipeline parallelism: use --pp-size 1 and --tp-size instead",
        ),
        (
            (args.attn_dp_size or 1) > 1,
            "gears do not run with DP attention: leave out --attn-dp-size and --enable-dp-attention",
        ),
        (
            bool(args.enable_lora or args.lora_paths),
            "gears do not run with LoRA adapters: merge the adapter into the model",
        ),
        (
            args.disaggregation_mode not in (None, "null"),
            "gears do not run with prefill-decode disaggregation: leave out --disaggregation-mode",
        ),
        (bool(args.enable_pdmux), "gears do not run with --enable-pdmux: leave it out"),
        (
            args.device == "cpu" and not (args.disable_cuda_graph or args.cuda_graph_backend_decode == "disabled"),
            "on the CPU engine give --cuda-graph-backend-decode disabled, or use python -m sdsie_sglang.launch_server",
        ),
        (
            args.device == "cpu" and (args.page_size or 1) != 1,
            "on the CPU engine gears need --page-size 1: leave it out",
        ),
        (
            bool(args.enable_return_hidden_states),
            "gears return no hidden states of drafted tokens: leave out --enable-return-hidden-states",
        ),
    ]


def check_drafting(args: Any, config: SdsieConfig) -> None:
    """Raises ConfigError if the draft that was asked for cannot be had, as far as files and flags tell."""
    if config.needs_draft_model:
        check_draft(args.model_path, args.speculative_draft_model_path)
    elif args.speculative_draft_model_path is not None:
        reason = "--sdsie-draft self-int4 drafts with the target"
        if config.resolution_layers is not None:
            reason = "--sdsie-resolution-layers drafts nothing"
        raise ConfigError(f"{reason}: leave out --speculative-draft-model-path")
    else:
        check_folder("target", args.model_path)
    check_int4(args, config)


def check_int4(args: Any, config: SdsieConfig) -> None:
    """Raises ConfigError if INT4 weights are asked for where they cannot be had."""
    common = {"tp_size": args.tp_size, "device": args.device or "", "dtype": args.dtype}
    problem = find_problem(
        config.int4,
        _read_json(args.model_path, "config.json"),
        quantization=args.quantization,
        drafts_itself=config.drafts_itself,
        resolution_layers=config.resolution_layers,
        **common,
    )
    if problem is not None and config.drafts_itself:
        problem += INSTEAD
    if problem is None and args.speculative_draft_model_path is not None:
        draft = _read_json(args.speculative_draft_model_path, "config.json")
        quantization = args.speculative_draft_model_quantization or args.quantization  # as SGLang fills it
        problem = find_problem(config.int4, draft, quantization=quantization, drafts_itself=False, **common)
        problem = problem and f"the draft: {problem}"
    for path in (args.model_path, args.speculative_draft_model_path):
        if problem is None and path is not None:
            problem = saved_problem(Path(path).expanduser(), _read_json(path, "config.json"))
    if problem is not None:
        raise ConfigError(problem)


def check_resolved(server_args: Any, config: SdsieConfig) -> None:
    """Raises ConfigError if the target turns out not to take INT4 weights beside its own, which is known once SGLang
    has looked into a model on a hub, and at the GPU."""
    if not config.drafts_itself:
        return
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolving_view

    from sdsie_sglang.int4.both import check_device
    from sdsie_sglang.int4.method import Int4Unsupported

    model = model_config_of(server_args)
    if model.quantization is not None:
        problem = f"--sdsie-draft self-int4 needs an unquantised target, this one is {model.quantization}"
        raise ConfigError(f"{problem}{INSTEAD}")
    try:
        check_device(torch.device(resolving_view(server_args).device), model.dtype)
    except Int4Unsupported as error:
        raise ConfigError(f"{error}{INSTEAD}") from None


def check_folder(role: str, path: str) -> None:
    """Raises ConfigError if `path` looks like a folder and is none; other names may be on a model hub."""
    if path.startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir():
        raise ConfigError(f"the {role} model {path} is not a folder")


def check_draft(target: str, draft: str | None) -> None:
    """Raises ConfigError if a folder is missing, or if the two are seen to differ in vocabulary.

    What lies on a model hub cannot be looked into yet: SGLang compares it once it has fetched it.
    """
    if draft is None:
        raise ConfigError(
            "a draft model is missing: --speculative-draft-model-path PATH, with the target's tokenizer, "
            "or --sdsie-draft self-int4"
        )
    for role, path in (("target", target), ("draft", draft)):
        check_folder(role, path)
    sizes = [_read_json(path, "config.json").get("vocab_size") for path in (target, draft)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ConfigError(f"the draft's vocabulary has {sizes[1]} tokens and the target's {sizes[0]}: they must match")
    vocabularies = [_vocabulary(_read_json(path, "tokenizer.json")) for path in (target, draft)]
    if None not in vocabularies and vocabularies[0] != vocabularies[1]:
        raise ConfigError("the draft's tokenizer gives other ids than the target's: use a draft of the same family")


def check_split(server_args: Any) -> None:
    """Raises ConfigError if the heads of target or draft do not divide by the tensor-parallel size."""
    if server_args.device == "cpu":
        return
    paths = {"target": server_args.model_path, "draft": server_args.speculative_draft_model_path}
    for role, path in paths.items():
        if path is None:
            continue  # the target drafts
        if problem := split_problem(role, _read_json(path, "config.json"), server_args.tp_size):
            raise ConfigError(problem)


def _vocabulary(tokenizer: dict[str, Any]) -> Any:
    model = tokenizer.get("model")
    return model.get("vocab") if isinstance(model, dict) else None


def _read_json(folder: str, name: str) -> dict[str, Any]:
    """The file's object; empty where there is no such file."""
    path = Path(folder).expanduser() / name
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        raise ConfigError(f"{path} cannot be read as JSON") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content


def register_algorithm() -> None:
    """Registers SDSIE with SGLang; once a process."""

    def factory(server_args: Any) -> type:
        from sdsie_sglang.worker.worker import SdsieWorker

        return SdsieWorker

    decorate: Callable[[Callable[[Any], type]], object] = SpeculativeAlgorithm.register(
        ALGORITHM, supports_overlap=True, validate_server_args=check_server_args, spec_class=SdsieAlgorithm
    )
    decorate(factory)
