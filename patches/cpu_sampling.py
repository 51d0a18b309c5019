"""Temperature, top-k, top-p and min-p under speculation on the CPU engine (cpu_engine/sampled_verify.py)."""

from sdsie_sglang.cpu_engine.sampled_verify import around_eagle_sample, around_verify_tree_greedy
from sdsie_sglang.patches.hook import Hook, Kind

PREPARE = Hook(
    target="sglang.srt.speculative.eagle_utils.eagle_sample",
    kind=Kind.AROUND,
    function=around_eagle_sample,
    parameters=("verify_input", "batch", "logits_output"),
    why="CPU engine only: its verify takes the argmax and ignores sampling parameters in silence",
    upstream="none",
    remove_when="SGLang's CPU verify samples",
)
DRAW = Hook(
    target="sglang.srt.speculative.eagle_utils.verify_tree_greedy_func",
    kind=Kind.AROUND,
    function=around_verify_tree_greedy,
    parameters=("predicts", "accept_index", "accept_token_num", "candidates"),
    why="CPU engine only: verifies drawn tokens where a request samples",
    upstream="none",
    remove_when="SGLang's CPU verify samples",
)
