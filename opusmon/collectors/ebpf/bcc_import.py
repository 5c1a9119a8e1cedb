"""The distribution's bcc, loaded from any virtual environment.

It is not on PyPI: the package of that name there is something else. Its folder (dist-packages) holds hundreds of
unrelated packages, so it is loaded by itself and the module path stays as it was.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from opusmon.collectors.ebpf.errors import ProbesUnavailable

_PLACES = ("lib/python3/dist-packages/bcc", "lib*/python3*/site-packages/bcc")


def folders(usr: Path = Path("/usr"), path: Iterable[str] | None = None) -> list[Path]:
    """Folders that hold the distribution's bcc, the one of the distribution's Python first.

    Args:
        usr: where distributions install.
        path: module path, searched last (a bundle unpacked elsewhere); by default this interpreter's.
    """
    found = [folder for place in _PLACES for folder in sorted(usr.glob(place))]
    found += [Path(entry) / "bcc" for entry in (sys.path if path is None else path) if entry]
    return [
        folder for folder in found if (folder / "table.py").is_file() and (folder / "libbcc.py").is_file()
    ]


def load() -> Any:
    """The module `bcc`; loads some 100 MB of compiler.

    Raises:
        ProbesUnavailable: it is not installed, or its library does not load.
    """
    known = sys.modules.get("bcc")
    if known is not None and hasattr(known, "BPF"):
        return known
    found = folders()
    if not found:
        raise ProbesUnavailable("bcc for Python is not installed", "sudo apt install python3-bpfcc")
    spec = importlib.util.spec_from_file_location(
        "bcc", found[0] / "__init__.py", submodule_search_locations=[str(found[0])]
    )
    assert spec is not None  # noqa: S101  (the name ends in .py)
    return _execute(spec, found[0])


def _execute(spec: ModuleSpec, folder: Path) -> ModuleType:
    module = importlib.util.module_from_spec(spec)
    sys.modules["bcc"] = module
    assert spec.loader is not None  # noqa: S101
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        for name in [name for name in sys.modules if name == "bcc" or name.startswith("bcc.")]:
            del sys.modules[name]
        text = str(error).splitlines()
        raise ProbesUnavailable(
            f"bcc in {folder} does not load: {text[0] if text else type(error).__name__}",
            "sudo apt install --reinstall python3-bpfcc",
        ) from error
    return module
