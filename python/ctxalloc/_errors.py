"""The exceptions of ctxalloc, in Python so that they are the same classes in every extension module built on it.

`src/python/errors.rs` says which error becomes which exception.
"""


class RegistrationError(ValueError):
    """A handler could not be entered into the table: its name or its struct is not as it must be."""

    __module__ = "ctxalloc"


class UnknownHandlerError(ValueError):
    """No handler has that name. The message lists those that are registered."""

    __module__ = "ctxalloc"


class RustPanic(RuntimeError):  # noqa: N818 - it is not the caller's error
    """A Rust future that Python awaited has panicked. The message is the panic's."""

    __module__ = "ctxalloc"


class BudgetExceeded(MemoryError):  # noqa: N818 - as the standard library's own, it says what happened
    """A budget had no room for what was asked for. The MemoryError that came of it is the cause.

    ``budget`` is the name of the one whose limit it was, perhaps one above that of the request.
    """

    __module__ = "ctxalloc"

    def __init__(self, budget: str, limit_bytes: int, in_use_bytes: int, requested_bytes: int) -> None:
        super().__init__(budget, limit_bytes, in_use_bytes, requested_bytes)
        self.budget = budget
        self.limit_bytes = limit_bytes
        self.in_use_bytes = in_use_bytes
        self.requested_bytes = requested_bytes

    def __str__(self) -> str:
        return (
            f"budget {self.budget!r} has no room for {self.requested_bytes} more bytes: {self.in_use_bytes} of its "
            f"{self.limit_bytes} are in use; free something, or give it a higher limit"
        )


class RequestEnded(MemoryError):  # noqa: N818 - as above
    """A request that has ended was asked for memory, and was begun with ``after_end="refuse"``."""

    __module__ = "ctxalloc"
