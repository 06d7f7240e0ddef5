"""An ASGI application that sends several messages of one answer at a time, or gives one up, in a whole request."""

PROGRAM = """
    from ctxalloc.asgi import AllocatorMiddleware
    if sys.argv[1] == "trio":
        import trio
        run, turn = trio.run, trio.lowlevel.checkpoint
        async def together(*calls):
            async with trio.open_nursery() as nursery:
                for call in calls:
                    nursery.start_soon(lambda call=call: call)
    else:
        run, turn, together = asyncio.run, lambda: asyncio.sleep(0), asyncio.gather
    START = {"type": "http.response.start", "status": 200, "headers": []}
    def part(body, more=True):
        return {"type": "http.response.body", "body": body, "more_body": more}

    async def late(scope, receive, send):
        await send(START)
        first = send(part(b"1"))
        await together(send(part(b"2")), first)
        await send(part(b"", more=False))
    async def many(scope, receive, send):
        await send(START)
        await together(*[send(part(b"%d" % number)) for number in range(3)])
        await send(part(b"", more=False))
    async def given_up(scope, receive, send):
        await send(START)
        send(part(b"ping")).close()
        await send(part(b"", more=False))

    async def serve(app):
        sent = []
        async def send(message):
            if message["type"] == "http.response.start":
                await turn()  # as a server that waits for its connection
                await turn()
            sent.append(message.get("body", b"headers"))
        await AllocatorMiddleware(app, default=ctxalloc.request(whole=True))(
            {"type": "http", "path": "/", "method": "GET", "headers": []}, None, send
        )
        return sent
    for app, bodies in (late, {b"1", b"2"}), (many, {b"0", b"1", b"2"}), (given_up, set()):
        first, *parts, last = run(serve, app) if sys.argv[1] == "trio" else run(serve(app))
        assert (first, set(parts), last) == (b"headers", bodies, b""), (app, first, parts, last)
        assert len(parts) == len(bodies)
"""
