"""`python -m sdsie_sglang.demo [--out DIR] [--weights DIR]`: make the demo's checkpoints and print their folders."""

import argparse
import sys
from pathlib import Path

from sdsie_sglang.demo import DemoError, cache_dir, compose
from sdsie_sglang.demo.checkpoints import WEIGHTS


def main() -> int:
    """Print one line per checkpoint, `name<TAB>folder`; exit code 2 and a line on stderr if one fails."""
    parser = argparse.ArgumentParser(prog="python -m sdsie_sglang.demo", description=__doc__)
    parser.add_argument("--out", type=Path, help=f"folder to write to (default: {cache_dir() / 'demo'})")
    parser.add_argument("--weights", type=Path, help="folder in place of the shipped weights; needs --out")
    options = parser.parse_args()
    if options.out == Path():
        parser.error("--out needs a folder of its own, not the current one")
    if options.weights is not None and options.out is None:
        parser.error("--weights needs --out: the cache is for the shipped weights")
    if options.weights is not None and not (options.weights / "manifest.json").is_file():
        parser.error(f"{options.weights} holds no manifest.json")
    try:
        made = compose(options.out, WEIGHTS if options.weights is None else options.weights)
    except (DemoError, OSError) as error:
        print(f"sdsie demo: {error}", file=sys.stderr)
        return 2
    for name in ("target", "draft", "eagle3"):
        print(f"{name}\t{getattr(made, name) or 'not shipped yet'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
