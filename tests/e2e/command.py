"""``python -m tests.e2e``: does a running SGLang restore from its storage what it computed?

Needs Python 3.11 and nothing else. docs/e2e.md says how to use it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.e2e.accounting import AccountingError, Rule
from tests.e2e.client import Client, EngineError, ServerInfo
from tests.e2e.divergence import Bounds
from tests.e2e.prompts import boundary_prompts
from tests.e2e.server import OwnEngine, wait_until_ready
from tests.e2e.trial import NotNewError, Trial
from tests.e2e.verdict import ExitCode, Judge, Judged, exit_code


def parser() -> argparse.ArgumentParser:
    """The options; argparse exits with 2, ExitCode.USAGE, for those it does not know."""
    options = argparse.ArgumentParser(
        prog="python -m tests.e2e", description=(__doc__ or "").splitlines()[0]
    )
    add = options.add_argument
    add("--url", default="http://127.0.0.1:30000", help="the server's address")
    add("--launch", metavar="COMMAND", help="start the server with this, and restart it")
    add("--log", type=Path, help="file for what that server prints")
    add("--restart", metavar="COMMAND", help="shell command that restarts a running server")
    add("--no-restart", action="store_true", help="do not restart the server that it started")
    add("--start-s", type=float, default=1800.0, help="how long a start may take")
    add("--backend", help="class that SGLang must name; by default the one it was told to load")
    add("--pages", type=int, nargs="+", default=[1, 4, 9], help="page ends to look at")
    add("--states", type=int, default=0, help="tokens between the states that a Mamba model keeps")
    add("--tokens", type=int, default=32, help="tokens to generate")
    add("--vocabulary", type=int, default=30000, help="ids in prompts are below it")
    add("--text", type=Path, help="prompts are taken from this text, not drawn")
    add("--seed", default=None, help="of the prompts; drawn where not given")
    add("--kl", type=float, default=Bounds.kl, help="bound on the mean divergence, in nats")
    add("--logprob", type=float, default=Bounds.logprob, help="bound on a logprob's change")
    add("--drain-s", type=float, default=120.0, help="how long writes may be under way")
    add("--api-key", help="of the server")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code."""
    options = parser().parse_args(arguments)
    options.seed = options.seed or secrets.token_hex(4)
    judged: list[Judged] = []
    trouble = None
    try:
        with engine(options) as (client, restart):
            judged = run(options, client, restart)
        code = exit_code(judged)
    except NotNewError as error:
        trouble, code = str(error), ExitCode.USAGE
    except (EngineError, AccountingError) as error:
        trouble, code = str(error), ExitCode.NO_ENGINE
    report(options, judged, trouble, code)
    return int(code)


@contextlib.contextmanager
def engine(options: argparse.Namespace) -> Iterator[tuple[Client, Callable[[], None] | None]]:
    """The server, and what restarts it."""
    client = Client(options.url.rstrip("/"), api_key=options.api_key)
    if options.launch is None:
        wait_until_ready(client, options.start_s)
        yield client, _by_command(options, client) if options.restart else None
        return
    with contextlib.ExitStack() as stack:
        log = options.log
        if log is None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
        own = OwnEngine(shlex.split(options.launch), client, log, start_s=options.start_s)
        stack.enter_context(own)
        yield client, None if options.no_restart else own.restart


def _by_command(options: argparse.Namespace, client: Client) -> Callable[[], None]:
    def restart() -> None:
        done = subprocess.run(options.restart, shell=True, check=False)
        if done.returncode:
            raise EngineError(f"{options.restart!r} ended with {done.returncode}")
        wait_until_ready(client, options.start_s)

    return restart


def run(
    options: argparse.Namespace, client: Client, restart: Callable[[], None] | None
) -> list[Judged]:
    """The trial that the options ask for."""
    info = client.info()
    text = client.tokenize(options.text.read_text()) if options.text else []
    trial = Trial(
        engine=client,
        judge=judge(options, info),
        prompts=boundary_prompts(
            info.page,
            options.pages,
            vocabulary=options.vocabulary,
            seed=options.seed,
            text=text,
        ),
        count=options.tokens,
        drain_s=options.drain_s,
        restart=restart,
        tell=(lambda judged: None) if options.json else _print_judged,
    )
    return trial.run()


def judge(options: argparse.Namespace, info: ServerInfo) -> Judge:
    """What is expected of this server.

    Raises:
        EngineError: it has no storage.
    """
    if info.storage is None:
        raise EngineError("this server runs without --hicache-storage-backend")
    return Judge(
        rule=Rule(info.page, info.threshold, options.states),
        bounds=Bounds(options.kl, options.logprob),
        backend=options.backend or info.class_name,
    )


def report(
    options: argparse.Namespace, judged: Sequence[Judged], trouble: str | None, code: ExitCode
) -> None:
    """Print the outcome."""
    if options.json:
        found = [{**dataclasses.asdict(each), "verdict": each.verdict.value} for each in judged]
        outcome = {
            "seed": options.seed,
            "exit_code": int(code),
            "outcome": code.name,
            "error": trouble,
            "prompts": found,
        }
        print(json.dumps(outcome, indent=2))
        return
    if trouble:
        print(f"e2e: {trouble}", file=sys.stderr)
    print(f"e2e: seed {options.seed}: {code.name.lower().replace('_', ' ')} ({int(code)})")


def _print_judged(judged: Judged) -> None:
    print(f"{judged.verdict.value}: {judged.prompt}, {judged.when}: {judged.why}", flush=True)
