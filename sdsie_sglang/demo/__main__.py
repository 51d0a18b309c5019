"""`python -m sdsie_sglang.demo [--out DIR]`: make the demo's checkpoints and print their folders."""

import argparse
import sys
from pathlib import Path

from sdsie_sglang.demo import DemoError, cache_dir, compose


def main() -> int:
    """Print one line per checkpoint, `name<TAB>folder`; exit code 2 and a line on stderr if one fails."""
    parser = argparse.ArgumentParser(prog="python -m sdsie_sglang.demo", description=__doc__)
    parser.add_argument("--out", type=Path, help=f"folder to write to (default: {cache_dir() / 'demo'})")
    out = parser.parse_args().out
    if out == Path():
        parser.error("--out needs a folder of its own, not the current one")
    try:
        made = compose(out)
    except (DemoError, OSError) as error:
        print(f"sdsie demo: {error}", file=sys.stderr)
        return 2
    for name in ("target", "draft", "eagle3"):
        print(f"{name}\t{getattr(made, name) or 'not shipped yet'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
