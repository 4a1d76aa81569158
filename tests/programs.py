"""Programs in processes of their own, forked from one that has imported what most of them need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

LIMIT_SECONDS = 180
_SERVER = """
import json, os, runpy, signal, sys, traceback
import torch, parsifl.engine.experiment, parsifl.sites

for line in sys.stdin:
    program, folder, output, limit = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    signal.alarm(limit)
    os.chdir(folder)
    for name, stream in output.items():
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), getattr(sys, name).fileno())
    sys.argv = [program]
    sys.path[0] = os.path.dirname(program)
    code = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""


class Programs:
    """Runs Python programs one after the other; warnings are errors."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _SERVER],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.communicate()

    def run(self, program: Path, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a program in a folder."""
        output = {name: folder / f"{program.stem}.{name}" for name in ("stdout", "stderr")}
        streams = {name: str(path) for name, path in output.items()}
        told = json.dumps([str(program), str(folder), streams, LIMIT_SECONDS])
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{told}\n")
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        shown = {name: path.read_text() for name, path in output.items()}
        return subprocess.CompletedProcess([str(program)], code, **shown)
