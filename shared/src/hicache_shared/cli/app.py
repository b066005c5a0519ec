"""The verbs of ``hicache`` and their options. What they need is imported when they run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

from hicache_shared import plugins
from hicache_shared.cli.interrupt import Interrupted, interruptible
from hicache_shared.cli.output import ExitCode, code_of, failure, own_stdout, print_json
from hicache_shared.errors import HiCacheError

log = logging.getLogger(__name__)

UsageError: Any = typer.BadParameter.__base__
"""Newer typers carry a click of their own; this is the right class of either."""

app = typer.Typer(
    name="hicache",
    help="Storage backends of SGLang's HiCache for hybrid models: try them, configure them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

MODELS = (
    "deepseek-v4-flash",
    "deepseek-v3.2",
    "mamba",
    "swa",
    "mha",
    "mla",
    "mha-asymmetric",
)
"""The names of ``hostpool.PRESETS``, so that help needs no numpy; a test compares them."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        "--root",
        metavar="WHERE",
        help="The store to use: host:port of a server that runs, or for ucm a folder. "
        "Else one is made for the while.",
    ),
]


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. See :func:`hicache_shared.cli.main`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with own_stdout(give_back=arguments is not None), interruptible():
        return _run_json(given) if "--json" in given else _run(given)


def _run(arguments: list[str]) -> int:
    try:
        app(arguments, prog_name="hicache", obj={})
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else ExitCode.GOOD
    except HiCacheError as error:
        sys.stderr.write(f"hicache: {error}\n")
        return code_of(error)
    except Interrupted as error:
        sys.stderr.write(f"hicache: {error}\n")
        return error.code
    return ExitCode.GOOD


def _run_json(arguments: list[str]) -> int:
    """As :func:`_run`, but what ends a command before its verdict is told as JSON too."""
    code: int
    answer: dict[str, Any] = {"backend": None}
    if "roundtrip" in arguments:
        answer["byte_exact"] = False
    try:
        code = app(arguments, prog_name="hicache", standalone_mode=False, obj=answer)
    except UsageError as error:
        problem, code = failure("UsageError", error.format_message()), ExitCode.USAGE
    except HiCacheError as error:
        problem, code = failure(type(error).__name__, str(error)), code_of(error)
    except Interrupted as error:
        problem, code = failure(type(error).__name__, str(error)), error.code
    except Exception as error:
        # The outermost boundary: a program that reads JSON gets JSON, whatever happened.
        log.exception("a fault of hicache or of a backend")
        problem, code = failure(type(error).__name__, str(error)), ExitCode.NEGATIVE
    else:
        return code or ExitCode.GOOD
    print_json({**answer, "error": problem})
    return code


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hicache {version('hicache-shared')}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def roundtrip(
    context: typer.Context,
    backend: Annotated[
        str | None, typer.Option(help="The backend; the first installed where not given.")
    ] = None,
    model: Annotated[
        str, typer.Option(help=f"Whose host pools to use: {', '.join(MODELS)}.")
    ] = MODELS[0],
    pages: Annotated[int, typer.Option(min=1, help="Pages of every pool.")] = 8,
    layout: Annotated[
        str, typer.Option(help="SGLang's --hicache-mem-layout of the host pools.")
    ] = "page_first",
    layers_div: Annotated[
        int, typer.Option(min=1, help="Divide the pools' layers, for small machines.")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the bytes and of the page order.")] = 0,
    master: Master = None,
    json: Json = False,
) -> None:
    """Store a model's pages, forget them, restore them elsewhere, and compare every byte.

    Exits with 0 only if every byte is as it should be; with 1 if not, 2 for wrong usage, 3 where
    the backend is not available.
    """
    from rich.console import Console

    from hicache_shared.cli import report
    from hicache_shared.cli.roundtrip import Request
    from hicache_shared.cli.roundtrip import roundtrip as put_through

    name = _backend_or_first(backend)
    request = Request(model=model, pages=pages, layout=layout, layers_div=layers_div, seed=seed)
    context.obj.update(
        report.request_json(name, request), restored_prefix_pages=0, byte_exact=False, pools=[]
    )
    with report.bar() as bar:
        result = put_through(plugins.find(name), request, master, bar)
    if json:
        print_json(report.as_json(result))
    else:
        report.print_report(result, Console())
    raise typer.Exit(ExitCode.GOOD if result.byte_exact else ExitCode.NEGATIVE)


@app.command()
def launch_args(
    context: typer.Context,
    backend: Annotated[
        str | None, typer.Option(help="The backend; the first installed where not given.")
    ] = None,
    model_path: Annotated[
        str | None, typer.Option(help="SGLang's --model-path; also names the model in keys.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="The checkpoint's revision.")] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="SGLang's --kv-cache-dtype.")] = None,
    master: Master = None,
    json: Json = False,
) -> None:
    """Print the SGLang flags that use a backend, ready to paste."""
    from hicache_shared.cli.launch import Identity, launch

    name = _backend_or_first(backend)
    context.obj.update(backend=name)
    identity = Identity(model_path, revision, kv_cache_dtype)
    result = launch(plugins.find(name), identity, master)
    if json:
        print_json(result.as_json())
    else:
        typer.echo(result.shell_text())
        for hint in result.hints:
            typer.echo(f"hint: {hint}", err=True)


def _backend_or_first(name: str | None) -> str:
    if name is not None:
        return name
    first = plugins.installed()[0]
    typer.echo(f"hicache: backend {first} (installed: {', '.join(plugins.installed())})", err=True)
    return first
