"""Types of the native module; `make lint` compares them with it (stubtest)."""

from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar, final

import numpy as np
from typing_extensions import disjoint_base

__all__ = [
    "Handler",
    "Scope",
    "Strategy",
    "Token",
    "__version__",
    "_table_1",
    "adopt",
    "current",
    "get_handler_name",
    "get_handler_version",
    "handler",
    "handler_of",
    "handlers",
    "register",
    "reset",
    "selection",
    "set_handler",
    "use",
]

_Function = TypeVar("_Function", bound=Callable[..., Any] | classmethod[Any, Any, Any])

__version__: str
selection: str
_table_1: object

@final
class Handler:
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def alignment(self) -> int: ...
    @property
    def capsule(self) -> object: ...
    def trim(self) -> int: ...
    def __reduce__(self) -> tuple[Callable[[str], Handler], tuple[str]]: ...

@final
class Token:
    @property
    def old_handler(self) -> Handler: ...
    @property
    def used(self) -> bool: ...

@final
class Scope:
    @property
    def handler(self) -> Handler: ...
    def __enter__(self) -> Handler: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...
    def __aenter__(self) -> Coroutine[Any, Any, Handler]: ...
    def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> Coroutine[Any, Any, None]: ...
    def __call__(self, function: _Function, /) -> _Function: ...

@disjoint_base
class Strategy:
    def __new__(cls, kind: str, /, **options: object) -> Self: ...

def adopt(capsule: object, /, *, name: str | None = None) -> Handler: ...
def current() -> Handler: ...
def get_handler_name(arr: np.ndarray[Any, Any] | None = None, /) -> str | None: ...
def get_handler_version(arr: np.ndarray[Any, Any] | None = None, /) -> int | None: ...
def handler(name: str, /) -> Handler: ...
def handler_of(arr: np.ndarray[Any, Any], /) -> Handler | None: ...
def handlers() -> list[Handler]: ...
def register(name: str, strategy: Strategy, /) -> Handler: ...
def reset(token: Token, /) -> None: ...
def set_handler(handler: Handler | str | None, /) -> Token: ...
def use(handler: Handler | str | None, /) -> Scope: ...
