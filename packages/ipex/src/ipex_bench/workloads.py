# SPDX-License-Identifier: Apache-2.0
"""The workloads: models with fixed weights, their inputs, and the answer that float32 gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .shapes import LAST_STEPS
from .task import Task

# -- single operations ------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Scaled dot products of three inputs."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the mixed values."""
        return nn.functional.scaled_dot_product_attention(q, k, v)


def _op(name: str, shape: dict[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    n, width, out = shape["rows"], shape["width"], shape.get("out", shape["width"])
    x = torch.randn(n, width)
    if name == "linear":
        return nn.Linear(width, out), {"x": x}
    if name == "mlp":
        return nn.Sequential(nn.Linear(width, out), nn.GELU(), nn.Linear(out, width)), {"x": x}
    if name == "layer-norm":
        return nn.LayerNorm(width), {"x": x}
    if name == "softmax":
        return nn.Softmax(-1), {"x": x}
    if name == "conv-relu":
        conv = nn.Conv2d(width, out, 3, padding=1)
        return nn.Sequential(conv, nn.ReLU()), {"x": torch.randn(1, width, n, n)}
    assert name == "attention", name
    qkv = {key: torch.randn(1, width // 64, n, 64) for key in "qkv"}
    return Attention(), qkv


# -- models -----------------------------------------------------------------------------------------------------------


class Output(nn.Module):
    """A tensor of a model's result, so that engines that know no named results can run it."""

    def __init__(self, model: nn.Module, key: str) -> None:
        super().__init__()
        self.model = model
        self.key = key

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the tensor."""
        result: Tensor = getattr(self.model(*inputs), self.key)
        return result


class Text(nn.Module):
    """An encoder of token ids."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the last hidden state."""
        result: Tensor = self.model(
            input_ids=input_ids, attention_mask=attention_mask
        ).last_hidden_state
        return result


def _bert_config(shape: dict[str, Any], **more: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        hidden_size=shape["hidden_size"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        intermediate_size=4 * shape["hidden_size"],
        vocab_size=shape["vocab_size"],
        **more,
    )


def _text(shape: dict[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import AutoModel, BertModel

    batch, tokens = shape["batch"], shape["tokens"]
    folder = shape.get("weights")
    if folder:
        from transformers import AutoTokenizer

        model = AutoModel.from_pretrained(folder, trust_remote_code=False).float()
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        texts = (shape["texts"] * math.ceil(batch / len(shape["texts"])))[:batch]
        found = tokenizer(
            texts, padding="max_length", truncation=True, max_length=tokens, return_tensors="pt"
        )
        ids, mask = found["input_ids"], found["attention_mask"]
    else:
        model = BertModel(_bert_config(shape), add_pooling_layer=False)
        ids = torch.randint(3, shape["vocab_size"], (batch, tokens))
        mask = torch.ones_like(ids)
        mask[:, tokens - tokens // 8 :] = 0  # a padded end, so that the mask counts
    return Text(model), {"input_ids": ids, "attention_mask": mask}


def _resnet(shape: dict[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=shape["widths"][0] // 4,
        hidden_sizes=shape["widths"],
        depths=shape["depths"],
        **{"num_labels": shape["classes"]},
    )
    model = ResNetForImageClassification(config).train()
    size = shape["pixels"]
    with torch.no_grad():
        for _ in range(2):  # batch norms that have seen something
            model(torch.randn(4, 3, size, size))
    return Output(model.eval(), "logits"), {
        "pixel_values": torch.randn(shape["batch"], 3, size, size)
    }


# -- language models --------------------------------------------------------------------------------------------------


def _llama(shape: dict[str, Any]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    keys = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    config = LlamaConfig(
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        # The output of a layer has the size of its input at any width: each token counts, and so does its place.
        initializer_range=0.64 / shape["hidden_size"] ** 0.5,
        **{key: shape[key] for key in keys},
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    # Nothing ends a text early: every engine makes as many tokens as it is asked for.
    model.generation_config.eos_token_id = None
    return model


# -- training ---------------------------------------------------------------------------------------------------------


def tables(shape: dict[str, Any], sparse: bool) -> list[nn.EmbeddingBag]:
    """Return the embedding tables of the recommendation model, equal at each call."""
    generator = torch.Generator().manual_seed(0)
    rows, width = shape["rows"], shape["width"]
    block = torch.randn(min(rows, 1000), width, generator=generator) * 0.01
    weight = block.repeat(-(-rows // block.shape[0]), 1)[:rows]
    return [
        nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse, _weight=weight.clone())
        for _ in range(shape["tables"])
    ]


def _mlp(*sizes: int, last: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(len(sizes) - 1):
        layers.append(nn.Linear(sizes[i], sizes[i + 1]))
        if last or i + 2 < len(sizes):
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Dlrm(nn.Module):
    """The linear layers and the interaction of DLRM; the looked up rows come from outside.

    ``interaction`` takes the bottom's result and the looked up rows; without it, stock operations do.
    """

    def __init__(self, shape: dict[str, Any], interaction: Callable[..., Tensor] | None = None):
        super().__init__()
        count, width = shape["tables"], shape["width"]
        self.interaction = interaction
        self.bottom = _mlp(13, *shape["bottom"], width, last=True)
        self.top = _mlp(width + (count + 1) * count // 2, *shape["top"], 1, last=False)
        self.pairs = torch.tril_indices(count + 1, count + 1, -1)

    def forward(self, x: Tensor, bags: list[Tensor]) -> Tensor:
        """Return logits."""
        x = self.bottom(x)
        if self.interaction is not None:
            return self.top(self.interaction(x, *bags))[:, 0]
        vectors = torch.stack([x, *bags], 1)
        products = torch.bmm(vectors, vectors.mT)[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], 1))[:, 0]


def _classifier(shape: dict[str, Any]) -> nn.Module:
    from transformers import BertForSequenceClassification

    # Without dropout the losses of two engines can be compared.
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(_bert_config(shape, **still))


def batches(task: Task) -> list[dict[str, Tensor]]:
    """Return the training batches of a task; steps go through them in turns."""
    generator = torch.Generator().manual_seed(1)
    shape, found = task.shape, []
    for _ in range(LAST_STEPS):
        size = shape["batch"]
        if task.name == "dlrm":
            one = {
                "x": torch.randn(size, 13, generator=generator),
                "y": torch.randint(2, (size,), generator=generator).float(),
                "rows": torch.randint(shape["rows"], (shape["tables"], size), generator=generator),
            }
        else:
            one = {
                "input_ids": torch.randint(
                    3, shape["vocab_size"], (size, shape["tokens"]), generator=generator
                ),
                "labels": torch.randint(2, (size,), generator=generator),
            }
        found.append(one)
    return found


# -- all of them ------------------------------------------------------------------------------------------------------


def build(task: Task) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the module of a task in float32 with random weights, and its inputs."""
    if task.kind == "ops":
        model, inputs = _op(task.name, task.shape)
    elif task.kind == "llm":
        model = _llama(task.shape)
        size = (task.shape["batch"], task.shape["prompt"])
        inputs = {"input_ids": torch.randint(3, task.shape["vocab_size"], size)}
    elif task.kind == "train":
        model, inputs = Dlrm(task.shape) if task.name == "dlrm" else _classifier(task.shape), {}
    elif task.name == "resnet50":
        model, inputs = _resnet(task.shape)
    else:
        model, inputs = _text(task.shape)
    return (model.train() if task.kind == "train" else model.eval()), inputs


def load(task: Task, module: Callable[[], nn.Module] | None = None) -> nn.Module:
    """Return the module of a task with the weights that `make` wrote."""
    if task.kind == "llm":
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, task.float_dtype)
        # The name of this argument of transformers changed; casting works in all versions.
        decoder = AutoModelForCausalLM.from_pretrained(task.path / "model", trust_remote_code=False)
        return decoder.to(dtype).eval()
    model = module() if module is not None else build(task)[0]
    model.load_state_dict(torch.load(task.path / "weights.pt", weights_only=True))
    return model
