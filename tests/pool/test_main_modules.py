"""Programs with process pools: imports of the main module by workers, and their exit with the program."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.conftest import ROOT
from tests.pace import patience
from tests.running import run, wait_for_ends


def run_script(folder: Path, body: str) -> "subprocess.CompletedProcess[str]":
    script = folder / "script.py"
    script.write_text(
        f"import asyncio, os, sys\nsys.path.append({str(ROOT)!r})\nfrom aioverbs import *\n" + textwrap.dedent(body)
    )
    command = [sys.executable, "-W", "error", str(script)]
    environment = {**os.environ, "AIOVERBS_DEVICE": "soft0", "PYTHONPATH": os.pathsep.join(sys.path)}
    return run(command, patience(50), env=environment)


def test_workers_run_functions_of_the_main_module(tmp_path: Path) -> None:
    body = """
        def square(number):
            return number * number

        async def main():
            async with open_device() as device, WorkerPool(device, 1, processes=True) as pool:
                print(await pool.map(square, range(5)))

        if __name__ == "__main__":
            asyncio.run(main())
    """
    done = run_script(tmp_path, body)
    assert (done.stdout, done.stderr, done.returncode) == ("[0, 1, 4, 9, 16]\n", "", 0)


def test_a_main_module_that_opens_a_pool_on_import_fails(tmp_path: Path) -> None:
    body = """
        async def main():
            async with open_device() as device, WorkerPool(device, 1, processes=True) as pool:
                await pool.run(os.getpid)

        asyncio.run(main())
    """
    done = run_script(tmp_path, body)
    assert done.returncode == 1
    assert "before the" in done.stderr
    assert "has finished its bootstrapping phase" in done.stderr


def test_open_fails_when_workers_cannot_import_the_main_module(tmp_path: Path) -> None:
    body = """
        if __name__ != "__main__":
            raise ZeroDivisionError("in a worker")

        async def main():
            async with open_device() as device:
                try:
                    await WorkerPool(device, 1, processes=True).open()
                except WorkerDiedError as error:
                    print(error)

        if __name__ == "__main__":
            asyncio.run(main())
    """
    done = run_script(tmp_path, body)
    assert done.returncode == 0
    assert "worker 0 of the pool died: its process ended with status 1" in done.stdout
    assert "ZeroDivisionError: in a worker" in done.stderr


def test_workers_run_functions_of_a_module_run_with_python_m(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(
        textwrap.dedent(
            """
            import asyncio, sys
            from aioverbs import *

            def arguments():
                return __name__, sys.argv[1:]

            async def main():
                async with open_device("soft0") as device, WorkerPool(device, 1, processes=True) as pool:
                    print(*await pool.run(arguments))

            if __name__ == "__main__":
                asyncio.run(main())
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = run([sys.executable, "-P", "-W", "error", "-m", "named", "1", "2"], patience(50), env=environment)
    assert (done.stdout, done.stderr, done.returncode) == ("__mp_main__ ['1', '2']\n", "", 0)


def test_workers_exit_when_the_pools_process_is_killed(tmp_path: Path) -> None:
    body = """
        async def main():
            async with open_device() as device, WorkerPool(device, 1, processes=True) as pool:
                print(*(worker.process_id for worker in pool.statistics().workers), flush=True)
                os.kill(os.getpid(), 9)

        if __name__ == "__main__":
            asyncio.run(main())
    """
    done = run_script(tmp_path, body)
    assert (done.stderr, done.returncode) == ("", -signal.SIGKILL)
    wait_for_ends(map(int, done.stdout.split()))
