"""Which gear to run next, decided in plain Python: no SGLang, no tensor, no device.

The same objects run in the server, in the simulator and in unit tests.
"""

from sdsie_sglang.gears.clutch import Clutch
from sdsie_sglang.gears.policy import Observation, Policy, RequestGate, build_policy
from sdsie_sglang.gears.settings import PRESETS, PolicySettings

__all__ = ["PRESETS", "Clutch", "Observation", "Policy", "PolicySettings", "RequestGate", "build_policy"]
