"""Places of SGLang that this project calls or overrides without patching them.

The exact version pin makes them safe at run time; the drift tests name the one that moved when the
pin is raised.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Seam:
    """A callable and the names its parameters must begin with."""

    path: str
    parameters: tuple[str, ...]
    used_by: str


_SPEC = "sglang.srt.speculative"
_WORKER = f"{_SPEC}.eagle_worker_v2.EAGLEWorkerV2"
_DRAFT = f"{_SPEC}.eagle_worker_v2.EagleDraftWorker"
_LLAMA = "sglang.srt.models.llama"
_BOUNDARY = "sglang.srt.layers.layer_boundary"
_COMMON = f"{_SPEC}.eagle_worker_common"

SEAMS: tuple[Seam, ...] = (
    Seam(
        f"{_SPEC}.standalone_worker_v2.StandaloneWorkerV2.__init__",
        ("self", "server_args", "gpu_id", "nccl_port", "target_worker"),
        "worker/worker.py",
    ),
    Seam(
        f"{_WORKER}.forward_batch_generation",
        ("self", "batch", "on_publish", "grammar_barrier", "pp_proxy_tensors"),
        "worker/worker.py",
    ),
    Seam(f"{_WORKER}.init_cuda_graphs", ("self",), "worker/worker.py"),
    Seam(f"{_WORKER}.verify", ("self", "batch", "pp_proxy_tensors", "grammar_barrier"), "worker/worker.py"),
    Seam(
        f"{_WORKER}.on_verify_complete_cpu",
        ("self", "num_correct_drafts_per_req", "batch_size"),
        "worker/worker.py",
    ),
    Seam(f"{_WORKER}.apply_runtime_state", ("self", "state"), "worker/worker.py"),
    Seam(
        f"{_WORKER}.build_adaptive_runtime_state",
        ("self", "speculative_num_steps", "speculative_num_draft_tokens", "cuda_graph_bs"),
        "worker/gear_resources.py",
    ),
    Seam(
        f"{_WORKER}._override_worker_state",
        ("self", "speculative_num_steps", "speculative_num_draft_tokens"),
        "worker/gear_resources.py",
    ),
    Seam(f"{_DRAFT}.init_attention_backend", ("self",), "worker/gear_resources.py"),
    Seam(f"{_DRAFT}._capture_cuda_graphs", ("self",), "worker/gear_resources.py"),
    Seam(f"{_DRAFT}.draft_forward", ("self", "forward_batch"), "worker/drafter.py"),
    Seam(
        f"{_COMMON}.prepare_for_draft",
        (
            "draft_input",
            "req_to_token_pool",
            "batch",
            "cuda_graph_runner",
            "draft_model_runner",
            "topk",
            "num_steps",
        ),
        "worker/drafter.py",
    ),
    Seam(
        f"{_COMMON}.prepare_for_draft_extend",
        (
            "draft_extend_input",
            "batch",
            "predict",
            "num_draft_tokens",
            "draft_model_runner",
            "cuda_graph_runner",
        ),
        "worker/drafter.py",
    ),
    Seam(
        f"{_COMMON}.build_eagle_verify_input",
        ("batch", "draft_input", "parent_list", "top_scores_index", "draft_tokens", "draft_probs"),
        "worker/drafter.py",
    ),
    Seam(
        f"{_SPEC}.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.execute",
        ("self", "forward_batch", "select_index"),
        "worker/drafter.py",
    ),
    Seam(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        ("batch", "model_runner"),
        "worker/plain_decode.py, worker/drafter.py",
    ),
    Seam(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        ("self", "batch", "forward_batch", "pp_proxy_tensors", "is_verify"),
        "worker/plain_decode.py",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner.ModelRunner.sample",
        ("self", "logits_output", "forward_batch"),
        "worker/plain_decode.py",
    ),
    Seam(
        "sglang.srt.model_executor.runner.DecodeCudaGraphRunner.__init__",
        ("self", "model_runner", "attn_backend", "speculative_num_steps", "speculative_num_draft_tokens"),
        "worker/gear_resources.py",
    ),
    Seam(
        f"{_SPEC}.spec_info.SpeculativeAlgorithm.register",
        ("name", "supports_overlap", "validate_server_args", "spec_class"),
        "algorithm.py",
    ),
    Seam(
        "sglang.srt.managers.overlap_utils.FutureMap.__init__",
        ("self", "device", "spec_algo", "req_to_token_pool", "needs_cpu_seq_lens", "needs_confidence_relay"),
        "algorithm.py",
    ),
    Seam(
        f"{_SPEC}.standalone_worker_v2.StandaloneDraftWorker.__init__",
        ("self", "server_args", "gpu_id", "nccl_port", "target_worker"),
        "worker/self_draft.py",
    ),
    Seam(f"{_SPEC}.standalone_worker_v2.TpModelWorker.alloc_memory_pool", ("self",), "worker/self_draft.py"),
    Seam(f"{_DRAFT}.init_cuda_graphs", ("self",), "worker/self_draft.py"),
    Seam(f"{_DRAFT}._rebuild_topk1_chain_buffers", ("self",), "worker/self_draft.py"),
    Seam(f"{_WORKER}.weight_update_runners", ("self",), "worker/worker.py"),
    Seam(f"{_WORKER}._draft_model_runners", ("self",), "worker/worker.py"),
    Seam(
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.create_weights",
        (
            "self",
            "layer",
            "input_size_per_partition",
            "output_partition_sizes",
            "input_size",
            "output_size",
            "params_dtype",
        ),
        "int4/method.py",
    ),
    Seam(
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        ("self", "layer", "x", "bias"),
        "int4/method.py",
    ),
    Seam(
        "sglang.srt.layers.quantization.base_config.QuantizationConfig.get_quant_method",
        ("self", "layer", "prefix"),
        "int4/quantization.py",
    ),
    Seam(
        "sglang.srt.arg_groups.choices.add_quantization_method_choices",
        ("iterable",),
        "int4/quantization.py",
    ),
    Seam(f"{_LLAMA}.LlamaAttention.forward", ("self", "positions", "hidden_states", "forward_batch"), "fused_layer.py"),
    Seam(f"{_LLAMA}.LlamaMLP.forward", ("self", "x", "forward_batch"), "fused_layer.py"),
    Seam(f"{_BOUNDARY}.stage.StageBoundary.prepare", ("self", "hidden_states", "forward_batch"), "fused_layer.py"),
    Seam(f"{_BOUNDARY}.stage.StageBoundary.finish", ("self", "hidden_states", "forward_batch"), "fused_layer.py"),
    Seam(f"{_BOUNDARY}.construction.StagePlan.variant_for", ("self", "forward_batch"), "fused_layer.py"),
    Seam(f"{_BOUNDARY}.residual.stream.ResidualStream.check", ("self", "hidden"), "fused_layer.py"),
    Seam(f"{_BOUNDARY}.residual.stream.ResidualStream.write", ("self", "residual"), "fused_layer.py"),
    Seam("sglang.srt.server_args.prepare_server_args", ("argv",), "launch_server.py"),
    Seam("sglang.launch_server.run_server", ("server_args",), "launch_server.py"),
)
