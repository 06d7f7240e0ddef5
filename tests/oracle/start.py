"""The words that start a line of execution, by each of the ways that the standard library has."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading

from language import IN_CONTEXT, PLAIN, WITH_HANDLER
from line import Child, Frame, Line, Pool
from steps import Run, Step


class Lines(Run):
    """What `spawn`, `thread`, `job` and `work` do."""

    async def do_spawn(self, frame: Frame, step: Step) -> str:
        label, kind, with_, *gives = step.numbers
        assert frame.hub is not None
        context: contextvars.Context | None = None
        if kind == PLAIN:
            context = frame.hub.ambient.copy()
        elif kind == IN_CONTEXT:
            context = frame.line.contexts.pop(with_, None)
            if context is None:
                return "n"
        elif kind == WITH_HANDLER:
            context = contextvars.copy_context()
            context.run(self.selection.set, with_)
        line = Line()
        frame.line.give(tuple(gives), line)
        future = frame.hub.loop.create_task(self.line(Frame(line, frame.hub), step), context=context)
        future.add_done_callback(line.wake_watcher)
        frame.line.children[label] = child = Child(line, frame.hub, is_task=True, future=future)
        frame.hub.children.append(child)
        return "k"

    async def do_thread(self, frame: Frame, step: Step) -> str:
        label, kind, with_, *gives = step.numbers
        context: contextvars.Context | None = None
        if kind == IN_CONTEXT:
            context = frame.line.contexts.pop(with_, None)
            if context is None:
                return "n"
        elif kind != PLAIN:
            context = contextvars.copy_context()
        child = Child(Line(is_free=True), None, is_task=False)
        frame.line.give(tuple(gives), child.line)

        def body() -> str:
            return self.sync_line(Frame(child.line), step)

        def target() -> None:
            try:
                child.ended.set_result(body() if context is None else context.run(body))
            except BaseException as error:  # noqa: BLE001
                child.ended.set_exception(error)

        child.thread = threading.Thread(target=target)
        child.thread.start()
        frame.line.children[label] = child
        self.threads.append(child)
        return "k"

    async def do_job(self, frame: Frame, step: Step) -> str:
        label, kind, _, *gives = step.numbers
        assert frame.hub is not None
        line = Line(is_free=True)
        frame.line.give(tuple(gives), line)
        executor = frame.hub.executor()
        future: asyncio.Future[str]
        if kind == PLAIN:
            future = frame.hub.loop.run_in_executor(executor, self.sync_line, Frame(line), step)
        else:
            future = frame.hub.loop.create_task(asyncio.to_thread(self.sync_line, Frame(line), step))
        frame.line.children[label] = child = Child(line, frame.hub, is_task=False, future=future)
        frame.hub.children.append(child)
        return "k"

    def submit(self, frame: Frame, step: Step) -> tuple[Line, Pool, concurrent.futures.Future[str]]:
        label, kind, _, *gives = step.numbers
        pool = frame.line.workers.pop(label, None)  # gone while it works: its job must not wait for itself
        if pool is None:
            pool = Pool(1)
            self.pools.append(pool)
        line = Line(is_free=True)
        frame.line.give(tuple(gives), line)
        if kind == PLAIN:
            return line, pool, pool.submit(self.sync_line, Frame(line), step)
        return line, pool, pool.submit(contextvars.copy_context().run, self.sync_line, Frame(line), step)


def take_back_worker(frame: Frame, step: Step, line: Line, pool: Pool) -> None:
    frame.line.take_back(line)
    frame.line.workers[step.numbers[0]] = pool
