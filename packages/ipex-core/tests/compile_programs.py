# SPDX-License-Identifier: Apache-2.0
"""The patterns of the compile passes as random programs, one family for each group of patterns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from compile_draw import FLOATS, WIDTH, Draw, Program, Run
from torch import Tensor
from torch.nn import functional as F

# -- activations and norms --------------------------------------------------------------------------------------------


def activation(draw: Draw) -> Callable[[Run, Tensor], Tensor]:
    kind = draw.pick(
        "relu", "silu", "swish", "gelu", "tanh", "new", "python", "exp", "quick", "sign"
    )
    root, inner = draw.mostly(math.sqrt(2.0), 1.4, 2.0), draw.mostly(0.044715, 0.0447, 0.05)
    half, one = draw.mostly(0.5, 0.25, 0.51), draw.mostly(1.0, 2.0, 0.5)
    power, wide = draw.mostly(3.0, 2.0), draw.flag(0.1)

    def apply(run: Run, given: Tensor) -> Tensor:
        x = given.float() if wide else given
        if kind == "relu":
            y = F.relu(x)
        elif kind == "silu":
            y = F.silu(x)
        elif kind == "swish":
            y = run.step(torch.sigmoid(x)) * x
        elif kind == "gelu":
            y = F.gelu(x)
        elif kind == "tanh":
            y = F.gelu(x, approximate="tanh")
        elif kind == "new":
            cubic = run.step(x + inner * torch.pow(x, power))
            y = half * x * (one + torch.tanh(math.sqrt(2 / math.pi) * cubic))
        elif kind == "python":
            y = x * half * (one + run.step(torch.erf(x / root)))
        elif kind == "exp":
            y = x / (one + run.step(torch.exp(-x)))
        elif kind == "quick":
            y = x * torch.sigmoid(1.702 * x)
        else:
            y = x / (1 + torch.exp(x))
        return run.step(y.to(given.dtype))

    return apply


def rms_norm(draw: Draw) -> Callable[[Run, Tensor], Tensor]:
    wide, early, back, left = (draw.flag(p) for p in (0.7, 0.5, 0.9, 0.5))
    square = draw.mostly("pow", "mul", "square", "cube", "other", chance=0.6)
    dim, keep = draw.mostly((-1,), (2,), (-2, -1), (-2,)), draw.mostly(True, False, chance=0.97)
    eps, root = draw.mostly(1e-6, 0.0, 1e-2, 1.0), draw.mostly("rsqrt", "inverse", "root")
    shape = draw.mostly((WIDTH,), (1, WIDTH), (1,), (3, 1), (3, WIDTH))
    spelled = draw.pick(
        "weight", "right", "offset", "wide", "wide offset", "twice", "number", "none"
    )
    offset, factor = draw.mostly(1.0, 2.0, 0.0), draw.mostly("same", "more", "other", chance=0.9)
    weight = draw.input(*shape, dtype=draw.other(), constant=draw.flag(0.7))

    def apply(run: Run, x: Tensor) -> Tensor:
        h = x.float() if wide else x
        squares: dict[str, Callable[[], Tensor]] = {
            "pow": lambda: h.pow(2),
            "mul": lambda: h * h,
            "square": lambda: torch.square(h),
            "cube": lambda: h.pow(3).abs(),
            "other": lambda: h * (h + 0.1),
        }
        mean = run.step(run.step(squares[square]()).mean(dim, keepdim=keep))
        mean = (mean if keep else mean.reshape(-1)[:1]) + eps
        inverse = {"rsqrt": torch.rsqrt, "inverse": lambda t: 1 / t.sqrt(), "root": torch.sqrt}[
            root
        ](mean)
        h = {"same": h, "more": h + 1, "other": h.flip(0)}[factor]
        y = run.step(h * inverse if left else inverse * h)
        y, w = y.to(x.dtype) if early else y, run[weight]
        y = {
            "weight": lambda: w * y,
            "right": lambda: y * w,
            "offset": lambda: y * (offset + w),
            "wide": lambda: y * w.float(),
            "wide offset": lambda: y * (offset + w.float()),
            "twice": lambda: y * w * w,
            "number": lambda: y * 1.5,
            "none": lambda: y,
        }[spelled]()
        return run.step(run.step(y).to(x.dtype) if back else y)

    return apply


def layer_norm(draw: Draw) -> Callable[[Run, Tensor], Tensor]:
    dims, eps = draw.mostly(1, 2, chance=0.9), draw.mostly(1e-5, 1e-12, 0.5)
    spelled = draw.mostly("stock", "hand", "std", "var", "unbiased", "wide", chance=0.5)
    has_weight, has_bias, shape = draw.flag(0.8), draw.flag(0.8), (3, WIDTH)[-dims:]
    weight, bias = (draw.input(*shape, constant=draw.flag(0.7)) for _ in range(2))

    def apply(run: Run, x: Tensor) -> Tensor:
        w, b = run[weight] if has_weight else None, run[bias] if has_bias else None
        if spelled in ("stock", "wide"):
            h = x.float() if spelled == "wide" else x
            w, b = (None if t is None else t.to(h.dtype) for t in (w, b))
            same = x.dtype == (t := run[weight]).dtype and h.dtype in (x.dtype, t.float().dtype)
            y = (
                F.layer_norm(h, x.shape[-dims:], w, b, eps)
                if same
                else F.layer_norm(h, x.shape[-dims:])
            )
            return run.step(y).to(x.dtype)
        mean = x.mean(-1, keepdim=True)
        if spelled == "hand":
            centered = run.step(x - mean)
            y = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
        elif spelled == "std":
            y = (x - mean) / (x.std(-1, keepdim=True) + eps)
        else:
            variance, mean = torch.var_mean(
                x, -1, correction=int(spelled == "unbiased"), keepdim=True
            )
            y = run.step(x - mean) * torch.rsqrt(variance + eps)
        y = y if w is None else run.step(y * w)
        return run.step(y if b is None else y + b)

    return apply


def norms(draw: Draw) -> Program:
    x = draw.input(2, 3, WIDTH)
    shape = draw.mostly((2, 3, WIDTH), (3, WIDTH), (2, 1, WIDTH), (WIDTH,))
    other = draw.input(*shape, dtype=draw.other())
    added, returned, written = draw.flag(0.6), draw.flag(0.5), draw.flag(0.1)
    alpha = draw.mostly(1, 2, 0.5, chance=0.9)
    chain = [draw.pick(rms_norm, layer_norm)(draw) for _ in range(draw.pick(1, 1, 2))]

    def program(run: Run) -> Any:
        h = run[x]
        if added:
            h = h.clone().add_(run[other]) if written else torch.add(h, run[other], alpha=alpha)
            h = run.step(h)
        y = h
        for norm in chain:
            y = norm(run, y)
        return (y, h) if returned else y

    return program


# -- attention and rotary embedding -----------------------------------------------------------------------------------


def attention(draw: Draw) -> Program:
    batch, heads, length, size = 2, 4, draw.pick(1, 3, 5), draw.pick(8, 16)
    groups = draw.pick(1, 1, 1, 2, 4)
    keys = draw.mostly(length, 7, 1, chance=0.7)
    value_size = draw.mostly(size, size // 2, chance=0.93)
    q = draw.input(batch, length, heads, size)
    k = draw.input(batch, keys, heads // groups, size, dtype=draw.other())
    v = draw.input(batch, keys, heads // groups, value_size, dtype=draw.other())
    full = (batch, heads, length, keys)
    shape = draw.pick(
        full,
        (batch, 1, length, keys),
        (1, 1, length, keys),
        (batch, 1, 1, keys),
        (length, keys),
        (keys,),
    )
    mask_kind = draw.pick("none", "add", "add", "hard", "bool", "fill", "where", "causal", "twice")
    fill = draw.mostly(-1e9, float("-inf"), -1e4, -3.0, -3e38, 5.0, chance=0.5)
    mask = draw.input(*shape, dtype=draw.mostly(draw.dtype, *FLOATS[:2]))
    scale = draw.mostly(size**-0.5, None, 0.25, 1.0, -0.3, 0.0, chance=0.5)
    where = draw.mostly("after", "divide", "query", "both", "masked", "tensor", chance=0.6)
    softmax = draw.mostly(None, torch.float32, torch.float64, chance=0.5)
    dim, repeat = (
        draw.mostly(-1, 3, 2, 1, chance=0.93),
        draw.mostly("expand", "tile", "interleave", chance=0.7),
    )
    stock, cap = draw.flag(0.35), draw.mostly(None, 20.0, 5.0, chance=0.85)
    keyed, transposed, floor = draw.flag(0.1), draw.flag(0.5), draw.flag(0.06)

    def program(run: Run) -> Any:
        query, key, value = (run[i].transpose(1, 2) for i in (q, k, v))
        key, value = run.step(key), run.step(value)
        m = run[mask]
        if groups > 1:

            def spread(t: Tensor) -> Tensor:
                b, h, s, d = t.shape
                if repeat == "interleave":
                    return t.repeat_interleave(groups, 1)
                apart = t[:, :, None].expand(b, h, groups, s, d)
                if repeat == "tile":
                    apart = t[:, None].expand(b, groups, h, s, d)
                return apart.reshape(b, h * groups, s, d)

            key, value = run.step(spread(key)), spread(value)
        if not query.dtype == key.dtype == value.dtype:
            query, key, value = (t.to(torch.float32) for t in (query, key, value))
        if stock:
            given = (
                None
                if mask_kind == "none"
                else m < 0.5
                if mask_kind == "bool"
                else m.to(query.dtype)
            )
            causal = mask_kind == "causal"
            return run.step(
                F.scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    None if causal else given,
                    is_causal=causal,
                    scale=scale or None,
                )
            )
        if where == "query":
            query = query * (0.3 if scale is None else scale)
        scores = run.step(torch.matmul(query, key.transpose(-1, -2)))
        if scale is not None and where in ("after", "both"):
            scores = scores * scale
        elif where == "divide":
            scores = scores / 3.0
        elif where == "tensor":
            scores = scores / torch.full([], 2.0, dtype=scores.dtype)
        if where == "both":
            scores = run.step(scores) * 0.7
        if cap:
            scores = run.step(torch.tanh(run.step(scores / cap))) * cap
        if mask_kind in ("add", "twice", "hard"):
            scores = scores + (m if mask_kind != "hard" else (m < 0) * -1e4)
        if mask_kind == "twice":
            scores = run.step(scores) + m.to(scores.dtype)
        elif mask_kind in ("bool", "fill"):
            scores = scores.masked_fill(m < 0, fill)
        elif mask_kind == "where":
            low = torch.full([], fill, dtype=scores.dtype)
            scores = (
                torch.where(m < 0, scores, low) if transposed else torch.where(m < 0, low, scores)
            )
        elif mask_kind == "causal":
            triangle = torch.ones(length, keys, dtype=torch.bool).tril()
            scores = scores.masked_fill(~triangle, torch.finfo(scores.dtype).min)
        if where == "masked":
            scores = scores * 0.5
        if floor:
            scores = scores.clamp_min(-1.0)
        weights = run.step(F.softmax(run.step(scores), dim=dim, dtype=softmax)).to(value.dtype)
        out = run.step(torch.matmul(weights, value))
        return (out.transpose(1, 2).contiguous(), weights) if keyed else out

    return program


def rotary(draw: Draw) -> Program:
    batch, length, heads, size = 2, draw.pick(1, 4), 3, draw.mostly(16, 12, chance=0.8)
    part = draw.mostly(size, size // 2, 4, chance=0.6)
    q = draw.input(batch, length, heads, size)
    k = draw.input(batch, length, draw.pick(heads, 1), size, dtype=draw.other())
    form = draw.pick("half", "tables")
    style = draw.mostly(form, "swapped", "interleaved", "uneven", "plus", chance=0.7)
    columns = part // 2 if style == "tables" else part
    shape = draw.mostly(
        (1, length, columns), (batch, length, columns), (length, columns), (1, length, 1)
    )
    cos = draw.input(*shape, dtype=draw.other())
    sin = draw.input(*draw.mostly(shape, (1, length, columns), chance=0.95), dtype=draw.other())
    alone, axis, minus = draw.flag(0.1), draw.mostly(1, 2, chance=0.9), draw.flag(0.07)
    wide, written, twice = draw.flag(0.2), draw.flag(0.1), draw.flag(0.1)

    def turn(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        if style == "interleaved":
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        if style == "uneven":
            half //= 2
        low, high = x[..., :half], x[..., half:]
        if style == "swapped":
            return torch.cat((high, -low), -1)
        return torch.cat((high if style == "plus" else -high, low), -1)

    def program(run: Run) -> Any:
        states = [run[i].transpose(1, 2) for i in (q, k)]
        c, s = (run[i].unsqueeze(axis) if run[i].dim() == 3 else run[i] for i in (cos, sin))
        if axis == 2:
            states = [run[i] for i in (q, k)]
        if wide:
            c, s = c.float(), s.float()
        results = []
        for x in states[: 1 if alone else 2]:
            y, rest = (x.float() if wide else x)[..., :part], x[..., part:]
            if written:
                y = y.clone().mul_(2)
            if style == "tables":
                low, high = y.chunk(2, -1)
                parts = low * c - run.step(high * s), run.step(high * c) + low * s
                y = run.step(torch.cat(parts[::-1] if minus else parts, -1))
            else:
                straight, turned = run.step(y * c), run.step(run.step(turn(y)) * s)
                y = run.step(straight - turned if minus else straight + turned)
            y = y.to(x.dtype) if wide else y
            results.append(torch.cat((y, rest), -1) if part < size and y.dtype == rest.dtype else y)
        if twice:
            results.append(results[0])
        return tuple(results)

    return program


# -- linear layers ----------------------------------------------------------------------------------------------------


def linear(draw: Draw, k: int, n: int) -> Callable[[Run, Tensor], Tensor]:
    spelled = draw.mostly("linear", "matmul", "addmm", "flat", chance=0.6)
    w = draw.weight(n, k)
    b = draw.input(*draw.mostly((n,), (1, n), (1,), chance=0.9), constant=draw.flag(0.9))
    bias, beta = draw.flag(0.6), draw.mostly(1, 2, 0.5, chance=0.93)

    def apply(run: Run, x: Tensor) -> Tensor:
        weight = run.step(run[w]).to(x.dtype)
        flat = x.reshape(-1, k)
        given = run[b].to(x.dtype)
        if spelled == "linear" and given.dim() == 1 and given.shape[0] == n:
            return run.step(F.linear(x, weight, given if bias else None))
        if spelled == "addmm":
            return run.step(torch.addmm(given, flat, weight.t(), beta=beta).view(*x.shape[:-1], n))
        if spelled == "flat":
            return run.step((run.step(flat @ weight.t())).view(*x.shape[:-1], n))
        y = run.step(x @ weight.t())
        return y + given if bias else y

    return apply


def layers(draw: Draw) -> Program:
    k, n = WIDTH, draw.pick(48, 33, WIDTH)
    rows = draw.pick((2, 3), (4,), (1, 1), (2, 2, 2))
    x, first = draw.input(*rows, k), linear(draw, k, n)
    shape = draw.mostly((*rows, n), (n,), (rows[-1], 1), (1, n), ())
    y = draw.input(*shape, dtype=draw.other())
    second = linear(draw, n, n) if draw.flag(0.4) else None
    steps = [
        draw.pick("act", "mul", "add", "radd", "number", "write", "self")
        for _ in range(draw.pick(1, 2, 3, 4))
    ]
    act, value, returned = activation(draw), draw.pick(0.5, 2, 1.0), draw.flag(0.3)

    def program(run: Run) -> Any:
        h = start = first(run, run[x])
        other = run[y].to(h.dtype)
        for kind in steps:
            if kind == "act":
                h = act(run, h)
            elif kind == "mul":
                h = run.step(h * other)
            elif kind == "add":
                h = run.step(h + other)
            elif kind == "radd":
                h = run.step(torch.add(other, h, alpha=value))
            elif kind == "number":
                h = h * value
            elif kind == "self":
                h = run.step(h * h) if value == 2 else h + h
            else:
                h = h.clone()
                h += other
        if second is not None:
            h = second(run, h) + (h if returned else 0)
        return (h, start, h) if returned else h

    return program


def gated(draw: Draw) -> Program:
    k, n = WIDTH, draw.pick(40, 64)
    x, z = draw.input(3, k), draw.input(3, k)
    gate, up, act = (
        linear(draw, k, n),
        linear(draw, k, draw.mostly(n, 1, chance=0.95)),
        activation(draw),
    )
    joint, kind = (
        linear(draw, k, 2 * n),
        draw.mostly("two", "chunk", "same", "inputs", "swapped", chance=0.5),
    )
    down, returned = linear(draw, n, k), draw.flag(0.2)

    def program(run: Run) -> Any:
        if kind == "chunk":
            a, b = joint(run, run[x]).chunk(2, -1)
        elif kind == "same":
            a = b = gate(run, run[x])
        else:
            a, b = gate(run, run[x]), up(run, run[z if kind == "inputs" else x])
        h = run.step(b * act(run, a) if kind == "swapped" else act(run, a) * b)
        out = down(run, h) + run[x] if h.shape[-1] == n else h
        return (out, h) if returned else out

    return program


FAMILIES = {f.__name__: f for f in (norms, attention, rotary, layers, gated)}
