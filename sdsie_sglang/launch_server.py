"""`python -m sdsie_sglang.launch_server`: SGLang's server with gears.

Takes every flag of SGLang's own launcher and the --sdsie-* flags. Where there is no GPU it chooses
SGLang's CPU engine.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

from sdsie_sglang.arguments import gives, value_of
from sdsie_sglang.calibration.first_start import say
from sdsie_sglang.cli import add_cli_args, settings_from_args
from sdsie_sglang.config import ALGORITHM, ConfigError, config_from_env, config_to_env, parse_config, turn_off
from sdsie_sglang.cpu_engine import enable as enable_cpu_engine
from sdsie_sglang.default_policy import choose, completed, leaves_open, undecided
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
    if not off and not gives(rest, ALGORITHM_FLAG):
        added += [ALGORITHM_FLAG, ALGORITHM]
    if on_cpu:
        for flag, value in CPU_DEFAULTS.items():
            if not gives(rest, flag):
                added += [flag] if value is None else [flag, value]
    return [*rest, *added]


def _print_help() -> None:
    """Our flags first: SGLang's are some 700 lines."""
    from sglang.srt.server_args import ServerArgs

    usage = f"{PROG} --model-path TARGET [--speculative-draft-model-path DRAFT] [--sdsie-...] [SGLang's flags]"
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
    off = getattr(ours, "sdsie_off", False)
    algorithm = (value_of(rest, ALGORITHM_FLAG) or ALGORITHM).upper()
    drafts = algorithm == ALGORITHM and not off
    try:
        check_install()
        given = settings_from_args(ours)
        settings = completed(given, rest) if drafts else given
        undecided(settings) if leaves_open(settings) else parse_config(settings)
    except (ConfigError, InstallError) as error:
        raise _fail(str(error)) from None
    on_cpu = enable_cpu_engine()
    if wants_help:
        return _print_help()
    if not drafts and vars(ours).keys() - {"sdsie_off"}:
        other = f"{ALGORITHM_FLAG} {algorithm}" if algorithm != ALGORITHM else "--sdsie-off"
        raise _fail(f"--sdsie-* flags mean nothing with {other}")
    unasked = settings.get("draft") != given.get("draft")
    serve(settings, sglang_args(rest, off=off, on_cpu=on_cpu), off=off, unasked=unasked)


def serve(settings: Mapping[str, Any], arguments: list[str], *, off: bool, unasked: bool) -> None:
    """Hands over to SGLang; settings travel to its processes in the environment.

    Args:
        unasked: the target drafts for itself because no draft was named.
    """
    algorithm = value_of(arguments, ALGORITHM_FLAG)
    if off and (algorithm or "").upper() == ALGORITHM:
        raise _fail(f"--sdsie-off contradicts {ALGORITHM_FLAG} {ALGORITHM}")
    is_open = leaves_open(settings)
    turn_off() if off else config_to_env(undecided(settings) if is_open else parse_config(settings))

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        server_args = _resolved(arguments)
        if unasked:
            say(
                "no draft model is named, so the target drafts for itself in INT4, for about a quarter more of a GPU's "
                "memory (--speculative-draft-model-path names one, --sdsie-off serves as shipped)"
            )
        if is_open and (server_args.speculative_algorithm or "").upper() == ALGORITHM:
            from sglang.srt.arg_groups.overrides import resolving_view

            from sdsie_sglang.calibration.conditions import conditions_of

            args, conditions = resolving_view(server_args), conditions_of(server_args, config_from_env())
            config_to_env(choose(settings, args, conditions, arguments, unasked=unasked))
            server_args = _resolved(arguments)  # anew: the widest gear sizes SGLang's buffers
    except (ValueError, OSError, AssertionError) as error:
        raise _fail(" ".join(str(error).split())) from None
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _resolved(arguments: list[str]) -> Any:
    """SGLang's ServerArgs, checked before any weight is loaded. Raises ValueError, OSError, AssertionError."""
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(arguments)
    if (server_args.speculative_algorithm or "").upper() == ALGORITHM:
        from sdsie_sglang.algorithm import check_drafting, check_resolved

        # SGLang takes a folder that is not there for a name on a model hub.
        check_drafting(server_args, config_from_env())
        server_args.resolve_once()
        check_resolved(server_args, config_from_env())
    server_args.resolve_once()
    return server_args


if __name__ == "__main__":
    main(sys.argv[1:])
