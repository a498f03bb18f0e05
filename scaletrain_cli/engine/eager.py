"""Functions that torch.compile leaves alone, in ranks that do not load it.

``torch.compiler.disable`` loads the compiler (dynamo, sympy, the tensors of FSDP) where it decorates a function, and
torch's own optimizers load it at their first call, only to be left alone by it: about a second of CPU time and 70 MB of
a rank that compiles nothing. (Activation checkpointing loads it all the same.)
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo
from torch.optim import SGD, Adam, Optimizer

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Functions of torch that every rank calls, wrapped by torch._disable_dynamo.
_OF_TORCH: tuple[Callable[..., Any], ...] = (
    Optimizer.add_param_group,
    Optimizer.zero_grad,
    Optimizer.state_dict,
    Optimizer.load_state_dict,
)
_CALLED = "__dynamo_disable"
_OPTIMIZERS = (Adam, SGD)
_of_the_engine: list[Callable[..., Any]] = []


def never_compiled(function: _Function) -> _Function:
    """Decorate a function that torch.compile leaves alone; the compiler loads at the first call, if at all."""
    wrapped = _disable_dynamo(function)
    _of_the_engine.append(wrapped)
    return cast(_Function, wrapped)


def constant_when_compiled(function: _Function) -> _Function:
    """Decorate a function whose result torch.compile takes for a constant, as torch.compiler.assume_constant_result."""
    cast(Any, function)._dynamo_marked_constant = True
    return function


def prepare_compiler(used: bool) -> None:
    """Prepare the functions above for a process that compiles blocks (``used``), or for one that compiles nothing.

    torch keeps what a wrapper calls as an attribute of the wrapped function, and loads the compiler to make it. In a
    process that compiles nothing the attribute is set to the function itself. torch.compile would trace that, so that
    it is removed where blocks are compiled.
    """
    for wrapped in (*_OF_TORCH, *_of_the_engine):
        function = getattr(wrapped, "__wrapped__", None)
        if function is None:  # other versions of torch load the compiler
            continue
        if not used:
            setattr(function, _CALLED, function)
        elif getattr(function, _CALLED, None) is function:
            delattr(function, _CALLED)
    for kind in _OPTIMIZERS:
        # Wrapped by torch to end a compiled graph and to leave out gradients, unless an optimizer exists already.
        step = getattr(kind.step, "__wrapped__", None)
        if step is not None and not hasattr(kind.step, "hooked"):
            cast(Any, kind).step = torch.no_grad()(step)
