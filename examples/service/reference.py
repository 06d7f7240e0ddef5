"""What must come back: each answer made once under NumPy's default handler, with no switching anywhere.

Neighbours: ``pipelines`` makes it, as it does in the service; ``client`` compares.
"""

from collections.abc import Mapping
from contextlib import nullcontext

from . import pipelines
from .audit import Audit
from .pipelines import Answer, Work

DEFAULT = "default_allocator"

Wanted = Mapping[tuple[str, str], Answer]
"""(route, name of the picture) -> what must come back."""


async def reference(pictures: Mapping[str, bytes]) -> Wanted:
    """Every route's answer to every picture. RuntimeError: an array on the way was not NumPy's default handler's."""
    audit = Audit()

    async def one(route: str, body: bytes) -> Answer:
        work = Work.begin(audit, route, asked=DEFAULT, scratch=DEFAULT, use=lambda _: nullcontext())
        return await pipelines.answer(route, body, work)

    wanted = {(route, name): await one(route, body) for route in pipelines.ROUTES for name, body in pictures.items()}
    if audit.mismatches:
        raise RuntimeError(f"{audit.mismatches} arrays of the reference were not made by {DEFAULT}")
    return wanted
