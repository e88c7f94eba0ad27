# SPDX-License-Identifier: Apache-2.0
"""Changes of inputs, all of them drawn from a generator that is given: the same seed gives the same input."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import torch

INTEGERS = (
    *(-(2**63), -(2**31) - 1, -129, -2, -1, 0, 1, 2, 3, 7, 255, 2**16, 2**31),
    *(2**32, 2**40, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 10**30),
)
FLOATS = (0.0, -0.0, -1.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *("", " ", "a", "None", "../x", "/etc/passwd", "a/../../b", "x" * 5000, "\0", "\u2028", "é"),
    *("__class__", "{0.__class__}", "%s%n", "-1", "1e999", "auto", "gptq", "int8", "*", "re:("),
)
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn),
)


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return other bytes: some flipped, cut, repeated, or overwritten with numbers at the edge of their range."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        place = rng.randrange(len(out) + 1)
        kind = rng.randrange(6)
        if kind == 0 and out:
            out[place % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[place : place + rng.choice((1, 2, 8, len(out)))]
        elif kind == 2:
            out[place:place] = out[place : place + rng.choice((1, 4, 32))] or b"\0"
        elif kind == 3:
            size = rng.choice((1, 2, 4, 8))
            value = rng.choice(INTEGERS) & (2 ** (8 * size) - 1)
            out[place : place + size] = value.to_bytes(size, "little")
        elif kind == 4:
            out[place:place] = rng.choice(
                (b"{", b"[", b'"', b":", b"\n", b"&a ", b"*a", b"[" * 3000)
            )
        else:
            out[place : place + 1] = bytes([rng.randrange(256)])
    return bytes(out)


def other_value(rng: random.Random, value: Any) -> Any:
    """Return something to put in the place of a value of JSON."""
    numbers: list[Any] = [*INTEGERS, *FLOATS]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and rng.random() < 0.5:
        near = [value + 1, value - 1, -value, value * 2, float(value), str(value)]
        return rng.choice([*numbers, *near])
    if isinstance(value, list) and value and rng.random() < 0.5:
        return rng.choice([value[:-1], [*value, value[0]], [value], value[::-1], value * 2])
    if isinstance(value, dict) and value and rng.random() < 0.5:
        return rng.choice([list(value), dict(list(value.items())[1:]), {"x": value}])
    others: list[Any] = [None, True, False, [], {}, [[]], {"a": 1}, {"": None}, [None], [1, "a"]]
    return rng.choice([*others, *numbers, *TEXTS])


def change_json(rng: random.Random, value: Any) -> Any:
    """Return a copy of a value of JSON with a few places changed."""
    box = [copy.deepcopy(value)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        owner: Any = box
        key: Any = 0
        while isinstance(owner[key], (dict, list)) and owner[key] and rng.random() < 0.85:
            owner = owner[key]
            key = rng.choice(list(owner)) if isinstance(owner, dict) else rng.randrange(len(owner))
        kind = rng.random()
        if owner is not box and kind < 0.2:
            del owner[key]
        elif isinstance(owner, dict) and kind < 0.35:
            owner[rng.choice(TEXTS)] = owner.pop(key)
        else:
            owner[key] = other_value(rng, owner[key])
        if not isinstance(box[0], (dict, list)) or not box[0]:
            break
    return box[0]


def change_json_text(rng: random.Random, data: bytes) -> bytes:
    """Return a changed JSON document, now and then as text that may be none any more."""
    if rng.random() < 0.15:
        return change_bytes(rng, data)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return change_bytes(rng, data)
    return json.dumps(change_json(rng, value)).encode("utf-8", "surrogatepass")


def change_lines(rng: random.Random, data: bytes) -> bytes:
    """Return a changed text of lines, as YAML and settings are."""
    if rng.random() < 0.3:
        return change_bytes(rng, data)
    lines = data.decode("utf-8", "replace").split("\n")
    for _ in range(rng.choice((1, 2, 3))):
        i = rng.randrange(len(lines))
        kind = rng.randrange(5)
        head, colon, _ = lines[i].partition(":")
        if kind == 0:
            values = (*map(str, INTEGERS), *map(str, FLOATS), *TEXTS)
            special = ("&a [*a]", "*b", "!!int x", "2021-99-99", "!!python/object:os.system x")
            more = ("? [1]", "{a: 1}", "[1, [2]]", "0b", "1_", "!!binary \u0448", "<<: 1", "|")
            lines[i] = f"{head}{colon or ':'} {rng.choice((*values, *special, *more))}"
        elif kind == 1:
            lines[i] = " " * rng.randrange(6) + lines[i].lstrip()
        elif kind == 2:
            lines.insert(i, rng.choice(lines))
        elif kind == 3:
            del lines[i]
            lines = lines or [""]
        else:
            lines[i] = f"{rng.choice(TEXTS)}{colon}{lines[i][len(head) + 1 :]}"
    return "\n".join(lines).encode("utf-8", "replace")


# -- arguments of ops -----------------------------------------------------------------------------------------


def change_tensor(rng: random.Random, tensor: torch.Tensor) -> Any:
    """Return another tensor: of other sizes, strides, dtype or values."""
    dim = tensor.dim()
    axis = rng.randrange(dim) if dim else 0
    ways: list[Callable[[], Any]] = [
        lambda: tensor.to(rng.choice(DTYPES)),
        lambda: tensor.unsqueeze(rng.randrange(dim + 1)),
        lambda: tensor.flatten(),
        lambda: torch.empty(0, dtype=tensor.dtype),
        lambda: torch.empty((0,) * dim, dtype=tensor.dtype),
        lambda: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"),
        lambda: tensor.clone().fill_(rng.choice((0, 1, 2, 5, 100))),
        lambda: values(rng, tensor),
        lambda: values(rng, tensor),
        lambda: None,
    ]
    if dim:
        ways += [
            lambda: tensor.narrow(axis, 0, rng.randrange(tensor.shape[axis] + 1)),
            lambda: torch.cat([tensor, tensor], axis),
            lambda: tensor.transpose(axis, rng.randrange(dim)),
            lambda: tensor.select(axis, 0) if tensor.shape[axis] else tensor,
            lambda: tensor.narrow(axis, 0, min(1, tensor.shape[axis])).expand(tensor.shape),
            lambda: torch.stack([tensor, tensor], -1)[..., 0],
        ]
    return rng.choice(ways)()


def values(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with some elements at the edge of what its dtype holds."""
    out = tensor.clone().contiguous()
    flat = out.view(-1)
    for _ in range(rng.choice((1, 3)) if flat.numel() else 0):
        place = rng.randrange(flat.numel())
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            flat[place] = torch.tensor(rng.choice(FLOATS)).to(tensor.dtype)
        elif tensor.dtype == torch.bool:
            flat[place] = not bool(flat[place])
        else:
            low, high = torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max
            flat[place] = rng.choice([i for i in INTEGERS if low <= i <= high])
    return out


def change_argument(rng: random.Random, value: Any) -> Any:
    """Return another argument for an op."""
    if rng.random() < 0.05:
        return rng.choice((None, 1, -1.5, "x", torch.ones(2), [torch.ones(2)], [1, 2], []))
    if isinstance(value, torch.Tensor):
        return change_tensor(rng, value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((*INTEGERS, value + 1, value - 1, value * 3))
    if isinstance(value, float):
        return rng.choice((*FLOATS, -value))
    if isinstance(value, str):
        return rng.choice((*TEXTS, value.upper()))
    if isinstance(value, (list, tuple)) and value:
        items = list(value)
        i = rng.randrange(len(items))
        items[i] = change_argument(rng, items[i])
        return rng.choice([items, items, items[:-1], items + items[:1]])
    if value is None:
        return rng.choice((0, 1.0, "x", torch.ones(3), torch.zeros(2, 2, dtype=torch.int64)))
    return value
