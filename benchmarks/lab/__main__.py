"""The network laboratory: what compression buys on real networks of 2 and 4 hosts, and where it buys nothing.

Hosts are network namespaces of this machine, joined by links of 100 Mbit/s, 1 Gbit/s and 10 Gbit/s; real
Horovod ranks talk over them by OpenMPI. Needs root. Everything measured goes into --into, one JSON file, and from there
into docs/results.md, its pictures and the table in README.md; --page alone does that without measuring.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import cases  # noqa: E402
import net  # noqa: E402
import page  # noqa: E402

ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}", "PYTHONPATH": f"{ROOT}:{HERE}",
    "OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "",
    "HVD_GRADCOMP_KERNELS": "require", "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
TRAINED = [*cases.DENSE, "uniform(bits=8)", "sign", "topk(ratio=0.01)"]
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/lab", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="2 hosts, 40 MB, a short training: 8 minutes in place of 55")
    add("--hosts", type=int, nargs="+", default=None, metavar="N", help="default: 2 4")
    add("--models", nargs="+", choices=list(cases.MODELS), help="default: all")
    add("--speeds", type=int, nargs="+", default=list(cases.SPEEDS), metavar="MBIT", help="default: 100 1000 10000")
    add("--seconds", type=float, default=3.0, help="of timed steps for each codec (default: 3)")
    add("--only", choices=["exchange", "training"], help="measure this anew, and keep the rest of --into")
    add("--transport", choices=["mpi", "gloo"], default="mpi", help="between hosts (default: mpi)")
    add("--env", nargs="+", default=[], metavar="NAME=VALUE", help="for the ranks, such as HOROVOD_CYCLE_TIME=0.5")
    add("--into", type=Path, default=ROOT / "docs" / "results.json", help="default: docs/results.json")
    add("--page", action="store_true", help="measure nothing, write the page from --into")
    args = parser.parse_args()
    if not args.page:
        try:
            measured = measure(args)
        except net.NetworkError as error:
            print(f"lab: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("lab: interrupted, the network is removed", file=sys.stderr)
            return 130
        if args.only and args.into.exists():
            rest, before = "training" if args.only == "exchange" else "exchange", json.loads(args.into.read_text())
            measured[rest] = before[rest]
            measured["kept"] = {"part": rest} | {name: before[name] for name in page.ORIGIN}
        args.into.write_text(json.dumps(measured, indent=1) + "\n")
    for file in page.write(json.loads(args.into.read_text()), args.into, ROOT):
        print(f"written: {os.path.relpath(file)}")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, as the JSON file holds it."""
    hosts = args.hosts or ([2] if args.quick else [2, 4])
    models = args.models or (["40 MB"] if args.quick else list(cases.MODELS))
    env = {**ENVIRONMENT, **dict(pair.split("=", 1) for pair in args.env)}
    began, load, together = time.time(), os.getloadavg()[0], _together()
    exchange: list[Row] = []
    training: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        logs = ROOT / "results" / "lab"
        logs.mkdir(parents=True, exist_ok=True)

        def ranks(network: net.Network | None, title: str, program: str, arguments: Sequence[str],
                  timeout: float, **facts: Any) -> list[Row]:
            print(f"{time.time() - began:5.0f} s  {title}", flush=True)
            file, log = out / "rows.json", logs / f"{title.replace(' ', '_').replace('/', '')}.log"
            command = [sys.executable, str(HERE / program), "--json", str(file), *arguments]
            launcher = facts.pop("launcher", [])

            def launch() -> None:
                if network is None:
                    net.run([*launcher, *command], timeout=timeout, log=log, env=env)
                else:
                    (network.gloo if args.transport == "gloo" else network.mpirun)(
                        command, timeout=timeout, log=log, env=env)

            try:
                launch()
            except net.NetworkError as error:  # an hour's measurements are not given up for one crash of a launcher
                print(f"{time.time() - began:5.0f} s  once more, after: {error}", flush=True)
                launch()
            return [{**facts, **row} for row in json.loads(file.read_text())]

        for count in hosts if args.only != "training" else []:
            with net.Network(count) as network:
                for speed in args.speeds:
                    network.shape(speed)
                    for model in models:
                        exchange += ranks(network, f"{count} hosts, {speed} Mbit/s, {model}", "exchange.py",
                                          ["--model", model, "--seconds", str(args.seconds)], 3600,
                                          where="network", mbit=speed, model=model)
        if args.only != "training":
            exchange += _where_it_does_not_pay(ranks, args)
        if args.only != "exchange":
            for count in hosts[:1]:
                with net.Network(count) as network:
                    for framework in ("torch", "tensorflow"):
                        for speed in sorted(args.speeds, reverse=True):  # the fastest tells how many steps it takes
                            network.shape(speed)
                            limit = 60 if speed == max(args.speeds) else 10 if args.quick else 40
                            arguments = ["--framework", framework, "--codecs", *TRAINED, "--limit", str(limit)]
                            training += ranks(network, f"{count} hosts, {speed} Mbit/s, {framework}", "train.py",
                                              arguments, 1200, mbit=speed)
    return {"made": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"), "quick": args.quick,
            "minutes": (time.time() - began) / 60, "load_before": load, "together": together, "cores": os.cpu_count(),
            "processor": _processor(), "python": platform.python_version(), "kernel": platform.release(),
            "env": args.env, "transport": args.transport, "exchange": exchange, "training": training}


def _where_it_does_not_pay(ranks: Any, args: argparse.Namespace) -> list[Row]:
    """Two ranks on one machine by TCP and by shared memory, tensors too small, and one rank."""
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    two = [*mpirun, "-np", "2", "--mca", "pml", "ob1", "--mca", "btl"]
    loopback = [*two, "tcp,self", "--mca", "btl_tcp_if_include", "lo"]
    memory = [*two, "vader,self"]
    seconds = ["--seconds", str(min(args.seconds, 2.0))]
    tiny = [*seconds, "--shapes", *["1000"] * 10, "--min-size", "0"]
    result = []
    for where, launcher, model, arguments in (
            ("loopback", loopback, "40 MB", seconds), ("shared memory", memory, "40 MB", seconds),
            ("shared memory", memory, "40 kB", tiny), ("one rank", [*mpirun, "-np", "1"], "40 MB", seconds)):
        result += ranks(None, f"{where}, {model}", "exchange.py", arguments, 600, launcher=launcher, where=where,
                        mbit=None, model=model)
    with net.Network(2) as network:
        for speed in args.speeds:
            network.shape(speed)
            result += ranks(network, f"2 hosts, {speed} Mbit/s, 40 kB", "exchange.py", tiny, 600,
                            where="network", mbit=speed, model="40 kB")
    return result


def _together() -> float:
    """How fast each of two processes adds vectors of 40 MB while the other does, against one alone: 0.5 to 1. Virtual
    cores may share a core, and all share memory."""
    code = ("import time, numpy as np; a = np.ones(10**7, np.float32); b = a.copy(); began = time.perf_counter(); "
            "[np.add(a, b, out=b) for _ in range(200)]; print(time.perf_counter() - began)")

    def seconds(count: int) -> float:
        running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(count)]
        return max(float(process.communicate()[0]) for process in running)

    return seconds(1) / seconds(2)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
