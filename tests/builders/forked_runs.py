"""Runs of test scripts in forks of a process that has imported torch and Transformers, which takes 6 s per process."""

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from counted_times import count_times

MODULES = (
    "torch._inductor.compile_fx", "torch.distributed.fsdp", "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
    "adacc_hf.callbacks.adacc", "adacc_hf.compiler", "adacc_hf.kernels.codecs", "pulp", "highspy", "pytest",
)  # fmt: skip
"""Modules that a server imports before it forks."""
PATIENCE = 5.0
"""Seconds for which a rank may go on after another rank failed or the time is up, before it is killed."""
FIRST_PORT, PORTS_PER_WORKER = 12_000, 2_000
"""Ports of the ranks' stores, below the ports that Linux gives to clients: 32768 and more."""


def run_forked(
    script: str | Path,
    *arguments: str,
    num_ranks: int | None = None,
    timeout: float = 280,
    paths: tuple[str, ...] = (),
    modules: tuple[str, ...] = (),
    cwd: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run the file `script` as `__main__`, as `python script` does, or as torchrun does on `num_ranks` ranks. If a rank
    fails, the other ranks are stopped. The output is that of all ranks, one after the other. `paths` is put at the
    front of sys.path, and `modules` is imported before the fork, both for all runs with these values."""
    settings = [{}]
    if num_ranks is not None:
        common = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "GROUP_RANK": 0}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        settings = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(num_ranks)]
    environments = [os.environ | environment | {key: str(text) for key, text in rank.items()} for rank in settings]
    with TemporaryDirectory(prefix="adacc_hf-tests-") as folder:
        request = {
            "command": [str(script), *arguments],
            "environments": environments,
            "cwd": str(cwd or Path.cwd()),
            "folder": folder,
            "timeout": timeout,
        }
        server = _server(paths, modules)
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, f"the server of forks for {script} has ended"
        outputs = [
            "".join((Path(folder) / f"{rank}.{name}").read_text(errors="replace") for rank in range(len(environments)))
            for name in ("out", "err")
        ]
    return subprocess.CompletedProcess([str(script), *arguments], json.loads(answer), *outputs)


@cache
def _server(paths: tuple[str, ...], modules: tuple[str, ...]) -> subprocess.Popen[str]:
    """Start a server in its own process, which ends with this process."""
    own = [*paths, str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    server = subprocess.Popen(
        [sys.executable, __file__, *MODULES, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(own),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else an import starts a thread, which no fork has
        },
    )

    def stop() -> None:
        server.stdin.close()
        server.stdout.close()
        server.wait()

    atexit.register(stop)
    return server


_ports = iter(range(PORTS_PER_WORKER))


def free_port() -> int:
    """Return a free port. Each of pytest's workers has its own range of ports."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in _ports:
        with socket.socket() as probe:
            port = FIRST_PORT + worker * PORTS_PER_WORKER + number
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no port is free")


# The server's side.


def serve() -> None:
    """Import the modules of the command line. Then run a script for each line of stdin, and write its exit status.
    Times that decide policies are counted in all scripts, see counted_times.py."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    for module in sys.argv[1:]:
        __import__(module)
    with count_times():
        for line in sys.stdin:
            answers.write(f"{_run_ranks(json.loads(line))}\n")
            answers.flush()


def _run_ranks(request: dict[str, Any]) -> int:
    """Fork one process per rank, wait for all, and return the first exit status other than 0."""
    pids = {_fork(request, rank): rank for rank in range(len(request["environments"]))}
    deadline = time.monotonic() + request["timeout"]
    status = 0
    while pids:
        pid, code = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            del pids[pid]
            if code and not status:
                status = os.waitstatus_to_exitcode(code)
                deadline = min(deadline, time.monotonic() + PATIENCE)
                _signal_all(pids, signal.SIGTERM)
        elif time.monotonic() > deadline:
            status = status or 124
            _signal_all(pids, signal.SIGKILL)
            deadline += PATIENCE
        else:
            time.sleep(0.01)
    return status


def _signal_all(pids: dict[int, int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def _fork(request: dict[str, Any], rank: int) -> int:
    """Return the id of a new process that runs the script as `rank`."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for descriptor, name in ((1, "out"), (2, "err")):
            file = os.open(f"{request['folder']}/{rank}.{name}", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, descriptor)
            os.close(file)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environments"][rank])
        script = request["command"][0]
        sys.argv[:] = request["command"]
        sys.path[0] = str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
