"""A cache for functions of what is made once per run spec and would take long to hash: specs, stages, networks."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _SameObject:
    def __init__(self, value: Any) -> None:
        self.value = value  # held, so that no other object gets its id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def cached_by_identity(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Cache the results of a function, whose arguments are positional and compared by identity."""

    @lru_cache(maxsize=64)
    def cached(*keys: _SameObject) -> _Result:
        return function(*(key.value for key in keys))  # type: ignore[call-arg]

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        assert not kwargs
        return cached(*map(_SameObject, args))

    return call
