"""What many options over a long state cost: a choice of N options against a noul over the same state, on any backend.

    python tools/bench_choice.py EXPORT --tokens 600 --options 255 --backend numpy --json choice.json

Prints rows, seconds and processor seconds of each (medians of a few), and the ratio of the latter on a CPU, of the former
on a GPU. Without shared rows the ratio would be near N.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jev.checkpoint.opening import open_export  # noqa: E402
from jev.contract import parse_request  # noqa: E402
from jev.model.backends import open_backbone  # noqa: E402
from jev.processor import Processor  # noqa: E402
from tools.tool import Needed  # noqa: E402


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export", type=Path)
    parser.add_argument("--tokens", type=int, default=600, help="words of the state, about as many tokens")
    parser.add_argument("--options", type=int, default=255)
    parser.add_argument("--backend", default="numpy", choices=("auto", "cuda", "numpy"))
    parser.add_argument("--max-length", type=int, help="tokens of a prompt, instead of what the export says")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = Needed().parse(parser, argv)
    export = open_export(args.export, args.max_length)
    processor = Processor.of(export)
    backbone = open_backbone(export, args.backend, args.max_length, log=lambda line: None)
    words = np.random.default_rng(0).choice("the parcel left depot on Tuesday and nobody saw it".split(), args.tokens)
    instructions = "Which shelf is it on?"
    questions = {"noul": {"type": "noul", "instructions": instructions},
                 f"choice of {args.options}": {"type": "choice", "instructions": instructions,
                                               "criteria": {f"shelf {i}": None for i in range(args.options)}}}
    results = {}
    for name, question in questions.items():
        body = json.dumps({"state": " ".join(words), "questions": {"q": question}}).encode()
        sequences = processor.encode(parse_request(body, export.model_names))
        times, busy = [], []
        for _ in range(args.repeats + 1):
            started, cpu = time.perf_counter(), time.process_time()
            _, rows, _ = backbone.hidden(sequences)
            times.append(time.perf_counter() - started)
            busy.append(time.process_time() - cpu)
        results[name] = {"rows": rows, "seconds": float(np.median(times[1:])), "cpu_seconds": float(np.median(busy[1:]))}
        print(f"{name:<16}{rows:>7} rows{results[name]['seconds']:>9.3f} s{results[name]['cpu_seconds']:>9.3f} s of CPU",
              flush=True)
    few, many = (r["cpu_seconds" if backbone.name == "numpy" else "seconds"] for r in results.values())
    results["ratio"] = many / few
    print(f"ratio {many / few:.2f}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
