"""The command ``jev``. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from jev import __version__
from jev.arguments import Parser
from jev.settings import Settings, SettingsError

if TYPE_CHECKING:
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
               "drain_seconds")
MODEL_FLAGS = ("model", "backend", "max_length", "graph", "cache_gb", "batch_rows")


class CommandError(Exception):
    """A sentence for the user; the command ends with status 1."""


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
    from jev.checkpoint.checkpoint import open_export
    from jev.engine import DEMO_NOTICE, Engine
    from jev.model.backends import open_backbone
    if settings.model is None:
        raise CommandError("which export? Give --model DIR or set OPEN_JEV_MODEL "
                           "(`jev demo-checkpoint DIR` makes a small one to try)")
    export = open_export(settings.model, settings.max_length)
    say(f"model: {describe(export)}")
    if export.demo:
        say(f"NOTE: {DEMO_NOTICE}")
    backbone = open_backbone(export, settings.backend, settings.max_length, settings.graph, settings.cache_gb, log=say)
    return Engine(export, backbone, settings)


def describe(export) -> str:
    from jev.checkpoint.checkpoint import DEMO, pinned
    manifest = export.manifest
    source = DEMO if export.demo else pinned(manifest.model_id)
    return (f"{source.title} ({manifest.model_id}), {export.config.num_layers} layers of {export.config.hidden_size}, "
            f"prompts of up to {manifest.max_length} tokens, temperature {manifest.temperature:g}")


def serve(args: argparse.Namespace) -> int:
    import signal
    server: Server | None = None

    def stop(signum: int, frame: Any) -> None:
        if server is None:          # still loading: nobody waits for anything
            raise SystemExit(0)
        server.stop()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, stop)       # before the imports below, which take a second

    from jev.app import create_app
    from jev.server import Server, bind
    settings = _settings(args)
    _set_up_logging()
    started = time.perf_counter()
    with _listening_on(settings):
        sock = bind(settings.host, settings.port)
    engine = open_engine(settings)
    with _listening_on(settings):       # another worker may have come first while this one loaded
        server = Server(create_app(engine, settings), engine, settings, sock)
    say(f"queue: {settings.queue} requests; forward passes of up to {engine.max_rows} rows")
    say(f"ready after {time.perf_counter() - started:.1f} s; listening on {server.url}")
    say(f"try: {_curl(server.url, settings.api_key is not None)}")
    if not server.run():
        say("stopped before every request was answered")
        _flush_stdout()
        os._exit(1)             # a forward pass is still under way, and the device must not be closed under it
    engine.close()
    say("stopped")
    _flush_stdout()
    return 0


@contextlib.contextmanager
def _listening_on(settings: Settings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "; choose another port with --port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else ""
        raise CommandError(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}{hint}") from None


def _curl(url: str, key: bool) -> str:
    authorization = " -H \"Authorization: Bearer $OPEN_JEV_API_KEY\"" if key else ""
    return (f"curl {url}/v1/systemone -H 'Content-Type: application/json'{authorization} "
            f"-d '{json.dumps(EXAMPLE_REQUEST)}'")


def _set_up_logging() -> None:
    """Access lines (JSON) to stdout; everything else that is worth reading to stderr."""
    import logging
    logging.raiseExceptions = False         # a reader of stdout or stderr that has left must not fill the other
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING,
                        format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    access = logging.getLogger("jev.access")
    access.setLevel(logging.INFO)
    access.propagate = False
    handler = logging.NullHandler() if sys.stdout is None else logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.addHandler(handler)


# ---------------------------------------------------------------------------------------------------------------------
# score


def score(args: argparse.Namespace) -> int:
    from concurrent.futures import ThreadPoolExecutor

    from tqdm import tqdm

    from jev import json_lines
    from jev.contract import MAX_BODY_BYTES
    if sys.stdout is None:
        raise CommandError("stdout is closed: there is nowhere to write answers to")
    file = _open_requests(args.file)
    # Several at a time share forward passes; results are written in the order of the requests.
    settings = _settings(args)
    engine = open_engine(replace(settings, queue=max(settings.queue, args.together)))
    stop = threading.Event()
    pool = ThreadPoolExecutor(args.together)
    failed = done = 0
    try:
        with tqdm(desc="requests", unit="", file=sys.stderr, disable=None) as progress:
            for line, body, result in json_lines.in_order(
                    pool, lambda body: _score_one(engine, body, stop), json_lines.requests(file, MAX_BODY_BYTES),
                    window=2 * args.together):
                if "error" in result:
                    failed += 1
                    result = {"line": line, **result}
                if args.pretty and "error" not in result:
                    from jev.terminal import render
                    _write(render(result, json.loads(body), unicode=_unicode(sys.stdout)) + "\n")
                else:
                    _write(json.dumps(result, ensure_ascii=False))
                done += 1
                progress.update()
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        engine.close()
    if not done:
        say(f"no requests in {'stdin' if args.file == '-' else args.file}")
    elif failed:
        say(f"{failed} of {done} requests failed")
    return 1 if failed or not done else 0


def _open_requests(name: str) -> BinaryIO:
    try:
        # Not sys.stdin: a thread that waits for it would be in Python's way when an interrupted command ends.
        return open(0, "rb", closefd=False) if name == "-" else open(name, "rb")
    except OSError as error:
        raise CommandError(f"{'stdin' if name == '-' else name}: {error.strerror}") from None


def _write(text: str) -> None:
    """A line to stdout, in UTF-8 whatever the terminal's encoding: JSON Lines are."""
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.buffer.flush()


def _score_one(engine: Engine, body: bytes | None, stop: threading.Event) -> dict[str, Any]:
    from jev.contract import MAX_BODY_BYTES
    from jev.engine import ContractError, InferenceError, QueueFull, RequestTooLarge
    if body is None:
        return _failure("request_too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")
    while True:
        try:
            return engine.answer(body, stop.is_set)
        except QueueFull as full:           # of memory: places are enough. Others will be done
            if stop.wait(full.retry_after):
                raise
        except ContractError as error:
            return {"error": str(error), "detail": error.errors}
        except RequestTooLarge as error:
            return _failure("request_too_large", str(error))
        except InferenceError as error:
            return _failure("inference_error", str(error))


def _failure(error_type: str, message: str) -> dict[str, Any]:
    return {"error": message, "detail": {"error_type": error_type, "message": message}}


# ---------------------------------------------------------------------------------------------------------------------
# demo, demo-checkpoint, check


def demo(args: argparse.Namespace) -> int:
    import signal
    import tempfile

    def stop(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, stop)
    place = contextlib.nullcontext(args.dir) if args.dir else tempfile.TemporaryDirectory(prefix="jev-demo-")
    with place as parent:
        folder = Path(parent) / "checkpoint"
        _make_demo_checkpoint(folder)
        status = _show_demo(folder, Path(args.request) if args.request else _example_request())
    if args.dir:
        say(f"To keep one running: {os.path.relpath(sys.executable)} -m jev serve --model {folder}")
    return status


def _make_demo_checkpoint(folder: Path) -> None:
    from jev.checkpoint.checked_json import CheckpointError
    from jev.checkpoint.checkpoint import open_export
    from jev.checkpoint.demo import write_demo_checkpoint
    from jev.processor import Processor, ProcessorError
    try:
        Processor.of(open_export(folder))
        say(f"1. a demo checkpoint lies in {folder} already")
    except (CheckpointError, ProcessorError):
        say(f"1. writing a demo checkpoint to {folder}: the real architecture, tiny, with random weights")
        try:
            write_demo_checkpoint(folder, overwrite=True)
        except CheckpointError as error:
            # Perhaps a demo that lost its manifest, perhaps something of the user's: not ours to delete.
            raise CommandError(f"{error}; remove that folder (`make clean` removes the one of `make demo`)") from None


def _example_request() -> Path:
    """The example of the repository, or of an installation."""
    for folder in (Path(__file__).resolve().parent.parent / "recipe/open_jev", Path(sys.prefix) / "share/jev"):
        if (folder / "example-request.json").exists():
            return folder / "example-request.json"
    raise CommandError("example-request.json is not where it was installed; give --request FILE")


def _show_demo(folder: Path, request_file: Path) -> int:
    import logging
    from http.client import HTTPConnection

    from jev.app import create_app
    from jev.server import Server, bind
    from jev.terminal import render
    body = request_file.read_bytes()
    backend = {name: os.environ.get(name, "") for name in ("OPEN_JEV_BACKEND", "OPEN_JEV_GRAPH")}
    settings = replace(Settings.from_environment(backend), model=folder, port=0, queue=8)
    say("2. starting the worker")
    sock = bind(settings.host, settings.port)
    engine = open_engine(settings)
    server = Server(create_app(engine, settings), engine, settings, sock)
    logging.getLogger("jev.server").setLevel(logging.CRITICAL)      # its farewells are for those who run a worker
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    thread = threading.Thread(target=server.run, name="jev-demo-server")
    thread.start()
    try:
        say(f"3. posting {request_file} to {server.url}/v1/systemone\n")
        connection = HTTPConnection(*sock.getsockname()[:2], timeout=120)
        started = time.perf_counter()
        connection.request("POST", "/v1/systemone", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        seconds = time.perf_counter() - started
        connection.close()
        if response.status != 200:
            raise CommandError(f"the worker answered {response.status}: {answer['error']}")
        print(render(answer, json.loads(body), seconds, _unicode(sys.stdout)), flush=True)
    except BaseException:       # Ctrl-C above all: nobody wants to wait for the forward pass that is under way
        server.stop()
        raise
    finally:
        server.stop()
        thread.join()
    engine.close()
    say("\n4. stopped the worker")
    return 0


def demo_checkpoint(args: argparse.Namespace) -> int:
    from jev.checkpoint.demo import write_demo_checkpoint
    write_demo_checkpoint(args.dir, seed=args.seed, overwrite=args.overwrite)
    say(f"wrote a demo checkpoint; serve it with: jev serve --model {args.dir}")
    return 0


def check(args: argparse.Namespace) -> int:
    from jev.checkpoint.checkpoint import open_export
    from jev.engine import DEMO_NOTICE
    from jev.processor import Processor
    export = open_export(args.export, _settings(args).max_length)
    manifest, config = export.manifest, export.config
    processor = Processor.of(export)
    size = sum(t.nbytes for t in export.tensors.values())
    kinds = [config.layer_types.count(kind) for kind in ("linear_attention", "full_attention")]
    print(f"{args.export}: a complete export")
    for name, value in {
        "model": describe(export), "base revision": manifest.base_revision,
        "checkpoint": manifest.checkpoint_revision,
        "layers": f"{kinds[0]} linear attention, {kinds[1]} full attention; intermediate {config.intermediate_size}",
        "heads": f"{config.num_attention_heads}/{config.num_key_value_heads} of {config.head_dim}; linear "
                 f"{config.linear_num_key_heads}/{config.linear_num_value_heads} of {config.linear_key_head_dim}",
        "weights": f"{len(export.tensors)} BF16 tensors, {size / 2e9:.3f} billion parameters, {size / 1e9:.3f} GB",
        "tokenizer": f"{processor.vocab_size} of {config.vocab_size} ids in use",
        "answers to": ", ".join(sorted(export.model_names)), **({"NOTE": DEMO_NOTICE} if export.demo else {})}.items():
        print(f"  {name:14} {value}")
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def _settings(args: argparse.Namespace) -> Settings:
    names = {f.name for f in fields(Settings)}
    return Settings.from_environment(os.environ, **{k: v for k, v in vars(args).items() if k in names})


def _add_settings(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    for f in fields(Settings):
        if f.name in names:
            default = "" if f.default is None else f"; default {int(f.default) if f.name == 'graph' else f.default}"
            parser.add_argument(f.metadata["flag"], dest=f.name, metavar=f.name.split("_")[-1].upper(),
                                help=f"{f.metadata['help']} [{', '.join(f.metadata['env'])}{default}]")


def _unicode(stream) -> bool:
    return (stream.encoding or "").lower().replace("-", "") == "utf8"


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 20 or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"expected an integer in {low}..{high}")
        return int(text)
    return parse


def build_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="jev", description=INTRODUCTION, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"jev {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str, epilog: str = ""):
        command = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.", epilog=epilog,
                                      formatter_class=raw)
        command.set_defaults(run=run)
        return command
    command = add("serve", serve, "serve an export over HTTP", f"""\
Every flag has an environment variable, shown in brackets; the flag wins. One more has no flag, because flags are
visible to other users: OPEN_JEV_API_KEY, {Settings.__dataclass_fields__['api_key'].metadata['help'].split(' (')[0]}.

Output: one JSON line for each request on stdout (no bodies, no keys); everything else on stderr.
SIGTERM or Ctrl-C: no new requests, those admitted are answered, exit 0. Again: give up on them, exit 1.

  {_curl('http://127.0.0.1:8000', False)}
""")
    _add_settings(command, SERVE_FLAGS)
    command = add("score", score, "answer the requests of a file, without a server", """\
FILE is one request, or JSON Lines with one request on each line; `-` reads stdin. For each request one line of JSON on
stdout, in order: the response, or {"line", "error", "detail"} for a request that failed; the others are still answered.
Exit status: 0 all answered, 1 some failed or there were none.
""")
    command.add_argument("file", metavar="FILE")
    command.add_argument("--pretty", action="store_true", help="show answers for reading instead of JSON")
    command.add_argument("--together", type=_integer(1, 1024), default=16, metavar="N",
                         help="requests under way at a time; they share forward passes; default 16")
    _add_settings(command, MODEL_FLAGS)
    command = add("demo", demo, "write a demo checkpoint, start a worker, ask it and show the answers")
    command.add_argument("--dir", help="keep the checkpoint in DIR/checkpoint; default: a temporary folder")
    command.add_argument("--request", metavar="FILE", help="post this request instead of the example")
    command = add("demo-checkpoint", demo_checkpoint, "write a small export with random weights, to try things with")
    command.add_argument("dir", metavar="DIR")
    command.add_argument("--seed", type=_integer(0, 2**32 - 1), default=0, help="of the weights; default 0")
    command.add_argument("--overwrite", action="store_true", help="replace a demo checkpoint that is there")
    command = add("check", check, "validate an export and say what it is")
    command.add_argument("export", metavar="EXPORT")
    _add_settings(command, ["max_length"])
    for name, (_, help) in DELEGATED.items():
        commands.add_parser(name, help=help, add_help=False)
    return parser


# Commands with a module and a parser of their own.
DELEGATED = {"export": ("jev.export.export", "merge a downloaded base model and an Open-Jev checkpoint into an export"),
             "frontend": ("jev.gateway.app", "the gateway in front of one or more workers"),
             "audit": ("jev.audit", "measure each operation of a backend against float64 on an export's own weights")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    # Before anything imports NumPy. Its BLAS threads wait for each other spinning, which on a busy machine makes the
    # worker many times slower, and the small products of the NumPy backend gain nothing from them. No bit changes.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv and argv[0] in DELEGATED:
            from importlib import import_module
            return import_module(DELEGATED[argv[0]][0]).main(argv[1:]) or 0
        args = build_parser().parse_args(argv)
        return args.run(args)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:         # whoever read stdout has left
        _flush_stdout()
        return 141
    except (CommandError, SettingsError) as error:
        say(f"jev: {error}")
        return 1
    except Exception as error:
        if not _expected(error):
            raise
        say(f"jev: {error}")
        _flush_stdout()                 # it may have been the full one
        return 1


def _expected(error: Exception) -> bool:
    """Errors whose message says it all: a bad export, an unusable backend, a port in use."""
    names = {"CheckpointError", "BackendError", "ProcessorError", "InferenceError"}
    return isinstance(error, OSError) or type(error).__name__ in names
