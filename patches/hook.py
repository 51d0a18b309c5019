"""What a patch of SGLang says about itself, and the check that its target is still there."""

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """How SGLang's hook registry applies a function to its target."""

    BEFORE = "before"  # hook(*args, **kwargs) -> None
    AFTER = "after"  # hook(result, *args, **kwargs) -> new result
    AROUND = "around"  # hook(original, *args, **kwargs) -> result


@dataclass(frozen=True)
class Hook:
    """One patched place in SGLang.

    Args:
        target: dotted path of a function or method.
        parameters: names that the target's own parameters must begin with, in order.
        why: what would be missing without it.
        upstream: issue or pull request that asks for the same, or "none".
        remove_when: what SGLang would have to offer.
    """

    target: str
    kind: Kind
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    why: str
    upstream: str
    remove_when: str

    @property
    def name(self) -> str:
        """Last two parts of the target: what logs and /server_info call it."""
        return ".".join(self.target.rsplit(".", 2)[-2:])


class SeamMoved(RuntimeError):
    """SGLang changed at a place that this project relies on. One line."""


def check_callable(path: str, parameters: Sequence[str]) -> None:
    """Raises SeamMoved unless `path` is a callable whose parameters begin with `parameters`."""
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise SeamMoved(f"{path} is gone from this SGLang ({error})") from None
    try:
        names = list(inspect.signature(inspect.unwrap(found)).parameters)
    except (TypeError, ValueError):
        raise SeamMoved(f"{path} is no longer a function") from None
    if names[: len(parameters)] != list(parameters):
        raise SeamMoved(f"{path} now takes ({', '.join(names)}), not ({', '.join(parameters)}, ...)")


def check_hooks(hooks: Sequence[Hook]) -> None:
    """Raises SeamMoved for the first hook whose target moved; registers nothing."""
    for hook in hooks:
        check_callable(hook.target, hook.parameters)


def register_hooks(hooks: Sequence[Hook]) -> None:
    """Hands checked hooks to SGLang's registry, which applies them when all plugins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind.value))
