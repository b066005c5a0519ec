"""SGLang's own engine and server on a CPU: what was stored is what is restored.

Each test starts processes of SGLang with a tiny model. Its prompts are written, forgotten by
device and host, and restored from the real backend's storage (``tests.e2e``).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.accounting import Cached, Rule
from tests.e2e.command import main
from tests.e2e.divergence import Bounds, compare
from tests.e2e.prompts import boundary_prompts
from tests.e2e.server import OwnEngine
from tests.e2e.stores import STORAGES, Storage, corrupt, kv_keys
from tests.e2e.trial import Trial
from tests.e2e.verdict import ExitCode, Judge, Verdict, exit_code
from tests.sglang.engine.engines import ENGINE, PAGE, SERVER, Setup
from tests.sglang.engine.tiny_models import VOCABULARY

pytest.importorskip("sglang.srt.mem_cache.hicache_storage")

PAGES = (2, 9)
TOKENS = 4
STORE_BYTES = 64 << 20
BOUNDS = Bounds()
"""On a CPU a run from the storage is the same but for rounding: with fewer tokens to compute, sums
are added in another order. Seen: up to 0.024 in a logprob of bf16 logits, and 0 in most runs."""


def backend(
    name: str, model: str, tp: int, *, module: str = ENGINE, page: int = PAGE
) -> pytest.ParameterSet:
    setup = Setup(module, model, name, tp, page)
    return pytest.param(setup, marks=pytest.mark.backend(name), id=f"{name}-{model}-tp{tp}")


@contextmanager
def running(setup: Setup, storage: Storage, models: Path, tmp_path: Path) -> Iterator[OwnEngine]:
    """An engine; what it printed is shown if the test fails."""
    log = tmp_path / "engine.log"
    engine = setup.engine(storage, models, log)
    try:
        with engine:
            yield engine
    except BaseException:
        print(log.read_text(errors="replace")[-8000:])
        raise


def try_out(engine: OwnEngine, *, seed: str, restart: bool) -> None:
    """Require a good run, with pages from the storage for every prompt that has some."""
    info = engine.client.info()
    trial = Trial(
        engine=engine.client,
        judge=Judge(Rule(info.page, info.threshold), BOUNDS, info.class_name),
        prompts=boundary_prompts(info.page, PAGES, vocabulary=VOCABULARY, seed=seed),
        count=TOKENS,
        drain_s=60.0,
        restart=engine.restart if restart else None,
        tell=print,
    )
    judged = trial.run()
    assert info.page == PAGE
    assert {each.verdict for each in judged} == {Verdict.FROM_STORAGE}
    assert exit_code(judged) is ExitCode.GOOD
    assert len(judged) == len(trial.prompts) * (3 if restart else 2)


def check_corruption(engine: OwnEngine, storage: Storage) -> None:
    """Require that a page whose bytes were changed in the storage is not taken for the old one:
    the output changes, or the page is a miss."""
    assert storage.raw is not None
    client = engine.client
    (*_, prompt) = boundary_prompts(PAGE, PAGES, vocabulary=VOCABULARY, seed="corrupted")
    before = kv_keys(storage.raw)
    right = client.generate(prompt.tokens, TOKENS)
    client.flush(60.0)
    ours = sorted(kv_keys(storage.raw) - before)
    assert len(ours) >= len(prompt.tokens) // PAGE
    corrupt(storage.raw, ours[0])
    wrong = client.generate(prompt.tokens, TOKENS)
    if wrong.cached.storage == right_count(prompt.tokens):
        assert not compare(right.steps, wrong.steps).within(BOUNDS)


def right_count(tokens: tuple[int, ...]) -> int:
    return Rule(PAGE, threshold=PAGE).from_storage(len(tokens))


@pytest.mark.parametrize("setup", [backend("ucm", "sliding-window", 1)])
def test_an_engine_restores_what_it_stored_and_so_does_the_next(
    setup: Setup, models: Path, tmp_path: Path
) -> None:
    with (
        STORAGES[setup.backend](tmp_path, STORE_BYTES) as storage,
        running(setup, storage, models, tmp_path) as engine,
    ):
        try_out(engine, seed="engine", restart=True)
        check_corruption(engine, storage)


@pytest.mark.parametrize("setup", [backend("mooncake", "llama", 2)])
def test_two_ranks_restore_what_they_stored(setup: Setup, models: Path, tmp_path: Path) -> None:
    with (
        STORAGES[setup.backend](tmp_path, STORE_BYTES) as storage,
        running(setup, storage, models, tmp_path) as engine,
    ):
        try_out(engine, seed="ranks", restart=False)
        check_corruption(engine, storage)


@pytest.mark.parametrize("setup", [backend("umbp", "llama", 1)])
def test_an_engine_restores_what_lies_in_its_own_memory(
    setup: Setup, models: Path, tmp_path: Path
) -> None:
    """UMBP embedded: the storage ends with the engine, so there is no restart, and nothing to
    corrupt from outside."""
    with (
        STORAGES[setup.backend](tmp_path, STORE_BYTES) as storage,
        running(setup, storage, models, tmp_path) as engine,
    ):
        try_out(engine, seed="engine", restart=False)


@pytest.mark.parametrize("setup", [backend("ucm", "short-convolution", 1, page=1)])
def test_a_text_goes_on_from_a_stored_state(setup: Setup, models: Path, tmp_path: Path) -> None:
    """A model with recurrent states, whose prefix ends where a state was kept: on a CPU at the end
    of a text, so that only a longer text can use it."""
    with (
        STORAGES[setup.backend](tmp_path, STORE_BYTES) as storage,
        running(setup, storage, models, tmp_path) as engine,
    ):
        client = engine.client
        (*_, prompt) = boundary_prompts(PAGE, PAGES, vocabulary=VOCABULARY, seed="state")
        first = client.generate(prompt.tokens, TOKENS)
        longer = [*prompt.tokens, *first.tokens, 7]
        reference = client.generate(longer, TOKENS, salt="apart")
        client.flush(60.0)
        again = client.generate(longer, TOKENS)
        assert reference.cached.total == 0
        # The last generated token was never an input, so nothing is known behind it.
        stored = len(longer) - 2
        assert again.cached == Cached(storage=stored, backend="UcmBackend")
        assert compare(reference.steps, again.steps).within(BOUNDS)


@pytest.mark.parametrize("setup", [backend("mooncake", "sliding-window", 1, module=SERVER)])
def test_the_command_finds_a_live_server_good(setup: Setup, models: Path, tmp_path: Path) -> None:
    with STORAGES[setup.backend](tmp_path, STORE_BYTES) as storage:
        engine = setup.engine(storage, models, tmp_path / "unused")
        assert run_command(engine, tmp_path) == ExitCode.GOOD


def run_command(engine: OwnEngine, tmp_path: Path) -> int:
    """``python -m tests.e2e`` on a server that it starts and restarts."""
    log = tmp_path / "server.log"
    variables = [f"{name}={value}" for name, value in engine.environment.items()]
    launch = shlex.join(["env", *variables, *engine.command])
    code = main(
        [
            *("--launch", launch, "--url", engine.client.url, "--log", str(log)),
            *("--vocabulary", str(VOCABULARY), "--tokens", str(TOKENS)),
            *("--pages", *map(str, PAGES)),
            *("--kl", str(BOUNDS.kl), "--logprob", str(BOUNDS.logprob)),
        ]
    )
    if code:
        print(log.read_text(errors="replace")[-8000:])
    return code
