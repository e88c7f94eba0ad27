# SPDX-License-Identifier: Apache-2.0
"""The same work on several engines: what ``ipex bench models|llm|train`` and ``ipex bench ops --peers`` run.

Each engine runs in a process of its own, possibly with another Python (``worker``); the parent (``run``) makes the
task, lets an engine show that its answer is right, and then times all of them in turns. ``peers`` has the
engines. Modules that a worker needs import each other relatively and import neither ``ipex`` nor, at the top, torch: in
the environment of another engine there may be neither.
"""
