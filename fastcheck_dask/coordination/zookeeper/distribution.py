"""Where Java and ZooKeeper's jars are on this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from fastcheck_dask.errors import ConfigError

_DEBIAN: Final = Path("/usr/share/java")
#: Debian's zookeeper.jar names the other jars that it needs, except these (and a logger).
_DEBIAN_EXTRAS: Final = (
    "slf4j-simple",
    "netty-codec",
    "netty-resolver",
    "netty-transport-native-unix-common",
)


class ZooKeeperMissingError(ConfigError):
    """ZooKeeper or Java is not installed; the message says how to install them."""


def java() -> str:
    """Return the path of Java: that of JAVA_HOME, or the one on the PATH.

    Raises
    ------
    ZooKeeperMissingError
        If there is none.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin") if home else None
    found = found or shutil.which("java")
    if found is None:
        raise ZooKeeperMissingError(
            "Java is not installed; on Debian or Ubuntu: apt-get install --no-install-recommends "
            "default-jre-headless; elsewhere install any Java runtime from version 11 on, and put it on the "
            "PATH or name its folder in JAVA_HOME"
        )
    return found


def class_path() -> str:
    """Return the jars of ZooKeeper: those of the release in ZOOKEEPER_HOME, or Debian's.

    Raises
    ------
    ZooKeeperMissingError
        If there are none.
    """
    if home := os.environ.get("ZOOKEEPER_HOME"):
        jars = sorted([*Path(home).glob("lib/*.jar"), *Path(home).glob("*.jar")])
        if not any(jar.name.startswith("zookeeper") for jar in jars):
            raise ZooKeeperMissingError(f"ZOOKEEPER_HOME is {home}, which holds no ZooKeeper release")
        return ":".join(map(str, jars))
    if not (_DEBIAN / "zookeeper.jar").exists():
        raise ZooKeeperMissingError(
            "ZooKeeper is not installed; on Debian or Ubuntu: apt-get install --no-install-recommends "
            "zookeeper; elsewhere unpack a release of Apache ZooKeeper and set ZOOKEEPER_HOME to its folder"
        )
    present = [jar for name in _DEBIAN_EXTRAS if (jar := _DEBIAN / f"{name}.jar").exists()]
    return ":".join(map(str, [_DEBIAN / "zookeeper.jar", *present]))
