"""benches/RESULTS.md from the numbers in target/bench: what `make bench` measured, against what we aim at.

    python -m harness.report      (in benches/, after the benches; `make bench` runs it last)

The part between the marks is written anew; what stands below it, the reasons where an aim is missed, is kept.
"""

import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from harness import OUT
from harness.peers import REQUEST

RESULTS: Final = Path(__file__).parents[1] / "RESULTS.md"
PICTURE: Final = Path(__file__).parents[2] / "docs" / "images" / "bench.png"
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"
DEFAULT: Final = "NumPy's default"
MIB: Final = 1 << 20

Aim = tuple[str, str, str, bool]
"""What is measured, what we aim at, what came out, whether that meets the aim."""


def numbers(name: str) -> dict[str, Any]:
    """What a Python bench kept. FileNotFoundError: it was not run."""
    kept: dict[str, Any] = json.loads((OUT / f"{name}.json").read_text(encoding="utf-8"))
    return kept


def rust(name: str) -> dict[str, dict[str, float]]:
    """What a Rust bench kept: group, variant, median in nanoseconds."""
    groups: dict[str, dict[str, float]] = {}
    for line in (OUT / f"{name}-rust.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        groups.setdefault(row["group"], {})[row["variant"]] = row["median_ns"]
    return groups


def selections() -> Iterator[Aim]:
    """Issue: one selection."""
    rows = {name: row["median_ns"] for name, row in numbers("python")["selection"].items()}
    use = rows["with ctxalloc.use(handler): pass"]
    var = use / rows["ContextVar: t = var.set(x); var.reset(t)"]
    peer = use / rows["numpy-allocator: with allocator: pass"]
    yield "`with use(h): pass` / `ContextVar.set` and `reset`", "1.5x", f"{var:.2f}x", var <= 1.5
    yield "`with use(h): pass` / numpy-allocator's", "0.5x", f"{peer:.2f}x", peer <= 0.5
    groups = rust("selection")
    poll = groups["one poll of a future"]
    alone = poll["the future alone"]
    ours = poll["ctxalloc: .with_handler()"] - alone
    local = poll["tokio: task_local!, .scope()"] - alone
    span = poll["tracing: Instrumented, idle subscriber"] - alone
    name = "a scoped future's poll, beyond the future's own"
    yield (
        name,
        "as `task_local!` or `Instrumented`",
        f"{ours:.1f} ns; {local:.1f}, {span:.1f} ns",
        ours <= min(local, span),
    )
    guard = groups["a scope"]["enter and drop of the guard"]
    yield "`enter` and drop of the guard in Rust", "3 ns", f"{guard:.1f} ns", guard < 3


def arrays() -> Iterator[Aim]:
    """Issue: strategies, speed."""
    works = numbers("arrays")["arrays"]

    def ratio(work: str, size: str, name: str = "pool", base: str = DEFAULT) -> float:
        rows = works[work][size]
        return float(rows[name]["median_ns"] / rows[base]["median_ns"])

    small = {size: ratio("np.empty(n)", size) for size in works["np.empty(n)"] if int(size) <= 32 * MIB}
    worst = max(small, key=lambda size: small[size])
    yield (
        "`np.empty(n)` and its end under `pool`, 8 B to 32 MiB",
        "1.0x NumPy's default at every size",
        f"{min(small.values()):.2f}x to {small[worst]:.2f}x (at {worst} B)",
        small[worst] <= 1.005,
    )
    for size in (64 * MIB, 256 * MIB):
        large = ratio("np.empty(n)", str(size))
        yield f"the same at {size // MIB} MiB", "0.1x", f"{large:.3f}x", large <= 0.1
    zeros = {
        (work, size): ratio(work, size) for work in ("np.zeros(n)", "np.zeros(n), touched") for size in works[work]
    }
    slowest = max(zeros, key=lambda key: zeros[key])
    yield (
        "`np.zeros` under `pool`, alone and with every page touched, 64 B to 256 MiB",
        "1.0x NumPy's default at every size",
        f"{min(zeros.values()):.2f}x to {zeros[slowest]:.2f}x ({slowest[0]}, {slowest[1]} B)",
        zeros[slowest] <= 1.005,
    )
    for name in ("pool", REQUEST):
        sums = {size: ratio("a*b + a - b", size, name) for size in works["a*b + a - b"]}
        worst = max(sums, key=lambda size: sums[size])
        where = "inside `request()`" if name == REQUEST else "under `pool`"
        yield (
            f"`a*b + a - b` {where}, 4 KiB to 256 MiB",
            "1.0x NumPy's default at every size",
            f"{min(sums.values()):.2f}x to {sums[worst]:.2f}x (at {worst} B)",
            sums[worst] <= 1.005,
        )
        limit = max(
            ratio("a*b + a - b", str(size * MIB), name, "limit (out=, into what is there)") for size in (64, 256)
        )
        yield "the same at 64 and 256 MiB / with `out=` into arrays that exist", "1.1x", f"{limit:.2f}x", limit <= 1.1
    full = {(work, size): ratio(work, size) for work in ("np.full(n)", "np.ones(n)") for size in works[work]}
    slowest = max(full, key=lambda key: full[key])
    yield (
        "`np.full`, `np.ones` under `pool`, 64 B to 256 MiB",
        "1.0x NumPy's default at every size",
        f"at most {full[slowest]:.2f}x ({slowest[0]}, {slowest[1]} B)",
        full[slowest] <= 1.005,
    )
    limits = [ratio(work, str(size * MIB), base="limit (fills what is there)") for work, size in LARGE]
    gains = [1 / full[work, str(size * MIB)] for work, size in LARGE]
    yield (
        "the same at 64 and 256 MiB / filling what is there",
        "1.1x",
        f"at most {max(limits):.2f}x",
        max(limits) <= 1.1,
    )
    yield "the same, speed against NumPy's default", "2x", f"{min(gains):.1f}x to {max(gains):.1f}x", min(gains) >= 2


LARGE: Final = [(work, size) for work in ("np.full(n)", "np.ones(n)") for size in (64, 256)]


def requests() -> Iterator[Aim]:
    """Issue: requests, speed."""
    kept = numbers("requests")
    empty = kept["empty"]["with ctxalloc.request(): pass"]["median_ns"]
    yield "`request()` enter and exit in Python, nothing allocated", "0.6 us", f"{empty / 1000:.2f} us", empty <= 600
    for how, more in kept["arrays"]["800"].items():
        each, besides = more["each_ns"], more["besides_ns"]
        what = f"an array of 800 B inside, {how}, beyond NumPy's default"
        yield what, "15 ns", f"{each:.1f} ns, and once in a request {besides:.0f} ns", each <= 15
    live = kept["live"]
    ratio = live["with ctxalloc.request()"]["median_ns"] / live["with ctxalloc.use('pool')"]["median_ns"]
    yield "a million small arrays alive in one request / under `pool`", "1.3x", f"{ratio:.2f}x", ratio <= 1.3
    groups = rust("requests")
    for threads in (1, 2, 4):
        found = [rows for name, rows in groups.items() if name.endswith(f" {threads} threads")]
        ratios = [rows["request(), one for each thread"] / rows["system: malloc, free"] for rows in found]
        what = f"1000 blocks of 16 B to 1 KiB in a Rust `request()`, {threads} thread(s) / `malloc`, `free`"
        yield what, "1.0x", f"{min(ratios):.2f}x to {max(ratios):.2f}x", max(ratios) <= 1.005
    own = groups["a request"]
    escape = own["with one that escapes, to a cache of 1000"]
    yield "a Rust request whose one block escapes", "2 us", f"{escape / 1000:.2f} us", escape <= 2000


def floors() -> Iterator[Aim]:
    """Issue: small blocks. Beside each ratio that of the least that anybody could take (`benches/floor.c`)."""
    kept = numbers("floor")
    sizes: dict[str, dict[str, float]] = {
        size: {name: row["median_ns"] for name, row in rows.items()} for size, rows in kept["arrays"].items()
    }
    for what, chosen in (
        ("8 to 1000 B", [rows for size, rows in sizes.items() if int(size) < 1024]),
        ("512 KiB to 2 MiB", [rows for size, rows in sizes.items() if int(size) > 1024]),
    ):
        least, plain = (
            max(rows[name] / rows[DEFAULT] for rows in chosen)
            for name in ("floor: a list of blocks of one size", "floor: malloc, free, nothing else")
        )
        for name in ("pool", "in a request()"):
            ratio = max(rows[name] / rows[DEFAULT] for rows in chosen)
            outcome = f"at most {ratio:.2f}x; the floor {least:.2f}x, `malloc` alone {plain:.2f}x"
            yield f"`np.empty` of {what}, {name}", "1.0x NumPy's default", outcome, ratio <= 1.005
    rows = {name: row["median_ns"] for name, row in kept["requests"].items()}
    base = rows["ContextVar: t = var.set(x); var.reset(t)"]
    for name, floor, most in (
        ("with request(): pass", "floor: the same, with a capsule of its own", 4),
        ("with a limit, a budget and a name", "floor: with a capsule, three options unread", 5),
    ):
        ratio = rows[name] / base
        outcome = f"{ratio:.2f}x; the floor {rows[floor] / base:.2f}x"
        yield f"`{name}` / `ContextVar.set` and `reset`", f"{most}x", outcome, ratio <= most


def blocks() -> Iterator[Aim]:
    """Issue: strategies in Rust."""
    groups = rust("strategies")
    pools = {
        name: rows["Pool"] / rows["mimalloc: mi_malloc, mi_free"]
        for name, rows in groups.items()
        if "Pool" in rows and "mimalloc: mi_malloc, mi_free" in rows
    }
    worst = max(pools, key=lambda name: pools[name])
    span = f"{min(pools.values()):.2f}x to {pools[worst]:.2f}x ({worst})"
    yield "`Pool` / the mimalloc crate, 16 B to 4 KiB, one and two threads", "1.2x", span, pools[worst] <= 1.2
    arena, peer = "Arena: allocate, release, reset", "bumpalo: alloc_layout, reset"
    stretches = [rows for rows in groups.values() if arena in rows]
    bare = max(rows[arena] / rows[peer] for rows in stretches)
    shared = max(rows[arena] / rows["bumpalo behind a Mutex: the same"] for rows in stretches)
    scratch = max(rows["Scratch: allocate_layout, reset"] / rows[peer] for rows in stretches)
    yield "`Scratch` / bumpalo, one thread, freed all at once", "2x", f"{scratch:.2f}x", scratch <= 2
    local = max(rows["Arena, its one thread by Scratch: allocate_layout, reset"] / rows[peer] for rows in stretches)
    yield "`Arena` on one thread (`Scratch::in_arena`) / bumpalo", "2x", f"{local:.2f}x", local <= 2
    yield "`Arena` / bumpalo behind a Mutex", "1x", f"{shared:.2f}x; {bare:.1f}x of bumpalo alone", shared <= 1
    adds = groups["what others add to a block of 100 B"]
    for name, most in (("Budgeted", 10), ("Tracked", 30)):
        more = adds[f"{name}, over Pool"] - adds["Pool, 64 bytes more (the record)" if name == "Tracked" else "Pool"]
        yield f"`{name}` adds to a block", f"{most} ns", f"{more:.1f} ns", more <= most


def rust_services() -> Iterator[Aim]:
    """Services in Rust: the layer, spans, and Rust's own heap."""
    groups = rust("services")
    rows = groups["a request of an axum service that does nothing"]
    layer = rows["tower::RequestLayer"] - rows["with a layer that does nothing"]
    yield (
        "`tower::RequestLayer` on a request, beyond a layer that does nothing",
        "1 us",
        f"{layer:.0f} ns",
        layer <= 1000,
    )
    poll = groups["one poll of a future in a request"]
    scoped = poll["request.scope()"]
    silent, heard = (poll[f"in its span, {who} subscriber"] - scoped for who in ("no", "idle"))
    yield (
        "a poll in a request's span, beyond the request's",
        "2 ns without a subscriber",
        (f"{silent:.1f} ns; {heard:.1f} ns with an idle one"),
        silent <= 2,
    )
    for where in ("application", "service over TCP"):
        served = groups[f"an axum {where}"]
        noise = max(abs(served[f"{bare}, no layer, again"] / served[f"{bare}, no layer"] - 1) for bare in BARE)
        for what, scoped_how, bare_how, most in (
            ("nothing selected", "no layer", "no layer", None),
            ("each request selected", "layer", "layer", 1.1),
            ("selected and limited", "layer, limit", "layer", 1.1),
        ):
            aim = f"two runs without it differ by {noise:.3f}" if most is None else f"{most}x the bare allocator"
            ratios = {
                bare: served[f"GlobalScoped over {scoped}, {scoped_how}"] / served[f"{bare}, {bare_how}"]
                for bare, scoped in BARE.items()
                if f"GlobalScoped over {scoped}, {scoped_how}" in served
            }
            outcome = "; ".join(f"over {bare} {ratio:.3f}x" for bare, ratio in ratios.items())
            yield f"`GlobalScoped`, an axum {where}, {what}", aim, outcome, max(ratios.values()) <= (most or 1 + noise)


BARE: Final = {"system": "it", "mimalloc": "mimalloc"}


def memory() -> Iterator[Aim]:
    """Issue: RSS after a load."""
    rows = numbers("load")["load"]
    after = {name: row["after_mib"] for name, row in rows.items()}
    ratio = after["pool"] / after[DEFAULT]
    peers = ", ".join(f"{name} {after[name] / after[DEFAULT]:.2f}x" for name in after if "preloaded" in name)
    yield "RSS after a mixed-lifetime load under `pool`", "0.6x NumPy's default", f"{ratio:.2f}x; {peers}", ratio <= 0.6


def burst() -> Iterator[Aim]:
    """Memory of a service after a burst."""
    after = {name: row["after_mib"] for name, row in numbers("burst")["burst"].items()}
    *peers, (ours, own) = after.items()
    others = ", ".join(f"{name} {mib:.0f}" for name, mib in peers)
    aim = "less than every peer"
    outcome = f"{own:.0f} MiB; {others}"
    yield f"RSS of a service after a burst and the decay, `{ours}`", aim, outcome, own < min(mib for _, mib in peers)


def services() -> Iterator[Aim]:
    """Middlewares."""
    kept = numbers("services")
    rows = kept["alone"]
    base = rows["no middleware"]["median_ns"]
    for name in ("an account", "a route, a limit and a tenant"):
        own = rows[name]["median_ns"] - base
        yield f"`asgi.AllocatorMiddleware` alone, CPU time: {name}", "3 us", f"{own / 1000:.2f} us", own <= 3000
    for route, found in kept["server"].items():
        bare, guarded = found["bare"], found["guarded"]
        lost = 1 - guarded["requests_per_second"] / bare["requests_per_second"]
        rate = f"{route}, {bare['requests_per_second']:.0f} requests/s behind uvicorn"
        nothing = 1 - found["passed on"]["requests_per_second"] / bare["requests_per_second"]
        beside = f"{100 * lost:.1f} %; a middleware in Python that does nothing {100 * nothing:.1f} %"
        yield f"what a NumPy route loses of its throughput: {rate}", "5 %", beside, lost <= 0.05
        more = guarded["p99_ms"] / bare["p99_ms"] - 1
        yield "what its p99 gains", "5 %", f"{100 * more:.1f} %", more <= 0.05


def waiting() -> Iterator[Aim]:
    """Reservations, wake-ups, and a service at twice its memory's capacity."""
    kept = numbers("waiting")
    for which, where in (("alone", ""), ("crowded", ", beside 10,000 waiters")):
        rows = kept[which]
        own = rows["the same, with a reservation"]["median_ns"] - rows["with a budget and a limit"]["median_ns"]
        yield f"the reservation of a request that need not wait{where}", "100 ns", f"{own:.0f} ns", own <= 100
    wake_up, plain, by_task = (
        kept["wake_up"][by]["median_ns"] / 1000
        for by in ("by a thread", "by a thread, of a plain future", "by a task of the same loop")
    )
    yield (
        "from the end of what was waited for to the coroutine",
        "20 us",
        f"{by_task:.0f} us by a task of the same loop; {wake_up:.0f} by a thread, of a plain future {plain:.0f}",
        max(by_task, wake_up) <= 20,
    )
    kept = numbers("overload")
    most = kept["overload"]["wait tenants"]["peak_mib"]
    limit = kept["capacity_bytes"] / MIB
    yield "arrays at twice a service's capacity, waiting", f"{limit:.0f} MiB", f"{most:.0f} MiB", most <= limit


def seeing() -> Iterator[Aim]:
    """Issue: see."""
    own = rust("requests")["a request"]
    named = own["with a name, by which it is counted"] - own["begin, end"]
    yield "counting a request under its name, in Rust", "100 ns", f"{named:.0f} ns", named <= 100
    kept = numbers("observe")
    for what, group, name, base in (
        ("`ctxalloc run` without `--report`, an array of 8 kB", "run", "ctxalloc run", "python"),
        (
            "the live page, mounted and asked by nobody, a request",
            "page",
            "mounted, and asked by nobody",
            "not mounted",
        ),
    ):
        ratio = kept[group][name]["median_ns"] / kept[group][base]["median_ns"]
        yield f"{what} / without", "1.0x (5 % are noise)", f"{ratio:.2f}x", ratio <= 1.05
    both, alone = (kept["imports"][name]["median_ns"] for name in ("import numpy, ctxalloc", "import numpy"))
    yield "`import numpy, ctxalloc` / `import numpy`", "1.1x", f"{both / alone:.2f}x", both / alone <= 1.1


def recording() -> Iterator[Aim]:
    """Issue: tune. What a service's requests take while one in ten is recorded."""
    for service, rows in numbers("recording")["services"].items():
        ratio = rows["one request in ten"]["median_ns"] / rows["not recording"]["median_ns"]
        yield f"a request with {service}, one in ten recorded / none", "1.03x", f"{ratio:.2f}x", ratio <= 1.03


def whole() -> Iterator[Aim]:
    """Issue: the whole request. Nothing where it cannot be had."""
    if not (OUT / "whole.json").exists():
        print("not in the table: request(whole=True), which needs Linux with glibc")
        return
    ratios: dict[str, dict[str, float]] = numbers("whole")["ratios"]
    loops = {name: found for name, found in ratios.items() if " B, " not in name}
    for kind, aim, title in (("none", 1.02, "nothing current"), ("current", 1.05, "in a whole request")):
        for name, found in loops.items():
            own = 1 / 0.97 if name == "service" else aim  # of its throughput
            came = f"{found[kind]:.3f}x; with the library and nothing counted {found['off']:.3f}x"
            yield f"`request(whole=True)`, {title}: {name}", f"{own:.2f}x", came, found[kind] <= own


def clusters() -> Iterator[Aim]:
    """Tasks of Dask; nothing where `make bench-clusters`, which has an environment of its own, was not run."""
    if not (OUT / "clusters.json").exists():
        print("not in the table: tasks of Dask, by `make bench-clusters`")
        return
    kept = numbers("clusters")
    call, in_request = (row["median_ns"] for row in kept["call"].values())
    own = (in_request - call) / 1000
    yield "a task of Dask, the plugin's part (`make bench-clusters`)", "20 us", f"{own:.1f} us", own <= 20
    for kind in ("passed", "the worker's processor"):
        ratios = {
            work: rows[kind]["with the plugin"]["median_ns"] / rows[kind]["without"]["median_ns"]
            for work, rows in kept.items()
            if isinstance(rows, dict) and kind in rows
        }
        worst = max(ratios, key=lambda work: ratios[work])
        yield (
            f"Dask's array patterns, with the plugin / without: time {kind}",
            "1.05x",
            f"{min(ratios.values()):.2f}x to {ratios[worst]:.2f}x ({worst})",
            ratios[worst] <= 1.05,
        )


PARTS: Final[tuple[Callable[[], Iterator[Aim]], ...]] = (
    selections,
    arrays,
    requests,
    floors,
    services,
    waiting,
    rust_services,
    seeing,
    recording,
    whole,
    clusters,
    blocks,
    memory,
    burst,
)


def main() -> int:
    """Writes the table; 1 where a bench was not run, or wrote something else than its part of the table reads."""
    lines = [
        f"`make bench` on {numbers('arrays')['machine']}, {time.strftime('%Y-%m-%d')}. Ratios are of medians",
        "measured in turn in one run; the raw numbers are in `target/bench/` after it.\n",
        "| measured | aim (at most) | came out | |",
        "| --- | --- | --- | --- |",
    ]
    unread = 0
    for part in PARTS:
        try:
            for what, aim, outcome, is_met in part():
                lines.append(f"| {what} | {aim} | {outcome} | {'met' if is_met else '**missed**'} |")
        except (LookupError, ValueError, TypeError, OSError):  # the other parts took most of an hour
            unread += 1
            lines.append(f"| {part.__name__} | | **not read** | |")
            traceback.print_exc()
    lines.append("\n![time against NumPy's default, by size](../docs/images/bench.png)")
    kept = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else f"# Results\n\n{BEGIN}{END}"
    before, _, rest = kept.partition(BEGIN)
    behind = rest.partition(END)[2]
    RESULTS.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + behind, encoding="utf-8")
    shutil.copyfile(OUT / "arrays.png", PICTURE)
    shutil.copyfile(OUT / "burst.png", PICTURE.with_name("burst.png"))
    print(f"written: {RESULTS}, {PICTURE}")
    return 1 if unread else 0


if __name__ == "__main__":
    sys.exit(main())
