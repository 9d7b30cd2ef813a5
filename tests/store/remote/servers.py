"""Redis servers that the tests start."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import redis


class RedisProcess:
    """A server of the tests' own, on a Unix socket and no port."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._folder = tempfile.mkdtemp(prefix="qcfuse-")  # pytest's own are too long for a socket's name
        self.socket = f"{self._folder}/redis.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = ["--port", "0", "--unixsocket", self.socket, "--save", "", "--appendonly", "no"]
        settings += ["--dir", self._folder, "--daemonize", "no"]
        self._process = subprocess.Popen([self._program, *settings], stdout=subprocess.DEVNULL)
        client = redis.Redis(unix_socket_path=self.socket)
        for _ in range(200):
            try:
                client.ping()
            except redis.ConnectionError:
                time.sleep(0.02)
            else:
                client.close()
                return
        self.remove()
        raise RuntimeError("the Redis server does not answer")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            Path(self.socket).unlink(missing_ok=True)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self._folder)


def new_server() -> RedisProcess:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("needs redis-server or valkey-server, such as `apt-get install redis-server` brings")
    server = RedisProcess(program)
    server.start()
    return server
