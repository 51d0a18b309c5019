"""Lossless gears for SGLang. Importing this package costs nothing; see `sdsie_sglang.launch_server`."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("sdsie-sglang")
except PackageNotFoundError:  # a checkout on PYTHONPATH; the plugin refuses to run like that
    __version__ = "0+uninstalled"
