"""The streaming client and the load generator against a small server in this process."""

import asyncio
import contextlib
import json
import threading

import pytest
from aiohttp import web

from dspark.bench import load as load_module
from dspark.bench.client import RequestFailed, request_body
from dspark.bench.load import Target, run_load

# Tokens known after each event: a first token, then two verify steps of 3 and 2 tokens.
COUNTS = (1, 4, 6)


class FakeServer:
    """Answers both protocols; every event carries several tokens, as under speculation."""

    def __init__(self, incremental=False, usage="each", error=None):
        self.incremental = incremental
        self.usage = usage  # "each" event, the "last" one, or "never"
        self.error = error
        self.bodies = []
        self.flushes = 0

    def app(self):
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/server_info", self.server_info)
        app.router.add_post("/flush_cache", self.flush)
        return app

    async def events(self, request, bodies):
        self.bodies.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for body in bodies:
            await response.write(b"data: " + json.dumps(body).encode() + b"\n\n")
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def generate(self, request):
        if self.error:
            return await self.events(request, [{"error": {"message": self.error}}])
        ids = [10, 11, 12, 13, 14, 15]
        bodies = []
        for before, count in zip((0, *COUNTS), COUNTS, strict=False):
            meta = {"completion_tokens": count}
            if count == COUNTS[-1]:
                meta |= {"spec_verify_ct": 2, "spec_correct_drafts_histogram": [0, 1, 1]}
            sent = ids[before:count] if self.incremental else ids[:count]
            bodies.append({"output_ids": sent, "meta_info": meta})
        return await self.events(request, bodies)

    async def completions(self, request):
        bodies = [{"choices": [{"text": "x"}]} for _ in COUNTS]
        if self.usage == "each":
            for body, count in zip(bodies, COUNTS, strict=True):
                body["usage"] = {"completion_tokens": count}
        if self.usage != "never":
            bodies.append({"choices": [], "usage": {"completion_tokens": COUNTS[-1]}})
        return await self.events(request, bodies)

    async def server_info(self, request):
        return web.json_response({"internal_states": [{"last_gen_throughput": 7.5}]})

    async def flush(self, request):
        """As SGLang right after its last answer: not idle yet, so refuses who does not wait."""
        self.flushes += 1
        return web.Response(status=200 if float(request.query.get("timeout", 0)) > 0 else 400)


@pytest.fixture
def ask(serve_app, monkeypatch):
    """Function (server, api, prompts) -> Load; the server runs in a thread of its own."""
    monkeypatch.setattr(load_module, "SAMPLE_S", 0.01)

    def run(server, api="sglang", prompts=((1, 2), (3, 4), (5, 6)), temperature=0):
        with serve_app(server.app()) as port:
            target = Target(f"http://127.0.0.1:{port}", api, "m", temperature)
            return run_load(target, prompts, 6)

    return run


@pytest.fixture
def serve_app():
    @contextlib.contextmanager
    def serve(app):
        loop = asyncio.new_event_loop()
        runner = web.AppRunner(app)
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()

        async def start():
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            return runner.addresses[0][1]

        try:
            yield asyncio.run_coroutine_threadsafe(start(), loop).result()
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    return serve


@pytest.mark.parametrize("incremental", [False, True])
def test_tokens_come_from_usage_not_from_chunks(ask, incremental):
    server = FakeServer(incremental)
    load = ask(server)
    assert [trace.tokens for trace in load.traces] == [6, 6, 6]
    for trace in load.traces:
        assert [step.tokens for step in trace.steps] == [1, 4, 6]
        assert trace.output_ids == [10, 11, 12, 13, 14, 15]
        assert (trace.verify_steps, trace.accepted) == (2, [0, 1, 1])
        assert trace.start <= trace.first_token <= trace.steps[-1].at <= trace.end
        assert load.release <= trace.end
    assert load.cache_flushed
    assert server.flushes == 1
    assert sorted(body["input_ids"] for body in server.bodies) == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("usage", ["each", "last"])
def test_openai_servers_are_counted_from_usage_too(ask, usage):
    (trace,) = ask(FakeServer(usage=usage), "openai", [(1, 2)]).traces
    assert trace.tokens == 6
    assert trace.output_ids is None
    assert trace.verify_steps is None
    assert [step.tokens for step in trace.steps] == ([1, 4, 6] if usage == "each" else [1, 6])


def test_a_server_without_usage_cannot_be_measured(ask):
    with pytest.raises(RequestFailed, match="no usage"):
        ask(FakeServer(usage="never"), "openai", [(1, 2)])


def test_an_error_in_the_stream_fails_the_run(ask):
    with pytest.raises(RequestFailed, match="out of memory"):
        ask(FakeServer(error="out of memory"))


def test_an_error_status_fails_the_run(ask):
    server = FakeServer()

    async def refuse(request):
        return web.Response(status=400, text="prompt too long")

    server.generate = refuse
    with pytest.raises(RequestFailed, match="400: prompt too long"):
        ask(server)


def test_requests_are_greedy_and_of_fixed_length():
    sglang = request_body("sglang", [1, 2], 7, "m")
    assert sglang["sampling_params"] == {
        "temperature": 0,
        "max_new_tokens": 7,
        "ignore_eos": True,
    }
    openai = request_body("openai", [1, 2], 7, "m")
    assert (openai["prompt"], openai["max_tokens"], openai["model"]) == ([1, 2], 7, "m")
    assert openai["ignore_eos"]
    assert openai["stream_options"]["include_usage"]


@pytest.mark.parametrize("api", ["sglang", "openai"])
def test_sampled_clients_have_seeds_of_their_own(ask, api):
    """The same ones in every run, so that two servers do the same work."""
    server = FakeServer()
    for _ in range(2):
        ask(server, api, temperature=0.7)
    assert len(server.bodies) == 6
    seeds = {}
    for body in server.bodies:
        wish = body.get("sampling_params", body)
        assert wish["temperature"] == 0.7
        prompt = tuple(body.get("input_ids") or body["prompt"])
        seeds.setdefault(prompt, []).append(wish.get("sampling_seed", wish.get("seed")))
    assert seeds == {(1, 2): [0, 0], (3, 4): [1, 1], (5, 6): [2, 2]}
