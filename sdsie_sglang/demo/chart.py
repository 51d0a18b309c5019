"""A strip chart for the terminal: one character a cycle."""

from collections.abc import Sequence

BARS = " ▁▂▃▄▅▆▇█"
FULL_SCALE_BITS = 6.0
GEAR_DIGITS = "·1234567"


def entropy_strip(entropy_bits: Sequence[float], full_scale_bits: float = FULL_SCALE_BITS) -> str:
    """Bars as high as the entropy; the highest stands for `full_scale_bits` and everything above."""
    top = len(BARS) - 1
    return "".join(BARS[min(top, round(h / full_scale_bits * top))] for h in entropy_bits)


def gear_strip(gears: Sequence[int]) -> str:
    """The gear of each cycle; a dot is gear 0, plain decoding."""
    return "".join(GEAR_DIGITS[k] for k in gears)


def wrapped(strips: Sequence[str], width: int) -> list[str]:
    """Strips of equal length, cut into lines of `width` that stay below each other."""
    return [strip[at : at + width] for at in range(0, len(strips[0]), width) for strip in strips]
