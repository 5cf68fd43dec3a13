"""The command line: help, score on files and pipes, demo, check, and how each of them fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection

import pytest

import jev.model.backends
from jev import cli
from jev.commands import demo
from jev.engine import Engine, QueueFull
from jev.terminal import bar, render
from tests.fakes import ROOT, FakeBackbone, body, choice, demo_export, request

GOOD = [body(request(state=f"State {i}", pick=choice(3))) for i in range(30)]


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return demo_export(tmp_path_factory.mktemp("export"))


@pytest.fixture
def fake(monkeypatch, export):
    """A fake backbone behind every command, and the demo export as OPEN_JEV_MODEL."""
    backbone = FakeBackbone()
    monkeypatch.setattr(jev.model.backends, "open_backbone", lambda *args, **kwargs: backbone)
    monkeypatch.setenv("OPEN_JEV_MODEL", str(export.path))
    return backbone


def run(*args: str, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OPEN_JEV_")}
    return subprocess.run([sys.executable, "-m", "jev", *args], cwd=ROOT, input=stdin, capture_output=True, timeout=120,
                          env={**clean, **env})


def results(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# ---------------------------------------------------------------------------------------------------------------------


def test_help_is_quick_and_teaches():
    started = time.monotonic()
    shown = run("--help")
    assert shown.returncode == 0 and time.monotonic() - started < 5
    for command in ("serve", "score", "demo", "demo-checkpoint", "check", "export", "frontend"):
        assert command.encode() in shown.stdout
    heavy = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "jev", "--help"], cwd=ROOT, capture_output=True, timeout=60)
    for module in (b"numpy", b"numba", b"flask", b"tokenizers", b"waitress"):
        assert b" " + module + b"\n" not in heavy.stderr


def test_serve_help_lists_flags_and_variables(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert done.value.code == 0
    for name in ("OPEN_JEV_MODEL", "OPEN_JEV_HOST", "OPEN_JEV_PORT", "OPEN_JEV_BACKEND", "OPEN_JEV_MAX_LENGTH",
                 "OPEN_JEV_GRAPH", "CUA_S1_GRAPH", "OPEN_JEV_API_KEY", "OPEN_JEV_QUEUE", "--queue-mb", "--max-length",
                 "--port", "OPEN_JEV_ALLOWED_HOSTS", "--allowed-hosts"):
        assert name in shown
    assert "--api-key" not in shown


@pytest.mark.parametrize("args, words", [
    (["serve", "/nowhere", "--port", "0"], "jev: /nowhere: no such export folder"),
    (["score", "/nowhere.jsonl", "/nowhere"], "jev: /nowhere.jsonl: No such file"),
    (["score", ".", "/nowhere"], "jev: .: Is a directory"),
    (["check", "/nowhere"], "no such export folder"),
    (["demo", "--request", "/nowhere.json"], "jev: /nowhere.json: No such file"),
    (["serve", "--model", "/nowhere", "--host", "203.0.113.1", "--port", "0"], "Cannot assign")])
def test_what_is_not_there_is_a_sentence_and_status_1(args, words):
    shown = run(*args)
    assert shown.returncode == 1 and shown.stderr.count(b"\n") == 1
    assert words.encode() in shown.stderr and b"Traceback" not in shown.stderr and shown.stdout == b""


@pytest.mark.parametrize("args, env, lines", [
    (["srve"], {}, ["jev: no such command; did you mean serve?"]),
    (["nonsense"], {}, ["jev: no such command"]),
    (["serve", "/e", "--prot", "80"], {}, ["jev serve: no such flag: --prot; did you mean --port?"]),
    (["frontend", "--bnid", "x"], {}, ["jev frontend: no such flag: --bnid; did you mean --bind?"]),
    (["serve", "/e", "--port", "x"], {}, ["jev serve: --port: expected an integer"]),
    (["serve", "/e"], {"OPEN_JEV_PORT": "99999"}, ["jev serve: OPEN_JEV_PORT: expected an integer"]),
    (["check", ".", "--max-length", "abc"], {}, ["jev check: --max-length: expected an integer"]),
    (["demo-checkpoint", "x", "--seed", "-1"], {}, ["jev demo-checkpoint: --seed: expected an integer"]),
    (["serve"], {}, ["jev serve: which export? Give EXPORT"]), (["score", "x"], {}, ["jev score: which export?"]),
    (["check"], {}, ["jev check: which export?"]), (["audit"], {}, ["jev audit: which export?"]),
    (["check", "/e", "--model", "/f"], {}, ["jev check: the export is given twice"]),
    (["check", "/e", "/f"], {}, ["jev check: 1 arguments too many"]),
    (["serve", "--nope", "--port", "x", "--queue=0"], {"OPEN_JEV_DRAIN_SECONDS": "soon"},
     ["jev serve: no such flag: --nope", "jev serve: --port: ", "jev serve: --queue: ", "jev serve: OPEN_JEV_DRAIN_SECONDS: "]),
    (["score", "x", "/e", "--nope", "--together", "0", "--max-length", "0"], {},
     ["jev score: no such flag: --nope", "jev score: --together: expected", "jev score: --max-length: expected"])])
def test_a_wrong_command_line_is_told_as_a_whole_with_status_2(args, env, lines):
    shown = run(*args, **env)
    said = shown.stderr.decode().splitlines()
    assert shown.returncode == 2 and shown.stdout == b"" and len(said) == len(lines)
    assert all(line.startswith(start) for line, start in zip(said, lines)), said
    assert said[-1].endswith(f"({lines[-1].split(':')[0]} --help tells more)")


def test_jev_alone_is_its_help():
    alone = run()
    assert alone.returncode == 0 and alone.stdout == run("--help").stdout and b"jev serve" in alone.stdout


def test_every_command_takes_the_export_in_the_same_ways(fake, export, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("OPEN_JEV_MODEL")
    file, folder = tmp_path / "r.jsonl", str(export.path)
    file.write_bytes(GOOD[0])
    for command in (["score", str(file)], ["check"], ["score", str(file), "--backend", "numpy"]):
        shown = []
        for way in ([folder], ["--model", folder], []):
            if not way:
                monkeypatch.setenv("OPEN_JEV_MODEL", folder)
            assert cli.main([*command, *way]) == 0
            shown.append(capsys.readouterr().out.partition('"usage"')[0])
        assert shown[0] and shown == shown[:1] * 3
        monkeypatch.delenv("OPEN_JEV_MODEL")
    for way in ([folder, "--port", "0"], ["--port", "0", folder], ["--port", "0", "--model", folder]):
        assert cli.build_parser().parse_args(["serve", *way]).settings.model == export.path


def test_settings_that_a_command_does_not_use_do_not_matter(export):
    wrong = {"OPEN_JEV_PORT": "x", "OPEN_JEV_QUEUE": "x", "OPEN_JEV_API_KEY": "", "OPEN_JEV_HOST": " "}
    assert run("check", str(export.path), **wrong, OPEN_JEV_BACKEND="x").returncode == 0
    assert run("score", "-", str(export.path), "--backend", "numpy", stdin=GOOD[0], **wrong).returncode == 0
    assert run("serve", "--help", **wrong, OPEN_JEV_BACKEND="x").returncode == 0
    assert b"OPEN_JEV_BACKEND: expected" in run("score", "-", str(export.path), OPEN_JEV_BACKEND="x").stderr


def test_variables_without_effect_are_told(export):
    shown = run("check", str(export.path), OPEN_JEV_MAX_LENGHT="100", OPEN_JEV_PRT="1", OPEN_JEV_HOME="/here")
    assert shown.returncode == 0 and shown.stderr.decode().splitlines() == [
        "jev: OPEN_JEV_MAX_LENGHT: no such setting, so it has no effect; OPEN_JEV_MAX_LENGTH was meant?"]


def test_limits_are_told_in_the_words_that_the_caller_used(export):
    flags, variables = ["--batch-rows", "100"], {"OPEN_JEV_BATCH_ROWS": "100", "OPEN_JEV_MAX_LENGTH": "200"}
    shown = run("score", "-", str(export.path), *flags, stdin=GOOD[0])
    assert shown.returncode == 1 and b"lower --max-length or raise --batch-rows" in shown.stderr
    shown = run("score", "-", str(export.path), stdin=GOOD[0], **variables)
    assert shown.returncode == 1 and b"lower OPEN_JEV_MAX_LENGTH or raise OPEN_JEV_BATCH_ROWS" in shown.stderr


def test_a_name_that_stdout_cannot_show_is_shown_escaped(export, tmp_path):
    for name, shown_as in (("modèle", b"mod\\xe8le"), (os.fsdecode(b"mod\xe8le"), b"mod\\udce8le")):
        folder = tmp_path / name
        shutil.copytree(export.path, folder)
        shown = run("check", str(folder), PYTHONIOENCODING="ascii", PYTHONUTF8="1")
        assert shown.returncode == 0, shown.stderr
        assert shown_as + b": a complete export" in shown.stdout
        shown = run("audit", str(folder), "--backend", "numpy", PYTHONIOENCODING="ascii", PYTHONUTF8="1")
        assert shown.returncode == 0, shown.stderr


def test_a_port_in_use_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--model", "/nowhere", "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert f"127.0.0.1 port {port}: Address already in use" in said and "--port" in said


def test_sigterm_before_the_worker_has_loaded_ends_it_in_order(tmp_path):
    (tmp_path / "flask.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(30)\n")
    command = [sys.executable, "-m", "jev", "serve", "/nowhere", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    with process:
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize("stdout", ["full", "closed", "pipe"])
def test_a_worker_does_not_mind_who_takes_its_access_log(export, stdout):
    close = ">&-" if stdout == "closed" else ""
    command = f"exec {sys.executable} -m jev serve --port 0 --backend numpy --model {export.path} {close}"
    reader, writer = os.pipe() if stdout == "pipe" else (None, os.open("/dev/full", os.O_WRONLY))
    with subprocess.Popen(["sh", "-c", command], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True) as process:
        os.close(writer)
        if reader is not None:
            os.close(reader)
        said = []
        for line in process.stderr:
            said.append(line)
            if "listening on" in line:
                connection = HTTPConnection(line.split("http://")[1].strip(), timeout=30)
                for _ in range(3):
                    connection.request("GET", "/health")
                    response = connection.getresponse()
                    assert response.read() and response.status == 200
                connection.close()
                process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert said[-1] == "stopped\n" and "Error" not in "".join(said)


def test_blas_threads_are_one_unless_the_environment_says_otherwise(monkeypatch):
    for given, used in ((None, "1"), ("2", "2")):
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", given or "")
        if given is None:
            monkeypatch.delenv("OPENBLAS_NUM_THREADS")
        assert cli.main(["check", "/nowhere"]) == 1 and os.environ["OPENBLAS_NUM_THREADS"] == used


# ---------------------------------------------------------------------------------------------------------------------
# score


def test_score_json_lines_in_order_with_errors_in_place(fake, capsys, tmp_path):
    lines = list(GOOD)
    lines[3:3] = [b"", b"{broken", body({"state": "x", "questions": {}})]
    (tmp_path / "r.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert cli.main(["score", str(tmp_path / "r.jsonl")]) == 1
    captured = capsys.readouterr()
    found = [json.loads(line) for line in captured.out.splitlines()]
    assert len(found) == 32
    assert [r.get("line") for r in found if "error" in r] == [5, 6]
    assert found[3]["detail"][0]["type"].startswith("json") and found[4]["detail"][0]["loc"] == ["body", "questions"]
    assert "2 of 32 requests failed" in captured.err
    good = [r for r in found if "error" not in r]
    cli.main(["score", str(tmp_path / "r.jsonl"), "--together", "1"])
    assert [r["answers"] for r in results(capsys) if "error" not in r] == [r["answers"] for r in good]
    assert fake.closed


def test_score_one_document_over_several_lines(fake, capsys, tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(request(pick=choice(2)), indent=2))
    assert cli.main(["score", str(tmp_path / "r.json")]) == 0
    answer, = results(capsys)
    assert list(answer["answers"]) == ["pick"]
    (tmp_path / "r.json").write_text(json.dumps(request(), indent=2)[:-5])
    assert cli.main(["score", str(tmp_path / "r.json")]) == 1
    broken, = results(capsys)
    assert broken["line"] == 1 and broken["detail"][0]["type"].startswith("json")


def test_score_with_a_broken_first_line(fake, capsys, tmp_path):
    (tmp_path / "r.jsonl").write_bytes(b'{"state": \n' + GOOD[0] + b"\n" + GOOD[1])
    assert cli.main(["score", str(tmp_path / "r.jsonl")]) == 1
    first, second, third = results(capsys)
    assert first["line"] == 1 and second["answers"] and third["answers"]


def test_score_carries_on_after_an_inference_failure(fake, capsys, tmp_path):
    (tmp_path / "r.jsonl").write_bytes(b"\n".join(GOOD[:4]))
    fake.fail = lambda sequences: RuntimeError("boom") if len(fake.forwards) == 2 else None
    assert cli.main(["score", str(tmp_path / "r.jsonl"), "--together", "1"]) == 1
    found = results(capsys)
    assert found[0] == {"line": 1, "error": "model inference failed",
                        "detail": {"error_type": "inference_error", "message": "model inference failed"}}
    assert all(r["answers"] for r in found[1:]) and len(found) == 4


def test_score_ends_with_a_lost_gpu(fake, capsys, tmp_path):
    (tmp_path / "r.jsonl").write_bytes(b"\n".join(GOOD[:4]))
    fake.fail = lambda sequences: jev.model.backbone.BackendLost("the GPU is lost") if len(fake.forwards) > 2 else None
    assert cli.main(["score", str(tmp_path / "r.jsonl"), "--together", "1"]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2 and "jev: the GPU is lost" in err


def test_score_of_nothing_and_of_a_missing_file(fake, capsys, tmp_path):
    (tmp_path / "empty").write_bytes(b"\n\n")
    assert cli.main(["score", str(tmp_path / "empty")]) == 1
    assert f"no requests in {tmp_path / 'empty'}" in capsys.readouterr().err
    assert cli.main(["score", str(tmp_path / "missing")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_score_of_a_line_too_large(fake, capsys, tmp_path):
    (tmp_path / "r.jsonl").write_bytes(b'{"state": "' + b"x" * (4 << 20) + b'"}\n' + GOOD[0] + b"\n")
    assert cli.main(["score", str(tmp_path / "r.jsonl")]) == 1
    large, answered = results(capsys)
    assert large["line"] == 1 and large["detail"]["error_type"] == "request_too_large" and answered["answers"]


def test_score_waits_for_memory_and_says_which_request_can_never_have_it(fake, capsys, tmp_path, monkeypatch):
    answer, refused = Engine.answer, []

    def full_once(self, body, cancelled=None):
        if body not in refused:
            refused.append(body)
            raise QueueFull("the requests that wait hold too much", 0)
        return answer(self, body, cancelled)
    monkeypatch.setattr(Engine, "answer", full_once)
    monkeypatch.setenv("OPEN_JEV_QUEUE_MB", "16")
    large = json.dumps({"state": "s", "questions": {"x" * 800_000: {"type": "noul", "instructions": "?"}}}).encode()
    (tmp_path / "r.jsonl").write_bytes(b"\n".join([GOOD[0], large, GOOD[1]]))
    assert cli.main(["score", str(tmp_path / "r.jsonl")]) == 1
    first, failed, last = results(capsys)
    assert first["answers"] and last["answers"] and len(refused) == 3
    assert failed["line"] == 2 and failed["detail"]["error_type"] == "request_too_large" and "16.0 MiB" in failed["error"]


def test_score_without_stdin_or_stdout(export):
    for closed, words in (("<&-", "stdin: Bad file descriptor"), (">&-", "stdout is closed")):
        shown = subprocess.run(["sh", "-c", f"exec {sys.executable} -m jev score - {closed}"], cwd=ROOT, timeout=60,
                               capture_output=True, text=True, env={**os.environ, "OPEN_JEV_MODEL": str(export.path)})
        assert shown.returncode == 1 and words in shown.stderr and "Traceback" not in shown.stderr


def test_score_answers_a_pipe_line_by_line_in_utf_8(export):
    command = [sys.executable, "-m", "jev", "score", "-", "--model", str(export.path), "--backend", "numpy"]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        for id in ("é😀", "b"):
            question = {"type": "noul", "instructions": "?"}
            process.stdin.write(body(request(state="a", **{id: question})) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()            # while stdin is open
            assert list(json.loads(line)["answers"]) == [id] and id.encode() in line
        process.send_signal(signal.SIGINT)              # while it waits for the next line
        assert process.wait(20) == 130
        assert b"Traceback" not in process.stderr.read()


def test_score_pretty(fake, capsys, tmp_path):
    (tmp_path / "r.json").write_bytes(GOOD[0])
    assert cli.main(["score", str(tmp_path / "r.json"), "--pretty"]) == 0
    shown = capsys.readouterr().out
    assert "option 1" in shown and "%" in shown and "chosen:" in shown and "not decisions" in shown


def test_score_reads_a_pipe_with_the_real_backbone(export):
    shown = run("score", "-", "--model", str(export.path), "--backend", "numpy", stdin=body(request(state="a")))
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["model"] == "open-jev-demo"
    assert b"not decisions" in shown.stderr


# ---------------------------------------------------------------------------------------------------------------------
# demo, demo-checkpoint, check


def test_demo(fake, capsys, tmp_path):
    for _ in range(2):                                  # works again where it has been before
        assert cli.main(["demo", "--dir", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    for text in ("next_step", "courier", "▸", "chosen:", "urgent", "upset", "score", "confidence", "ms over HTTP",
                 "What should be done with this parcel?", "not decisions"):
        assert text in captured.out
    assert "stopped the worker" in captured.err and "lies in" in captured.err


def test_demo_repairs_its_checkpoint_and_deletes_nothing_else(fake, capsys, tmp_path):
    folder = tmp_path / "checkpoint"
    demo._make_demo_checkpoint(folder)
    (folder / "tokenizer.json").write_bytes(b"{")
    demo._make_demo_checkpoint(folder)
    demo._make_demo_checkpoint(folder)
    said = capsys.readouterr().err
    assert said.count("writing a demo") == 2 and said.count("lies in") == 1
    for damage in (lambda file: file.write_bytes(b"{"), lambda file: file.unlink()):
        damage(folder / "open_jev_export.json")
        assert cli.main(["demo", "--dir", str(tmp_path)]) == 1
        said = capsys.readouterr().err
        assert str(folder) in said and "make clean" in said and (folder / "model.safetensors").exists()


def test_demo_reports_a_refused_request(fake, capsys, tmp_path):
    (tmp_path / "bad.json").write_text('{"state": 1}')
    assert cli.main(["demo", "--dir", str(tmp_path), "--request", str(tmp_path / "bad.json")]) == 1
    assert "answered 422" in capsys.readouterr().err


def test_demo_stops_at_once_when_interrupted(tmp_path):
    (tmp_path / "r.json").write_bytes(GOOD[0])
    (tmp_path / "program.py").write_text(f"""
import sys, time, jev.model.backends, jev.cli
from tests.fakes import FakeBackbone
backbone = FakeBackbone()
backbone.fail = lambda sequences: time.sleep(60) if len(backbone.forwards) > 1 else None
jev.model.backends.open_backbone = lambda *args, **kwargs: backbone
sys.exit(jev.cli.main(['demo', '--dir', {str(tmp_path)!r}, '--request', {str(tmp_path / 'r.json')!r}]))
""")
    process = subprocess.Popen([sys.executable, str(tmp_path / "program.py")], cwd=ROOT, stderr=subprocess.PIPE,
                               text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    said = []
    for line in process.stderr:
        said.append(line)
        if "posting" in line or "Traceback" in line:
            break
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    assert process.wait(30) == 130
    assert time.monotonic() - started < 5
    rest = process.stderr.read()
    process.stderr.close()
    assert "interrupted" in rest and "Traceback" not in "".join(said) + rest


def test_demo_checkpoint_and_check(capsys, tmp_path):
    folder = tmp_path / "demo"
    assert cli.main(["demo-checkpoint", str(folder)]) == 0
    assert cli.main(["demo-checkpoint", str(folder)]) == 1
    assert cli.main(["demo-checkpoint", str(folder), "--overwrite", "--seed", "1"]) == 0
    capsys.readouterr()
    assert cli.main(["check", str(folder)]) == 0
    shown = capsys.readouterr().out
    for text in ("a complete export", "open-jev-demo", "linear attention", "billion parameters", "jev-latest",
                 "not decisions"):
        assert text in shown
    (folder / "model.safetensors").write_bytes(b"")
    assert cli.main(["check", str(folder)]) == 1
    assert "model.safetensors" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Rendering


def test_bars():
    assert bar(0, 4) == "····" and bar(1, 4) == "████" and bar(0.5, 4) == "██··"
    assert all(len(bar(p / 100)) == 24 for p in range(101))
    assert bar(0.5, 4, unicode=False) == "##.."


def test_render_survives_odd_names_and_plain_terminals():
    answers = {"a\x1b[31m\n": {"type": "choice", "choice": "x" * 99, "confidence": 1.0,
                               "probabilities": {"x" * 99: 0.75, "": 0.25}},
               "s": {"type": "score", "score": 0.5, "confidence": 0.0, "probabilities": {"0": 0.5, "1": 0.5},
                     "legend": {"0": {"deep": ["ü"]}, "1": "b"}}}
    response = {"model": "m", "answers": answers, "usage": {"input_tokens": 3, "output_tokens": 0},
                "metadata": {"candidate_sequences": 4, "inference_seconds": 0.001, "prefix_cache": {"rows": 2}}}
    shown = render(response)
    assert "\x1b" not in shown and max(map(len, shown.splitlines())) < 110
    render(response, unicode=False).encode("ascii")
