"""`python -m sdsie_sglang.launch_server`: SGLang's server with gears.

Takes every flag of SGLang's own launcher and the --sdsie-* flags. Where there is no GPU it chooses
SGLang's CPU engine.
"""

import argparse
import os
import sys
from itertools import pairwise
from pathlib import Path

import yaml

from sdsie_sglang.cli import add_cli_args, config_from_args
from sdsie_sglang.config import ALGORITHM, ConfigError, SdsieConfig, config_to_env, turn_off
from sdsie_sglang.cpu_engine import enable as enable_cpu_engine
from sdsie_sglang.plugin import InstallError, check_install

PROG = "python -m sdsie_sglang.launch_server"
ALGORITHM_FLAG = "--speculative-algorithm"
# float32: bf16 rounds differently for one token and for several, so that greedy answers could differ.
# An idle scheduler would keep one of few cores busy.
CPU_DEFAULTS = {
    "--device": "cpu",
    "--dtype": "float32",
    "--cuda-graph-backend-decode": "disabled",
    "--cuda-graph-backend-prefill": "disabled",
    "--sleep-on-idle": None,
}


def _fail(message: str) -> "SystemExit":
    print(f"{PROG}: error: {message}", file=sys.stderr)
    return SystemExit(2)


def _names(arg: str, flag: str) -> bool:
    """Whether `arg` is the flag, also cut short as argparse allows, with or without `=value`."""
    name = arg.split("=", 1)[0]
    return len(name) > len("--x") and name.startswith("--") and flag.startswith(name)


def _gives(argv: list[str], flag: str) -> bool:
    return any(_names(arg, flag) for arg in argv) or flag in _from_config_file(argv)


def _from_config_file(argv: list[str]) -> set[str]:
    """Flags that SGLang's own --config file gives; SGLang complains of a file that it cannot read."""
    path = next((value for flag, value in pairwise(argv) if flag == "--config"), None)
    try:
        values = yaml.safe_load(Path(path).read_text()) if path is not None else None
    except (OSError, ValueError, yaml.YAMLError):
        return set()
    return {f"--{str(key).replace('_', '-')}" for key in values} if isinstance(values, dict) else set()


def _value(argv: list[str], flag: str) -> str | None:
    for i, arg in enumerate(argv):
        if _names(arg, flag):
            return arg.split("=", 1)[1] if "=" in arg else next(iter(argv[i + 1 : i + 2]), None)
    return None


def split_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest for SGLang. Raises SystemExit(2) on a malformed flag of ours."""
    parser = argparse.ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    add_cli_args(parser)
    parser.error = lambda message: (_ for _ in ()).throw(_fail(message))  # type: ignore[method-assign]
    ours, rest = parser.parse_known_args(argv)
    unknown = [arg for arg in rest if arg.startswith("--sdsie-")]
    if unknown:
        raise _fail(f"unknown flag {unknown[0].split('=')[0]}; --help lists them")
    return ours, rest


def sglang_args(rest: list[str], *, off: bool, on_cpu: bool) -> list[str]:
    """SGLang's arguments with the defaults of this launcher added where they were not given."""
    added: list[str] = []
    if not off and not _gives(rest, ALGORITHM_FLAG):
        added += [ALGORITHM_FLAG, ALGORITHM]
    if on_cpu:
        for flag, value in CPU_DEFAULTS.items():
            if not _gives(rest, flag):
                added += [flag] if value is None else [flag, value]
    return [*rest, *added]


def _print_help() -> None:
    """Our flags first: SGLang's are some 700 lines."""
    from sglang.srt.server_args import ServerArgs

    usage = f"{PROG} --model-path TARGET --speculative-draft-model-path DRAFT [--sdsie-...] [SGLang's flags]"
    ours = argparse.ArgumentParser(
        usage=usage, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_cli_args(ours)
    sglangs = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    ServerArgs.add_cli_args(sglangs)
    print(f"{ours.format_help()}\nSGLang's own {sglangs.format_help()}")


def main(argv: list[str]) -> None:
    """Starts the server and serves until it is stopped. Raises SystemExit(2) on bad input."""
    ours, rest = split_args(argv)
    wants_help = "-h" in rest or "--help" in rest
    try:
        check_install()
        config = config_from_args(ours)
    except (ConfigError, InstallError) as error:
        raise _fail(str(error)) from None
    on_cpu = enable_cpu_engine()
    if wants_help:
        return _print_help()
    off = getattr(ours, "sdsie_off", False)
    algorithm = (_value(rest, ALGORITHM_FLAG) or ALGORITHM).upper()
    if vars(ours) and (algorithm != ALGORITHM or off) and set(vars(ours)) != {"sdsie_off"}:
        given = f"{ALGORITHM_FLAG} {algorithm}" if algorithm != ALGORITHM else "--sdsie-off"
        raise _fail(f"--sdsie-* flags mean nothing with {given}")
    serve(config, sglang_args(rest, off=off, on_cpu=on_cpu), off=off)


def serve(config: SdsieConfig, arguments: list[str], *, off: bool) -> None:
    """Hands over to SGLang; settings travel to its processes in the environment."""
    algorithm = _value(arguments, ALGORITHM_FLAG)
    if off and (algorithm or "").upper() == ALGORITHM:
        raise _fail(f"--sdsie-off contradicts {ALGORITHM_FLAG} {ALGORITHM}")
    turn_off() if off else config_to_env(config)

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        server_args = prepare_server_args(arguments)
        if (server_args.speculative_algorithm or "").upper() == ALGORITHM:
            from sdsie_sglang.algorithm import check_drafting

            # SGLang takes a folder that is not there for a name on a model hub.
            check_drafting(server_args, config)
        server_args.resolve_once()
    except (ValueError, OSError, AssertionError) as error:
        raise _fail(" ".join(str(error).split())) from None
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
