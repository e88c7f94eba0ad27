# SPDX-License-Identifier: Apache-2.0
"""Version of ipex."""

__version__ = "0.2.0"


def __getattr__(name: str) -> str:
    from ipex.compat import migration

    migration.refuse(f"_version.{name}")
    raise AttributeError(f"module 'ipex._version' has no attribute {name!r}")
