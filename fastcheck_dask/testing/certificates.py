"""Certificates for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

_NEW_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Certificates:
    """A CA, and certificates that it signs, made with the program ``openssl`` and good for a day.

    Parameters
    ----------
    folder : Path
        Where the files go; created if missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.ca, self._ca_key = folder / "ca.pem", folder / "ca.key"
        self._run(
            *("req", "-x509", *_NEW_KEY, "-keyout", self._ca_key, "-out", self.ca),
            *("-days", "1", "-subj", f"/CN=CA {folder.name}"),
        )

    def issue(self, name: str, *, days: int = 1, host: str = "IP:127.0.0.1") -> tuple[Path, Path]:
        """Return the files of a certificate and its key; 0 `days` make one that is over."""
        cert, key, request, extensions = (
            self._folder / f"{name}.{end}" for end in ("pem", "key", "csr", "ext")
        )
        extensions.write_text(f"subjectAltName={host}\n")
        self._run("req", "-new", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        self._run(
            *("x509", "-req", "-in", request, "-out", cert, "-CA", self.ca, "-CAkey", self._ca_key),
            *("-CAcreateserial", "-days", str(days), "-extfile", extensions),
        )
        return cert, key

    def _run(self, *arguments: str | Path) -> None:
        done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"openssl {arguments[0]} failed: {done.stderr}")
