# SPDX-License-Identifier: Apache-2.0
"""A piece of work that every engine gets: a folder with its description, weights, inputs and the answer of float32."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: The least cosine to the answer of float32, by the precision in which an engine computes. Random weights suffer more
#: from few bits than trained ones.
LEAST_COSINE = {"float32": 0.9999, "bfloat16": 0.99, "float16": 0.99, "int8": 0.96, "int4": 0.9}

#: The same for each token that a language model decodes. In float types it leaves no room for a token that was lost
#: from the cache or stands at a place beside its own; weights of few bits are worse than that.
LEAST_DECODED = {
    "float32": 0.9999,
    "bfloat16": 0.999,
    "float16": 0.999,
    "int8": 0.995,
    "int4": 0.85,
}

#: The least cosine of what an engine says after a text that it decoded and after the same text as a prompt. Both have
#: its weights, so this holds for few bits, too.
LEAST_WHOLE = 0.999

#: The largest relative difference of training losses from float32, by precision.
MOST_LOSS_ERROR = {"float32": 1e-3, "bfloat16": 0.03}


class UnsupportedError(Exception):
    """The engine cannot do this task; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """What to run.

    Attributes:
        kind: ``"ops"``, ``"models"``, ``"llm"`` or ``"train"``.
        name: Name of the workload.
        case: What the table calls it: the workload and its shape.
        shape: Numbers of the workload.
        dtype: ``"float32"``, ``"bfloat16"``, ``"int8"`` or ``"int4"``.
        threads: Threads of each engine.
        folder: Where its files are.
        rest: Of ``"int8"`` and ``"int4"``: the element type of what is not quantized.
    """

    kind: str
    name: str
    case: str
    shape: dict[str, Any]
    dtype: str
    threads: int
    folder: str
    rest: str = "bfloat16"

    @property
    def path(self) -> Path:
        """The folder."""
        return Path(self.folder)

    @property
    def float_dtype(self) -> str:
        """The element type of what is not quantized."""
        return self.rest if self.dtype in {"int8", "int4"} else self.dtype

    def write(self) -> None:
        """Write the description into the folder."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (self.path / "task.json").write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: str) -> Task:
        """Read the description of a folder."""
        return cls(**json.loads((Path(folder) / "task.json").read_text(encoding="utf-8")))

    def forced(self) -> Any:
        """Return the tokens [batch, new - 1] that follow the prompt of a language model where its answer is checked."""
        return self._arrays("forced.npz")["ids"]

    def inputs(self) -> dict[str, Any]:
        """Return the inputs as numpy arrays, in the order of the arguments."""
        return self._arrays("inputs.npz")

    def wanted(self) -> Any:
        """Return the answer of float32 as a numpy array."""
        return self._arrays("answer.npz")["answer"]

    def _arrays(self, name: str) -> dict[str, Any]:
        import numpy

        with numpy.load(self.path / name, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}


@dataclasses.dataclass(slots=True)
class Prepared:
    """A task that is ready to run on an engine.

    Attributes:
        precision: In which it computes; it decides how exact the answer must be.
        answer: Returns the answer, an array of numbers.
        calls: What is timed, by name; each call does the work once.
        note: What a reader of the table should know.
        whole: Language models: returns the last of ``answer`` again, [batch, vocabulary], without decoding. None where
            that would be another graph to compile.
    """

    precision: str
    answer: Any
    calls: dict[str, Any]
    note: str = ""
    whole: Any = None


def greedy(task: Task, step: Callable[[Any, int], Any], precision: str, note: str = "") -> Prepared:
    """Return a language model ready to decode.

    Args:
        task: The task.
        step: Gets token ids [batch, tokens] and the place of the first one in the text; 0 begins a new text. Returns
            the logits of the last token, [batch, vocabulary]; they may be overwritten by the next step.
        precision: In which it computes.
        note: Goes into the table.
    """
    import numpy

    ids, forced = task.inputs()["input_ids"], task.forced()
    length, new = ids.shape[1], task.shape["new"]

    def make(count: int) -> Any:
        logits = step(ids, 0)
        for place in range(length, length + count - 1):
            logits = step(logits.argmax(-1)[:, None], place)
        return logits

    def answer() -> Any:
        found = [step(ids, 0).copy()]
        for place in range(forced.shape[1]):
            found.append(step(forced[:, place : place + 1], length + place).copy())
        return numpy.stack(found, 1)

    def whole() -> Any:
        return step(numpy.concatenate([ids, forced], 1), 0).copy()

    calls = {"first": lambda: make(1), "all": lambda: make(new)}
    return Prepared(precision, answer, calls, note, whole)
