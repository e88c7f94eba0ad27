# SPDX-License-Identifier: Apache-2.0
"""`autotune`: the fastest INT8 form of a model whose accuracy is enough."""

from __future__ import annotations

import copy
import functools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_quant.int8.api import _DYNAMIC, _STATIC
from ipex_quant.int8.convert import as_call, cosine
from ipex_quant.int8.dataflow import tensors_of
from ipex_quant.int8.state import detach, forget, state_of
from ipex_quant.tuning.report import Progress, State, Tuning, fingerprint
from ipex_quant.tuning.search import Search, tuner_of
from ipex_quant.tuning.space import Criterion, Trial, type_options

_OP = "autotune"
_ALPHAS = (0.5, 0.75, 0.25, "auto")
Call = tuple[tuple[Any, ...], dict[str, Any]]


def autotune(
    model: nn.Module,
    calib_dataloader: Iterable[Any],
    calib_func: Callable[[nn.Module], Any] | None = None,
    eval_func: Callable[[nn.Module], Any] | None = None,
    op_type_dict: Mapping[str, Any] | None = None,
    smoothquant_args: Mapping[str, Any] | None = None,
    sampling_sizes: Sequence[int] | None = None,
    accuracy_criterion: Mapping[str, float] | None = None,
    tuning_time: float = 0,
    *,
    engine: str | None = None,
    state_file: str | os.PathLike[str] | None = None,
    report: str | os.PathLike[str] | None = None,
    progress: bool = True,
    timer: Callable[[], float] = time.monotonic,
) -> Any:
    """Search the fastest INT8 form of a model that is accurate enough.

    Whole recipes are tried first: static scales from histograms, from minima and maxima, SmoothQuant with several
    alpha, dynamic scales. If none is accurate enough, the most accurate one goes on with fewer layers: linear layers
    get the scale of each row, types of layers stay float, and at last single layers, in the order of the error that
    each makes alone in the output, as few as possible.

    Args:
        model: A float model in evaluation mode, or a result of `prepare`, whose own configuration is then tried first.
            It is not changed.
        calib_dataloader: Batches to calibrate with: tensors, tuples of arguments, dicts of keyword arguments, or pairs
            of one of these and a label. It is gone through more than once.
        calib_func: Calibrates a prepared model instead of the loader, whose first batch is an example then.
        eval_func: Takes a model and returns its accuracy, a number, the more the better. None: the mean cosine of the
            outputs to the float model on the loader.
        op_type_dict: Choices by type of layer, in the form of neural-compressor: ``{"linear": {"weight": {"dtype":
            ["fp32"]}}}`` leaves linear layers float; ``algo``, ``scheme`` and ``granularity`` choose observers.
        smoothquant_args: ``{"alpha": ...}`` with a number, a list of numbers or ``"auto"``, and ``auto_alpha_args`` as
            in `get_smooth_quant_qconfig_mapping`: only SmoothQuant is tried. Without it, 0.5, 0.75, 0.25 and ``"auto"``
            are tried among the others. By position it stands where IPEX 2.2 to 2.6 had it; the order of 2.8, which
            has no such argument, is told from it by the types.
        sampling_sizes: How many samples to calibrate with, one or several numbers to try. None: 100.
        accuracy_criterion: ``{"relative": share}`` or ``{"absolute": loss}`` that may be lost. None: 0.01 relative.
        tuning_time: Seconds in which to look for the fastest; 0 to take the first that is accurate enough, however
            long that takes. A trial that has begun is finished.
        engine: Who says which recipe is next and when to stop: ``"neural_compressor"`` its tuner, ``"ipex"`` this
            package, None neural-compressor if version 3 of it is installed. It is never installed here. What a trial
            is, its calibration and the search for single layers are the same for both.
        state_file: JSON file with what was found so far; a search that was stopped goes on from it.
        report: Folder for ``tuning.txt``, ``tuning.json`` and ``tuning.png`` (accuracy against speed-up).
        progress: Whether to show a bar on a terminal; elsewhere there are log lines.
        timer: Returns the seconds that ``tuning_time`` counts.

    Returns:
        The prepared and calibrated model for `convert`, with a `Tuning` as attribute ``tuning``. If nothing is accurate
        enough it is the most accurate one, and a warning says so.

    Raises:
        TypeError: ``model`` is not a module.
        OpArgumentError: Another argument is not as described, the loader is empty, ``eval_func`` returns no number, or
            the accuracy of the float model is NaN or infinite.
        MissingComponentError: ``engine`` is ``"neural_compressor"`` and version 3 of it is not installed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_OP}: model must be a torch.nn.Module, got {type(model).__name__}")
    for name, function in (("calib_func", calib_func), ("eval_func", eval_func)):
        what = type(function).__name__
        check(function is None or callable(function), _OP, name, "be a function", what)
    smoothquant_args, sampling_sizes, accuracy_criterion, tuning_time = _in_order(
        smoothquant_args, sampling_sizes, accuracy_criterion, tuning_time
    )
    criterion = Criterion.of(
        {"relative": 0.01} if accuracy_criterion is None else accuracy_criterion
    )
    sizes = _sizes(sampling_sizes)
    _check_seconds(tuning_time)
    tuner = tuner_of(engine)
    options = type_options(op_type_dict)
    given = getattr(model, "q_config", None) if state_of(model) is not None else None
    model = _float_of(model)
    check(not model.training, _OP, "model", "be in evaluation mode", "training mode")
    data = _Batches(model, calib_dataloader, calib_func)
    trials = _trials(model, given, options, sizes, smoothquant_args)
    auto_alpha_args = (smoothquant_args or {}).get("auto_alpha_args")
    settings = {
        "trials": [trial.key for trial in trials],
        "op_type_dict": repr(sorted((k.__name__, v) for k, v in options.items())),
        "accuracy": "eval_func" if eval_func is not None else "cosine",
        "criterion": [criterion.kind, criterion.loss],
        "auto_alpha_args": repr(auto_alpha_args),
    }
    if eval_func is not None:
        evaluate: Callable[[nn.Module], float] = functools.partial(_accuracy, eval_func)
    else:
        evaluate = functools.partial(_agreement, model, lambda: data.calls(max(sizes)))
    state, baseline = _begun(state_file, model, settings, evaluate)
    start = timer()
    bar = Progress(progress, float(tuning_time))
    args, kwargs = next(data.calls(1))
    search = Search(
        model=model,
        args=args,
        kwargs=kwargs,
        given=given,
        options=options,
        auto_alpha_args=auto_alpha_args,
        calibrate=data.calibrate,
        evaluate=evaluate,
        least=criterion.least(baseline),
        state=state,
        expired=lambda: tuning_time > 0 and timer() - start >= tuning_time,
        thorough=tuning_time > 0,
        on_trial=lambda trial: bar.trial(trial, timer() - start),
        tuner=tuner,
    )
    try:
        best = search.run(trials)
    finally:
        bar.stop()
    tuning = Tuning(baseline, search.least, best, tuple(search.results), complete=search.complete)
    if not best.met:
        warnings.warn(
            f"{_OP}: no configuration has an accuracy of {search.least:.7g} or more; the most accurate one,"
            f" {best.trial.name}, has {best.accuracy:.5g}",
            stacklevel=2,
        )
    if report is not None:
        tuning.write(Path(report))
    result: Any = search.prepared(best.trial)
    result.__dict__["tuning"] = tuning
    return result


def _begun(
    state_file: str | os.PathLike[str] | None,
    model: nn.Module,
    settings: Mapping[str, Any],
    evaluate: Callable[[nn.Module], float],
) -> tuple[State, float]:
    """Return what an earlier search with these settings found, and the accuracy of the float model."""
    path = None if state_file is None else Path(state_file)
    state = State(path, {} if path is None else fingerprint(model, **settings))
    if state.baseline is None:
        state.baseline = evaluate(model)
        finite = math.isfinite(state.baseline)
        check(finite, _OP, "eval_func", "give a finite number for the float model", state.baseline)
        state.save()
    return state, state.baseline


def _check_seconds(tuning_time: Any) -> None:
    number = isinstance(tuning_time, (int, float)) and not isinstance(tuning_time, bool)
    usable = number and 0 <= tuning_time < math.inf
    check(usable, _OP, "tuning_time", "be a finite number of seconds, 0 or more", tuning_time)


def _in_order(smooth: Any, sizes: Any, criterion: Any, seconds: Any) -> tuple[Any, Any, Any, Any]:
    """Return four arguments in this order, also if given in the order of IPEX 2.8, without the first."""
    shifted = isinstance(smooth, (int, list, tuple)) or (
        smooth is None and isinstance(sizes, Mapping)
    )
    if not shifted:
        return smooth, sizes, criterion, seconds
    named = [value for value in (criterion, seconds) if isinstance(value, Mapping)]
    fits = not (named and isinstance(sizes, Mapping))
    check(fits, _OP, "accuracy_criterion", "be given once", "two dicts")
    if isinstance(criterion, Mapping):  # by name
        return None, smooth, criterion, seconds
    return None, smooth, sizes, criterion if criterion is not None else seconds


def _sizes(sampling_sizes: Any) -> list[int]:
    sizes = [100] if sampling_sizes is None else sampling_sizes
    sizes = [sizes] if isinstance(sizes, int) else list(sizes)
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes)
    check(bool(sizes) and whole, _OP, "sampling_sizes", "have positive whole numbers", sizes)
    return sizes


def _float_of(model: nn.Module) -> nn.Module:
    """Return a prepared model without observers, another model as it is."""
    if state_of(model) is None:
        return model
    model = copy.deepcopy(model)
    detach(model)
    forget(model)
    model.__dict__.pop("tuning", None)
    return model


def _trials(
    model: nn.Module,
    given: Any,
    options: Mapping[type[nn.Module], Any],
    sizes: Sequence[int],
    smoothquant_args: Any,
) -> list[Trial]:
    """Return the whole recipes in the order in which they are tried."""
    kinds = {type(m) for m in model.modules()} - {kind for kind, o in options.items() if o is None}
    static, dynamic = bool(kinds & set(_STATIC)), bool(kinds & set(_DYNAMIC))
    check(static or dynamic, _OP, "model", "have layers that can become INT8", "none")
    alphas: Any = _ALPHAS
    if smoothquant_args is not None:
        name = "smoothquant_args"
        good = isinstance(smoothquant_args, Mapping)
        check(good, _OP, name, "be a dict", type(smoothquant_args).__name__)
        known = set(smoothquant_args) <= {"alpha", "folding", "auto_alpha_args"}
        check(known, _OP, name, "have alpha, folding or auto_alpha_args", list(smoothquant_args))
        alphas = smoothquant_args.get("alpha", "auto")
        alphas = list(alphas) if isinstance(alphas, (list, tuple)) else [alphas]
        only = nn.Linear in kinds and bool(alphas)
        check(only, _OP, name, "come with linear layers and at least one alpha", alphas)
    found: list[Trial] = []
    for size in sizes:
        if given is not None:
            found.append(Trial("as prepared", samples=size))
        if static and smoothquant_args is None:
            found += [Trial("static", samples=size), Trial("min-max", samples=size)]
        if nn.Linear in kinds:
            found += [Trial("smooth", alpha=alpha, samples=size) for alpha in alphas]
    if smoothquant_args is None and dynamic:
        found.append(Trial("dynamic"))
    return found


class _Batches:
    """What the model is calibrated and compared with.

    Args:
        model: The float model.
        loader: Its batches, as in `autotune`.
        calib_func: Calibrates instead of the loader.
    """

    def __init__(
        self, model: nn.Module, loader: Any, calib_func: Callable[[nn.Module], Any] | None
    ) -> None:
        self.loader, self.calib_func = loader, calib_func
        self.as_arguments = _batch_form(model, loader)

    def calls(self, samples: float) -> Iterator[Call]:
        """Yield the arguments of as many calls as have that many samples."""
        seen = 0
        for batch in self.loader:
            if seen >= samples:
                break
            args, kwargs = self.as_arguments(batch)
            seen += _rows(args, kwargs)
            yield args, kwargs

    def calibrate(self, prepared: nn.Module, samples: int) -> None:
        with torch.no_grad():
            if self.calib_func is not None:
                self.calib_func(prepared)
                return
            for args, kwargs in self.calls(samples):
                prepared(*args, **kwargs)


def _batch_form(model: nn.Module, loader: Any) -> Callable[[Any], Call]:
    """Return how a batch of the loader becomes arguments of the model."""
    check(
        isinstance(loader, Iterable), _OP, "calib_dataloader", "be iterable", type(loader).__name__
    )
    again = not isinstance(loader, Iterator)
    check(again, _OP, "calib_dataloader", "be iterable more than once", type(loader).__name__)
    first = next(iter(loader), None)
    check(first is not None, _OP, "calib_dataloader", "have at least one batch", "none")
    pair = isinstance(first, (tuple, list)) and len(first) == 2
    forms: list[Callable[[Any], Call]] = [lambda batch: as_call(batch[0])] if pair else []
    error: Exception | None = None
    for form in (*forms, as_call):
        args, kwargs = form(first)
        try:
            with torch.no_grad():
                model(*args, **kwargs)
            return form
        except Exception as caught:
            error = caught
    raise OpArgumentError(
        f"{_OP}: calib_dataloader must yield batches that the model takes, got one that fails with"
        f" {type(error).__name__}: {error}"
    ) from error


def _rows(args: Any, kwargs: Any) -> int:
    tensors = (t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim())
    first = next(tensors, None)
    return 1 if first is None else max(1, first.shape[0])


def _accuracy(eval_func: Callable[[nn.Module], Any], model: nn.Module) -> float:
    with torch.no_grad():
        value = eval_func(model)
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise OpArgumentError(
            f"{_OP}: eval_func must return a number, got {type(value).__name__}"
        ) from None


def _agreement(
    model: nn.Module, calls: Callable[[], Iterator[Call]], candidate: nn.Module
) -> float:
    """Return the mean cosine of the outputs of two models."""
    if candidate is model:
        return 1.0
    found = []
    with torch.no_grad():
        for args, kwargs in calls():
            ours, theirs = (tensors_of(m(*args, **kwargs)) for m in (candidate, model))
            found.append(cosine(*(next(iter(t)).float() for t in (theirs, ours))))
    return sum(found) / len(found)
