"""The exceptions of ctxalloc: Python classes, so that every extension module built on it raises the same ones.

`src/python/errors.rs` says which error becomes which exception.
"""

from typing import Any


class RegistrationError(ValueError):
    """A handler could not be registered: its name or its struct is invalid, or the name is taken."""

    __module__ = "ctxalloc"


class UnknownHandlerError(ValueError):
    """No handler has that name. The message lists those that are registered."""

    __module__ = "ctxalloc"


class RouteWarning(UserWarning):
    """A pattern in ``routes`` of a middleware matches no route of the application: a slip of the pen, most likely."""

    __module__ = "ctxalloc"


class RustPanic(RuntimeError):  # noqa: N818 - it is not the caller's error
    """Rust code panicked, most often a future that Python awaited. The message is the panic's."""

    __module__ = "ctxalloc"


class BudgetExceeded(MemoryError):  # noqa: N818 - says what happened, like names in the standard library
    """A budget had no room for an allocation. ``__cause__`` is the MemoryError that it led to.

    ``budget`` is the name of the budget that refused, which may be one above the request's own; ``limit_bytes``, its
    limit, or 2**64 - 1 where it has none and the sum cannot be counted; ``in_use_bytes``, what was charged to it;
    ``requested_bytes``, the size of the allocation.

    ``budget_id`` is that budget's ``id``, which tells it from others of the same name; None in an exception that was
    copied or unpickled, or not made by ctxalloc. ``of_request``: it is the limit of a request, and no budget that
    others share. ``held_bytes``: how much of what was in use the request itself had. ``chosen_for``: for whom it was
    chosen to make room in that budget (``Budget.victims_after``), if that is why it was refused; else None.
    ``guaranteed_bytes``: how much of the limit is guaranteed to others, and is never this request's.
    """

    __module__ = "ctxalloc"

    def __init__(  # noqa: PLR0917 - Rust passes them by position
        self,
        budget: str,
        limit_bytes: int,
        in_use_bytes: int,
        requested_bytes: int,
        held_bytes: int = 0,
        budget_id: int | None = None,
        of_request: bool = False,  # noqa: FBT001, FBT002 - as above
        chosen_for: str | None = None,
        guaranteed_bytes: int = 0,
    ) -> None:
        super().__init__(budget, limit_bytes, in_use_bytes, requested_bytes)
        self.chosen_for = chosen_for
        self.guaranteed_bytes = guaranteed_bytes
        self.budget = budget
        self.limit_bytes = limit_bytes
        self.in_use_bytes = in_use_bytes
        self.requested_bytes = requested_bytes
        self.held_bytes = held_bytes
        self.budget_id = budget_id
        self.of_request = of_request

    def __reduce__(self) -> tuple[Any, ...]:
        # In another process the number means another budget.
        return type(self), self.args, {**self.__dict__, "budget_id": None}

    @property
    def never_fits(self) -> bool:
        """Whether the budget could not give as much even if the request were the only one that it is charged with."""
        if self.chosen_for is not None:
            return False
        if self.limit_bytes == 2**64 - 1:
            return True
        return self.held_bytes + self.requested_bytes + self.guaranteed_bytes > self.limit_bytes

    def __str__(self) -> str:
        if self.chosen_for is not None:
            return (
                f"budget {self.budget!r} is full, and the request that holds {self.held_bytes} bytes of it was chosen "
                f"to make room for {self.chosen_for}; it should give back what it can, and be tried again later"
            )
        if self.limit_bytes == 2**64 - 1:
            return (
                f"budget {self.budget!r} has no limit, but cannot count {self.requested_bytes} more bytes: with the "
                f"{self.in_use_bytes} in use the sum would be more than can be counted; ask for less"
            )
        kept = f", of which {self.guaranteed_bytes} are guaranteed to others" if self.guaranteed_bytes else ""
        return (
            f"budget {self.budget!r} has no room for {self.requested_bytes} more bytes: {self.in_use_bytes} of its "
            f"{self.limit_bytes} are in use{kept}; free something, or give it a higher limit"
        )


class NoRoom(BudgetExceeded):
    """A request with ``reserve_bytes=`` could not begin: a budget had no room, and it did not wait, or not longer.

    ``reason`` says why: ``"never fits"`` (the limit, less ``guaranteed_bytes``, is less than the reservation),
    ``"timed out"``, ``"queue is full"`` (as many wait as may), ``"inside of another"`` (a request inside of another one
    might wait for itself), ``"inside of a reclaimer"``, ``"busy"`` (it was not to wait), ``"forked"`` (the process was
    forked meanwhile, and this is the child).
    """

    __module__ = "ctxalloc"

    def __init__(  # noqa: PLR0917 - Rust passes them by position
        self,
        budget: str,
        limit_bytes: int,
        in_use_bytes: int,
        requested_bytes: int,
        message: str,
        reason: str,
        budget_id: int | None = None,
        of_request: bool = False,  # noqa: FBT001, FBT002 - as above
        guaranteed_bytes: int = 0,
    ) -> None:
        super().__init__(budget, limit_bytes, in_use_bytes, requested_bytes, 0, budget_id, of_request)
        self.guaranteed_bytes = guaranteed_bytes
        self.args = (budget, limit_bytes, in_use_bytes, requested_bytes, message, reason)
        self.message = message
        self.reason = reason

    @property
    def never_fits(self) -> bool:
        """Whether it could not have begun however long it had waited."""
        return self.reason == "never fits"

    def __str__(self) -> str:
        return self.message


class RequestEnded(MemoryError):  # noqa: N818 - for the same reason
    """An allocation was refused: its request has ended, and was begun with ``after_end="refuse"``.

    ``ctxalloc.usm`` and C code (``ctxalloc_new()``) raise it. NumPy raises a plain MemoryError there.
    """

    __module__ = "ctxalloc"


class TaskBudgetExceeded(BudgetExceeded):
    """A budget had no room for an allocation of a task of Dask or Ray. It goes to the client by pickle.

    ``key`` is the task's key in Dask, its id in Ray; ``prefix`` is the key's prefix in Dask, the name of the function
    in Ray, which limits can be given for.
    """

    __module__ = "ctxalloc"

    def __init__(  # noqa: PLR0917 - pickle makes it anew from its `args`
        self, budget: str, limit_bytes: int, in_use_bytes: int, requested_bytes: int, key: object, prefix: str
    ) -> None:
        super().__init__(budget, limit_bytes, in_use_bytes, requested_bytes)
        self.args = (budget, limit_bytes, in_use_bytes, requested_bytes, key, prefix)
        self.key = key
        self.prefix = prefix

    def __str__(self) -> str:
        return f"task {self.key!r}: {super().__str__()}"
