"""What of SGLang's HTTP API is used here."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.e2e.accounting import PREFETCH_THRESHOLD, Cached
from tests.e2e.divergence import Step

TOP = 20
"""Logprobs asked for a place."""


class EngineError(RuntimeError):
    """The engine cannot be reached or refuses a request."""


@dataclass(frozen=True)
class Answer:
    """A generated or scored text, and where its prompt's KV came from."""

    steps: tuple[Step, ...]
    cached: Cached

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(step.token for step in self.steps)


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself.

    Attributes:
        page: tokens a page.
        threshold: of prefetches from the storage, in tokens.
        storage: its ``--hicache-storage-backend``; None without one.
        class_name: the class that ``dynamic`` loads; None for SGLang's own backends.
    """

    page: int
    threshold: int
    storage: str | None
    class_name: str | None


@dataclass(frozen=True)
class Client:
    """A client of one server. Requests go one after the other; no state is kept.

    Attributes:
        url: ``http://host:port``.
        timeout_s: of a request.
        api_key: of a server that wants one.
    """

    url: str
    timeout_s: float = 600.0
    api_key: str | None = None

    def generate(self, tokens: Sequence[int], count: int, *, salt: str | None = None) -> Answer:
        """The ``count`` likeliest next tokens, one by one (greedy).

        Args:
            salt: pages of one salt are found by requests with the same alone, so a new one makes a
                run without a cache.

        Raises:
            EngineError: no answer, or a refusal.
        """
        body = {**_request(tokens, salt), "sampling_params": _greedy(count)}
        meta = self._json("/generate", body)["meta_info"]
        chosen, top = meta["output_token_logprobs"], meta["output_top_logprobs"]
        return Answer(tuple(map(_step, chosen, top)), Cached.of(meta))

    def score(
        self, tokens: Sequence[int], text: Sequence[int], *, salt: str | None = None
    ) -> Answer:
        """The logprobs of a given ``text`` after a prompt (teacher-forced).

        Raises:
            EngineError: no answer, or a refusal.
        """
        body = {
            **_request([*tokens, *text], salt),
            "sampling_params": _greedy(1),
            # The first place that is told has no logprob of its own: it is the prompt's last.
            "logprob_start_len": len(tokens) - 1,
        }
        meta = self._json("/generate", body)["meta_info"]
        chosen, top = meta["input_token_logprobs"], meta["input_top_logprobs"]
        return Answer(tuple(map(_step, chosen[1:], top[1:])), Cached.of(meta))

    def flush(self, timeout_s: float) -> None:
        """Wait until no page is under way to host or storage, then forget device and host.

        The wait is SGLang's: with a timeout, ``/flush_cache`` is carried out once no request runs
        and no backup, prefetch or write to the host is under way.

        Raises:
            EngineError: that did not come within ``timeout_s``.
        """
        self._read(f"/flush_cache?timeout={timeout_s}", {})

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text.

        Raises:
            EngineError: no answer, or the server has no tokenizer.
        """
        body = {"prompt": text, "add_special_tokens": False}
        return [int(token) for token in self._json("/tokenize", body)["tokens"]]

    def info(self) -> ServerInfo:
        """What the server says of itself.

        Raises:
            EngineError: no answer.
        """
        said = self._json("/server_info", None)
        extra = json.loads(said.get("hicache_storage_backend_extra_config") or "{}")
        return ServerInfo(
            page=int(said["page_size"]),
            threshold=int(extra.get("prefetch_threshold", PREFETCH_THRESHOLD)),
            storage=said.get("hicache_storage_backend"),
            class_name=extra.get("class_name"),
        )

    def _json(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._read(path, body))
        return answer

    def _read(self, path: str, body: dict[str, Any] | None) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as refusal:
            said = refusal.read().decode(errors="replace").strip()
            raise EngineError(f"{path} answered {refusal.code}: {said}") from refusal
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"no answer from {self.url}{path}: {error}") from error


def _request(tokens: Sequence[int], salt: str | None) -> dict[str, Any]:
    salted = {} if salt is None else {"cache_salt": salt}
    return {
        "input_ids": list(tokens),
        "return_logprob": True,
        "top_logprobs_num": TOP,
        **salted,
    }


def _greedy(count: int) -> dict[str, Any]:
    # Without ignore_eos a text could end early, and a prompt would show less than others.
    return {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}


def _step(chosen: Sequence[Any], top: Sequence[Sequence[Any]]) -> Step:
    return Step(int(chosen[1]), float(chosen[0]), {int(each[1]): float(each[0]) for each in top})
