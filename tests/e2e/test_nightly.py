"""What a nightly run is told by its environment, and what it starts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e import machines, nightly
from tests.e2e.command import parser
from tests.e2e.nightly import Nightly
from tests.e2e.stores import Storage
from tests.e2e.verdict import ExitCode

GIVEN = {"HICACHE_E2E_BACKEND": "mooncake", "HICACHE_E2E_MODEL": "org/model"}


def test_a_variable_is_a_field_and_an_empty_one_is_not_set() -> None:
    environ = {**GIVEN, "HICACHE_E2E_TP": "8", "HICACHE_E2E_PAGE_SIZE": "", "HICACHE_E2E_PORT": "1"}
    assert Nightly.of(environ) == Nightly("mooncake", "org/model", tp=8, port=1)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "not set: HICACHE_E2E_BACKEND, HICACHE_E2E_MODEL"),
        ({**GIVEN, "HICACHE_E2E_BACKEND": "disk"}, "is one of mooncake, ucm, umbp"),
        ({**GIVEN, "HICACHE_E2E_TP": "two"}, "invalid literal"),
    ],
)
def test_what_is_wrong_is_said(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Nightly.of(environ)


def test_the_server_is_told_the_model_the_page_the_ranks_and_the_storage() -> None:
    run = Nightly("mooncake", "org/model", tp=4, page_size=256, flags="--trust-remote-code")
    command = run.command(Storage({"master_server_address": "127.0.0.1:1"}, raw=None))
    pairs = dict(pairwise(command))
    assert pairs["--model-path"] == "org/model"
    assert (pairs["--tp-size"], pairs["--page-size"]) == ("4", "256")
    assert pairs["--hicache-storage-backend"] == "dynamic"
    assert command[-1] == "--trust-remote-code"
    extra = json.loads(pairs["--hicache-storage-backend-extra-config"])
    assert extra["class_name"] == "MooncakeBackend"
    assert extra["master_server_address"] == "127.0.0.1:1"
    assert extra["model_id"] == "org/model"


@pytest.mark.parametrize("lasts", [True, False])
def test_an_engine_is_restarted_where_its_storage_outlives_it(lasts: bool) -> None:
    storage = Storage({}, raw=NoObjects() if lasts else None)
    arguments = Nightly("umbp", "org/model", states=64).arguments(storage, Path("log"))
    options = parser().parse_args(arguments)
    assert options.no_restart is not lasts
    assert options.states == 64
    assert "--page-size 64" in options.launch


class NoObjects:
    def raw_keys(self, prefix: str = "") -> list[str]:
        return []

    def raw_get(self, key: str) -> bytes | None:
        return None

    def raw_put(self, key: str, data: bytes, /) -> None:
        raise KeyError(key)


@pytest.mark.parametrize(("required", "code"), [("1", ExitCode.NO_ENGINE), ("", ExitCode.GOOD)])
def test_without_a_gpu_it_skips_or_where_it_is_required_fails(
    monkeypatch: pytest.MonkeyPatch, required: str, code: ExitCode
) -> None:
    monkeypatch.setattr(nightly, "missing", lambda device: f"no {device}")
    monkeypatch.setenv("HICACHE_REQUIRE_GPU", required)
    assert nightly.main([]) == code


def test_every_backend_and_model_of_the_machines_can_be_run() -> None:
    facts = json.loads(machines.FACTS.read_text())
    backends = [name for machine in facts["machines"].values() for name in machine["backends"]]
    assert sorted(backends) == ["mooncake", "ucm", "umbp"]
    assert {"deepseek-v4-flash", "mamba", "dsa"} <= set(facts["models"])
    jobs = machines.matrix(facts)["include"]
    assert len(jobs) == len(backends) * len(facts["models"])
    assert all("self-hosted" in job["runs_on"] for job in jobs)
    for model, variables in facts["models"].items():
        assert machines.lines(facts, [model]) == [f"{n}={v}" for n, v in variables.items()]
        run = Nightly.of({"HICACHE_E2E_BACKEND": "ucm", **variables})
        assert run.page_size > 0
        assert set(variables) <= {f"HICACHE_E2E_{name.upper()}" for name in vars(run)}
