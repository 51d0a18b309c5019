"""What `import sgl_kernel` finds on a host without a GPU: `sdsie_sglang.cpu_engine.ops`."""

from sdsie_sglang.cpu_engine.ops import *  # noqa: F403

__version__ = "0+sdsie"
