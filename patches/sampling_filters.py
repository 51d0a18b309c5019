"""top-k with top-p, and min-p, under speculation on a GPU (sdsie_sglang/worker/sampling_filters.py)."""

from sdsie_sglang.patches.hook import Hook, Kind
from sdsie_sglang.worker.sampling_filters import around_eagle_sample, around_softmax

VERIFY = Hook(
    target="sglang.srt.speculative.eagle_utils.eagle_sample",
    kind=Kind.AROUND,
    function=around_eagle_sample,
    parameters=("verify_input", "batch", "logits_output"),
    why="GPU only: verify takes top-p of what top-k left and ignores min-p, where a plain decode does neither",
    upstream="none",
    remove_when="verify filters as SGLang's plain sampler",
)
SOFTMAX = Hook(
    target="sglang.srt.speculative.eagle_utils.sampling_softmax",
    kind=Kind.AROUND,
    function=around_softmax,
    parameters=("logits", "temperatures"),
    why="GPU only: where verify's probabilities are filtered instead",
    upstream="none",
    remove_when="verify filters as SGLang's plain sampler",
)
