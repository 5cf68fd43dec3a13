"""How far from float64: our BF16 forward pass and Transformers', on one GPU, the same synthetic weights and token ids.

    python tools/gpu_parity.py --layers 2,4,16,64 --json parity.json

Needs torch and transformers. Distances are means over sequences of the final hidden state's error (tests/yardstick.py);
the reference is tests/torch_ops.py in float64. Prints one line per number of layers.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jev.checkpoint.checkpoint import ModelConfig  # noqa: E402
from jev.model import row_pool  # noqa: E402
from jev.model.forward import forward  # noqa: E402
from jev.model.weights import assemble  # noqa: E402
from jev_kernels import bf16  # noqa: E402
from jev_kernels.runtime.device import find_device, memory  # noqa: E402
from tests import torch_ops, yardstick  # noqa: E402
from tests.gpu.device_models import transformers_hidden, transformers_model  # noqa: E402
from tools import synthetic  # noqa: E402
from tools.bench_forward import synthetic_backbone  # noqa: E402

LENGTHS = (1, 7, 64, 65, 107, 139, 250, 400)


def sequences(config: ModelConfig, seed: int, lengths=LENGTHS) -> list[np.ndarray]:
    """Random sequences; every second one shares half of its tokens with the one before."""
    rng = np.random.default_rng(seed)
    out = [rng.integers(0, config.vocab_size, n).astype(np.int32) for n in lengths]
    for i in range(1, len(out), 2):
        n = min(len(out[i]), len(out[i - 1])) // 2
        out[i][:n] = out[i - 1][:n]
    return out


def float64_hidden(config: ModelConfig, held: dict, ids: list[np.ndarray]) -> np.ndarray:
    """float64 [n, h] of the last tokens, on the GPU, from the weights that a CudaBackbone holds."""
    ops = torch_ops.TorchOps(config, "cuda")
    widened = {key: torch_ops.tensor(w.array, "cuda") for key, w in held.items()}
    return forward(ops, assemble(widened, config), row_pool.build(ids)).cpu().numpy()


@torch.inference_mode()
def distances(config: ModelConfig, seed: int = 0, lengths=LENGTHS, repeats: int = 1, **options) -> dict[str, float]:
    """{"ours", "transformers": distance from float64, "apart": from each other, "ratio", "gb": memory of our backbone}.

    AssertionError unless ``repeats`` forward passes give the same bits.
    """
    find_device()
    torch.cuda.empty_cache()
    free, _ = memory()
    ours = synthetic_backbone(config, seed, **options)
    ids = sequences(config, seed, lengths)
    first = ours.hidden(ids)[0]
    for i in range(1, repeats):
        assert (ours.hidden(ids)[0] == first).all(), f"forward {i} gave other bits"
    taken = (free - memory()[0]) / 1e9            # nothing else allocates meanwhile
    hidden = bf16.to_float32(first).astype(np.float64)
    exact = float64_hidden(config, ours.weights.held, ids)
    model = transformers_model(config, ours.weights.held)
    theirs = torch.stack([transformers_hidden(model, s) for s in ids]).cpu().numpy()
    del model
    ours.close()
    torch.cuda.empty_cache()
    a, b = yardstick.distance(hidden, exact), yardstick.distance(theirs, exact)
    return {"ours": a, "transformers": b, "ratio": a / b, "apart": yardstick.distance(hidden, theirs), "gb": taken}


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=synthetic.CONFIGS, default="27b")
    parser.add_argument("--layers", default="2,4,16,64")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the models of at most 16 layers; one for more")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    rows = []
    print(f"{'layers':>6}{'seeds':>6}{'ours':>11}{'transformers':>14}{'ratio':>8}{'worst':>8}{'apart':>11}{'GB':>7}")
    for layers in map(int, args.layers.split(",")):
        config = synthetic.config(args.model, layers)
        seeds = args.seeds if layers <= 16 else 1
        found = [distances(config, seed, graph=False, log=lambda line: None, ready_rows=0, tune=False) for seed in range(seeds)]
        mean = {key: float(np.mean([d[key] for d in found])) for key in found[0]}
        worst = max(d["ratio"] for d in found)
        rows.append({"layers": layers, "seeds": seeds, "worst": worst, **mean})
        print(f"{layers:>6}{seeds:>6}{mean['ours']:>11.3e}{mean['transformers']:>14.3e}{mean['ratio']:>8.3f}{worst:>8.3f}"
              f"{mean['apart']:>11.3e}{mean['gb']:>7.1f}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
