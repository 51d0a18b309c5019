"""`--quantization sdsie_int4`: SGLang's configuration of a quantised model, and its registration."""

from typing import Any

import torch
from pydantic import ValidationError
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from sdsie_sglang.config import config_from_env
from sdsie_sglang.cpu_engine import is_enabled as cpu_engine_is_enabled
from sdsie_sglang.gears.settings import first_error
from sdsie_sglang.int4.checkpoint_format import FORMAT, METHOD
from sdsie_sglang.int4.head import mark_possible_head
from sdsie_sglang.int4.method import Int4LinearMethod, Int4Unsupported, SavedInt4LinearMethod
from sdsie_sglang.int4.settings import CALIBRATIONS, Int4Settings
from sdsie_sglang.int4.weight import KERNEL_DTYPES, MIN_CAPABILITY


class Int4Config(QuantizationConfig):
    """Args:
    settings: the flags', or what a saved checkpoint says.
    saved: whether the checkpoint's weights are INT4 already.
    """

    def __init__(self, settings: Int4Settings | None = None, saved: bool = False) -> None:
        super().__init__()
        self.settings = config_from_env().int4 if settings is None else settings
        self.saved = saved
        if CALIBRATIONS[self.settings.calibration].needs_text and not saved:
            raise Int4Unsupported(
                f"calibration {self.settings.calibration} needs a little text and so cannot be done while loading: "
                "write a checkpoint with python -m sdsie_sglang.int4.quantize and serve that"
            )

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [*KERNEL_DTYPES, *([torch.float32] if cpu_engine_is_enabled() else [])]

    @classmethod
    def get_min_capability(cls) -> int:
        return MIN_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: without `quantization_config` in config.json the weights are quantised while loading."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Int4Config":
        """From the `quantization_config` of a checkpoint. Raises Int4Unsupported."""
        if config.get("quant_method") != METHOD:
            raise Int4Unsupported(
                f"the checkpoint is quantised already, by {config.get('quant_method')}: --quantization {METHOD} "
                "takes an unquantised one, or one that sdsie_sglang.int4.quantize wrote"
            )
        if config.get("format") != FORMAT:
            raise Int4Unsupported(
                f"the checkpoint's INT4 format is {config.get('format')}, this version reads {FORMAT}: write it again"
            )
        try:
            settings = Int4Settings(**{key: config[key] for key in Int4Settings.model_fields if key in config})
        except ValidationError as error:
            raise Int4Unsupported(f"the checkpoint's quantization_config: {first_error(error)}") from None
        return cls(settings, saved=True)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> LinearMethodBase | None:
        is_head = isinstance(layer, ParallelLMHead)
        if isinstance(layer, VocabParallelEmbedding) and not is_head and self.settings.lm_head:
            mark_possible_head(layer, self.settings.calibration)
        if not isinstance(layer, LinearBase) and not (is_head and self.settings.lm_head):
            return None
        if self.settings.excludes(prefix):
            return None if is_head else UnquantizedLinearMethod()
        method = SavedInt4LinearMethod if self.saved else Int4LinearMethod
        return method(prefix, self.settings.calibration)

    def get_scaled_act_names(self) -> list[str]:
        return []


def register_quantization() -> None:
    """Makes SGLang know the method; once a process, before arguments are parsed."""
    from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES, add_quantization_method_choices
    from sglang.srt.layers.quantization import CPU_QUANTIZATION_METHODS, QUANTIZATION_METHODS

    QUANTIZATION_METHODS[METHOD] = CPU_QUANTIZATION_METHODS[METHOD] = Int4Config
    if METHOD not in QUANTIZATION_CHOICES:
        add_quantization_method_choices([METHOD])
