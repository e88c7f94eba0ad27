# SPDX-License-Identifier: Apache-2.0
"""Configuration of the documentation. `nox -s docs` builds it, with warnings as errors, and runs the examples."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

project = "ipex"
author = "The ipex developers"
project_copyright = "The ipex developers, Apache-2.0"
release = version = importlib.metadata.version("ipex-core")

extensions = [
    "myst_parser",
    "sphinx_design",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "generated_pages",
    "line_breaks",
]
exclude_patterns = ["_build", "generated/parts"]

html_theme = "furo"
html_title = "ipex"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["ipex.css"]

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

# Single backticks in docstrings are code; what is meant as a link is written as one.
default_role = "code"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Source", "params_style")]

# Types of other libraries are named, not linked: the build needs no network. References to our own names must resolve.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!ipex).*"),
    (
        r"py:(class|obj|data)",
        r"ipex_(core|quant|runtime|llm\.optimization|llm\.engine\.lora)\..*",
    ),  # types in signatures that have no page
]

# Examples in docstrings use names as their module has them.
doctest_global_setup = """
import ipex
import ipex_core
import torch
from ipex import *
from ipex_core.library import *
from ipex_core.library.spec import bind
from ipex_core.amp import *
from ipex_core.benchmark import *
from ipex_core.jit import fuse, fused
from ipex_core.testing import *
from ipex_llm.engine import *
from ipex_llm.functional import *
from ipex_llm.modules import *
from ipex_quant.qconfig.weight_only import *
from ipex_core.woq import *
_ = torch.manual_seed(0)
"""
# Only blocks that ask for it, and the docstrings of documented objects.
doctest_test_doctest_blocks = "default"
trim_doctest_flags = True
