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
