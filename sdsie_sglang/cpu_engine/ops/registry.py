"""Registration of PyTorch functions as `torch.ops.sgl_kernel.*`."""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")

Op = TypeVar("Op", bound=Callable[..., Any])


def op(schema: str) -> Callable[[Op], Op]:
    """Define the op that `schema` describes and implement it with the decorated function."""

    def register(function: Op) -> Op:
        name = schema.partition("(")[0]
        if name != function.__name__:
            raise ValueError(f"schema names {name}, function is {function.__name__}")
        LIBRARY.define(schema)
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return function

    return register


def unavailable(name: str, needed_for: str) -> None:
    """Make `torch.ops.sgl_kernel.<name>` exist for code that binds it at import; calling it raises."""

    def raise_error(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} ({needed_for}) needs SGLang's compiled CPU build")

    raise_error.__name__ = name
    setattr(torch.ops.sgl_kernel, name, raise_error)
