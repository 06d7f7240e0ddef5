"""Breaks ctxalloc on purpose, one way at a time, in a copy of the tree, and sees that the oracle notices.

Each mutant replaces text that must be there exactly once. Fails where a mutant survives, where its text is not found
any more, or where the oracle finds differences without any mutant. `run_oracle.py --list`, `run_oracle.py NAME...`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from mutant import TREE
from mutant import Mutant as Replaced

PLACE: Final = TREE / "target" / "mutants"
PROGRAMS: Final = 3_000
"""As many as `make oracle` runs for a seed: what survives them is a survivor."""


@dataclass(frozen=True, slots=True)
class Mutant(Replaced):
    """One that breaks the selection, and the sides of the oracle that run it."""

    sides: Literal["rust", "python"] = "rust"
    environment: tuple[tuple[str, str], ...] = ()


FUTURE: Final = "src/scope/future.rs"
CONTEXT: Final = "src/scope/context.rs"
TOKEN: Final = "src/scope/token.rs"
GUARD: Final = "src/scope/guard.rs"
CURRENT: Final = "src/scope/current.rs"
TASK: Final = "src/task/mod.rs"
JOIN_SET: Final = "src/task/join_set.rs"
SCOPE: Final = "src/python/scope.rs"
PY_TOKEN: Final = "src/python/token.rs"
SELECTION: Final = "src/python/selection.rs"
DECORATE: Final = "python/ctxalloc/_decorate.py"
RESTORE: Final = "        drop(selected::replace(old.take()));\n"
EXIT: Final = "    match numpy.selection().reset(&token) {\n"
UNCHECKED: Final = """let old = numpy.selection().old_capsule(token.bind(py))?;
    let outcome = numpy.selection().set(old.as_ref().unwrap_or(numpy.default_capsule(py))).map(drop);"""
STREAM_END: Final = "this.inner.set(None); // destructors of the stream run in its context"
POLL: Final = """        let _inside = this.context.swap_in();
        let inner = this.inner.as_mut().as_pin_mut().expect"""
POLLED: Final = """("a `Scoped` future was polled after it was complete");
        let output = ready!(inner.poll(cx));
"""
DROP: Final = """            let _inside = this.context.swap_in();
            this.inner.set(None);
"""
COMPLETE: Final = "        this.inner.set(None); // destructors of the future run in its context\n"
NEXT: Final = """        let _inside = this.context.swap_in();
        let Some(inner)"""

MUTANTS: Final = (
    # a future's context
    Mutant("the context is not swapped out after a poll", FUTURE, POLL, POLL.replace(
        "let _inside = this.context.swap_in();", "std::mem::forget(this.context.swap_in());")),
    Mutant("the context is not swapped in for a poll", FUTURE, POLL, POLL.replace("_inside = ", "_ = ")),
    Mutant("what a future selects is lost at its next await", CONTEXT, "self.context.state = replace(state);",
        "drop(replace(state));"),
    Mutant("a cancelled future is dropped outside of its context", FUTURE, DROP, "            this.inner.set(None);\n"),
    Mutant("a completed future is dropped outside of its context", FUTURE, COMPLETE,
        "        drop(_inside);\n" + COMPLETE),
    Mutant("a panic in a poll leaves the future's context behind", FUTURE, POLL + POLLED,
        POLL.replace("let _inside = this.context.swap_in()",
            "let inside = std::mem::ManuallyDrop::new(this.context.swap_in())")
        + POLLED.replace("let output = ready!(inner.poll(cx));",
            "let polled = inner.poll(cx);\n        let _inside = std::mem::ManuallyDrop::into_inner(inside);\n"
            "        let output = ready!(polled);")),
    Mutant("a stream's context is not swapped out", FUTURE, NEXT, NEXT.replace(
        "let _inside = this.context.swap_in();", "std::mem::forget(this.context.swap_in());")),
    Mutant("a stream's context is not swapped in", FUTURE, NEXT, NEXT.replace("_inside = ", "_ = ")),
    Mutant("a finished stream is dropped outside of its context", FUTURE, STREAM_END,
        "drop(_inside);\n            " + STREAM_END),
    Mutant("with_handler selects nothing", FUTURE,
        "self.in_context(Context::with_handler(handler))", "{ let _ = handler; self.in_context(Context::new()) }"),
    Mutant("with_handler selects for the caller too", FUTURE, "self.in_context(Context::with_handler(handler))",
        "{ let _ = super::set(handler); self.in_context(Context::with_handler(handler)) }"),
    Mutant("in_current_handler starts empty", FUTURE, "self.in_context(Context::copy_current())",
        "self.in_context(Context::new())"),
    # contexts
    Mutant("a copy is taken for its original: identities", CONTEXT, "        Self::selecting(selection())\n",
        "        let state = replace(State::EMPTY);\n"
        "        let copy = State { selected: state.selected.clone(), identity: state.identity };\n"
        "        drop(replace(state));\n        Self { state: copy }\n"),
    Mutant("a clone is taken for its original: identities", CONTEXT, "Self::selecting(self.state.selected.clone())",
        "Self { state: State { selected: self.state.selected.clone(), identity: self.state.identity } }"),
    Mutant("a new context is a copy", CONTEXT, "pub const fn new() -> Self {\n        Self { state: State::EMPTY }",
        "pub fn new() -> Self {\n        Self::copy_current()"),
    Mutant("a panic in Context::run is not undone", CONTEXT,
        "        let _inside = self.swap_in();\n        work()\n",
        "        let inside = std::mem::ManuallyDrop::new(self.swap_in());\n        let result = work();\n"
        "        drop(std::mem::ManuallyDrop::into_inner(inside));\n        result\n"),
    Mutant("Context::run runs outside", CONTEXT, "let _inside = self.swap_in();\n        work()",
        "drop(self.swap_in());\n        work()"),
    Mutant("wrapped work runs outside", CONTEXT, "context.run(work)", "let _ = context;\n            work()"),
    Mutant("all contexts have one identity", CURRENT, "Self(NonZeroU64::new(next).expect(",
        "Self(NonZeroU64::new(next.min(1)).expect("),
    # tokens
    Mutant("reset ignores whose token it is", CURRENT, "let own = IDENTITY.get() == Some(context);",
        "let own = IDENTITY.get() == Some(context) || true;"),
    Mutant("reset ignores that a token was used", TOKEN, "if token.used.get() {", "if false && token.used.get() {"),
    Mutant("a foreign token counts as used", TOKEN, "if !restore(&mut old, token.context) {",
        "token.used.set(true);\n    if !restore(&mut old, token.context) {"),
    Mutant("whose token it is comes before whether it was used", TOKEN, "if token.used.get() {",
        "if super::current::select(Held::on(super::current())).1 == token.context && token.used.get() {"),
    Mutant("reset cannot go back to nothing", CURRENT,
        RESTORE, RESTORE.replace("old.take()", "old.take().or_else(selection)")),
    Mutant("reset goes back to the default always", CURRENT,
        RESTORE, RESTORE.replace("old.take()", "old.take().and(None)")),
    Mutant("a context has a new identity after a reset", CURRENT, RESTORE, RESTORE + "        IDENTITY.set(None);\n"),
    Mutant("a context has a new identity after a set", CURRENT, "IDENTITY.get().unwrap_or_else(|| {",
        "IDENTITY.get().filter(|_| false).unwrap_or_else(|| {"),
    Mutant("a token knows the new handler as the old one", TOKEN, "        self.old\n",
        "        Some(super::current())\n"),
    Mutant("set keeps a selection where the default is asked for", TOKEN,
        "handler.into().unwrap_or_else(default_handler)", "handler.into().unwrap_or_else(super::current)"),
    # scopes
    Mutant("a panic in scope() is not undone", GUARD, "    let _guard = enter(handler);\n    work()\n",
        "    let guard = std::mem::ManuallyDrop::new(enter(handler));\n    let result = work();\n"
        "    drop(std::mem::ManuallyDrop::into_inner(guard));\n    result\n"),
    Mutant("scope() does not restore", GUARD, "let _guard = enter(handler);\n    work()",
        "std::mem::forget(enter(handler));\n    work()"),
    Mutant("a dropped guard does not restore", GUARD, "if !restore(&mut self.old, self.context) {", "if false {"),
    Mutant("a guard restores in whatever context it goes", GUARD, "if restore(&mut old, context) {",
        "let context = select(Held::on(super::current())).1;\n        if restore(&mut old, context) {"),
    Mutant("a guard restores the default", GUARD, "Guard { old, context, not_send: PhantomData }",
        "Guard { old: old.and(None), context, not_send: PhantomData }"),
    # tasks and threads
    Mutant("spawn copies nothing", TASK, "tokio::spawn(future.in_current_handler())", "tokio::spawn(future)"),
    Mutant("spawn copies at the first poll, not at the call", TASK, "tokio::spawn(future.in_current_handler())",
        "tokio::spawn(async move { future.in_current_handler().await })"),
    Mutant("spawn_on copies nothing", TASK, "runtime.spawn(future.in_current_handler())", "runtime.spawn(future)"),
    Mutant("spawn_local copies nothing", TASK, "tokio::task::spawn_local(future.in_current_handler())",
        "tokio::task::spawn_local(future)"),
    Mutant("spawn_blocking copies nothing", TASK, "tokio::task::spawn_blocking(Context::copy_current().wrap(work))",
        "tokio::task::spawn_blocking(work)"),
    Mutant("spawn_blocking copies when it runs, not at the call", TASK,
        "tokio::task::spawn_blocking(Context::copy_current().wrap(work))",
        "tokio::task::spawn_blocking(|| Context::copy_current().wrap(work)())"),
    Mutant("spawn_blocking_on copies nothing", TASK, "runtime.spawn_blocking(Context::copy_current().wrap(work))",
        "runtime.spawn_blocking(work)"),
    Mutant("JoinSet::spawn copies nothing", JOIN_SET, "self.inner.spawn(task.in_current_handler())",
        "self.inner.spawn(task)"),
    Mutant("JoinSet::spawn_local copies nothing", JOIN_SET, "self.inner.spawn_local(task.in_current_handler())",
        "self.inner.spawn_local(task)"),
    Mutant("JoinSet::spawn_blocking copies nothing", JOIN_SET,
        "self.inner.spawn_blocking(Context::copy_current().wrap(work))", "self.inner.spawn_blocking(work)"),
    Mutant("thread::spawn copies nothing", "src/thread.rs", "std::thread::spawn(Context::copy_current().wrap(work))",
        "std::thread::spawn(work)"),
    # memory
    Mutant("a block is made by the default handler", "src/memory/buffer.rs", "Self::zeroed_in(current(), length)",
        "Self::zeroed_in(crate::handler::default_handler(), length)"),
    # scopes and tokens in Python
    Mutant("use() does not restore", SCOPE, EXIT,
        "        let _ = numpy;\n        match Ok::<(), PyErr>(()) {\n", "python"),
    Mutant("use() restores in whatever Context it is left", SCOPE, EXIT,
        UNCHECKED.replace("token.bind(py)", "&token") + "\n        match outcome {\n", "python"),
    Mutant("use() says nothing where it is left in another Context", SCOPE,
        "Err(entered_elsewhere(py, &name(), error))", "Ok(drop(error))", "python"),
    Mutant("reset() throws the Token away, as PyDataMem_SetHandler does", PY_TOKEN,
        "    numpy.selection().reset(token.get().token.bind(py)).map_err(|error| explain(py, error))?;\n",
        "    let token_bound = token.get().token.bind(py);\n    "
        + UNCHECKED.replace("token.bind(py)", "token_bound") + "\n    outcome.map_err(|error| explain(py, error))?;\n",
        "python"),
    Mutant("a Token does not know that it was used", PY_TOKEN, "token.get().used.store(true,",
        "token.get().used.store(false,", "python"),
    Mutant("a used Token is called foreign", PY_TOKEN, "PyErr::from(Error::TokenUsed)",
        "PyErr::from(Error::TokenForeign)", "python"),
    Mutant("a foreign Token is called used", PY_TOKEN, "PyErr::from(Error::TokenForeign)",
        "PyErr::from(Error::TokenUsed)", "python"),
    Mutant("a Token knows no old handler", SELECTION, "Ok((!old.is(&missing)).then_some(old))",
        "Ok((!old.is(&missing) && false).then_some(old))", "python"),
    Mutant("without the ContextVar, nobody asks whose Token it is", SELECTION,
        'marker.bind(py).call_method1("reset", (witness,))?;',
        "let _ = (marker, witness);", "python", (("CTXALLOC_SELECTION", "sethandler"),)),
    # decorators in Python
    Mutant("a decorated function does not restore", DECORATE, "with block():\n            return function(",
        "block().__enter__()\n        return function(", "python"),
    Mutant("a decorated coroutine does not restore", DECORATE, "with block():\n            return await",
        "block().__enter__()\n        return await", "python"),
    Mutant("what an async generator selects is lost at its yield", DECORATE,
        "                    except StopAsyncIteration:\n                        return\n                    finally:\n"
        "                        selected = current()\n",
        "                    except StopAsyncIteration:\n                        return\n"
        "                    finally:\n", "python"),
    Mutant("an async generator's scope leaks across its yield", DECORATE,
        "                with use(selected):\n                    try:\n                        item = await step()",
        "                use(selected).__enter__()\n                if True:\n                    try:\n"
        "                        item = await step()",
        "python"),
    Mutant("an async generator is closed outside of its scope", DECORATE,
        "step = functools.partial(body.athrow, error)", "await body.athrow(error)", "python"),
)  # fmt: skip


def copy_of_the_tree() -> Path:
    """A copy in target/, at a place that stays, so that cargo compiles only what a mutant changes."""
    tree = PLACE / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    ignored = shutil.ignore_patterns("target", ".*", "*.so", "__pycache__", "wheels", "out", "dist")
    # With the times of the copy: what was built from a mutant must not pass for built from this.
    shutil.copytree(TREE, tree, ignore=ignored, copy_function=shutil.copy)
    return tree


def build(tree: Path, sides: str) -> dict[str, str] | str:
    """Compiles the copy; the environment to run it in, or what the compiler says."""
    environment = os.environ | {"CARGO_TARGET_DIR": str(PLACE / f"target-{sides}"), "PYTHONPATH": str(tree / "python")}
    if sides == "rust":
        command = ["cargo", "build", "--quiet", "--locked", "--example", "oracle"]
    else:
        environment |= {"PYO3_PYTHON": sys.executable, "PYO3_BUILD_EXTENSION_MODULE": "1"}
        command = ["cargo", "rustc", "--quiet", "--locked", "--lib", "--crate-type", "cdylib", "--features", "abi3"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr
    if sides == "python":
        library = PLACE / f"target-{sides}" / "debug" / f"libctxalloc{sysconfig.get_config_var('SHLIB_SUFFIX')}"
        shutil.copyfile(library, tree / "python" / "ctxalloc" / "_native.abi3.so")
    return environment


def judge(tree: Path, environment: dict[str, str], sides: str) -> str:
    """How the oracle caught it; empty where it did not."""
    command = [sys.executable, str(tree / "tests" / "oracle" / "run.py"), "--jobs", "1", "--no-shrink"]
    command += ["--seed", "mutant", "--programs", str(PROGRAMS), "--hang-seconds", "30"]
    if sides == "rust":
        interpreter = PLACE / f"target-{sides}" / "debug" / "examples" / "oracle"
        command += ["--sides", "contextvars,current,multi,local", "--interpreter", str(interpreter)]
        environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    else:
        command += ["--sides", "contextvars,numpy"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = re.search(r"DIFFERENCE in program (\d+)", done.stdout)
    if found:
        return f"by program {int(found[1]) + 1}"
    if done.returncode == 3:
        hang = re.search(r"HANG: .*", done.stderr)
        return hang[0] if hang else "by a crash"
    if done.returncode:
        raise RuntimeError(f"the oracle failed:\n{done.stdout}{done.stderr}")
    return ""


def try_one(tree: Path, mutant: Mutant) -> str:
    """How a mutant was caught. RuntimeError where it was not."""
    path = tree / mutant.path
    original = path.read_text()
    path.write_text(mutant.applied(tree))
    try:
        environment = build(tree, mutant.sides)
        if isinstance(environment, str):
            raise RuntimeError(f"it does not compile: adapt the mutant\n{environment}")  # noqa: TRY004
        caught = judge(tree, environment | dict(mutant.environment), mutant.sides)
    finally:
        path.write_text(original)
    if not caught:
        raise RuntimeError(f"it SURVIVED {PROGRAMS} programs")
    return caught


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="show the mutants' names")
    parser.add_argument("--sides", choices=("rust", "python"), help="only mutants of one layer")
    parser.add_argument("names", nargs="*", help="only mutants with these words in their names")
    options = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if options.sides in (None, mutant.sides)]
    if options.names:
        mutants = [mutant for mutant in mutants if any(name in mutant.name for name in options.names)]
    if options.list or not mutants:
        print("\n".join(f"{mutant.sides}: {mutant.name}" for mutant in mutants))
        return 0 if mutants else 2
    tree = copy_of_the_tree()
    for sides in sorted({mutant.sides for mutant in mutants}):
        environment = build(tree, sides)
        if isinstance(environment, str):
            print(f"mutants: the tree itself does not build:\n{environment}")
            return 1
        caught = judge(tree, environment, sides)
        if caught:
            print(f"mutants: the oracle catches the tree itself ({sides} sides) {caught}")
            return 1
    failures = 0
    for mutant in mutants:
        started = time.monotonic()
        try:
            caught = f"caught {try_one(tree, mutant)}"
        except RuntimeError as error:
            failures += 1
            caught = f"FAILED: {error}"
        print(f"{mutant.sides:6} {mutant.name}: {caught} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"mutants: {len(mutants) - failures} of {len(mutants)} caught")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
