# SPDX-License-Identifier: Apache-2.0
"""The reference is complete: public names, variables of the environment, and the messages of the help page."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: The modules whose names people import; those below them are reached through these.
MODULES = (
    *("ipex", "ipex_core", "ipex_core.amp", "ipex_core.config", "ipex_core.distributed"),
    *("ipex_core.errors", "ipex_core.jit", "ipex_core.nn.functional", "ipex_core.nn.modules"),
    *("ipex_core.nn.modules.merged_embeddingbag", "ipex_core.optim", "ipex_core.optim.tpp"),
    *("ipex_core.program", "ipex_core.testing", "ipex_core.benchmark", "ipex_core.woq"),
    *("ipex_quant", "ipex_quant.fp8", "ipex_llm", "ipex_llm.engine", "ipex_llm.functional"),
    *("ipex_llm.generation", "ipex_llm.integrations", "ipex_llm.modules", "ipex_llm.quantization"),
    *("ipex_llm.utils", "ipex_runtime", "ipex_runtime.topology", "ipex_runtime.launch"),
    "ipex_runtime.codeless",
)
#: Names that are described elsewhere: the contract of kernel packages in docs/architecture.md, those of torch in its
#: pages, the launcher's pool of IPEX's scripts in docs/launcher.md.
ELSEWHERE = {
    *("ipex_core.ProviderInfo", "ipex_core.optim.Adafactor", "ipex_core.optim.RMSprop"),
    "ipex_runtime.launch.CPUPool",
}


@pytest.fixture(autouse=True)
def extensions_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")


def sources() -> Iterator[str]:
    """Yield the text of each file of the packages in which messages and names of variables are."""
    for pattern in ("src/**/*.py", "csrc/**/*.cpp", "csrc/**/*.h"):
        for path in ROOT.glob(f"packages/*/{pattern}"):
            yield path.read_text(encoding="utf-8")


def test_each_public_name_is_in_the_reference() -> None:
    for name in MODULES:
        pytest.importorskip(name)
    text = "\n".join(importlib.import_module("api_pages").pages().values())
    directives = re.findall(r"^\.\. auto(?:function|class|exception):: (\S+)$", text, re.MULTILINE)
    documented = {id(pkgutil.resolve_name(path)) for path in directives}
    missing = []
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            described = callable(value) and not isinstance(value, ModuleType)
            if described and id(value) not in documented:
                missing.append(f"{module.__name__}.{name}")
    assert set(missing) - ELSEWHERE == set()


READ = re.compile(r'(?:environ(?:\.get\(|\[)|getenv\()\s*"((?:DISABLE_)?(?:IPEX|ONEDNN|DNNL)_\w+)"')


def test_each_variable_that_is_read_is_in_the_reference() -> None:
    page = importlib.import_module("config_pages").index_page()
    found = {"IPEX_INSTALL_PREFIX"}
    for text in sources():
        found.update(READ.findall(text))
    assert {"DISABLE_IPEX_SAMPLE", "IPEX_CPU_ISA", "IPEX_XPU_CACHE"} <= found
    assert [name for name in sorted(found) if f"`{name}`" not in page] == []


def test_each_command_is_in_the_reference() -> None:
    typer = pytest.importorskip("typer.main")
    for name in ("ipex_llm", "ipex_runtime"):
        pytest.importorskip(name)
    from ipex_cli.app import app

    pages = importlib.import_module("command_pages").pages()
    titles = re.findall(r"^## (?:ipex )?([\w-]+)", pages["options.md"], re.MULTILINE)
    group = typer.get_command(app)
    names = set(group.list_commands(None))
    assert {"auto", "hypertune", "llm", "run"} <= names
    assert names - {"llm", "run"} <= set(titles) and "ipexrun" in titles
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert [name for name in sorted(names) if f"`ipex {name}" not in page] == []


def messages(page: str, heading: str) -> list[str]:
    """Return the code in the first cells of the tables below a heading."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    part = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    assert part is not None, heading
    cells = re.findall(r"^\| (.*?) \|", part[1], re.MULTILINE)
    return [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        ("troubleshooting.md", "At import and installation"),
        ("troubleshooting.md", "When a model is optimized or run"),
        ("install.md", "When something is wrong"),
        ("xpu.md", "Messages"),
    ],
)
def test_messages_of_the_help_pages_are_in_the_code(page: str, heading: str) -> None:
    # Literals that stand one after the other are one.
    source = re.sub(r'"\s*f?"', "", "".join(sources()))
    found = messages(page, heading)
    assert len(found) >= 3
    for message in found:
        for part in re.split(r"\.\.\.|<\w+>|\*|\d\.\d+|: ", message):
            piece = part.strip(" ;'?()")
            of_torch = re.match("torch\\.|Unknown |load_state", message)
            assert len(piece) < 4 or of_torch or piece in source, (message, piece)


def test_long_names_break_at_their_joints() -> None:
    from line_breaks import breakable

    def shown(text: str) -> str:
        page = breakable(f'<code><span class="pre">{text}</span></code> {text}')
        assert page.replace("<wbr>", "") == f'<code><span class="pre">{text}</span></code> {text}'
        assert page.endswith(f"</code> {text}")  # only inline code
        return page.split('"pre">')[1].split("</span>")[0].replace("<wbr>", "|")

    assert shown("ipex.quantization.prepare") == "ipex.|quantization.|prepare"
    assert shown("_set_compiler_backend") == "_set_|compiler_|backend"
    assert shown("dtype=torch.bfloat16)") == "dtype=|torch.|bfloat16)"
    assert shown("__version__") == "__version__"
    assert shown("version=2.8.0+cpu") == "version=|2.8.0+cpu"
    assert shown("op_info") == "op_info"  # short ones stay whole
