# SPDX-License-Identifier: Apache-2.0
"""What `test_serve_parallel` starts as an engine: the server on a runner that checks the paged cache."""

from __future__ import annotations

import sys
import time

import uvicorn
from entrypoints.test_serve import Tokenizer
from fake_runner import FakeRunner

from ipex_llm.engine import Engine
from ipex_llm.entrypoints.cli.parallel import end_with_parent
from ipex_llm.entrypoints.openai.guard import protocol
from ipex_llm.entrypoints.openai.server import Settings, create_app
from ipex_llm.entrypoints.openai.worker import Worker


class Runner(FakeRunner):
    """Takes its time."""

    def forward(self, *args):
        time.sleep(0.01)
        return super().forward(*args)


if __name__ == "__main__":
    end_with_parent()
    engine = Engine(
        Runner(), Tokenizer(), block_size=4, num_blocks=512, max_num_seqs=4, eos_token_ids=()
    )
    app = create_app(Worker(engine), Settings(name="toy"))
    socket = sys.argv[sys.argv.index("--uds") + 1]
    uvicorn.run(app, uds=socket, log_level="warning", http=protocol(30))
