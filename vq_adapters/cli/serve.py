"""`vq serve`: mlx_lm's own server, whose models make compressed caches."""

import argparse
import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
from mlx_lm import server

from vq_adapters.cli.models import check_draft, check_mlx_lm, compressing, patched, reports_in_one_line, uneven
from vq_adapters.cli.parsing import LongHelp, UsageError, add_cache_arguments, model_name, say
from vq_adapters.cli.settings import configuration
from vq_adapters.config import KVCacheConfig
from vq_adapters.names import name_of

DEFAULT = "default_model"  # mlx_lm's name for what its options name
PATIENCE = 2.0  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command itself; all others are mlx_lm's."""
    parser.add_argument("-h", "--help", action=LongHelp, const=_help)
    parser.add_argument(
        "--model", type=model_name, help="folder or repository of a model; without it requests name theirs"
    )
    add_cache_arguments(parser)


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Serve until interrupted; returns the exit status."""
    config = configuration(args)
    _check_batches(config, not args.no_hook)
    argv = [*([] if args.model is None else [f"--model={args.model}"]), *rest]
    start = functools.partial(_start, server.run, config, not args.no_hook)
    with reports_in_one_line(server), patched(sys, argv=["vq serve", *argv]), patched(server, run=start):
        server.main()
    return 0


def _check_batches(config: KVCacheConfig | None, hook: bool) -> None:
    """Refuse what a batch could raise: mlx_lm's generating thread ends by it, and the server with that.

    What a method can't do without is told of.
    """
    if config is None:
        return
    if config.capacity is not None:
        raise UsageError("`capacity` would end the server at the first request past it; bound answers by --max-tokens")
    if config.method == "qfilters" and config.qfilters_on_low_retention == "raise":
        raise UsageError("`qfilters_on_low_retention=raise` would end the server; leave it at warn")
    if not hook and uneven(config):
        raise UsageError(f"--no-hook can't serve batches of {config.method}: its layers hold different numbers of rows")
    if config.max_tokens is not None:
        field = name_of(config.method, "max_ctx")
        say(f"warning: a request of more than {config.max_tokens} tokens would end the server; `{field}` says how many")


@attrs.define
class Told:
    """What the generating thread tells the main one."""

    thread: int = 0  # the operating system's number of it
    failure: Exception | None = None  # why the model couldn't be loaded


def _start(
    run_server: Callable[..., None], config: KVCacheConfig | None, hook: bool, host: str, port: int, provider: Any
) -> None:
    """mlx_lm's `run`, once the options go with the caches; loads of models are wrapped meanwhile."""
    options, told = provider.cli_args, Told()
    check_mlx_lm(options, config)
    if options.draft_model is not None:
        # With a draft mlx_lm stores a prompt's caches as if they held one token more.
        options.prompt_cache_size = 0
    provider.load_default = functools.partial(_load_or_tell, provider.load_default, told)
    provider.load = functools.partial(_load_asked, provider.load, config)
    loads = {
        name: compressing(getattr(server, name), config, hook, options.draft_model) for name in ("load", "sharded_load")
    }
    http = functools.partial(_serve_http, server._run_http_server, told)
    with patched(server, _run_http_server=http, **loads):
        run_server(host, port, provider)


def _load_or_tell(load: Callable[[], None], told: Told) -> None:
    """Load in the generating thread; a failure is the main thread's to report, and ends this one in silence."""
    told.thread = threading.get_native_id()
    try:
        load()
    except Exception as error:
        told.failure = error
        raise SystemExit from error


def _load_asked(
    load: Callable[..., Any], config: KVCacheConfig | None, model: str, adapter: Any = None, draft: Any = None
) -> Any:
    """mlx_lm's `load` of what a request names, unless it is a draft that the caches can't serve."""
    if draft not in (None, DEFAULT):
        check_draft(config)
    return load(model, adapter, draft)


def _serve_http(serve: Callable[..., None], told: Told, host: str, port: int, generator: Any, **options: Any) -> None:
    """mlx_lm's HTTP loop, ended by a model that can't be loaded; the generating thread ends with it."""

    class Watching(ThreadingHTTPServer):
        def service_actions(self) -> None:
            if told.failure is not None:
                raise told.failure

    try:
        serve(host, port, generator, **{"server_class": Watching, **options})
    finally:
        generator.stop_and_join()
        _wait_for_end(told.thread)
    # The loop returns only when it is interrupted.
    raise KeyboardInterrupt


def _wait_for_end(thread: int) -> None:
    """Wait for a joined thread to leave the process.

    It still has to give up what it compiled, and for that it needs an interpreter that is not being torn down.
    """
    task = Path(f"/proc/self/task/{thread}")
    time.sleep(0 if task.parent.is_dir() else PATIENCE / 10)
    deadline = time.monotonic() + PATIENCE
    while task.is_dir() and time.monotonic() < deadline:
        time.sleep(0.01)


def _help() -> None:
    with patched(sys, argv=["vq serve", "--help"]), contextlib.suppress(SystemExit):
        server.main()
