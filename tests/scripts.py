"""
Runs a script as `python SCRIPT` does, in a process forked from the server of ranks.

The server has imported the heavy packages already, and it also forks the ranks that the script starts, which would
otherwise import them twice more.
"""

import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.distributed import server_context


def run_script(script: Path, arguments: Sequence[str], timeout: float = 380) -> str:
    """The output of a script that is run with the environment of this process, and has to end with exit code 0."""
    context = server_context()
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        output, errors = Path(folder, "stdout"), Path(folder, "stderr")
        multiprocessing.forkserver.ensure_running()
        server = vars(multiprocessing.forkserver)["_forkserver"]._forkserver_address
        words = (str(script), list(arguments), str(output), str(errors), dict(os.environ), server, timeout)
        process = context.Process(target=_script_main, args=words, name=script.stem)
        process.start()
        try:
            process.join(timeout)
            code = process.exitcode
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            process.close()
        said = output.read_text() if output.exists() else ""
        assert code == 0, f"{script.name}: exit code {code}\n{said}{errors.read_text() if errors.exists() else ''}"
        return said


def _script_main(
    script: str, arguments: list[str], output: str, errors: str, environment: dict, server: str, lifetime_s: float
) -> None:
    """Body of the process."""
    os.setsid()
    signal.alarm(int(lifetime_s) + 10)  # ends a script whose parent was killed
    for stream, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    gc.freeze()  # else each collection walks, and so copies, all that the server has imported
    os.environ.clear()
    os.environ.update(environment)
    forkserver: Any = vars(multiprocessing.forkserver)["_forkserver"]
    forkserver._forkserver_address = server
    forkserver.ensure_running = multiprocessing.resource_tracker.ensure_running  # the server is not a child of this
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
