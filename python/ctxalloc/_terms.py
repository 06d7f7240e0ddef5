"""What users say of a task's request, checked: for the adapters to clusters, and for processes of a pool.

They may be said in another process than the one that they are kept in, so whether a whole request can be had is only
known where the request is made.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from ctxalloc._native import Request, request

TermsOf: TypeAlias = Mapping[str, Any] | None
"""Terms as users write them: ``{"limit_bytes": n}``; None for none."""


def by_name(found: object, where: str) -> Mapping[str, TermsOf]:
    """Return ``found`` if it can be terms by name. TypeError: it is no mapping, or its keys are no names."""
    if not isinstance(found, Mapping):
        raise TypeError(f"{where}: {found!r} has no terms; give a dict like {{'name': {{'limit_bytes': n}}}}")
    wrong = [key for key in found if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"{where}: {wrong} are no names; give a dict like {{'name': {{'limit_bytes': n}}}}")
    return found


class Terms(NamedTuple):
    """What a task gets."""

    limit_bytes: int | None = None
    """The limit of its request."""
    handler: str | None = None
    """Instead of a request: the name of the handler that its arrays live in."""
    strict: bool = False
    """Whether its request has no overdraft."""
    whole: bool = False
    """Whether its request counts native memory and Python objects too (docs/whole.md)."""

    def changed(self, changes: TermsOf, where: str) -> "Terms | None":
        """These terms with ``changes``. None: no request. TypeError, ValueError: the changes are not valid."""
        if changes is None:
            return None
        if not isinstance(changes, Mapping):
            raise TypeError(f"{where}: {changes!r} are no terms; give a dict like {{'limit_bytes': n}}, or None")
        unknown = sorted(str(key) for key in set(changes) - set(self._fields))
        if set(unknown) & {"reserve_bytes", "timeout", "max_waiting"}:
            raise TypeError(
                f"{where}: {unknown}: a task does not wait for memory in its worker: it would hold one of the worker's "
                "threads, and what it waits for may be held by results that only waiting tasks use; have the scheduler "
                'admit it instead, with resources={"memory": n} in Dask and memory=n in Ray'
            )
        if unknown:
            raise TypeError(f"{where}: {unknown} are no terms; there are {list(self._fields)}")
        # A limit and a handler exclude each other: whichever is given replaces the other.
        base = self
        if changes.get("handler") is not None and "limit_bytes" not in changes:
            base = base._replace(limit_bytes=None)
        if changes.get("limit_bytes") is not None and "handler" not in changes:
            base = base._replace(handler=None)
        return base._replace(**changes).checked(where)

    def checked(self, where: str) -> "Terms":
        """These terms, if they are possible. TypeError, ValueError: they are not."""
        if self.handler is not None:
            if not isinstance(self.handler, str):
                raise TypeError(f"{where}: handler={self.handler!r}: give the name of a handler")
            if self.limit_bytes is not None or self.strict or self.whole:
                raise ValueError(
                    f"{where}: handler={self.handler!r} selects a handler instead of a request, so there is nothing to "
                    "limit or to count; leave out limit_bytes, strict and whole, or the handler"
                )
        if not isinstance(self.whole, bool):
            raise TypeError(f"{where}: whole={self.whole!r}: give True or False")
        try:
            request(limit_bytes=self.limit_bytes, strict=self.strict)
        except OverflowError as error:
            raise ValueError(f"{where}: limit_bytes={self.limit_bytes!r}: {error}") from None
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from None
        return self

    def request(self, **others: Any) -> Request:
        """A request on these terms. RuntimeError: it is to be whole, which cannot be had in this process."""
        return request(limit_bytes=self.limit_bytes, strict=self.strict, whole=self.whole, root=True, **others)
