"""Write tests/data/export_merge.json and export_scores.json: what Transformers and PEFT make of seeded inputs.

export_merge.json   SHA-256 of every tensor of tests/export_inputs.py's base after PEFT's merge, for several adapters;
                    a test without torch compares a whole export with them.
export_scores.json  hidden states at the last token, in float64, and the BF16 forward pass's distance from them, for a
                    few prompts over the demo checkpoint; so a test without torch compares scores.

Needs the extra ``parity``. From the repository root: python tools/make_export_fixtures.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from jev.checkpoint.demo import CHAT_PREFIX, CHAT_SUFFIX, write_demo_checkpoint  # noqa: E402
from jev.checkpoint.opening import open_export  # noqa: E402
from jev_kernels import bf16  # noqa: E402
from tests import export_inputs  # noqa: E402
from tools.tool import Needed  # noqa: E402

with Needed() as needed:
    import torch
    from peft import PeftModel

    from tests import parity_reference

VARIANTS = {"float32": {}, "bfloat16": {"dtype": "BF16"}, "rslora": {"use_rslora": True, "lora_alpha": 7}}
PROMPTS = ("Context:\nThe parcel left the depot on Tuesday.\n\nQuestion: Which queue takes this parcel?\n"
           "Proposed answer: air: Needs to arrive tomorrow.\nIs this proposed answer correct? Answer Yes or No.",
           "Context:\nThe parcel left the depot on Tuesday.\n\nQuestion: Is the parcel damaged?\n"
           "Is the answer to this question yes? Answer Yes or No.",
           "Context:\n{\"open\": true, \"subject\": \"status\"}\n\nQuestion: How urgent is it?\n"
           "Proposed answer: very urgent\nIs this proposed answer correct? Answer Yes or No.",
           "Context:\n" + "The server stopped answering at night. " * 7 + "\n\nQuestion: Was data lost?\n"
           "Is the answer to this question yes? Answer Yes or No.")


def merge_hashes(variant: dict) -> dict[str, str]:
    """Name -> SHA-256 of the BF16 bits after PEFT's merge."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        export_inputs.write_checkpoint(checkpoint, **variant)
        tensors = export_inputs.base_tensors(0)
        exact = np.random.default_rng([0, 2]).standard_normal(6).astype(np.float32)
        tensors["layers.0.linear_attn.A_log"] = bf16.from_float32(exact)
        model = parity_reference.build(export_inputs.CONFIG, tensors, torch.bfloat16)
        model = PeftModel.from_pretrained(model, checkpoint / "adapter").merge_and_unload(safe_merge=True)
    state = model.state_dict()
    return {name: hashlib.sha256(state[name].contiguous().view(torch.int16).numpy().tobytes()).hexdigest()
            for name in export_inputs.CONFIG.tensor_shapes()}


def demo_scores() -> list[dict]:
    """Per prompt: ids, Transformers' float64 hidden state and score, and the relative distance of its BF16 one."""
    with tempfile.TemporaryDirectory() as folder:
        write_demo_checkpoint(Path(folder) / "demo")
        export = open_export(Path(folder) / "demo")
        tensors = {name: np.array(x) for name, x in export.tensors.items()}
        tokenizer = Tokenizer.from_file(str(export.tokenizer_file))
    models = {dtype: parity_reference.build(export.config, tensors, dtype) for dtype in (torch.float64, torch.bfloat16)}
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(CHAT_PREFIX + prompt + CHAT_SUFFIX, add_special_tokens=False).ids
        exact, rounded = (parity_reference.all_hidden(models[d], np.array(ids))[-1] for d in models)
        cases.append({"ids": ids, "hidden": [float(f"{x:.9g}") for x in exact],
                      "score": float(exact @ export.head.weight.astype(np.float64) + export.head.bias),
                      "bf16_distance": float(np.linalg.norm(rounded - exact) / np.linalg.norm(exact))})
    return cases


if __name__ == "__main__":
    needed.parse(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    data = ROOT / "tests/data"
    merges = {name: {"settings": variant, "sha256": merge_hashes(variant)} for name, variant in VARIANTS.items()}
    (data / "export_merge.json").write_text(json.dumps(merges, indent=1) + "\n")
    (data / "export_scores.json").write_text(json.dumps(demo_scores()) + "\n")
