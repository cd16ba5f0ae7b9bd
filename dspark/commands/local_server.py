"""A `dspark serve` process of one's own: started, waited for, asked, and stopped again.

Used by the demo, the benchmarks and the tests.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import requests

POLL_S = 0.25
STOP_S = 30
IDLE_S = 30  # most seconds that SGLang shall wait for its last step to end
# What follows `python -m`.
SERVE = ("dspark.cli", "serve")
PLAIN = ("sglang.launch_server",)


class ServerFailed(RuntimeError):
    """The server ended or did not become ready; the message ends with the tail of its log."""


class Output(NamedTuple):
    ids: list[int]
    text: str  # empty for a server without tokenizer
    meta: dict[str, Any]  # SGLang's `meta_info`


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class LocalServer:
    """One server process on a free port of this machine.

    Args:
        model_path: checkpoint directory.
        flags: further `dspark serve` arguments.
        env: variables on top of this process's.
        log: file for the server's output; a temporary one if None.
        ready_s: seconds to wait for the server to answer.
        program: SERVE or PLAIN.

    Raises:
        ServerFailed: on start, if it ends early or is not ready in time.
    """

    def __init__(
        self,
        model_path: str | Path,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        ready_s: float = 600,
        program: Sequence[str] = SERVE,
    ):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_file = log or Path(tempfile.mkstemp(prefix="dspark-serve-", suffix=".log")[1])
        command = [sys.executable, "-m", *program, "--model-path", str(model_path)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *flags]
        started = time.monotonic()
        with self.log_file.open("w") as log_stream:
            # A group of its own, so that stopping reaches every worker and nobody else.
            self.process = subprocess.Popen(
                command,
                env=os.environ | dict(env or {}),
                stdout=log_stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_ready(started + ready_s)
        except BaseException:
            self.stop()
            raise
        self.startup_s = time.monotonic() - started

    def __enter__(self) -> "LocalServer":
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def alive(self) -> bool:
        return self.process.poll() is None

    def _wait_ready(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if not self.alive():
                raise ServerFailed(f"The server ended during start-up:\n{self._log_tail()}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=30).ok:
                    return
            time.sleep(POLL_S)
        raise ServerFailed(f"The server was not ready in time:\n{self._log_tail()}")

    def _log_tail(self, lines: int = 25) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def stop(self) -> int:
        """Ask the server to end, insist after a while, and return its exit status."""
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # workers that outlived their parent
        return self.process.wait()

    def request(self, path: str, body: dict | None = None, timeout: float = 600) -> Any:
        """GET, or POST a JSON body; the decoded JSON answer, or its text.

        Raises:
            requests.HTTPError: any status but 2xx; the response hangs on the exception.
        """
        if body is None:
            response = requests.get(self.url + path, timeout=timeout)
        else:
            response = requests.post(self.url + path, json=body, timeout=timeout)
        response.raise_for_status()
        try:
            return response.json()
        except ValueError:
            return response.text

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        request_id: str | None = None,
        **sampling,
    ) -> Output:
        """One completion, greedy and of exactly `max_new_tokens` unless `sampling` says else."""
        body = _body(prompt, max_new_tokens, sampling)
        if request_id is not None:
            body["rid"] = request_id  # the name to abort it by
        return _output(self.request("/generate", body))

    def abort(self, request_id: str) -> None:
        self.request("/abort_request", {"rid": request_id})

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **sampling
    ) -> list[Output]:
        """One HTTP request with many prompts, answered in their order."""
        body = _body([], max_new_tokens, sampling) | {"input_ids": [list(p) for p in prompts]}
        return [_output(answer) for answer in self.request("/generate", body)]

    def generate_concurrently(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int], **sampling
    ) -> list[Output]:
        """One HTTP request per prompt, all at once, submitted in order."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            jobs = [
                threads.submit(self.generate, prompt, length, **sampling)
                for prompt, length in zip(prompts, max_new_tokens, strict=True)
            ]
            return [job.result() for job in jobs]

    def stream(
        self, prompt: str | Sequence[int], max_new_tokens: int, **sampling
    ) -> Iterator[Output]:
        """Yield the completion so far, each time the server sends more of it."""
        body = _body(prompt, max_new_tokens, sampling) | {"stream": True}
        with requests.post(f"{self.url}/generate", json=body, stream=True, timeout=600) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                event = line.removeprefix(b"data: ")
                if event and event != b"[DONE]":
                    yield _output(json.loads(event))

    def flush_cache(self) -> None:
        """Forget every cached prefix, once the server is idle.

        It still is not when its last answer arrives: an overlapped step is yet to end.
        """
        self.request(f"/flush_cache?timeout={IDLE_S}", {})

    def load(self) -> dict[str, Any]:
        """SGLang's load report of the only worker: used tokens, running and waiting requests."""
        return self.request("/v1/loads")["loads"][0]

    def info(self) -> dict[str, Any]:
        """SGLang's `/server_info`."""
        return self.request("/server_info")


def _body(prompt: str | Sequence[int], max_new_tokens: int, sampling: dict) -> dict[str, Any]:
    parameters = {"temperature": 0, "ignore_eos": True, "max_new_tokens": max_new_tokens}
    inputs = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    return inputs | {"sampling_params": parameters | sampling}


def _output(answer: dict[str, Any]) -> Output:
    if "error" in answer:  # a stream reports errors in its body
        raise ServerFailed(answer["error"]["message"])
    return Output(answer.get("output_ids", []), answer.get("text", ""), answer["meta_info"])
