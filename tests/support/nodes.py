"""Nodes of a made-up cluster: Linux network namespaces with an address, host name and mounts each, and a switch between them."""

import ctypes
import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmtrain.cli import main
from llmtrain.distributed.processes import end_with_parent
from llmtrain.errors import exit_with
from tests.support.ranks import warm

_NEW_NETWORK, _NEW_MOUNTS, _NEW_HOST_NAME = 0x40000000, 0x00020000, 0x04000000
"""CLONE_NEWNET, CLONE_NEWNS and CLONE_NEWUTS of Linux."""
_numbers = itertools.count()


def why_not() -> str:
    """The reason why there can be no nodes here; empty if there can."""
    missing = [tool for tool in ("ip", "tc", "mount") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} (iproute2, mount) here"
    try:
        Nodes(2, Path()).close()
    except subprocess.CalledProcessError as error:
        return f"network namespaces are forbidden here: {error.stderr.strip()}"
    return ""


class Node:
    """A process on a node: `llmtrain ARGUMENTS`, as a launcher would start it there."""

    def __init__(self, process: Any, printed: Path):
        self.process, self.printed, self.began = process, printed, time.monotonic()

    @property
    def text(self) -> str:
        return self.printed.read_text() if self.printed.exists() else ""

    def wait(self, seconds: float) -> int:
        """The exit status. Raises AssertionError if there is none in so many seconds."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"no end in {seconds} s; it printed:\n{self.text}"
        return self.process.exitcode

    def kill(self) -> None:
        """Kill the process and what it started."""
        if self.process.exitcode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()


class Nodes:
    """`count` nodes of one rank each. Their switch is in a namespace as well: nothing of this machine's own network changes."""

    def __init__(self, count: int, folder: Path):
        self.count, self.folder = count, folder
        self._name = f"lt{os.getpid()}x{next(_numbers)}"
        self._processes: list[Node] = []
        try:
            self._run("ip", "netns", "add", self._name)
            self._run("ip", "-n", self._name, "link", "add", "br0", "type", "bridge")
            self._run("ip", "-n", self._name, "link", "set", "br0", "up")
            for node in range(count):
                own, port = self.namespace(node), f"port{node}"
                self._run("ip", "netns", "add", own)
                self._run(
                    *("ip", "-n", self._name, "link", "add", port, "type", "veth", "peer"),
                    *("name", "eth0", "netns", own),
                )
                self._run("ip", "-n", self._name, "link", "set", port, "master", "br0", "up")
                self._run("ip", "-n", own, "link", "set", "lo", "up")
                self._run("ip", "-n", own, "link", "set", "eth0", "up")
                self._run("ip", "-n", own, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
        except subprocess.CalledProcessError:
            self.close()
            raise

    def namespace(self, node: int) -> str:
        return f"{self._name}n{node}"

    @staticmethod
    def address(node: int) -> str:
        return f"10.231.0.{node + 1}"

    def slow(self, node: int, rate: str) -> None:
        """Limit what a node sends, `100mbit` say."""
        shape = ("tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
        self._run("tc", "-n", self.namespace(node), "qdisc", "add", "dev", "eth0", "root", *shape)

    def without_ipv4(self) -> None:
        """Give every node an IPv6 address, fd00::1 and so on, in place of its own."""
        for node in range(self.count):
            own = self.namespace(node)
            self._run("ip", "-n", own, "addr", "flush", "dev", "eth0")
            self._run("ip", "-n", own, "addr", "add", f"fd00::{node + 1}/64", "dev", "eth0", "nodad")

    def add_interface(self, node: int, name: str, address: str) -> None:
        """Give a node one more interface, which leads nowhere."""
        own = self.namespace(node)
        self._run("ip", "-n", own, "link", "add", name, "type", "veth", "peer", "name", f"{name}.end")
        self._run("ip", "-n", own, "link", "set", name, "up")
        self._run("ip", "-n", own, "addr", "add", address, "dev", name)

    def cut_off(self, node: int) -> None:
        """Pull a node's cable: nothing arrives any more, and nobody is told."""
        self._run("ip", "-n", self._name, "link", "set", f"port{node}", "down")

    def hosts(self) -> tuple[str, ...]:
        """Arguments of `mount` with which a node finds the others by their names, node0 and so on."""
        file = self.folder / "hosts"
        names = (f"{self.address(node)} node{node}\n" for node in range(self.count))
        file.write_text("127.0.0.1 localhost\n" + "".join(names))
        return "--bind", str(file), "/etc/hosts"

    def start(
        self,
        node: int,
        *arguments: str,
        program: Callable[[], int | None] = main,
        mounts: tuple[tuple[str, ...], ...] = (),
        **environment: str,
    ) -> Node:
        """Begin `llmtrain ARGUMENTS` (or a program's, by its main function) as the rank of a node. mounts: arguments of `mount`,
        for this node alone."""
        ranks = {"RANK": node, "WORLD_SIZE": self.count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": node}
        meeting = {"MASTER_ADDR": self.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
        variables = {name: str(value) for name, value in ranks.items()} | meeting | environment
        printed = self.folder / f"printed-{len(self._processes)}.txt"
        process = warm().Process(
            target=_run_on_node,
            args=(self.namespace(node), node, program, arguments, mounts, variables, printed),
            daemon=False,
        )
        process.start()
        self._processes.append(Node(process, printed))
        return self._processes[-1]

    def close(self) -> None:
        for one in self._processes:
            one.kill()
        for name in (*map(self.namespace, range(self.count)), self._name):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, text=True)


def _run_on_node(
    namespace: str,
    node: int,
    program: Callable[[], int | None],
    arguments: tuple[str, ...],
    mounts: tuple[tuple[str, ...], ...],
    variables: dict[str, str],
    printed: Path,
) -> None:
    end_with_parent()
    os.setsid()
    with printed.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    linux = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as network:
        assert linux.setns(network.fileno(), _NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
    assert linux.unshare(_NEW_MOUNTS | _NEW_HOST_NAME) == 0, os.strerror(ctypes.get_errno())
    assert linux.sethostname(f"node{node}".encode(), 5) == 0
    for one in (("--make-rprivate", "/"), *mounts):
        subprocess.run(["mount", *one], check=True)
    os.environ.update(variables)
    multiprocessing.set_start_method("fork", force=True)  # for loader workers, as in a command of its own
    sys.argv[1:] = arguments
    exit_with(program)
