# SPDX-License-Identifier: Apache-2.0
"""The native interpreter of programs: the same as the reference for every op, and what can go wrong."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from ipex_core.library.kernels import specs
from ipex_core.program import ProgramBuilder
from ipex_core.testing import samples

DTYPES = [torch.float32, torch.bfloat16]
run_native = torch.ops.ipex.program_run


def single(name, args, kwargs):
    """Return a program of one call, its tensor inputs and where they are among the arguments."""
    b = ProgramBuilder()
    inputs: list[torch.Tensor] = []

    def bound(value):
        if isinstance(value, torch.Tensor):
            inputs.append(value)
            return b.input(f"x{len(inputs)}")
        return [bound(one) for one in value] if isinstance(value, (list, tuple)) else value

    results = b.call(
        name, *(bound(v) for v in args), **{key: bound(v) for key, v in kwargs.items()}
    )
    kept = results if isinstance(results, tuple) else () if results is None else (results,)
    return b.build(kept), inputs


def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", list(specs()))
def test_every_op_is_an_instruction(name):
    """What the native interpreter returns and writes is bit for bit what the op does when torch calls it."""
    spec = specs()[name]
    for dtype in [d for d in DTYPES if d in spec.dtypes] or spec.dtypes[:1]:
        for _, sample in itertools.islice(samples(name, dtype), 6):
            program, inputs = single(name, sample.args, sample.kwargs)
            ours, theirs = copy.deepcopy(inputs), copy.deepcopy(inputs)
            assert program.native
            got, want = program.run(*ours), program.run_reference(*theirs)
            for a, b in zip([*got, *ours], [*want, *theirs], strict=True):
                assert a.dtype == b.dtype
                assert a.stride() == b.stride()
                assert torch.equal(bits(a), bits(b)), sample.id
            memory = {x.untyped_storage().data_ptr() for x in ours if x.numel()}
            assert all(a.untyped_storage().data_ptr() not in memory for a in got if a.numel())


def decoder(dtype, layers=3, heads=4, kv_heads=2, size=16, blocks=8, block_size=16):
    """Return a decoder over a paged cache and its caches."""
    torch.manual_seed(0)
    hidden = heads * size
    b = ProgramBuilder()
    tokens, positions, slots = b.input("tokens"), b.input("positions"), b.input("slots")
    tables, lengths, longest = b.input("tables"), b.input("lengths"), b.input_int("longest")

    def weight(n, k):
        packed = torch.ops.ipex.pack_linear_weight((torch.randn(n, k) / k**0.5).to(dtype))
        return b.constant(packed)

    angles = torch.outer(torch.arange(64.0), torch.rand(size // 2))
    sin, cos = b.constant(angles.sin()), b.constant(angles.cos())
    ones = b.constant(torch.ones(hidden, dtype=dtype))
    caches = []
    x = b.call("embedding", b.constant(torch.randn(50, hidden, dtype=dtype)), tokens)
    residual = b.call("mul", x, 0.5)
    for _ in range(layers):
        cache = [torch.zeros(blocks, kv_heads, block_size, size, dtype=dtype) for _ in range(2)]
        caches += cache
        h, residual = b.call("add_rms_norm", x, residual, ones)
        width = (heads + 2 * kv_heads) * size
        qkv = b.call("linear", h, weight(width, hidden), width)
        at = 0
        parts = []
        for n in (heads, kv_heads, kv_heads):
            part = b.call("narrow", qkv, 1, at * size, n * size)
            parts.append(b.call("reshape", part, [0, n, size]))
            at += n
        keys, values = map(b.constant, cache)
        b.call(
            "rotary_embedding_and_cache",
            *parts,
            keys,
            values,
            sin,
            cos,
            slots,
            size,
            True,
            positions,
        )
        o = b.call("empty_like", parts[0])
        call = ("single_query_cached_kv_attention", o, parts[0], keys, values, None, size**-0.5)
        b.call(*call, tables, lengths, block_size, longest, None)
        o = b.call("reshape", o, [0, -1])
        x = b.call("linear", o, weight(hidden, hidden), hidden, residual=x)
        h = b.call("rms_norm", x, ones)
        h = b.call("silu_and_mul", b.call("linear", h, weight(4 * hidden, hidden), 4 * hidden))
        x = b.call("linear", h, weight(hidden, 2 * hidden), hidden)
    y = b.call("cast", b.call("add", x, residual), torch.float32)
    logits = b.call("mul", b.call("tanh", b.call("mul", y, 0.1)), 10.0)
    return b.build([logits, b.call("select_rows", y, b.constant(torch.tensor([0])))]), caches


def step(n):
    """Return the inputs of decoding step ``n`` of two sequences."""
    slots = torch.tensor([n, 32 + n])
    tables = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    lengths = torch.tensor([n + 1, n + 1], dtype=torch.int32)
    return torch.tensor([n, 2 * n]), torch.tensor([n, n]), slots, tables, lengths, n + 1


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_a_decoder_with_its_cache(dtype):
    program, caches = decoder(dtype)
    assert program.native
    native, stepped = [], []
    for n in range(20):
        native.append(program.run(*step(n)))
    filled = copy.deepcopy(caches)
    for cache in caches:
        cache.zero_()
    for n in range(20):
        stepped.append(program.run_reference(*step(n)))
    for got, want in zip(native, stepped, strict=True):
        assert all(map(torch.equal, got, want))
    assert all(map(torch.equal, filled, caches))
    assert all(cache.abs().sum() > 0 for cache in caches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_arithmetic_and_views(dtype):
    torch.manual_seed(0)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-8])
    x = torch.cat([special, torch.randn(18)]).view(4, 6).to(dtype)
    wide = torch.randn(3, 300, 70).to(dtype)
    shapes = [
        (x, x.flip(0)),
        (x, x[:1]),
        (x[:, :1], x[0]),
        (x.T, x.T),
        (x, x[0, 3]),
        (wide, wide[0, 1]),
        (wide, wide[:, :1]),
        (wide[:, ::2], wide[:1, ::2]),
        (wide[:, :0], wide[:, :0]),
    ]
    b = ProgramBuilder()
    a, c = b.input("a"), b.input("c")
    views = [b.call("transpose", a, 0, -1), b.call("reshape", a, [-1])]
    outputs = [b.call("add", a, c), b.call("mul", a, c), b.call("add", a, 0.3), *views]
    outputs += [b.call("mul", a, -1.7), b.call("tanh", a), b.call("mul", views[0], 3)]
    outputs += [b.call("clamp", a, -0.3, 0.9), b.call("clamp", views[0], 0.1, 0.1)]
    outputs += [b.call("cast", a, d) for d in (torch.float32, torch.bfloat16, torch.float16)]
    program = b.build([*outputs, b.call("cast", a, torch.float64)])
    for pair in shapes:
        for got, want in zip(program.run(*pair), program.run_reference(*pair), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            assert got.dtype == want.dtype


def test_reshape_is_a_view_where_torch_makes_one():
    base = torch.arange(240.0).view(4, 5, 12)
    sources = [base, base[:, 1:3], base[:, :, 2:8], base.transpose(0, 1), base[::2], base[:, :1]]
    sizes = [[-1], [0, -1], [0, 0, 2, -1], [2, -1], [1, 0, -1, 1], [0, 0, 3, 2, 1], [-1, 2], []]
    for x in sources:
        for size in sizes:
            b = ProgramBuilder()
            program = b.build([b.call("reshape", b.input("x"), size)])
            try:
                (want,) = program.run_reference(x)
            except RuntimeError as error:
                with pytest.raises(RuntimeError) as caught:
                    program.run(x)
                assert str(caught.value) == str(error)
                continue
            (got,) = program.run(x)
            assert torch.equal(got, want)
            assert (got.data_ptr() == x.data_ptr()) == (want.data_ptr() == x.data_ptr()), size


def test_narrow_of_a_narrow():
    x = torch.arange(60.0).view(6, 10)[1:]
    b = ProgramBuilder()
    n = b.call("narrow", b.call("narrow", b.input("x"), 1, 2, 6), 0, 1, 3)
    program = b.build([b.call("transpose", b.call("narrow", n, 1, 1, 4), 0, 1)])
    assert torch.equal(program.run(x)[0], x[1:4, 3:7].T)


def test_lookups():
    table = torch.randn(9, 5)[:, 1:4]
    cube = torch.randn(4, 3, 2).transpose(1, 2)
    ids = torch.tensor([[3, 0], [8, 8]])
    for dtype in (torch.int32, torch.int64):
        b = ProgramBuilder()
        i = b.input("ids")
        flat = b.call("reshape", b.call("narrow", i, 0, 0, 1), [-1])
        outputs = [b.call("embedding", b.constant(table), i)]
        outputs.append(b.call("select_rows", b.constant(cube), flat))
        program = b.build(outputs)
        got = program.run(ids.to(dtype))
        assert torch.equal(got[0], table[ids])
        assert torch.equal(got[1], cube[ids[0]])
        b = ProgramBuilder()
        program = b.build([b.call("embedding", b.constant(table), b.input("ids"))])
        none = program.run(torch.empty(0, 3, dtype=dtype))
        assert none[0].shape == (0, 3, 3)


@pytest.mark.parametrize("shape", [(4, 6), (6,), (1, 6), (4, 1), ()], ids=str)
def test_copy(shape):
    for dst, dtype in ((torch.zeros(4, 6), torch.float32), (torch.zeros(6, 4).T, torch.bfloat16)):
        src = torch.randn(shape).to(dtype)
        b = ProgramBuilder()
        b.call("copy_", b.input("dst"), b.input("src"))
        assert b.build([]).run(dst, src) == ()
        assert torch.equal(dst, src.float().expand(4, 6))


def test_results_do_not_share_recycled_memory():
    """Memory is reused inside a run, never that of something still readable."""
    b = ProgramBuilder()
    x = b.input("x")
    kept, value = [], x
    for i in range(40):
        value = b.call("add", value, 1.0)
        if i % 7 == 0:
            kept.append(value)
        if i % 5 == 0:
            kept.append(b.call("narrow", b.call("mul", value, 2.0), 0, 0, 2))
    program = b.build([*kept, value, x])
    inputs = torch.zeros(4, 3)
    first, again = program.run(inputs), program.run(inputs)
    for got in (first, again):
        for one, want in zip(got, program.run_reference(inputs), strict=True):
            assert torch.equal(one, want)
    assert len({one.data_ptr() for one in (*first[:-1], *again[:-1])}) == 2 * len(first[:-1])
    assert first[-1].data_ptr() == inputs.data_ptr()


def test_errors_leave_everything_usable():
    program, _ = decoder(torch.float32)
    want = program.run(*step(0))
    tokens, positions, slots, tables, lengths, longest = step(0)
    place = r"program: instruction 0 \(embedding\): embedding: ids must be in \[0, 50\), got 50"
    with pytest.raises(RuntimeError, match=place):
        program.run(tokens + 50, positions, slots, tables, lengths, longest)
    place = r"program: instruction 10 \(rotary_embedding_and_cache\): rotary.*slots below .* = 128"
    with pytest.raises(RuntimeError, match=place):
        program.run(tokens, positions, slots + 1000, tables, lengths, longest)
    with pytest.raises(RuntimeError, match=r"instruction 12 \(single_query.*max_context_len must"):
        program.run(tokens, positions, slots, tables, lengths, 0)
    assert all(map(torch.equal, program.run(*step(0)), want))
    # Outside of programs, allocation is as ever.
    x = torch.randn(2, 64)
    assert (torch.ops.ipex.rms_norm(x, None) - torch.ops.ipex.rms_norm(x, None)).abs().max() == 0


def test_programs_are_freed_with_their_constants():
    b = ProgramBuilder()
    size = 2**26
    before = resident()
    program = b.build([b.call("add", b.input("x"), b.constant(torch.ones(size)))])
    program.run(torch.ones(1))
    handle = program._native.handle(program)
    one = torch.ones(1)
    assert run_native(handle, [one], [])[0][0] == 2
    held = resident()
    del program, b
    gc.collect()
    # Not what it grew by: memory of earlier tests may have been given back meanwhile.
    assert held - resident() > 4 * size - 2**24
    assert resident() - before < 2**26
    with pytest.raises(RuntimeError, match="handle must be one of program_create, got"):
        run_native(handle, [one], [])
    with pytest.raises(RuntimeError, match="handle must be one of program_create, got"):
        torch.ops.ipex.program_free(handle)


def test_programs_are_freed_in_the_middle_of_a_trace():
    class Refuses(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise RuntimeError("refused")

    for mode in (Refuses(), FakeTensorMode()):
        b = ProgramBuilder()
        program = b.build([b.call("add", b.input("x"), 1.0)])
        program.run(torch.ones(1))
        handle = program._native.handle(program)
        x = torch.ones(1)
        with mode:
            del program, b
            gc.collect()
        with pytest.raises(RuntimeError, match="handle must be one of program_create, got"):
            run_native(handle, [x], [])


def test_memory_of_dead_registers_is_given_back():
    """A long program needs the memory of what is alive at one time, not of all its results."""
    b = ProgramBuilder()
    value = b.input("x")
    for _ in range(60):
        value = b.call("add", value, 1.0)
    program = b.build([value])
    x = torch.ones(2**22)
    program.run(x)
    before = peak()
    (y,) = program.run(x)
    assert y[0] == 61
    assert peak() - before < 6 * x.nbytes


def memory(key):
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{key}:\s+(\d+) kB", text)[1]) * 1024


def resident():
    return memory("VmRSS")


def peak():
    return memory("VmHWM")


def test_threads():
    """One program in several threads, and another beside it."""
    program, caches = decoder(torch.float32)
    b = ProgramBuilder()
    value = b.input("x")
    for _ in range(200):
        value = b.call("mul", b.call("rms_norm", value, None), 1.5)
    other = b.build([value])
    x = torch.randn(3, 32)
    want_other = other.run(x)[0]
    want = program.run(*step(0))
    caught = []

    def work(i):
        try:
            for _ in range(50):
                if i == 0:  # the caches get the same values from each run
                    assert all(map(torch.equal, program.run(*step(0)), want))
                else:
                    assert torch.equal(other.run(x)[0], want_other)
        except BaseException as error:
            caught.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not caught
    assert all(torch.isfinite(cache).all() for cache in caches)


@pytest.fixture
def threads_of_torch():
    """Give the function that sets the number of torch's threads, and set the old one back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def wide_program(hidden=1024):
    """Return a program whose runs with 64 rows take some milliseconds."""
    b = ProgramBuilder()
    value, rows = b.input("x"), b.input("rows")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(hidden, hidden, generator=generator) / hidden**0.5
    packed = b.constant(torch.ops.ipex.pack_linear_weight(weight))
    for _ in range(40):
        h = b.call("linear", b.call("rms_norm", value, None), packed, hidden)
        value = b.call("tanh", b.call("add", value, h))  # tanh is torch's, with loops of torch
    return b.build([value, b.call("select_rows", value, rows)])


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_long_run_gives_the_same_bits_with_any_team(threads, threads_of_torch):
    program = wide_program()
    x, rows = torch.randn(64, 1024), torch.tensor([5])
    threads_of_torch(1)
    want = program.run(x, rows)
    threads_of_torch(threads)
    for _ in range(4):
        assert all(map(torch.equal, program.run(x, rows), want))
    # An error inside of a team is the error of the run, and the next run works.
    with pytest.raises(RuntimeError, match=r"program: instruction \d+ \(select_rows\): .*rows"):
        program.run(x, rows + 64)
    assert all(map(torch.equal, program.run(x, rows), want))
    assert torch.get_num_threads() == threads


def test_long_runs_in_two_threads_at_once(threads_of_torch):
    threads_of_torch(3)
    programs = [wide_program(), wide_program()]
    x, rows = torch.randn(64, 1024), torch.tensor([0])
    want = programs[0].run(x, rows)
    caught = []

    def work(program):
        try:
            for _ in range(5):
                assert all(map(torch.equal, program.run(x, rows), want))
        except BaseException as error:
            caught.append(error)

    threads = [threading.Thread(target=work, args=(program,)) for program in programs * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not caught


def test_long_runs_in_pools(threads_of_torch):
    """A run has the threads and the cores of the pool to which its caller is pinned, also two at once."""
    runtime = pytest.importorskip("ipex_runtime")
    threads_of_torch(3)
    program, x, rows = wide_program(), torch.randn(64, 1024), torch.tensor([5])
    want = program.run(x, rows)
    program.run(x, rows)  # counts its loops, so that the next run is one region
    cores = runtime.CPUPool().core_ids
    pools = [runtime.CPUPool(cores[:1]), runtime.CPUPool(cores[:2]), runtime.CPUPool()]

    def run():
        return all(map(torch.equal, program.run(x, rows), want)), torch.get_num_threads()

    for pool in pools:
        with runtime.pin(pool):
            assert run() == (True, pool.num_threads)
        assert run() == (True, 3)
    with contextlib.ExitStack() as stack:
        tasks = [stack.enter_context(runtime.Task(run, pool)) for pool in (pools[0], pools[2])]
        futures = [task() for task in tasks * 4]
        found = [future.get() for future in futures]
    assert found == [(True, pool.num_threads) for pool in (pools[0], pools[2])] * 4


FORKED = """
import os, signal, sys, threading
import torch
sys.path.insert(0, TESTS)
from test_program import wide_program

torch.set_num_threads(3)
program, x, rows = wide_program(), torch.randn(64, 1024), torch.tensor([5])
for _ in range(3):
    want = program.run(x, rows)
child = os.fork()
if child == 0:
    signal.alarm(60)
    same, threads = [], []

    def work():
        threads.append(torch.get_num_threads())
        same.extend(map(torch.equal, program.run(x, rows), want))

    work()
    x @ x.T, x + x  # loops of torch and of MKL
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    print(same, threads, flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1], torch.get_num_threads(), torch.equal(program.run(x, rows)[0], want[0]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_run_after_fork():
    """A child does not wait for threads that it lacks: it works alone, threads that it starts do not."""
    code = FORKED.replace("TESTS", repr(str(Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    child, parent = done.stdout.splitlines()
    assert child == "[True, True, True, True] [1, 3]"
    assert parent == "0 3 True"


def encoded(words, text=b"add", constants=()):
    code = torch.tensor(words, dtype=torch.int64)
    return torch.ops.ipex.program_create(
        code, torch.tensor(list(text), dtype=torch.uint8), list(constants)
    )


# version, 2 registers, input 0, no integers, no constants, output 1, one instruction: add(0, 0) -> 1
GOOD = [1, 2, 1, 0, 0, 0, 1, 1, 1, 0, 3, 2, 1, 0, 1, 0, 1, 1, 0]


def test_the_encoding_is_checked():
    handle = encoded(GOOD)
    x = torch.ones(2)
    assert run_native(handle, [x], [])[0].tolist() == [2, 2]
    for tensors, integers in (([], []), ([x, x], []), ([x], [1])):
        with pytest.raises(RuntimeError, match=r"program_run: (tensors|integers) must have"):
            run_native(handle, tensors, integers)
    for size in range(len(GOOD)):
        with pytest.raises(RuntimeError, match="must"):
            encoded(GOOD[:size])
    with pytest.raises(RuntimeError, match="got more words"):
        encoded([*GOOD, 0])
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):  # any change is refused or gives a program that can be run
        words = list(GOOD)
        at, value = torch.randint(0, 2**62, (2,), generator=generator).tolist()
        words[at % len(words)] = value % 6 - 2 if value % 3 else value
        try:
            handle = encoded(words)
        except RuntimeError:
            continue
        try:
            run_native(handle, [x], [])
        except RuntimeError as error:
            assert "must" in str(error)
        torch.ops.ipex.program_free(handle)


def test_no_inputs_and_no_outputs():
    b = ProgramBuilder()
    weight = torch.ones(3)
    b.call("copy_", b.constant(weight), b.constant(torch.zeros(3)))
    assert b.build([]).run() == ()
    assert weight.sum() == 0
    (same,) = b.build([b.constant(weight)]).run()
    assert same.data_ptr() == weight.data_ptr()
