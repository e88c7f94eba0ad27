# SPDX-License-Identifier: Apache-2.0
"""What a folder says about the vectors and scores of its model: the files of sentence-transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ipex_llm.engine.params import Pooling
from ipex_quant.util.safetensors import CheckpointError, read_config

#: Names of sentence-transformers.
_MODES: dict[str, Pooling] = {
    "cls": "first",
    "cls_token": "first",
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
}


@dataclasses.dataclass(frozen=True)
class PoolingConfig:
    """How states become a vector, and logits a score.

    Attributes:
        pooling: Which states count.
        normalize: Vectors have the length 1.
        max_length: Most tokens of a text, None for what the model takes.
        sigmoid: Scores of a classifier are between 0 and 1.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    max_length: int | None = None
    sigmoid: bool = True


def encoder_class(folder: Path) -> str | None:
    """Return the name of the class of transformers that loads the folder's encoder, None for a decoder.

    Raises:
        CheckpointError: The folder has no config.json, or one that is no JSON object.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    config = read_config(folder)
    names = config.get("architectures") or [""]
    name = str(names[0]) if isinstance(names, list) else ""
    if name.endswith("ForSequenceClassification"):
        return "AutoModelForSequenceClassification"
    masked = str(config.get("model_type")) in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if masked and not name.endswith(("ForCausalLM", "LMHeadModel")):
        return "AutoModel"
    return None


def read_pooling(folder: Path, encoder: bool) -> PoolingConfig:
    """Return what a folder says; without the files of sentence-transformers, as that library does then.

    Args:
        folder: A model folder.
        encoder: Whether the model is an encoder: the mean of all states, where nothing else is said.

    Raises:
        CheckpointError: It asks for something that is not known here.
    """
    found = PoolingConfig(pooling="mean" if encoder else "last", normalize=True)
    config = read_config(folder)
    named = config.get("sentence_transformers")
    activation = named.get("activation_fn") if isinstance(named, dict) else None
    activation = str(activation or config.get("sbert_ce_default_activation_function") or "Sigmoid")
    kind = activation.rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise CheckpointError(f"{folder}: the activation must be Sigmoid or Identity, got {kind}")
    found = dataclasses.replace(found, sigmoid=kind == "Sigmoid")
    if (folder / "sentence_bert_config.json").is_file():
        longest = read_config(folder, "sentence_bert_config.json").get("max_seq_length")
        found = dataclasses.replace(found, max_length=longest if type(longest) is int else None)
    for kind, path in _modules(folder):
        if kind == "Pooling":
            pooling = _pooling(folder, read_config(folder, f"{path}/config.json"))
            found = dataclasses.replace(found, pooling=pooling, normalize=False)
        elif kind == "Normalize":
            found = dataclasses.replace(found, normalize=True)
        elif kind != "Transformer":
            raise CheckpointError(
                f"{folder}: modules.json must have Transformer, Pooling and Normalize, got {kind}"
            )
    return found


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return kind and folder of the modules of sentence-transformers."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        entries: Any = json.loads(path.read_text(encoding="utf-8"))
        found = [(str(e["type"]).rpartition(".")[2], str(e["path"])) for e in entries]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} must be a list of modules, got {error!r}") from None
    outside = next((p for _, p in found if Path(p).is_absolute() or ".." in Path(p).parts), None)
    if outside is not None:
        raise CheckpointError(f"{path} must name folders inside of its own, got {outside!r}")
    return found


def _pooling(folder: Path, config: dict[str, Any]) -> Pooling:
    mode = config.get("pooling_mode")
    names = [mode] if isinstance(mode, str) else mode if isinstance(mode, list) else []
    prefix = "pooling_mode_"
    names = names or [
        name[len(prefix) :] for name, on in config.items() if name.startswith(prefix) and on is True
    ]
    if len(names) != 1 or str(names[0]) not in _MODES:
        raise CheckpointError(
            f"{folder}: the pooling must be one of cls, mean and lasttoken, got {', '.join(map(str, names))}"
        )
    return _MODES[str(names[0])]
