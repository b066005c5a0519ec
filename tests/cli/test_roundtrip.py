"""``hicache roundtrip``: its verdict, its JSON, its exit codes."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from hicache_shared import plugins
from hicache_shared.cli import main
from hicache_shared.cli.app import MODELS
from hicache_shared.cli.roundtrip import Request, roundtrip
from hicache_shared.hostpool import PRESETS, legal_layouts, preset
from hicache_shared.layout import MEMORY_LAYOUTS
from hicache_shared.memory import MemoryStore
from hicache_shared.store import Code

SMALL = ["--layers-div", "12", "--pages", "4"]
TOP = {
    "backend",
    "model",
    "layout",
    "layers_div",
    "pages",
    "restored_prefix_pages",
    "byte_exact",
    "pools",
}
POOL = {"pool", "page_bytes", "components", "pages", "bytes", "set_gbps", "get_gbps"}
C4 = "deepseek_v4_c4"
C4_STATE = "deepseek_v4_c4_state"

Run = Callable[..., tuple[int, dict[str, Any]]]
Spans = list[tuple[int, int]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run ``hicache roundtrip --json``: the exit code, and the JSON on standard output."""

    def run(*options: str, backend: str = "memory") -> tuple[int, dict[str, Any]]:
        code = main(["roundtrip", "--backend", backend, "--json", *options])
        return code, json.loads(capfd.readouterr().out)

    return run


LEGAL = [(model, layout) for model in PRESETS for layout in legal_layouts(preset(model))]
ILLEGAL = [
    (model, layout)
    for model in PRESETS
    for layout in (*MEMORY_LAYOUTS, "diagonal")
    if (model, layout) not in LEGAL
]


@pytest.mark.backend("memory")
@pytest.mark.parametrize(("model", "layout"), LEGAL)
def test_every_preset_and_legal_layout_is_byte_exact(run: Run, model: str, layout: str) -> None:
    code, report = run("--model", model, "--layout", layout, *SMALL)
    assert code == 0
    assert report.keys() == TOP
    pools = report.pop("pools")
    assert report == {
        "backend": "memory",
        "model": model,
        "layout": layout,
        "layers_div": 12,
        "pages": 4,
        "restored_prefix_pages": 4,
        "byte_exact": True,
    }
    assert [pool["pool"] for pool in pools] == [str(pool.name) for pool in preset(model).pools]
    for pool in pools:
        assert pool.keys() == POOL
        assert pool["pages"] == 4
        assert pool["bytes"] == 4 * pool["page_bytes"]
        if pool["page_bytes"]:
            assert pool["components"] > 0
            assert pool["set_gbps"] > 0
            assert pool["get_gbps"] > 0
        else:
            assert (pool["pool"], pool["components"]) == ("kv", 0)
            assert pool["set_gbps"] is pool["get_gbps"] is None


@pytest.mark.backend("memory")
def test_full_deepseek_v4_flash_has_the_published_geometry(run: Run) -> None:
    code, report = run("--pages", "8")
    assert (code, report["model"], report["layers_div"]) == (0, "deepseek-v4-flash", 1)
    assert [pool["page_bytes"] for pool in report["pools"]] == [
        0,
        44 * 149_760,
        21 * 37_440,
        21 * 8_448,
        21 * 131_072,
        21 * 32_768,
        20 * 1_728,
    ]


@pytest.mark.backend("memory")
@pytest.mark.parametrize("pages", ["1", "2", "130"])
def test_any_number_of_pages_is_byte_exact(run: Run, pages: str) -> None:
    code, report = run("--model", "swa", "--layers-div", "100", "--pages", pages)
    assert (code, report["restored_prefix_pages"]) == (0, int(pages))


@pytest.mark.parametrize(("model", "layout"), ILLEGAL)
def test_an_illegal_layout_names_the_legal_ones(run: Run, model: str, layout: str) -> None:
    code, report = run("--model", model, "--layout", layout, *SMALL)
    assert code == 2
    assert report.keys() == {*TOP, "error"}
    assert (report["byte_exact"], report["pools"]) == (False, [])
    assert report["error"]["kind"] == "LayoutError"
    assert report["error"]["message"].endswith(", ".join(legal_layouts(preset(model))))


# --- a backend that does wrong ------------------------------------------------------------


def flip(address: int) -> None:
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 1


def harm_gets(
    monkeypatch: pytest.MonkeyPatch, name: str, harm: Callable[[Code, Spans], Code]
) -> None:
    """Let ``harm`` change what the reference store does when it reads pages of a pool."""
    real = MemoryStore._get

    def get(store: MemoryStore, pool: Any, key: str, spans: Spans) -> Code:
        code = real(store, pool, key, spans)
        return harm(code, spans) if pool.layout.name == name else code

    monkeypatch.setattr(MemoryStore, "_get", get)


@pytest.mark.parametrize("name", ["swa", C4, C4_STATE, "deepseek_v4_c128"])
def test_one_wrong_byte_is_found_and_its_pool_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def last_byte(code: Code, spans: Spans) -> Code:
        flip(spans[-1][0] + spans[-1][1] - 1)
        return code

    harm_gets(monkeypatch, name, last_byte)
    code, report = run(*SMALL)
    assert code == 1
    assert report.keys() == {*TOP, "error"}
    assert report["byte_exact"] is False
    assert report["error"]["kind"] == "NotByteExact"
    (nbytes,) = (pool["page_bytes"] for pool in report["pools"] if pool["pool"] == name)
    together, alone = report["error"]["message"].split("; ")
    for line in (together, alone):
        assert line.startswith(f"pool {name}: page ")
        assert f"differs from byte {nbytes - 1} of component 0 on" in line
    assert together.endswith("with all pools in one call")
    assert alone.endswith("(4 of 4 pages differ), with one pool a call")


@pytest.mark.parametrize("name", ["kv", "mamba"])
@pytest.mark.parametrize("part", [0, -1])
def test_a_stray_write_beside_a_page_is_found(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, part: int
) -> None:
    def one_past_the_end(code: Code, spans: Spans) -> Code:
        flip(spans[part][0] + spans[part][1])
        return code

    harm_gets(monkeypatch, name, one_past_the_end)
    code, report = run("--model", "mamba", *SMALL)
    assert code == 1
    assert f"pool {name}: guard byte 0 of component" in report["error"]["message"]


def test_a_stray_write_outside_every_page_is_found(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowest: list[int] = []

    def before_all_pages(code: Code, spans: Spans) -> Code:
        lowest.append(min(address for address, _ in spans))
        if len(lowest) == 8:
            flip(min(lowest) - spans[0][1] - 1)
        return code

    harm_gets(monkeypatch, "kv", before_all_pages)
    code, report = run("--model", "mla", *SMALL)
    assert code == 1
    assert "a guard byte outside every page changed" in report["error"]["message"]


def test_another_pages_bytes_are_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = MemoryStore._put
    first: dict[str, Spans] = {}

    def put(store: MemoryStore, pool: Any, key: str, spans: Spans) -> Code:
        return real(store, pool, key, first.setdefault(pool.layout.name, spans))

    monkeypatch.setattr(MemoryStore, "_put", put)
    code, report = run("--model", "mha", *SMALL)
    assert code == 1
    assert "pool kv: page 1 " in report["error"]["message"]
    assert "(3 of 4 pages differ)" in report["error"]["message"]


def test_a_fault_of_calls_with_several_pools_is_found(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = MemoryStore.get

    def get(store: MemoryStore, batches: Any, deadline_s: float) -> list[list[int]]:
        answers = real(store, batches, deadline_s)
        if len(batches) > 1:
            flip(batches[-1].addresses[0])
        return answers

    monkeypatch.setattr(MemoryStore, "get", get)
    code, report = run(*SMALL)
    assert code == 1
    assert "with all pools in one call" in report["error"]["message"]
    assert "with one pool a call" not in report["error"]["message"]


def test_a_page_that_is_not_given_back_is_no_success(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    harm_gets(monkeypatch, "swa", lambda code, spans: Code.MISSING)
    code, report = run("--model", "swa", *SMALL)
    assert (code, report["restored_prefix_pages"]) == (1, 0)
    assert "the prefetch restored 0 of 4 pages" in report["error"]["message"]
    assert "pool swa: 4 of 4 pages were not restored" in report["error"]["message"]
    rates = {pool["pool"]: pool["get_gbps"] for pool in report["pools"]}
    assert rates["swa"] is None
    assert rates["kv"] > 0


def test_a_page_that_is_not_stored_is_no_success(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = MemoryStore._put

    def put(store: MemoryStore, pool: Any, key: str, spans: Spans) -> Code:
        return Code.NO_SPACE if pool.layout.name == C4 else real(store, pool, key, spans)

    monkeypatch.setattr(MemoryStore, "_put", put)
    code, report = run(*SMALL)
    assert (code, report["restored_prefix_pages"]) == (1, 0)
    message = report["error"]["message"]
    assert f"pool {C4}: the backup stored 0 of 4 pages" in message
    assert "the hit query finds a prefix of 0 of 4 pages" in message


def test_a_fault_of_the_backend_itself_is_json_too(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_store(*_: object) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("hicache_shared.memory_backend.MemoryBackend.open_store", open_store)
    code, report = run(*SMALL)
    assert code == 1
    assert report["error"] == {"kind": "ZeroDivisionError", "message": "on purpose"}


# --- usage ------------------------------------------------------------------------------------


def test_an_unknown_model_lists_the_known_ones(run: Run) -> None:
    code, report = run("--model", "gpt-9")
    assert (code, report["model"]) == (2, "gpt-9")
    assert report["error"]["kind"] == "ConfigError"
    assert all(name in report["error"]["message"] for name in PRESETS)


@pytest.mark.parametrize(
    "options", [["--pages", "0"], ["--pages", "x"], ["--layers-div", "0"], ["--bogus"], ["word"]]
)
def test_a_wrong_option_is_json_too(run: Run, options: list[str]) -> None:
    code, report = run(*options)
    assert code == 2
    assert report["byte_exact"] is False
    assert report["error"]["kind"] == "UsageError"


def test_more_than_4_gb_is_refused_with_what_would_fit(run: Run) -> None:
    code, report = run("--pages", "1000")
    assert (code, report["error"]["kind"]) == (2, "ConfigError")
    assert "take --layers-div 12 or more, or --pages 72 at most" in report["error"]["message"]


def test_a_master_for_a_backend_without_server_is_refused(run: Run) -> None:
    code, report = run("--master", "127.0.0.1:1", *SMALL)
    assert (code, report["error"]["kind"]) == (2, "ConfigError")


def test_the_models_in_the_help_are_the_presets() -> None:
    assert MODELS == PRESETS


def test_progress_ends_with_its_last_step() -> None:
    class Count:
        steps = begun = 0

        def start(self, steps: int) -> None:
            self.steps = steps

        def step(self, text: str) -> None:
            self.begun += 1

    progress = Count()
    request = Request(model="swa", pages=2, layout="page_first", layers_div=12, seed=0)
    roundtrip(plugins.MEMORY, request, None, progress)
    assert progress.begun == progress.steps > 0


# --- for people ---------------------------------------------------------------------------------


@pytest.mark.backend("memory")
def test_people_get_a_table_and_a_verdict(capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["roundtrip", "--backend", "memory", "--model", "mla", "--layers-div", "3"])
    out, err = capfd.readouterr()
    assert code == 0
    assert "layers divided by 3" in out
    assert f"{64 * 576 * 2 * 9:,}" in out
    assert "restored prefix: 8 of 8 pages" in out
    assert "byte-exact: every byte of 1 pools as stored" in out
    assert "\x1b" not in out + err


def test_people_are_told_what_differs(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_byte(code: Code, spans: Spans) -> Code:
        flip(spans[0][0])
        return code

    harm_gets(monkeypatch, "kv", first_byte)
    code = main(["roundtrip", "--backend", "memory", "--model", "mla", *SMALL])
    out = capfd.readouterr().out
    assert code == 1
    assert "NOT byte-exact" in out
    assert "pool kv: page " in out


def test_people_get_an_error_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["roundtrip", "--backend", "memory", "--model", "gpt-9"])
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("hicache: unknown model 'gpt-9'")


# --- on the real Mooncake -----------------------------------------------------------------------


def hicache(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hicache_shared.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.backend("mooncake")
@pytest.mark.parametrize("model", PRESETS)
def test_every_preset_is_byte_exact_through_mooncake_and_stdout_is_json_alone(model: str) -> None:
    done = hicache("roundtrip", "--backend", "mooncake", "--model", model, "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["backend"], report["byte_exact"]) == ("mooncake", True)
    assert report["restored_prefix_pages"] == 4


@pytest.mark.backend("mooncake")
def test_a_named_master_is_used_and_nothing_is_left_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from hicache_mooncake.server import MooncakeMaster
    from hicache_mooncake.testing import RawMooncake

    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    with (
        MooncakeMaster() as master,
        # A segment that outlives the command, since a client takes its own along.
        RawMooncake(master.address, master.admin_address, segment_bytes=256 * 2**20) as raw,
    ):
        raw.raw_put("another/deployment", b"stays")
        done = hicache(
            "roundtrip", "--backend", "mooncake", "--master", master.address, "--json", *SMALL
        )
        assert done.returncode == 0, done.stderr
        assert raw.raw_keys() == ["another/deployment"]


@pytest.mark.backend("mooncake")
def test_without_the_native_client_the_backend_is_not_available(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    code, report = run(*SMALL, backend="mooncake")
    assert (code, report["error"]["kind"]) == (3, "BackendUnavailableError")
    assert "hicache-mooncake[client" in report["error"]["message"]


@pytest.mark.backend("mooncake")
def test_without_a_master_there_the_backend_is_not_available() -> None:
    done = hicache("roundtrip", "--backend", "mooncake", "--master", "127.0.0.1:1", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["kind"] == "BackendUnavailableError"
