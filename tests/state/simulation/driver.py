"""A random operator: the same events as the property tests, in long cheap runs."""

import random

from .server import LOAD_STEPS, Server, prompt

SHORT = [1, 2, 3, 4, 5, 7, 8, 40, 122, 126, 127, 128, 130, 250, 255]
LONG = [256, 257, 259, 262, 300, 511, 512, 513, 516, 520, 600]
WEIGHTS = {
    "admit": 16,
    "readmit": 3,
    "chunk": 22,
    "verify": 36,
    "idle": 2,
    "finish": 9,
    "abort": 3,
    "retract": 2,
    "slide": 2,
    "evict": 1,
    "tombstone": 3,
    "backup": 2,
    "squeeze": 8,
    "flush": 0.5,
    "resume": 0.5,
}


def operate(server: Server, rng: random.Random, events: int) -> None:
    """`events` random events with all checks after each."""
    for _ in range(events):
        event(server, rng)
        server.check()
    server.settle()
    server.check()


def event(server: Server, rng: random.Random) -> None:
    rows = server.state.geometry.verify_width
    live = server.live
    match rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]:
        case "admit":
            fail = rng.choice([None, None, *range(len(LOAD_STEPS))])
            server.admit(
                prompt(rng.randrange(2), rng.choice(rng.choice([SHORT, LONG, LONG]))), fail
            )
        case "readmit":
            server.readmit()
        case "chunk":
            server.chunk(rng.choice([1, 3, 128, 131, 256, 300, 600, 600]), rng.randint(1, 3))
        case "verify":
            lengths = rng.choice([[rows], [1], [rng.randint(1, rows) for _ in range(4)]])
            server.verify([rng.randint(1, rows) for _ in range(4)], lengths)
        case "finish" if live:
            server.finish(rng.choice(live), cut=rng.randint(0, 3))
        case "abort" if live:
            server.abort(rng.choice(live))
        case "retract" if live:
            server.retract(rng.choice(live))
        case "slide" | "evict" | "tombstone" | "backup" | "squeeze" | "idle" as name:
            getattr(server, name)()
        case "flush" | "resume" as name:
            for request in list(live):
                server.abort(request)
            getattr(server, name)()
