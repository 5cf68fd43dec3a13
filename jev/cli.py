"""The command ``jev``. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from jev import __version__, signals
from jev.arguments import Parser, did_you_mean, integer
from jev.errors import JevError
from jev.settings import Settings
from jev.threads import OutOfThreads, limits, refused

if TYPE_CHECKING:
    from jev.checkpoint.opening import Export
    from jev.engine import Engine

INTRODUCTION = """\
A decision worker for Open-Jev checkpoints. It takes a state and typed questions, runs every candidate answer through
the model once, and gives calibrated probabilities. Nothing is generated.

  jev demo                      see it work, on any machine, with a small checkpoint of random weights
  jev serve --model EXPORT      the worker: POST /v1/systemone, GET /health, GET /v1/models
  jev score requests.jsonl --model EXPORT     the same answers without a server
"""
EXAMPLE_REQUEST = {"state": "The parcel is still in the depot.",
                   "questions": {"late": {"type": "noul", "instructions": "Is the parcel late?"}}}
SERVE_FLAGS = ("model", "host", "port", "backend", "max_length", "graph", "cache_gb", "queue", "queue_mb", "batch_rows",
               "drain_seconds", "allowed_hosts", "verify")
SCORE_FLAGS = ("model", "backend", "max_length", "graph", "cache_gb", "queue_mb", "batch_rows", "verify")


def say(text: str = "") -> None:
    """To the person at the terminal: stderr, so that stdout holds results and the access log alone."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):      # nobody listens any more
            print(text, file=sys.stderr, flush=True)


def _flush_stdout() -> None:
    """Python would complain at exit, and change the status, if stdout were still holding what nobody takes."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---------------------------------------------------------------------------------------------------------------------
# serve


def open_engine(settings: Settings) -> Engine:
    """Load the export of ``settings``, warm it up and say what it is. Raises errors for which ``main`` has words."""
    from jev.checkpoint.opening import open_export
    from jev.checkpoint.verify import verify
    from jev.engine import DEMO_NOTICE, Engine
    from jev.model.backends import open_backbone
    assert settings.model is not None           # the command line asks for it
    export = open_export(settings.model, settings.max_length)
    say(f"model: {describe(export)}")
    say(f"files: {verify(export, weights=settings.verify)}")
    if export.demo:
        say(f"NOTE: {DEMO_NOTICE}")
    backbone = open_backbone(export, settings.backend, settings.max_length, settings.graph, settings.cache_gb, log=say)
    return Engine(export, backbone, settings)


def describe(export: Export) -> str:
    manifest = export.manifest
    return (f"{manifest.source.title} ({manifest.model_id}), {export.config.num_layers} layers of {export.config.hidden_size}, "
            f"prompts of up to {manifest.max_length} tokens, temperature {manifest.temperature:g}")


def serve(args: argparse.Namespace) -> int:
    import logging

    from jev import logs
    with logs.service(logging.WARNING):
        signals.on_stop(lambda: logs.leave(0))          # still loading: nobody waits for anything
        return _serve(args)


def _serve(args: argparse.Namespace) -> int:
    from jev import logs
    from jev.app import create_app
    from jev.server import Server, bind
    settings = args.settings
    started = time.perf_counter()
    with _listening_on(settings):
        sock = bind(settings.host, settings.port)
    engine = open_engine(settings)
    with _listening_on(settings):       # another worker may have come first while this one loaded
        server = Server(create_app(engine, settings), engine, settings, sock)
    signals.on_stop(server.stop)
    say(f"queue: {settings.queue} requests; forward passes of up to {engine.max_rows} rows")
    say(f"ready after {time.perf_counter() - started:.1f} s; listening on {server.url}")
    say(f"try: {_curl(server.url, settings.api_key is not None)}")
    answered = server.run()
    if engine.lost:
        say(f"jev: {engine.lost}")
        logs.leave(1)           # for a supervisor to start a new one; nothing of the device can be closed
    if not answered:
        say("stopped before every request was answered")
        logs.leave(1)           # a forward pass is still under way, and the device must not be closed under it
    engine.close()
    say("stopped")
    return 0


@contextlib.contextmanager
def _listening_on(settings: Settings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "; choose another port with --port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""
        raise JevError(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}{hint}") from None


def _curl(url: str, key: bool) -> str:
    authorization = " -H \"Authorization: Bearer $OPEN_JEV_API_KEY\"" if key else ""
    return (f"curl {url}/v1/systemone -H 'Content-Type: application/json'{authorization} "
            f"-d '{json.dumps(EXAMPLE_REQUEST)}'")


# ---------------------------------------------------------------------------------------------------------------------
# demo-checkpoint, check


def demo_checkpoint(args: argparse.Namespace) -> int:
    from jev.checkpoint.demo import write_demo_checkpoint
    write_demo_checkpoint(args.dir, seed=args.seed, overwrite=args.overwrite)
    say(f"wrote a demo checkpoint; serve it with: jev serve --model {args.dir}")
    return 0


def check(args: argparse.Namespace) -> int:
    from jev.checkpoint.checked_json import read_json
    from jev.checkpoint.config import CONFIG_FILE
    from jev.checkpoint.config_fields import unknown_fields
    from jev.checkpoint.opening import open_export
    from jev.checkpoint.verify import shortened, verify
    from jev.engine import DEMO_NOTICE
    from jev.processor import Processor
    settings = args.settings
    export = open_export(settings.model, settings.max_length)
    manifest, config = export.manifest, export.config
    processor = Processor.of(export)
    verified = verify(export)
    unknown = shortened([ascii(field) for field in unknown_fields(read_json(export.path / CONFIG_FILE))])
    size = sum(t.nbytes for t in export.tensors.values())
    kinds = [config.layer_types.count(kind) for kind in ("linear_attention", "full_attention")]
    print(f"{settings.model}: a complete export")
    for name, value in {
        "model": describe(export), "base revision": manifest.base_revision,
        "checkpoint": manifest.checkpoint_revision,
        "layers": f"{kinds[0]} linear attention, {kinds[1]} full attention; intermediate {config.intermediate_size}",
        "heads": f"{config.num_attention_heads}/{config.num_key_value_heads} of {config.head_dim}; linear "
                 f"{config.linear_num_key_heads}/{config.linear_num_value_heads} of {config.linear_key_head_dim}",
        "weights": f"{len(export.tensors)} BF16 tensors, {size / 2e9:.3f} billion parameters, {size / 1e9:.3f} GB",
        "tokenizer": f"{processor.vocab_size} of {config.vocab_size} ids in use",
        "answers to": ", ".join(sorted(export.model_names)), "files": verified,
        **({"not read": f"{unknown} of {CONFIG_FILE}, which no Qwen3.5 model reads"} if unknown else {}),
        **({"NOTE": DEMO_NOTICE} if export.demo else {})}.items():
        print(f"  {name:14} {value}")
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def build_parser() -> Parser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="jev", description=INTRODUCTION, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"jev {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str, epilog: str = "") -> Parser:
        command = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.", epilog=epilog,
                                      formatter_class=raw)
        command.set_defaults(run=run)
        return command
    command = add("serve", serve, "serve an export over HTTP", f"""\
Every flag has an environment variable, shown in brackets; the flag wins. One more has no flag, because flags are
visible to other users: OPEN_JEV_API_KEY, {Settings.__dataclass_fields__['api_key'].metadata['help'].split(' (')[0]}.

Output: one JSON line for each request on stdout (no bodies, no keys); everything else on stderr.
SIGTERM, SIGHUP or Ctrl-C: no new requests, those admitted are answered, exit 0. Again: give up on them, exit 1.

  {_curl('http://127.0.0.1:8000', False)}
""")
    command.add_settings(SERVE_FLAGS, ["api_key"])
    command = add("score", _from("score"), "answer the requests of a file, without a server", """\
FILE is one request, or JSON Lines with one request on each line; `-` reads stdin. For each request one line of JSON on
stdout, in order: the response, or {"line", "error", "detail"} for a request that failed; the others are still answered.
Exit status: 0 all answered, 1 some failed or there were none, 2 the command line is wrong.
""")
    command.add_argument("file", metavar="FILE")
    command.add_settings(SCORE_FLAGS)
    command.add_argument("--pretty", action="store_true", help="show answers for reading instead of JSON")
    command.add_argument("--together", type=integer(1, 1024), default=16, metavar="N",
                         help="requests under way at a time; they share forward passes; default 16")
    command = add("demo", _from("demo"), "write a demo checkpoint, start a worker, ask it and show the answers")
    command.add_argument("--dir", help="keep the checkpoint in DIR/checkpoint; default: a temporary folder")
    command.add_argument("--request", metavar="FILE", help="post this request instead of the example")
    command.uses = ("backend", "graph")
    command = add("demo-checkpoint", demo_checkpoint, "write a small export with random weights, to try things with")
    command.add_argument("dir", metavar="DIR")
    command.add_argument("--seed", type=integer(0, 2**32 - 1), default=0, help="of the weights; default 0")
    command.add_argument("--overwrite", action="store_true", help="replace a demo checkpoint that is there")
    command = add("check", check, "validate an export and say what it is")
    command.add_settings(["model", "max_length"])
    for name, (_, help) in DELEGATED.items():
        commands.add_parser(name, help=help, add_help=False)
    return parser


def _from(module: str) -> Callable[[argparse.Namespace], int]:
    """The function ``run`` of a module of ``jev.commands``, imported when it is called."""
    return lambda args: import_module(f"jev.commands.{module}").run(args)


# Commands with a module and a parser of their own.
DELEGATED = {"export": ("jev.export.command", "merge a downloaded base model and an Open-Jev checkpoint into an export"),
             "frontend": ("jev.gateway.app", "the gateway in front of one or more workers"),
             "audit": ("jev.audit", "measure each operation of a backend against float64 on an export's own weights")}
FLAGS = ("-h", "--help", "--version")          # before a command
COMMANDS = ("serve", "score", "demo", "demo-checkpoint", "check", *DELEGATED)

SERVICES = (["serve"], ["frontend"])            # they run until a signal ends them


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    # Before anything imports NumPy. Its BLAS threads wait for each other spinning, which on a busy machine makes the
    # worker many times slower, and the small products of the NumPy backend gain nothing from them. No bit changes.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if hasattr(sys.stdout, "reconfigure"):      # a name that a terminal of another encoding cannot show ends no command
        sys.stdout.reconfigure(errors="backslashreplace")
    argv = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        with signals.service() if argv[:1] in SERVICES else signals.interruptible():
            if argv[0] in DELEGATED:
                return import_module(DELEGATED[argv[0]][0]).main(argv[1:]) or 0
            parser = build_parser()
            if not argv[0].startswith("-") and argv[0] not in COMMANDS:
                parser.error(f"no such command{did_you_mean(argv[0], COMMANDS)}")
            flag = argv[0].partition("=")[0]
            if flag.startswith("-") and not any(known.startswith(flag) for known in FLAGS):    # argparse misses a command
                parser.error(f"no such flag: {flag}{did_you_mean(flag, FLAGS)}")
            args = parser.parse_args(argv)
            for remark in getattr(args, "remarks", ()):
                say(f"jev: {remark}")
            status: int = args.run(args)
            return status
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:         # whoever read stdout has left
        _flush_stdout()
        return 141
    except JevError as error:
        say(f"jev: {error}")
        return error.status
    except OSError as error:        # a file that is not there, a full disk
        place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        say(f"jev: {place}{error.strerror or error}")
        _flush_stdout()                 # it may have been the full one
        return 1
    except BaseException as error:
        if not refused(error):
            raise
        say(f"jev: {OutOfThreads(f'cannot start a thread: {limits()}')}")
        return 1
