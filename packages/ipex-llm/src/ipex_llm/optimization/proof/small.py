# SPDX-License-Identifier: Apache-2.0
"""Small copies of models: their class, made from their configuration with smaller numbers and fewer layers.

Numbers are made smaller by what their names say. What a name does not tell is taken for something that begins at a
distance, as windows do, so that a short text is enough to see it.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import torch
from torch import nn

from ipex_llm.arch.seeded import seeded

HEAD, VOCAB, EXPERTS, POSITIONS, LAYERS = 16, 128, 8, 160, 8

_LAYERS = ("decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim", "n_embed")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KV = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads")
_IS_HEADS = re.compile(r"(^|_)n?_?heads?(_kv)?$|_heads_")
_IS_DIM = re.compile(
    r"dim(s|ension)?$|_dim_|rank|hidden|embd|embed|d_model|d_ff|d_kv|d_rel|inner|ffn|width|channels|_size$|intermediate|ndims"
)
_NOT_DIM = re.compile(
    r"vocab|ngram|window|chunk|block|kernel|patch|image|conv|group_size|page|stride|local|batch|topk|top_k"
)
_IS_EXPERTS = re.compile(r"experts?$|^moe_num_experts|num_local_experts|_experts_")
_IS_TOP = re.compile(
    r"per_tok|top_?k$|^top_k_experts$|experts_top|moe_k$|num_selected|num_experts_per"
)
_IS_POSITIONS = re.compile(
    r"max_\w*position|n_positions|n_ctx|max_seq|seq_length|max_target|model_max|max_length"
)
_IS_PLAIN = re.compile(
    r"token|_id$|_ids$|index$|version|kernel|conv|pretraining_tp|_parts$|seed|bits|layers?$|n_group|topk_group|interval"
    r"|pattern|_step|_freq|period|num_labels|multiple_of|scal|factor|multiplier|loops?$|streams?$|iter|mult$|expan|inference_chunk"
)
#: Of numbers that say which layers run several times.
_LOOP = "loop_layer_index_"
_IS_INTERVAL = re.compile(r"interval|pattern|_step$|_freq$|period|every")
_IS_DENSE = re.compile(
    r"^first_k_dense|first_dense|num_dense|n_dense|dense_layers$|moe_layer_start"
)
#: How many layers at the end read the keys and values of layers before.
_IS_SHARED = re.compile(r"shared_layers$")


def config_of(model: Any) -> Any:
    """Return the configuration of the text part of a model."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return text() if callable(text) else config


def _get(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # what differs among layers has to be asked for each of them
        return vars(config).get(name)


def _overrides(config: Any) -> dict[int, dict[str, Any]]:
    """Return what single layers have instead of the values of a configuration, by their index."""
    spec = vars(config).get("_heterogeneity_spec")
    found = getattr(spec, "per_layer_overrides", {})
    return {int(index): dict(values) for index, values in found.items()}


def _first(config: Any, names: tuple[str, ...], default: int = 0) -> int:
    for name in names:
        value = _get(config, name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return default


def _values(config: Any) -> dict[str, Any]:
    found = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    if "do_sample" in found:  # transformers 4 keeps here how to generate, too
        for name in getattr(config, "_get_global_generation_defaults", dict)():
            found.pop(name, None)
    return found


def _integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _indices(name: str, value: Any, count: int) -> list[int] | None:
    """Return the numbers of layers that a list holds, None if it holds something else."""
    if not (isinstance(value, (list, tuple)) and value and all(map(_integer, value))):
        return None
    if name == "ple_layer_ids":  # counted from one (Qwen 4)
        return [one - 1 for one in value]
    plain = len(set(value)) == len(value) and min(value) >= 0 and max(value) < count
    named = re.search(r"layer|indices|idx", name) is not None and max(value) > 1
    return list(value) if plain and named else None


def _of_layers(name: str, value: Any, count: int) -> list[Any] | None:
    """Return what a list says about each layer, where names of kinds may repeat (RecurrentGemma); None: nothing."""
    if not isinstance(value, (list, tuple)):
        return None
    cycle = 1 < len(value) < count and name.endswith("types") and isinstance(value[0], str)
    return [value[i % len(value)] for i in range(count)] if cycle or len(value) == count else None


def _sections(config: Any, count: int) -> dict[str, range]:
    """Return the layers of each part of a stack, by the names of their numbers (Dory); empty: it has no parts.

    With the places where layers begin and end to run again these are the parts up to there (Inkling 2's loops).
    """
    start, stop = (_get(config, f"{_LOOP}{name}") for name in ("start", "end"))
    if _integer(start) and _integer(stop):
        return {f"{_LOOP}start": range(start), f"{_LOOP}end": range(start, stop)}
    found, end = {}, 0
    for name in ("n_input_layers", "n_recurrent_layers", "n_output_layers"):
        size = _get(config, name)
        if not _integer(size):
            return {}
        found[name] = range(end, end := end + size)
    return found if end == count else {}


def kinds_of_layers(config: Any) -> list[tuple[object, ...]]:
    """Return what the lists of a configuration say about each layer."""
    count = _first(config, _LAYERS)
    kinds: list[list[object]] = [[] for _ in range(count)]
    for name, value in sorted(_values(config).items()):
        if (indices := _indices(name, value, count)) is not None:
            for index, kind in enumerate(kinds):
                kind.append(index in indices)
        elif (every := _of_layers(name, value, count)) is not None:
            for one, kind in zip(every, kinds, strict=True):
                kind.append(str(one))
        elif _integer(value) and _IS_DENSE.search(name) and value < count:
            for index, kind in enumerate(kinds):
                kind.append(index < value)
        elif _integer(value) and _IS_SHARED.search(name) and 0 < value < count:
            for index, kind in enumerate(kinds):
                kind.append(index >= count - value)
    for name, section in _sections(config, count).items():
        for index in () if _LOOP in name else section:
            kinds[index].append(name)
    for index, values in _overrides(config).items():
        if index < count:
            kinds[index].append(str(sorted(values.items(), key=str)))
    return [tuple(kind) for kind in kinds]


def chosen_layers(config: Any) -> list[int]:
    """Return the numbers of the layers that the small copy has: one of each kind, two of the kind of layer 0."""
    count = _first(config, _LAYERS)
    steps = [v for k, v in _values(config).items() if _IS_INTERVAL.search(k) and _integer(v)]
    kinds = kinds_of_layers(config)
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    steps = [step for step in steps if 1 < step <= LAYERS]
    if steps and len(first) < 2:
        return list(range(min(count, max(steps) + 1)))
    parts = [one for n, one in _sections(config, count).items() if _LOOP in n]
    if parts:  # two before the loops and in them, of two kinds if there are, and what other kinds are behind
        found: list[int] = []
        for part in parts:
            each = {kinds.index(kinds[at], part.start) for at in part}
            own = [*sorted(each), *(at for at in part if at not in each)]
            found += sorted(own[:2])
        have = {kinds[at] for at in found}
        return found + [at for at in first if at >= parts[1].stop and kinds[at] not in have]
    # Layer 0 may differ from all others of its kind, for instance by having no norm.
    again = [index for index in range(1, count) if kinds[index] == kinds[0]]
    if again and len(first) < LAYERS:
        first.append(again[0])
    if len(first) < 2:
        first += range(1, min(count, 2))
    return sorted(first)[:LAYERS]  # further kinds are not proven


def _cut_layers(config: Any) -> None:
    count, chosen = _first(config, _LAYERS), chosen_layers(config)
    if not count or len(chosen) >= count:
        return
    overrides = _overrides(config)
    sections, end = _sections(config, count), 0
    for name, section in sections.items():
        own = sum(index in section for index in chosen)
        end += own
        setattr(config, name, end if _LOOP in name else own)
    for name, value in _values(config).items():
        if name.startswith("n_") and name.endswith("_layers"):
            continue
        if (indices := _indices(name, value, count)) is not None:
            kept = [at for at, index in enumerate(chosen) if index in indices]
            setattr(config, name, [at + value[0] - indices[0] for at in kept])
        elif (every := _of_layers(name, value, count)) is not None:
            setattr(config, name, type(value)(every[index] for index in chosen))
        elif _integer(value) and _IS_DENSE.search(name) and value <= count:
            setattr(config, name, sum(index < value for index in chosen))
        elif _integer(value) and _IS_SHARED.search(name) and value < count:
            setattr(config, name, sum(index >= count - value for index in chosen))
    for name in (*_LAYERS, "encoder_layers", "num_decoder_layers", "num_blocks"):
        if _integer(_get(config, name)):
            setattr(config, name, min(len(chosen), _get(config, name)))
    if overrides:
        config.per_layer_config = {
            at: overrides[index] for at, index in enumerate(chosen) if index in overrides
        }


def _heads(heads: int, kv: int) -> tuple[int, int]:
    if kv in (0, heads):
        return 4, 4
    if kv == 1:
        return 4, 1
    group = heads // kv
    return (4, 2) if group % 2 == 0 else (6, 2)


class _Sizes:
    """Old sizes -> new ones."""

    def __init__(self, config: Any) -> None:
        self.heads, kv = _first(config, _HEADS, 1), _first(config, _KV)
        self.kv = kv or self.heads
        self.hidden = _first(config, _HIDDEN)
        self.head = _first(config, ("head_dim", "kv_channels"))
        self.head = self.head or max(self.hidden // max(self.heads, 1), 1)
        self.active = self.hidden > 8 * HEAD
        new_heads, new_kv = _heads(self.heads, kv)
        whole = self.heads * self.head
        wide = new_heads * HEAD if self.hidden == whole else new_heads * HEAD + 32
        self.new_heads, self.new_kv = new_heads, new_kv
        # Attention that is a multiple of the stream wide, since it reads more than that (Zamba 2).
        multiple = _first(config, ("attention_hidden_size",)) == whole and whole % self.hidden == 0
        if multiple and whole > self.hidden:
            wide = new_heads * HEAD // (whole // self.hidden)
        self.table = {self.hidden * k: wide * k for k in (1, 2, 3, 4)}
        self.table.update({whole: new_heads * HEAD, self.kv * self.head: new_kv * HEAD})
        self.table[self.hidden] = wide
        self.table[self.head] = HEAD

    def dim(self, value: int) -> int:
        if value in self.table:
            return self.table[value]
        if value < self.head:
            return max(4, 4 * round(value * HEAD / self.head / 4))
        return min(48, max(HEAD, 8 * (value * HEAD // self.head // 8)))

    def head_count(self, name: str, value: int) -> int:
        if name in _KV:
            return self.new_kv
        if value == self.heads:
            return self.new_heads
        return value if value < 4 else 2 if value < self.heads else 4


def _is_sizes(name: str, value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(_integer(one) and one > 1 for one in value)
        and _IS_DIM.search(name) is not None
        and not _NOT_DIM.search(name)
    )


def _shrink(config: Any, unknown: bool, outer: _Sizes | None = None) -> None:
    sizes = outer or _Sizes(config)
    windows = iter(range(8, 80))  # beyond the seven tokens of a match
    seen: dict[int, int] = {}
    turned = _first(config, ("qk_rope_head_dim", "rotary_dim"))
    for name, value in _values(config).items():
        if sizes.active and _is_sizes(name, value):  # of each layer
            setattr(config, name, [sizes.dim(one) for one in value])
        if name == "compress_rates":  # tokens of a window in layers of a kind (DeepSeek V4)
            setattr(config, name, {kind: min(rate, 8) for kind, rate in value.items()})
        limits = "swiglu_limit|clip_threshold"
        if isinstance(value, float) and re.search(limits, name):  # within reach
            setattr(config, name, min(value, 0.5))
        if not _integer(value) or value < 2 or name in _LAYERS:
            continue
        new = value
        if "vocab" in name:
            new = min(value, VOCAB)
        elif _IS_POSITIONS.search(name):
            new = min(value, POSITIONS)
        elif name == "log_scaling_n_floor":
            new = min(value, 24)
        elif name in (
            "n_layers_per_attn_res_block",
            "loop_num_passes",
            "heads_per_ngram",
            "hc_sinkhorn_iters",
        ):
            new = min(value, 2)
        elif name.startswith(_LOOP):
            continue
        elif _IS_PLAIN.search(name):
            if re.search(r"token_id$|token_index$", name):
                new = value % VOCAB
            elif name == "n_group":
                new = 2
        elif name in ("index_topk", "index_topk_blocks", "index_block_size", "keep_window_size"):
            # Fewer keys are all chosen, and only so many are computed by programs.
            new = min(value, 40 if name in ("index_topk", "keep_window_size") else 6)
        elif name in ("indexer_budget", "indexer_compress_ratio"):  # a multiple of the other
            new = 40 if name == "indexer_budget" else math.gcd(value, 4)
        elif name == "num_expert_group":  # what `n_group` is called in files of Kimi and Ling
            new = 2
        elif _IS_TOP.search(name) and value <= 64 and "index" not in name:
            new = min(value, 2)
        elif _IS_EXPERTS.search(name):
            new = min(value, EXPERTS)
        elif _IS_HEADS.search(name):
            new = sizes.head_count(name, value) if sizes.active else value
        elif _IS_DIM.search(name) and not _NOT_DIM.search(name):
            new = sizes.dim(value) if sizes.active else value
        elif value > 16 and (unknown or re.search(r"window|chunk|block|local|topk|top_k", name)):
            new = seen[value] = seen.get(value) or next(windows)
        if new != value:
            setattr(config, name, new)
    if _get(config, "n_group") != 0 and _integer(_get(config, "topk_group")):
        config.topk_group = min(config.topk_group, max(1, _get(config, "n_group") or 1))
    if sizes.active and turned and _integer(_get(config, "qk_nope_head_dim")):
        config.qk_head_dim = _get(config, "qk_nope_head_dim") + _get(config, "qk_rope_head_dim")
    if sizes.active:
        _state_space(config)
        _shrink_overrides(config, sizes)
    for name, value in _values(config).items():
        if name.endswith(("token_id", "token_index", "token_ids")) and isinstance(value, list):
            setattr(config, name, [v % VOCAB if _integer(v) else v for v in value])
        elif name.startswith("rope") and isinstance(value, dict):
            setattr(config, name, _rope(value, sizes))


def _shrink_overrides(config: Any, sizes: _Sizes) -> None:
    overrides = _overrides(config)
    for values in overrides.values():
        for name, value in values.items():
            if not _integer(value) or value < 2:
                continue
            if name in _KV:
                values[name] = max(1, sizes.new_kv * value // sizes.kv)
            elif _IS_HEADS.search(name):
                values[name] = sizes.head_count(name, value)
            elif _IS_DIM.search(name) and not _NOT_DIM.search(name):
                values[name] = sizes.dim(value)
    if overrides:
        config.per_layer_config = overrides


#: Names of numbers of heads, sizes of heads and factors on the width of state space layers that belong together.
_STATE_SPACE = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("mamba_num_heads", "mamba_head_dim", "expand"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
    ("num_heads", "head_dim", "expand"),
)


def _state_space(config: Any) -> None:
    """Let heads of state space layers fill their width again, and keys of xLSTM a multiple of 64 features."""
    width = _first(config, _HIDDEN)
    share = _get(config, "qk_dim_factor")
    if share:
        config.hidden_size = config.embedding_dim = round(64 / min(share, 1.0))
    for heads, size, expand in _STATE_SPACE:
        factor = _get(config, expand)
        if _get(config, heads) is None or _get(config, size) is None or factor is None:
            continue
        inner = int(width * factor)
        if _integer(_get(config, "mamba_d_ssm")):
            config.mamba_d_ssm = inner
        setattr(config, size, HEAD)
        setattr(config, heads, inner // HEAD)
        for groups in ("mamba_n_groups", "n_groups", "mamba_ngroups"):
            if _integer(_get(config, groups)) and (inner // HEAD) % _get(config, groups):
                setattr(config, groups, 1)


def _rope(parameters: dict[str, Any], sizes: _Sizes) -> dict[str, Any]:
    """Return parameters of rotary embeddings for smaller heads and earlier limits."""
    found = {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            value = _rope(value, sizes)
        elif name == "original_max_position_embeddings":
            value = min(value, 24)
        elif name == "partial_rotary_factor" and sizes.active:  # more than one pair
            value = max(value, 4 / HEAD)
        elif isinstance(value, (list, tuple)) and sizes.active:
            if name == "mrope_section":
                value = [2, 3, 3] if len(value) == 3 else value
            elif name.endswith("factor"):
                value = list(value)[: max(1, len(value) * HEAD // sizes.head)]
        found[name] = value
    return found


def small_config(config: Any, unknown: bool = True) -> Any:
    """Return a copy of a configuration for a model that runs in milliseconds.

    Args:
        config: Of a decoder.
        unknown: Make large integers of unknown meaning small, too.
    """
    new = copy.deepcopy(config)
    for value in _values(new).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):  # of a part of the model
            _cut_layers(value)
            # One without layers is of a part of a layer, and has sizes of the whole (DBRX).
            _shrink(value, unknown, None if _first(value, _LAYERS) else _Sizes(new))
    _cut_layers(new)
    _shrink(new, unknown)
    kind = getattr(new, "rope_parameters", None) or getattr(new, "rope_scaling", None) or {}
    if "dynamic" in str(kind) or "longrope" in str(kind):
        for name, value in _values(new).items():
            original = name.startswith("original")
            if (
                _integer(value)
                and _IS_POSITIONS.search(name)
                and ("dynamic" in str(kind) or original)
            ):
                setattr(new, name, min(value, 24))
    return new


def reach(config: Any) -> int:
    """Return how many tokens it takes to be beyond all that begins at a distance, twice."""
    found = [8]
    for name, value in _values(config).items():
        plain = _IS_PLAIN.search(name) or _IS_EXPERTS.search(name) or _IS_HEADS.search(name)
        dims = (_IS_DIM.search(name) and not _NOT_DIM.search(name)) or _IS_POSITIONS.search(name)
        if _integer(value) and not plain and not dims and "vocab" not in name and 1 < value <= 32:
            found.append(value)
    if re.search("dynamic|longrope|yarn", str(getattr(config, "rope_parameters", ""))):
        found.append(24)
    return 2 * max(found) + 5


def _scale(parameter: torch.Tensor, embeddings: set[int]) -> float:
    fan = parameter[0].numel() if parameter.ndim == 2 else parameter.shape[1]
    return 0.3 if id(parameter) in embeddings else 1.2 / max(fan, 1) ** 0.5


def spread(parameter: torch.Tensor) -> float:
    """Return how far apart random elements of a bias or of factors are; small equal ones keep their size (Dory)."""
    first = float(parameter.flatten()[0]) if parameter.numel() else 0.0
    small = 0.0 < abs(first) < 0.1 and bool((parameter == first).all())
    return 0.15 * (abs(first) if small else 1.0)


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give a model weights that make all of its parts matter, and return it in eval mode.

    Biases are not zero and norms not one, unlike in a new model.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(shape: torch.Size, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            kept = parameter.nan_to_num().clamp(-1, 1)
            parameter.copy_(kept + noise(parameter.shape, spread(kept)))
        elif "log" in name.rpartition(".")[2]:
            parameter.add_(noise(parameter.shape, 0.05))
        else:
            parameter.copy_(noise(parameter.shape, _scale(parameter, embeddings)))
        parameter.requires_grad_(False)
    for name, buffer in model.named_buffers():
        if name.endswith("bias") and buffer.is_floating_point() and buffer.ndim == 1:
            buffer.copy_(noise(buffer.shape, 0.3))  # of routers
        elif name.endswith("layer_scalar"):
            buffer.copy_(1.0 + noise(buffer.shape, 0.15))
        elif name.endswith("tid2eid"):  # the experts of each token
            buffer.copy_(torch.arange(buffer.numel()).view_as(buffer) % (buffer.shape[1] + 1))
    return model.eval()


def small_model(kind: type, config: Any, unknown: bool = True, seed: int = 0) -> nn.Module:
    """Return a small model of a class, float32, with random weights.

    Args:
        kind: Class of the model.
        config: Configuration of the large one.
        unknown: As for `small_config`.
        seed: Of the weights.
    """
    small = small_config(config, unknown)
    with seeded(seed):
        model: nn.Module = kind(small)
    return randomize(model.float(), seed)
