# SPDX-License-Identifier: Apache-2.0
"""Calls at imports of other libraries' modules: once or always, and nothing else about the import changes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import threading

import pytest

from ipex_core.util import import_hooks


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Return a function that writes a module, which is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(import_hooks, "_always", [])
    before, names = set(sys.modules), set(import_hooks._second)

    def write(name, text="value = 1\n"):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return name

    yield write
    for name in set(sys.modules) - before:
        sys.modules.pop(name)
    for name in set(import_hooks._second) - names:
        import_hooks._second.pop(name)
    import_hooks._once.clear()
    import_hooks._place()


def finders():
    return sum(finder is import_hooks._FINDER for finder in sys.meta_path)


def test_once(source):
    name, seen = source("hooked_once"), []
    import_hooks.when_imported(name, seen.append)
    import_hooks.when_imported(name, seen.append)
    assert finders() == 1 and not seen
    assert importlib.util.find_spec(name).origin.endswith("hooked_once.py")
    assert finders() == 1 and not seen  # a look at the spec uses nothing up
    module = importlib.import_module(name)
    assert seen == [module, module] and finders() == (1 if import_hooks._second else 0)
    assert type(module.__spec__.loader) is type(inspect.__spec__.loader)
    assert module.__loader__ is module.__spec__.loader and "value" in inspect.getsource(module)
    importlib.reload(module)
    assert len(seen) == 2
    import_hooks.when_imported(name, seen.append)  # at once
    assert len(seen) == 3


def test_each_import_that_matches(source):
    early, late, seen = source("hooked_early"), source("hooked_late"), []
    importlib.import_module(early)
    import_hooks.when_matching(lambda name: name.startswith("hooked_"), seen.append)
    assert [module.__name__ for module in seen] == [early]
    module = importlib.import_module(late)
    importlib.reload(module)
    assert [module.__name__ for module in seen] == [early, late, late] and finders() == 1


def test_an_import_that_fails_is_waited_for_again(source):
    name, seen = source("hooked_bad", "raise ValueError\n"), []
    import_hooks.when_imported(name, seen.append)
    with pytest.raises(ValueError):
        importlib.import_module(name)
    assert not seen
    source(name, "value = 12345\n")
    assert importlib.import_module(name).value == 12345 and len(seen) == 1


def test_second_names(source):
    source("hooked_first")
    import_hooks.second_names(
        {"json.hooked_second": "hooked_first", "json.decoder": "hooked_first"}
    )
    import json.hooked_second

    import hooked_first

    assert json.hooked_second is hooked_first and hooked_first.__spec__.name == "hooked_first"
    assert importlib.util.find_spec("json.decoder").origin == json.decoder.__file__
    assert importlib.reload(json.decoder).JSONDecoder is json.decoder.JSONDecoder


def test_threads(source):
    names = [source(f"hooked_{i}", "import time; time.sleep(0.01)\n") for i in range(8)]
    seen, barrier = [], threading.Barrier(16)

    def work(i):
        barrier.wait()
        import_hooks.when_imported(names[i % 8], seen.append)
        importlib.import_module(names[i % 8])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {module.__name__ for module in seen} == set(names)
    assert len(seen) == 16 and not import_hooks._once
