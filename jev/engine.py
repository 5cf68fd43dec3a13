"""The worker without HTTP: a request's bytes in, the response object of the contract out.

    bytes -> place in the queue -> questions and prompts -> token ids -> scores (shared forwards) -> typed answers

``answer`` may be called from any number of threads. The scheduler lets one at a time use the backbone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime, timezone
from typing import Any

import numpy as np

from jev import contract
from jev.checkpoint.manifest import MANIFEST_FILE
from jev.checkpoint.opening import Export
from jev.contract import ContractError
from jev.model import finite
from jev.model.backbone import Backbone, BackendError, BackendLost
from jev.model.sequences import Sequences
from jev.processor import Processor
from jev.scheduler import (
    MIB,
    Cancelled,
    InferenceError,
    Inferred,
    Place,
    QueueFull,
    Refused,
    RequestTooLarge,
    Scheduler,
    ShuttingDown,
)
from jev.settings import Settings

__all__ = ["Cancelled", "ContractError", "Engine", "InferenceError", "QueueFull", "Refused", "RequestTooLarge",
           "ShuttingDown"]

logger = logging.getLogger("jev.engine")

# A forward takes up to a second on a GPU, some more with GEMMs to time, and up to minutes in NumPy. One that takes longer
# than this hangs, and with it all that wait.
STUCK_SECONDS = {"cuda": 60.0, "numpy": 600.0}
# Bodies of more bytes are parsed and tokenized one at a time: many at once would take no less time, as the interpreter
# runs one thread, and a hundred times their size in memory, each.
LARGE_BODY = 1 << 15
# What is kept of a parsed body, in bytes for each of its bytes, at most: `{"":{}},` has 8, and takes 250 or more.
PARSED = 40
METHOD = "numba_merged_lora_decision_head"
DEMO_NOTICE = "demo checkpoint with random weights: these answers are not decisions"
WARM_UP = (b'{"state": "The worker has just started.", "questions": {'
           b'"ready": {"type": "noul", "instructions": "Is the worker ready?"}}}')


class Engine:
    """Answers requests with one export on one backbone. Raises BackendError, ProcessorError or InferenceError if it
    cannot.

    When the constructor returns, a real inference has run (``ready``). ``close`` waits for a running forward and closes the
    backbone. ``lost`` is why no further forward can succeed in this process, or None; ``on_lost()`` is called when that
    happens. Whoever waits then is answered with InferenceError.
    """

    lost: BackendLost | None = None
    on_lost: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, export: Export, backbone: Backbone, settings: Settings) -> None:
        self.export = export
        self.backbone = backbone
        manifest = export.manifest
        self.max_rows = min(settings.batch_rows or backbone.max_rows, backbone.max_rows)
        if manifest.max_length > self.max_rows:
            advice = "" if manifest.max_length > backbone.max_rows else f" or raise {settings.named('batch_rows')}"
            raise BackendError(f"prompts of up to {manifest.max_length} tokens do not fit in a forward pass of "
                               f"{self.max_rows} rows: lower {settings.named('max_length')}{advice}")
        self._models = _about(export)
        self.processor = Processor.of(export)
        self.processor.start_threads()
        self.scheduler = Scheduler(self._infer, self.max_rows, settings.queue, self._probe, settings.queue_mb * MIB,
                                   backbone.resumable)
        self._large = threading.Lock()
        prompt, = contract.parse_request(WARM_UP, export.model_names).questions[0].prompts
        # Cut, which no request ever is: a worker for very short prompts has to start too.
        self._warm_up = Sequences.of([self.processor.tokenize(prompt)[:manifest.max_length]])
        self.ready = False
        try:
            with self.scheduler.admit() as place:
                self.scheduler.run(place, self._warm_up)
        except InferenceError as error:
            self.scheduler.close(timeout=5)
            reason = self._why_not_finite()
            self.backbone.close()
            raise InferenceError(f"the warm-up is not finite: {reason}" if reason else str(error)) from None
        self.ready = True

    def answer(self, body: bytes, cancelled: Callable[[], bool] | None = None) -> dict[str, Any]:
        """Answer one request. ``cancelled`` says whether its client has gone.

        Raises ContractError (422), RequestTooLarge (413), QueueFull or ShuttingDown (503, with ``retry_after``),
        InferenceError (500) or Cancelled.
        """
        with self.scheduler.admit(cancelled, len(body)) as place:
            request, sequences = self._prepare(body, place)
            result = self.scheduler.run(place, sequences, (1 + PARSED) * len(body))
        scores, start = [], 0
        for question in request.questions:
            scores.append(result.scores[start:start + len(question.parts)])
            start += len(question.parts)
        try:
            answers = contract.answers(request, scores, self.export.manifest.temperature)
        except ValueError:                  # finite scores may still overflow over a tiny temperature
            logger.error("the scores of a request gave no finite probabilities")
            raise InferenceError("model inference failed") from None
        manifest = self.export.manifest
        metadata = {
            "method": METHOD,
            "temperature": manifest.temperature,
            "candidate_sequences": len(sequences),
            "inference_seconds": result.seconds,
            "base_revision": manifest.base_revision,
            "max_length": manifest.max_length,
            # rows: distinct token rows of this request, whatever else shared the forward. cached: those of them that were
            # kept from earlier requests.
            "prefix_cache": {"enabled": True, "mode": "request_rows", "rows": sequences.rows, "cached": result.cached},
        }
        if request.ignored:
            metadata["ignored_fields"] = list(request.ignored)
        if self.export.demo:
            metadata |= {"demo": True, "notice": DEMO_NOTICE}
        usage = {"input_tokens": sequences.total, "output_tokens": 0}
        return {"model": manifest.model_id, "answers": answers, "usage": usage, "metadata": metadata}

    def _prepare(self, body: bytes, place: Place) -> tuple[contract.Request, Sequences]:
        with self._large if len(body) > LARGE_BODY else nullcontext():
            if len(body) > LARGE_BODY and place.gone():       # while it waited for others
                raise Cancelled
            request = contract.parse_request(body, self.export.model_names)
            return request, self.processor.encode(request)

    def health(self) -> dict[str, Any]:
        """The object of GET /health. ``status`` is "ready", "draining", or "failing" after a failed forward or while one
        hangs."""
        works = self.ready and self.scheduler.busy_seconds < STUCK_SECONDS[self.backbone.name]
        status = "draining" if self.scheduler.draining else "ready" if works else "failing"
        health = {"status": status, "model": self.export.manifest.model_id}
        return health | {"demo": True, "notice": DEMO_NOTICE} if self.export.demo else health

    def models(self) -> dict[str, Any]:
        """The object of GET /v1/models."""
        return self._models

    @property
    def pending(self) -> int:
        """Requests admitted and not yet answered."""
        return self.scheduler.admitted

    @property
    def draining(self) -> bool:
        """Nothing is admitted any more."""
        return self.scheduler.draining

    def drain(self) -> None:
        """Admit nothing more (ShuttingDown); what was admitted is answered."""
        self.scheduler.drain()

    def close(self) -> None:
        """Fail what still waits and release the backbone."""
        self.scheduler.close(timeout=5)
        self.backbone.close()

    def _infer(self, sequences: Sequences) -> Inferred:
        try:
            found = self.backbone.hidden(sequences)
        except BackendLost as error:
            self.lost = self.lost or error
            raise
        scores = self.export.head.score(found.hidden)
        self.ready = True
        return Inferred(scores, found.resumed)

    def _why_not_finite(self) -> str | None:
        """After a warm-up without a score: what was not finite, if that was it."""
        try:
            return finite.explain(self.export, self.backbone, self._warm_up)
        except Exception as error:          # the forward itself fails, and the log has its cause
            logger.error("the warm-up cannot be looked into (%s: %s)", type(error).__name__, error)
            return None

    def _probe(self) -> None:
        """After a failed forward: does the backbone still work? No other forward runs meanwhile."""
        self.ready = False
        if self.lost:
            self.on_lost()
            return
        try:
            scores = self._infer(self._warm_up).scores
            self.ready = bool(np.isfinite(scores).all())
        except Exception as error:
            self.ready = False
            logger.error("the backend does not recover (%s: %s); restart the worker", type(error).__name__, error)


def _about(export: Export) -> dict[str, Any]:
    """What GET /v1/models says of an export, whose folder may be gone or touched later."""
    model_id = export.manifest.model_id
    about = DEMO_NOTICE if export.demo else f"decision head and merged LoRA on {model_id}"
    # Clients require a date, and the checkpoints state none: the day on which this export was made.
    made = datetime.fromtimestamp((export.path / MANIFEST_FILE).stat().st_mtime, timezone.utc)
    entry = {"id": model_id, "name": model_id, "description": f"{export.manifest.source.title}: {about}",
             "release_date": made.date().isoformat()}
    return {"models": [entry], "aliases": sorted(export.model_names - {model_id})}
