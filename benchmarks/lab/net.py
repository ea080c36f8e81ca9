"""Hosts that are network namespaces, joined by a switch whose links have a given speed. Linux, root, iproute2."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

PREFIX = "gclab"
FILES = Path("/etc/netns")
SUBNET = "10.77.0"
BURST = 1e-3
"""Seconds at full speed that a link lets through at once after a pause: little, or small payloads would be free."""
QUEUE = 0.05
"""Seconds that a frame may wait in a link's queue before it is dropped, as in a switch with deep buffers."""


class NetworkError(RuntimeError):
    """The network could not be made, or what ran on it failed."""


class Network:
    """``with Network(2) as network: network.shape(100)``: namespaces ``gclab0``, ``gclab1`` with the addresses
    10.77.0.1 and 10.77.0.2 on ``eth0``, and ``gclab-switch``, a bridge. Nothing of it is visible outside of
    them. The end of the block removes everything and ends what runs in it, also after Ctrl-C or SIGTERM.

    Raises NetworkError without root or iproute2, or while another laboratory is at work.
    """

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts
        self.names = [f"{PREFIX}{i}" for i in range(hosts)]
        self.addresses = [f"{SUBNET}.{i + 1}" for i in range(hosts)]
        self._folder = Path()
        self._lock: IO[str] | None = None

    def __enter__(self) -> Network:
        if os.geteuid() != 0:
            raise NetworkError("network namespaces need root: sudo make lab")
        if not all(map(shutil.which, ("ip", "tc"))):
            raise NetworkError("ip and tc are missing (Debian: apt-get install iproute2)")
        self._lock = open(Path(tempfile.gettempdir()) / f"{PREFIX}.lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise NetworkError("another laboratory is at work on this machine") from None
        signal.signal(signal.SIGTERM, _interrupt)
        remove()  # what a killed laboratory left
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C must not stop this
        try:
            remove()
            shutil.rmtree(self._folder, ignore_errors=True)
        finally:
            if self._lock is not None:
                self._lock.close()
            signal.signal(signal.SIGINT, before)

    def _make(self) -> None:
        switch = f"{PREFIX}-switch"
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", switch, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "-n", switch, "link", "set", f"port{i}", "master", "br0", "up")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            # `ip netns exec` lays this over /etc/hosts: Gloo takes the address that the host's own name has.
            (FILES / name).mkdir(parents=True)
            (FILES / name / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        agent = self._folder / "agent"
        lines = [f'  {address}) exec ip netns exec {name} bash -c "$*" ;;'
                 for name, address in zip(self.names, self.addresses, strict=True)]
        agent.write_text("\n".join(["#!/bin/bash", "# In place of ssh: HOST COMMAND...", "host=$1; shift",
                                    'case "$host" in', *lines, "  *) exit 255 ;;", "esac", ""]))
        agent.chmod(0o755)

    def shape(self, megabits: float | None) -> None:
        """Give all links this speed in both directions; None: as fast as the machine is."""
        for i, name in enumerate(self.names):
            for namespace, device in ((name, "eth0"), (f"{PREFIX}-switch", f"port{i}")):
                subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True)
                if megabits is not None:
                    burst, queue = max(round(megabits * 1e6 / 8 * BURST), 2000), round(1e3 * QUEUE)
                    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate",
                         f"{round(megabits * 1e6)}bit", "burst", str(burst), "latency", f"{queue}ms")

    def mpirun(self, command: Sequence[str], *, timeout: float, log: Path, env: Mapping[str, str]) -> None:
        """Run ``command`` on every host with OpenMPI over TCP, output into ``log``. Raises NetworkError if it fails or
        takes longer."""
        network = f"{SUBNET}.0/24"
        hosts = ",".join(f"{address}:1" for address in self.addresses)
        launcher = ["ip", "netns", "exec", self.names[0], "mpirun", "--allow-run-as-root", "-np", str(self.hosts),
                    "-H", hosts, "--bind-to", "none", "--mca", "rtc", "^hwloc",  # all daemons are on one machine
                    "--mca", "plm", "rsh", "--mca", "plm_rsh_agent",
                    str(self._folder / "agent"), "--mca", "pml", "ob1", "--mca", "btl", "tcp,self",
                    "--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network]
        run([*launcher, *(x for name in env for x in ("-x", name)), *command], timeout=timeout, log=log, env=env)

    def gloo(self, command: Sequence[str], *, timeout: float, log: Path, env: Mapping[str, str]) -> None:
        """The same with Gloo."""
        hosts = [f"{address}={name}" for address, name in zip(self.addresses, self.names, strict=True)]
        launcher = ["ip", "netns", "exec", self.names[0], sys.executable, str(Path(__file__).with_name("gloo.py"))]
        run([*launcher, *hosts, "--", *command], timeout=timeout, log=log, env=env)


def run(command: Sequence[str], *, timeout: float, log: Path, env: Mapping[str, str]) -> None:
    """Run a launcher; whatever happens, it has ended by then. Raises NetworkError with the end of its output."""
    with log.open("w") as output:
        process = subprocess.Popen(command, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
    if code != 0:
        said = log.read_text(errors="replace")[-3000:]
        what = f"not done after {timeout:g} s" if code is None else f"exit code {code}"
        raise NetworkError(f"{what}: {' '.join(command[-4:])}, output in {log}, which ends with\n{said}")


def remove() -> None:
    """End what runs in the laboratory's namespaces and delete them; the links go with them."""
    for name in _existing():
        for sign in (signal.SIGTERM, signal.SIGKILL):
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in pids:
                try:
                    os.kill(int(pid), sign)
                except ProcessLookupError:
                    continue
            if pids:
                time.sleep(0.5)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        shutil.rmtree(FILES / name, ignore_errors=True)


def counters(device: str = "eth0") -> dict[str, int]:
    """Bytes that an interface of the calling process's own namespace has sent and received, headers included."""
    folder = Path("/sys/class/net") / device / "statistics"
    return {name: int((folder / f"{name}_bytes").read_text()) for name in ("rx", "tx")}


def _existing() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    return [name for name in names if name.startswith(PREFIX)]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")


def _interrupt(*_: object) -> None:
    sys.exit(143)  # as an exception, so that every `with` and `finally` runs
