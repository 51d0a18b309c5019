"""Demo models: SmolLM2-135M as target, a draft distilled from it, and an EAGLE-3 head.

    from sdsie_sglang.demo import compose
    models = compose()  # models.target, models.draft, models.eagle3: checkpoint folders

or `python -m sdsie_sglang.demo [--out DIR]`.
"""

from sdsie_sglang.config import cache_dir
from sdsie_sglang.demo.checkpoints import DemoCheckpoints, compose
from sdsie_sglang.demo.errors import DemoError

__all__ = ["DemoCheckpoints", "DemoError", "cache_dir", "compose"]
