"""A fake of SGLang's HTTP API, for tests of the accounting alone.

``python -m tests.e2e.fake PORT FILE`` serves it, and writes to the file the ID of a process that it
starts beside it, as an engine starts its ranks.

Its "model" is a digest of the tokens so far, its cache a set of prefixes a tier. It shows nothing
about SGLang or a storage.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

VOCABULARY = 500

Prefix = tuple[str | None, tuple[int, ...]]


@dataclass
class FakeEngine:
    """An engine of two tiers, device and storage, and what may be wrong with it.

    Attributes:
        page, threshold: of its storage.
        backend: what it was told to load.
        named: named in its answers.
        api_key: what a client must show; empty where it need not.
        loses: the storage forgets all that it is given.
        keeps_device: a flush does not forget the device.
        garbles: bytes from the storage are others.
        drifts: added to a logprob where KV comes from the storage, in nats.
        wavers: prompts of these lengths get another answer each time.
        stuck: writes never end.
        uncached_salts: salts of the requests that had one, and nothing cached.
    """

    page: int = 16
    threshold: int = 16
    backend: str = "FakeBackend"
    named: str = "FakeBackend"
    api_key: str = ""
    loses: bool = False
    keeps_device: bool = False
    garbles: bool = False
    drifts: float = 0.0
    wavers: frozenset[int] = frozenset()
    stuck: bool = False
    device: set[Prefix] = field(default_factory=set)
    storage: set[Prefix] = field(default_factory=set)
    uncached_salts: list[str] = field(default_factory=list)
    requests: int = 0

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """``/generate``."""
        self.requests += 1
        tokens = list(body["input_ids"])
        start = body.get("logprob_start_len", -1)
        cached = self._cached(body.get("cache_salt"), tokens, len(tokens) if start < 0 else start)
        if body.get("cache_salt") and not any(cached.values()):
            self.uncached_salts.append(body["cache_salt"])
        count = body["sampling_params"]["max_new_tokens"]
        state = self._state(tokens, cached)
        prompt = len(tokens)
        for place in range(count):
            tokens.append(state(tokens, prompt + place)[0])
        meta: dict[str, Any] = {"cached_tokens": sum(cached.values())}
        if any(cached.values()):
            meta["cached_tokens_details"] = {**cached, "storage_backend": self.named}
        told = [state(tokens, place)[1] for place in range(prompt, len(tokens))]
        meta["output_token_logprobs"] = [_told(tokens[prompt + i], t) for i, t in enumerate(told)]
        meta["output_top_logprobs"] = [[[p, t, None] for t, p in top.items()] for top in told]
        if start >= 0:
            tops = [state(tokens, place)[1] for place in range(start + 1, prompt)]
            scored = [_told(tokens[start + 1 + i], top) for i, top in enumerate(tops)]
            meta["input_token_logprobs"] = [[None, tokens[start], None], *scored]
            listed = [[[p, t, None] for t, p in top.items()] for top in tops]
            meta["input_top_logprobs"] = [None, *listed]
        return {"output_ids": tokens[prompt:], "meta_info": meta}

    def flush(self) -> bool:
        """``/flush_cache``; False where writes do not end."""
        if self.stuck:
            return False
        if not self.keeps_device:
            self.device.clear()
        return True

    def restart(self) -> None:
        """Forget the device."""
        self.device.clear()

    def info(self) -> dict[str, Any]:
        """``/server_info``."""
        extra = {"class_name": self.backend, "prefetch_threshold": self.threshold}
        return {
            "page_size": self.page,
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps(extra),
        }

    def _cached(self, salt: str | None, tokens: Sequence[int], most: int) -> dict[str, int]:
        usable = min(len(tokens) - 1, most) // self.page
        ends = [page * self.page for page in range(1, len(tokens) // self.page + 1)]
        prefixes: list[Prefix] = [(salt, tuple(tokens[:end])) for end in ends]
        device = _run(prefixes[:usable], self.device) * self.page
        storage = 0
        if not device and usable * self.page >= self.threshold:
            storage = _run(prefixes[:usable], self.storage) * self.page
        self.device.update(prefixes)
        if not self.loses:
            self.storage.update(prefixes)
        return {"device": device, "host": 0, "storage": storage}

    def _state(
        self, prompt: Sequence[int], cached: dict[str, int]
    ) -> Callable[[Sequence[int], int], tuple[int, dict[int, float]]]:
        """What comes at a place of a text: the likeliest token, and the logprobs."""
        wrong = self.garbles and cached["storage"] > 0
        salt = f"{self.requests if len(prompt) in self.wavers else ''}{'x' if wrong else ''}"
        drift = self.drifts if cached["storage"] else 0.0

        def state(tokens: Sequence[int], place: int) -> tuple[int, dict[int, float]]:
            digest = hashlib.sha256(f"{salt}{list(tokens[:place])}".encode()).digest()
            ids = [digest[0] * 256 + digest[1], digest[2], 256 + digest[3]]
            first, second = ids[0] % VOCABULARY, ids[1]
            chances = {first: 0.6, second if second != first else ids[2]: 0.3}
            return first, {token: math.log(p) - drift for token, p in chances.items()}

        return state


def _told(token: int, top: dict[int, float]) -> list[Any]:
    return [top.get(token, -9.0), token, None]


def _run(prefixes: Sequence[Prefix], tier: set[Prefix]) -> int:
    length = 0
    while length < len(prefixes) and prefixes[length] in tier:
        length += 1
    return length


class FakeServer:
    """The fake over HTTP while the context lasts.

    Attributes:
        engine: what answers; one request at a time.
        url: where.
    """

    def __init__(self, engine: FakeEngine, port: int = 0) -> None:
        self.engine = engine
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(engine))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._route(None)

        def do_POST(self) -> None:
            self._route(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *_: Any) -> None:
            pass

        def _route(self, body: Any) -> None:
            path = self.path.partition("?")[0]
            if engine.api_key and self.headers["Authorization"] != f"Bearer {engine.api_key}":
                self._answer(401, "Unauthorized")
            elif path == "/server_info":
                self._answer(200, engine.info())
            elif path == "/generate":
                self._answer(200, engine.generate(body))
            elif path == "/tokenize":
                self._answer(200, {"tokens": [3 + byte for byte in body["prompt"].encode()]})
            elif path == "/restart":
                engine.restart()
                self._answer(200, "Restarted.")
            elif path == "/flush_cache" and engine.flush():
                self._answer(200, "Cache flushed.")
            else:
                self._answer(400, "Timed out waiting for idle state.")

        def _answer(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def main() -> None:
    rank = subprocess.Popen(["sleep", "600"])
    Path(sys.argv[2]).write_text(str(rank.pid))
    with FakeServer(FakeEngine(), int(sys.argv[1])):
        rank.wait()


if __name__ == "__main__":
    main()
