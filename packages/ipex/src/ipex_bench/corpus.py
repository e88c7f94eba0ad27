# SPDX-License-Identifier: Apache-2.0
"""The corpus: cases of ops that occur in real models, each with what computes it, and their measurement.

``_data/corpus_of_ops.tsv`` has a case in each line. "ours" is what a user gets: a layer after `ipex.optimize`, or a
function of `ipex_core.nn.functional`, with the choices of kernels in force.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ipex_core import benchmark
from ipex_core.kernels import measured

FILE = Path(__file__).parent / "_data" / "corpus_of_ops.tsv"
#: The ratio below which a case fails, if its spread lies below 1.
LEAST = 0.97
#: Seconds that a timed window should have: a single call of a small op is shorter than the clock is exact.
_WINDOW = 100e-6

Function = Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A line of the file.

    Attributes:
        op: Name of the op.
        sizes: ``name=value`` separated by blanks.
        dtype: Name of the dtype.
        strides: How the operands lie in memory.
        threads: ``"1"`` or ``"all"``.
        origin: The models that have it.
    """

    op: str
    sizes: str
    dtype: str
    strides: str
    threads: str
    origin: str


def numbers(sizes: str) -> dict[str, Any]:
    """Return the sizes of a case by name; those that are no numbers as they are."""
    pairs = (part.split("=", 1) for part in sizes.split())
    return {name: int(value) if value.isdecimal() else value for name, value in pairs}


def amount(op: str, sizes: str) -> int:
    """Return how large a case is: products of two numbers for what multiplies matrices, else elements."""
    s = numbers(sizes)
    if op == "optimizer":
        shapes = (part.split("x") for part in s["tensors"].split("+"))
        return sum(math.prod(map(int, shape)) for shape in shapes)
    if op == "convolution":
        places = (s["height"] // s["stride"]) ** 2
        return int(
            s["images"] * s["channels"] * places * s["out"] * s["window"] ** 2 // s["groups"]
        )
    left_out = {
        "attention": ("causal", "kv_heads"),
        "embedding_bag": ("rows",),
        "embedding_update": ("rows",),
        "linear": ("bias",),
    }.get(op, ())
    return math.prod(v for k, v in s.items() if isinstance(v, int) and k not in left_out)


def cases(
    ops: Iterable[str] = (),
    *,
    containing: str = "",
    dtypes: Iterable[str] = (),
    threads: Iterable[str] = (),
    file: Path = FILE,
) -> list[Case]:
    """Return the cases of some ops, all by default.

    Args:
        ops: Names of ops.
        containing: A text that sizes or origin contain.
        dtypes: Names of dtypes.
        threads: Of ``"1"`` and ``"all"``.
        file: Where they are.

    Raises:
        ValueError: An op has no case.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    found = [Case(*line.split("\t")) for line in lines if line and not line.startswith("#")]
    known = dict.fromkeys(case.op for case in found)
    for op in ops:
        if op not in known:
            raise ValueError(f"must be one of {', '.join(known)}, got {op!r}")
    chosen = set(ops) or set(known)
    kinds, counts = set(dtypes), set(threads)
    return [
        case
        for case in found
        if case.op in chosen
        and (containing in case.sizes or containing in case.origin)
        and (not kinds or case.dtype in kinds)
        and (not counts or case.threads in counts)
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A case and its times.

    Attributes:
        op, sizes, dtype, strides: As in `Case`.
        threads: The number there was.
        level: ISA level of our kernels.
        side: What "ours" ran: ``"ipex"``, ``"onednn"`` or ``"stock"``; ``""`` where a measurement decided.
        us: Median microseconds of "stock" and "ours", and of "onednn" and "ipex" where they were measured.
        ratio: Time of the stock op / ours, the median over rounds, and its 10th and 90th percentile.
        onednn: The same for oneDNN on a prepacked weight, or None.
        rounds: How often each side was timed.
    """

    op: str
    sizes: str
    dtype: str
    strides: str
    threads: int
    level: str
    side: str
    us: dict[str, float]
    ratio: tuple[float, float, float]
    onednn: tuple[float, float, float] | None
    rounds: int

    @property
    def worst(self) -> tuple[float, float, float]:
        """The lower of the two ratios, with its spread."""
        return self.ratio if self.onednn is None else min(self.ratio, self.onednn)

    @property
    def slower(self) -> bool:
        """Whether ours is slower than stock or oneDNN by more than 3 % and beyond the spread of the run."""
        pairs = (self.ratio,) if self.onednn is None else (self.ratio, self.onednn)
        return any(median < LEAST and high < 1.0 for median, _, high in pairs)


def measure(case: Case, *, seconds: float = 0.15, kernels: bool = False) -> Measured:
    """Measure a case on the threads that torch has now.

    Args:
        case: The case.
        seconds: Time of all rounds.
        kernels: Whether to time our kernel too where the choice is another one.
    """
    torch.manual_seed(0)
    make = _MAKERS[case.op]
    functions, side = make(numbers(case.sizes), getattr(torch, case.dtype), case.strides)
    if not kernels or side == "ipex":
        functions.pop("ipex", None)
    learning = case.op in ("optimizer", "embedding_update")
    with torch.set_grad_enabled(learning):
        repeats = 1
        for function in functions.values():
            function()
            begin = time.perf_counter()
            function()
            took = max(time.perf_counter() - begin, 1e-7)
            repeats = max(repeats, min(math.ceil(_WINDOW / took), 50))
        timed = {name: _repeated(f, repeats) for name, f in functions.items()}
        times = benchmark.paired(timed, seconds=seconds, min_rounds=7, max_rounds=60, warmup=1)

    def compared(name: str) -> tuple[float, float, float]:
        found = benchmark.ratio(times[name], times["ours"])
        return round(found.median, 3), round(found.low, 3), round(found.high, 3)

    medians = {name: statistics.median(values) for name, values in times.items()}
    return Measured(
        op=case.op,
        sizes=case.sizes,
        dtype=case.dtype,
        strides=case.strides,
        threads=torch.get_num_threads(),
        level=benchmark.active_level(),
        side=side,
        us={name: round(1e6 * value / repeats, 2) for name, value in medians.items()},
        ratio=compared("stock"),
        onednn=compared("onednn") if "onednn" in times else None,
        rounds=len(times["ours"]),
    )


def _repeated(function: Function, count: int) -> Function:
    if count == 1:
        return function

    def run() -> None:
        for _ in range(count):
            function()

    return run


# --- cases as functions -----------------------------------------------------------------------------------------------

_Made = tuple[dict[str, Function], str]


def _numbers(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return normally distributed numbers. In large tensors they repeat, which no kernel notices."""
    count = math.prod(shape)
    block = torch.randn(min(count, 1 << 18)) * scale
    repeats = -(-count // max(block.numel(), 1))
    return block.to(dtype).repeat(repeats)[:count].view(shape)


def _filled(module: nn.Module) -> nn.Module:
    """Give a module weights; made on no device, it has not drawn any."""
    module = module.to_empty(device="cpu").eval()
    for parameter in module.parameters():
        fan = max(parameter[0].numel(), 1)
        parameter.data.copy_(_numbers(*parameter.shape, dtype=parameter.dtype, scale=fan**-0.5))
    return module


def _optimized(module: nn.Module, dtype: torch.dtype, x: Any, **sides: str) -> nn.Module:
    import ipex

    with contextlib.ExitStack() as stack:
        for op, side in sides.items():
            stack.enter_context(measured.forced(op, side))
        sample = x.float() if isinstance(x, Tensor) else x  # of the model as it is given
        fast: nn.Module = ipex.optimize(module, dtype=dtype, sample_input=sample)
    return fast


def _forced(op: str, side: str, function: Function) -> Function:
    """Return a function in which one side is taken; entering and leaving takes half a microsecond."""

    def run() -> object:
        measured._forced[op] = side
        try:
            return function()
        finally:
            del measured._forced[op]

    return run


def _side(op: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> str:
    return measured.side(op, dtype, sizes) or "ipex"


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}


def _linear(s: dict[str, Any], dtype: torch.dtype, strides: str) -> _Made:
    from ipex_core.kernels.policy import choose_linear, onednn_supports

    with torch.device("meta"):
        layers: list[nn.Module] = [nn.Linear(s["in"], s["out"], bias=bool(s["bias"]))]
        if s["act"] != "none":
            layers.append(_ACTIVATIONS[s["act"]]())
    module = _filled(nn.Sequential(*layers))
    x = _numbers(s["rows"], s["in"], dtype=dtype)
    stock, ours = copy.deepcopy(module).to(dtype), _optimized(module, dtype, x)
    functions: dict[str, Function] = {"stock": lambda: stock(x), "ours": lambda: ours(x)}
    choice = choose_linear(dtype, s["out"], s["in"], s["rows"]).form
    if onednn_supports(dtype):
        onednn = _optimized(module, dtype, x, linear="onednn")
        functions["onednn"] = lambda: onednn(x)
    if choice != "ipex":
        kernel = _optimized(module, dtype, x, linear="ipex")
        functions["ipex"] = lambda: kernel(x)
    return functions, {"ipex": "ipex", "mkldnn": "onednn"}.get(choice or "", "stock")


def _layer(module: nn.Module, x: Tensor, op: str, sizes: tuple[int, ...]) -> _Made:
    stock, ours = copy.deepcopy(module).to(x.dtype), _optimized(module, x.dtype, x)
    functions: dict[str, Function] = {
        "stock": lambda: stock(x),
        "ours": lambda: ours(x),
        "ipex": _forced(op, "ipex", lambda: ours(x)),
    }
    return functions, _side(op, x.dtype, sizes)


def _norm(kind: Callable[[int], nn.Module], op: str) -> Callable[..., _Made]:
    def make(s: dict[str, Any], dtype: torch.dtype, strides: str) -> _Made:
        sizes = s["rows"], s["columns"]
        x = _numbers(*sizes, dtype=dtype)
        return _layer(kind(s["columns"]).eval(), x, op, sizes)

    return make


def _gelu(s: dict[str, Any], dtype: torch.dtype, strides: str) -> _Made:
    x = _numbers(s["rows"], s["columns"], dtype=dtype)
    kind = s["approximate"]
    return _layer(nn.GELU(approximate=kind).eval(), x, f"gelu:{kind}", (x.numel(),))


def _attention(s: dict[str, Any], dtype: torch.dtype, strides: str) -> _Made:
    from ipex_core.kernels.policy import prefer_ipex_attention
    from ipex_core.nn import functional as ours

    def operand(heads: int, length: int) -> Tensor:
        x = _numbers(s["batch"], length, heads, s["size"], dtype=dtype).transpose(1, 2)
        return x if strides == "heads" else x.contiguous()

    q = operand(s["heads"], s["queries"])
    k, v = operand(s["kv_heads"], s["keys"]), operand(s["kv_heads"], s["keys"])
    options = {"is_causal": bool(s["causal"]), "enable_gqa": s["heads"] != s["kv_heads"]}
    fast: Function = lambda: ours.attention(q, k, v, **options)  # noqa: E731
    functions: dict[str, Function] = {
        "stock": lambda: functional.scaled_dot_product_attention(q, k, v, **options),
        "ours": fast,
        "ipex": _forced("attention", "ipex", fast),
    }
    chosen = prefer_ipex_attention(q.shape, k.shape, dtype)
    return functions, "ipex" if chosen else "stock"


def _bmm(s: dict[str, Any], dtype: torch.dtype, strides: str) -> _Made:
    from ipex_core.kernels.policy import prefer_ipex_bmm
    from ipex_core.nn import functional as ours

    a = _numbers(s["batch"], s["m"], s["k"], dtype=dtype)
    if strides == "transposed":
        b = _numbers(s["batch"], s["n"], s["k"], dtype=dtype).mT
    else:
        b = _numbers(s["batch"], s["k"], s["n"], dtype=dtype)
    fast: Function = lambda: ours.bmm(a, b)  # noqa: E731
    functions: dict[str, Function] = {
        "stock": lambda: torch.bmm(a, b),
        "ours": fast,
        "ipex": _forced("bmm", "ipex", fast),
    }
    return functions, "ipex" if prefer_ipex_bmm(a.shape, b.shape, dtype) else "stock"


def _convolution(s: dict[str, Any], dtype: torch.dtype, strides: str) -> _Made:
    from ipex_core.kernels.policy import onednn_supports
    from ipex_core.module_swap.base import call
    from ipex_core.ops.conv import pack_convolution, winograd_pays

    last = torch.channels_last
    with torch.device("meta"):
        layer = nn.Conv2d(
            s["channels"],
            s["out"],
            s["window"],
            stride=s["stride"],
            padding=s["padding"],
            groups=s["groups"],
        )
    module = _filled(layer)
    x = _numbers(s["images"], s["channels"], s["height"], s["height"], dtype=dtype)
    x = x.contiguous(memory_format=last)
    stock: Any = copy.deepcopy(module).to(dtype).to(memory_format=last)  # type: ignore[call-overload]
    ours = _optimized(module, dtype, x)
    functions: dict[str, Function] = {"stock": lambda: stock(x), "ours": lambda: ours(x)}
    if onednn_supports(dtype):
        onednn = _optimized(module, dtype, x, convolution="onednn")
        functions["onednn"] = lambda: onednn(x)
    if s["groups"] == 1:
        weight, bias = stock.weight.detach(), stock.bias.detach()  # type: ignore[union-attr,operator]
        window, stride, padding = ([s[name]] * 2 for name in ("window", "stride", "padding"))
        winograd = winograd_pays(x.shape, weight, stride, padding, [1, 1], 1)
        packed = pack_convolution(weight, winograd=winograd)
        args = (packed, s["out"], window, stride, padding, [1, 1], bias)
        op = torch.ops.ipex.convolution.default
        functions["ipex"] = lambda: call(op, x, *args)
    return functions, ""


def _lookups(s: dict[str, Any]) -> tuple[Tensor, Tensor]:
    indices = torch.randint(s["rows"], (s["bags"] * s["lookups"],))
    return indices, torch.arange(s["bags"]) * s["lookups"]


def _embedding_bag(s: dict[str, Any], dtype: torch.dtype, strides: str) -> _Made:
    with torch.device("meta"):
        layer = nn.EmbeddingBag(s["rows"], s["size"], mode=s["mode"])
    module = _filled(layer)
    indices, offsets = _lookups(s)
    stock = copy.deepcopy(module).to(dtype)
    ours = _optimized(module, dtype, (indices, offsets))
    functions: dict[str, Function] = {
        "stock": lambda: stock(indices, offsets),
        "ours": lambda: ours(indices, offsets),
    }
    if s["mode"] != "mean":
        return functions, "stock"
    op = "embedding_bag:mean"
    functions["ipex"] = _forced(op, "ipex", functions["ours"])
    return functions, _side(op, dtype, (s["bags"], indices.numel(), s["size"]))


def _update(s: dict[str, Any], dtype: torch.dtype, strides: str) -> _Made:
    from ipex_core.nn import embedding

    def tables() -> list[nn.EmbeddingBag]:
        shape = s["rows"], s["size"]
        return [nn.EmbeddingBag(*shape, mode="sum", sparse=True) for _ in range(s["tables"])]

    lookups = [_lookups(s) for _ in range(s["tables"])]
    indices, offsets = ([one[i] for one in lookups] for i in (0, 1))
    stock = tables()
    weights = [table.weight for table in stock]
    sgd = s["step"] == "sgd"
    kind: Any = torch.optim.SGD if sgd else torch.optim.Adagrad
    optimizer = kind(weights, lr=0.01)
    with_sgd, with_adagrad = (
        embedding.MergedEmbeddingBagWithSGD,
        embedding.MergedEmbeddingBagWithAdaGrad,
    )
    merged = (with_sgd if sgd else with_adagrad).from_embeddingbag_list(tables(), lr=0.01)
    grads = [torch.randn(s["bags"], s["size"]) for _ in lookups]

    def step() -> None:
        bags = [table(*given) for table, given in zip(stock, lookups, strict=True)]
        torch.autograd.backward(bags, grads)
        optimizer.step()
        optimizer.zero_grad()

    def ours() -> None:
        torch.autograd.backward(merged(indices, offsets), grads)

    return {"stock": step, "ours": ours}, "ipex"


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **k: torch.optim.SGD(p, lr=1e-3, momentum=0.9, **k),
    "adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=1e-3, **k),
    "adamw": lambda p, **k: torch.optim.AdamW(p, lr=1e-3, **k),
}


def _optimizer(s: dict[str, Any], dtype: torch.dtype, strides: str) -> _Made:
    import ipex

    def model() -> nn.Module:
        parts = [part.split("x") for part in s["tensors"].split("+")]
        shapes = [(int(n), int(k)) for count, n, k in parts for _ in range(int(count))]
        with torch.device("meta"):
            layers = [nn.Linear(k, n, bias=False) for n, k in shapes]
        module = _filled(nn.Sequential(*layers)).train()
        for parameter in module.parameters():
            parameter.grad = _numbers(*parameter.shape, dtype=dtype)
        return module

    make = _OPTIMIZERS[s["step"]]
    stock, mine = model(), model()
    fused = make(stock.parameters(), fused=True)
    _, ours = ipex.optimize(mine, optimizer=make(mine.parameters()), inplace=True)
    return {"stock": fused.step, "ours": ours.step}, "stock"


_MAKERS: dict[str, Callable[[dict[str, Any], torch.dtype, str], _Made]] = {
    "linear": _linear,
    "layer_norm": _norm(nn.LayerNorm, "layer_norm"),
    "rms_norm": _norm(nn.RMSNorm, "rms_norm"),
    "softmax": _norm(lambda columns: nn.Softmax(-1), "softmax"),
    "gelu": _gelu,
    "attention": _attention,
    "bmm": _bmm,
    "convolution": _convolution,
    "embedding_bag": _embedding_bag,
    "embedding_update": _update,
    "optimizer": _optimizer,
}


# --- results ----------------------------------------------------------------------------------------------------------


def chosen_by(result: Measured) -> tuple[str, tuple[int, ...]] | None:
    """Return the op and the sizes by which `ipex_core.kernels.measured` chooses; None where it does not."""
    s = numbers(result.sizes)
    if result.op == "linear":
        return "linear", (s["rows"], s["out"], s["in"])
    if result.op in ("layer_norm", "rms_norm", "softmax"):
        return result.op, (s["rows"], s["columns"])
    if result.op == "gelu":
        return f"gelu:{s['approximate']}", (s["rows"] * s["columns"],)
    if result.op == "attention":
        names = ("batch", "heads", "queries", "size", "kv_heads", "keys")
        return "attention", tuple(s[name] for name in names)
    if result.op == "bmm":
        return "bmm", (s["batch"], s["m"], s["k"], s["n"])
    if result.op == "embedding_bag" and s["mode"] == "mean":
        return "embedding_bag:mean", (s["bags"], s["bags"] * s["lookups"], s["size"])
    return None


def text(results: Iterable[Measured], machine: dict[str, Any], command: str) -> str:
    """Return a result file: JSON with a line for each result."""
    rows = ",\n".join(json.dumps(dataclasses.asdict(result)) for result in results)
    head = json.dumps({"kind": "corpus", "command": command, "machine": machine}, indent=1)
    return f'{head[:-2]},\n "results": [\n{rows}\n ]\n}}\n'


def read(file: Path) -> tuple[dict[str, Any], list[Measured]]:
    """Return the machine of a result file, and the results.

    Raises:
        ValueError: It is another file.
    """
    data = json.loads(file.read_text(encoding="utf-8"))
    if data.get("kind") != "corpus":
        raise ValueError(f"must be a result file of ipex bench corpus, got {file}")
    found = []
    for row in data["results"]:
        pairs = {name: row[name] and tuple(row[name]) for name in ("ratio", "onednn")}
        found.append(Measured(**{**row, **pairs}))
    return data["machine"], found
