"""``jev audit``: how far each operation of a backend is from float64, on an export's own weights and a real request.

The two implementations side by side are in ``jev.model.ops.audit``.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jev import contract
from jev.arguments import Parser
from jev.checkpoint.opening import Export, open_export
from jev.cli import say
from jev.errors import JevError
from jev.model import row_pool, weights
from jev.model.backbone import Backbone
from jev.model.backends import open_backbone
from jev.model.forward import forward
from jev.model.ops.audit import AuditOps, Pair, Record, compare, table
from jev.model.ops.numpy import NumpyOps
from jev.processor import Processor

INTRODUCTION = """\
Every operation of one forward pass is given to the backend and, with the same inputs, to NumPy in float64; the hidden
states after the whole pass are compared as well. For auditors, and for whoever changed a kernel.
"""
EXAMPLE = (b'{"state": "The parcel left the depot on Tuesday and nobody has seen it since.", "questions": {'
           b'"lost": {"type": "noul", "instructions": "Is the parcel lost?"}, '
           b'"next": {"type": "choice", "instructions": "What happens next?", "criteria": {"wait": null, '
           b'"search": "Ask every depot on the way.", "pay": "Refund the customer."}}}}')


def audit(export: Export, backbone: Backbone, sequences: Sequence[np.ndarray]) -> tuple[dict[str, list[Record]], Record]:
    """(records by operation, record of the final hidden states) of one forward pass against float64.

    The operations' records compare on identical inputs; the last one compares the whole pass with a float64 pass.
    """
    reference = NumpyOps(export.config, "float64", export.manifest.max_length, resident=False)
    held = weights.load(export.tensors, export.config, reference)
    bound = backbone.bound(row_pool.build(sequences))
    audited = AuditOps(bound.ops, reference)
    hidden = audited.values(forward(audited, paired(bound.model, held), Pair(bound.pool, bound.rows)))
    return audited.records, compare(hidden, forward(reference, held, bound.rows))


def paired(ours: weights.Model, theirs: weights.Model) -> weights.Model:
    """One model whose weights are pairs, for ``AuditOps``."""
    def layer(a: weights.Layer, b: weights.Layer) -> weights.Layer:
        pairs: dict[str, Any] = {name: Pair(x, getattr(b, name)) for name, x in vars(a).items()
                                 if name not in ("kind", "number") and x is not None}
        return replace(a, **pairs)
    layers = tuple(map(layer, ours.layers, theirs.layers))
    return weights.Model(Pair(ours.embed, theirs.embed), layers, Pair(ours.norm, theirs.norm))


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exits with 1 if anything is not finite; how close is close enough the reader decides."""
    parser = Parser(prog="jev audit", description=INTRODUCTION,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--request", type=Path, help="a request (JSON) to audit with; default: a small example")
    parser.add_argument("--json", type=Path, help="write every record here")
    parser.add_settings(["model", "backend", "max_length"])
    args = parser.parse_args(argv)
    settings = args.settings
    for remark in args.remarks:
        say(f"jev audit: {remark}")
    body = args.request.read_bytes() if args.request else EXAMPLE
    export = open_export(settings.model, settings.max_length)
    try:
        sequences = Processor.of(export).encode(contract.parse_request(body, export.model_names))
    except contract.ContractError as error:
        raise JevError(f"{args.request or 'the example'}: {error}") from None
    backbone = open_backbone(export, settings.backend, settings.max_length, log=say)
    try:
        records, whole = audit(export, backbone, sequences)
    finally:
        backbone.close()
    print(f"{len(sequences)} sequences, {row_pool.count_rows(sequences)} rows, {export.config.num_layers} layers on "
          f"{backbone.name}; distances from float64 on the same inputs\n{table(records)}\n"
          f"hidden states after the whole pass: {whole.relative:.2e}")
    if args.json:
        args.json.write_text(json.dumps(as_json(records, whole), indent=1))
    finite = all(np.isfinite(r.relative) for found in records.values() for r in found) and np.isfinite(whole.relative)
    if not finite:
        say("something is not finite")
    return 0 if finite else 1


def as_json(records: dict[str, list[Record]], whole: Record) -> dict[str, Any]:
    return {"operations": {name: [r._asdict() for r in found] for name, found in records.items()}, "hidden": whole._asdict()}
