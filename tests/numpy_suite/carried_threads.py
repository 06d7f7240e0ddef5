"""Threads that a test starts run in a copy of the starter's Context, and so under the handler that the test has."""

import contextvars
import threading

# Tests that check the very thing we add: a thread of theirs must start as Python starts it.
START_WITH_THE_DEFAULT = ("test_mem_policy.py::test_thread_locality",)


class CarriedThreads:
    """Replaces `Thread.start` for the whole process; `on` says whether it carries."""

    def __init__(self) -> None:
        self.on = True
        self.count = 0

    def install(self) -> None:
        """From now on every thread carries what its starter has, handler and all."""
        start = threading.Thread.start

        def start_in_a_copied_context(thread: threading.Thread) -> None:
            if self.on:
                self.count += 1
                context, run = contextvars.copy_context(), thread.run

                def run_in_context() -> None:
                    del thread.run  # the instance's own: no reference cycle stays behind
                    context.run(run)

                thread.run = run_in_context  # type: ignore[method-assign]
            start(thread)

        threading.Thread.start = start_in_a_copied_context  # type: ignore[method-assign]
