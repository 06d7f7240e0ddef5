"""Requests by the million, each leaking an array for a while or for ever: memory stays with what is alive.

`CTXALLOC_STRESS` multiplies the work (`make stress`: a million requests). In a process of its own, for its RSS.
"""

import json
import os

import pytest
import subprocesses

REQUESTS = 2000 * int(os.environ.get("CTXALLOC_STRESS", "1"))

PROGRAM = """
import asyncio, collections, json, os, random, threading, ctxalloc, numpy as np
from resident import rss

REQUESTS, THREADS = {requests}, 2
tenant = ctxalloc.Budget(name="tenant")
for_ever = []

async def one(choose, for_a_while, budget):
    async with ctxalloc.request(budget=budget) as scope:
        kept = np.full(choose.randrange(1, 3000), 7)
        scratch = [np.ones(choose.randrange(1, 20_000)) for _ in range(3)]
        if choose.random() < 0.1:
            await asyncio.sleep(0)
        assert scope.stats.live_blocks == 4
    for_a_while.append(kept)
    if choose.random() < 1 / 500:
        for_ever.append(kept)

async def many(seed):
    choose = random.Random(seed)
    for_a_while = collections.deque(maxlen=50)
    for _ in range(REQUESTS // THREADS // 10):
        await asyncio.gather(*(one(choose, for_a_while, tenant) for _ in range(10)))

def run(seed):
    asyncio.run(many(seed))

def all_threads():
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(THREADS)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()

before = rss()
all_threads()
alive = sum(array.nbytes for array in for_ever)
ctxalloc.handler("pool").trim()  # what it keeps warm is no leak
after = rss()
assert all((array == 7).all() for array in for_ever)
full = ctxalloc.request_metrics()
kept = len(for_ever)
for_ever.clear()
empty = ctxalloc.request_metrics()
print(json.dumps(dict(grown=after - before, alive=alive, kept=kept, slots=full.slots, begun=full.begun,
                      with_escapes=full.present, present=empty.present, in_use=tenant.in_use_bytes)))
"""


@pytest.mark.once
def test_stress_memory_stays_with_what_is_alive() -> None:
    printed = json.loads(subprocesses.says(PROGRAM.format(requests=REQUESTS)))
    assert printed["begun"] == REQUESTS
    assert printed["with_escapes"] == printed["kept"]
    assert printed["present"] == 0
    assert printed["in_use"] == 0
    # What each escape costs besides: its slot and its account, and what lies around it in the pool.
    assert printed["grown"] <= 1.5 * printed["alive"] + printed["kept"] * 32 * 1024 + 16 * 1024 * 1024, printed
