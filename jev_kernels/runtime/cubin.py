"""Machine code of kernels, kept on disk: compiling all of them takes half a minute, reading them back a tenth of a second.

``factory`` decorates the functions that make kernels. What identifies a kernel's code is then: the factory and its
arguments, the source of the factory's module and of every module here that it imports, the signature and
launch bounds, the compute capability, the versions of Python, Numba and NVIDIA's compiler, and Numba's settings in the
environment. Any change of these is another file, and the newest KEPT_FILES stay. Sources are read when their module is
imported, so that one edited later does not give its name to what runs. A file holds the SHA-256 of the code in front of the
code: a damaged one is compiled anew. A folder that cannot be written costs only the time.
"""
from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import platform
import re
import sys
import warnings
from importlib import metadata
from pathlib import Path

from jev_kernels.runtime import disk

DIGEST = hashlib.sha256().digest_size
KEPT_FILES = 1024                  # some fifteen versions of every kernel, 50 MB
ENABLED = True                     # False: every kernel is compiled anew (for code that replaces parts of kernels)


def factory(make):
    """Remember the kernels that ``make(*arguments)`` returns (a Kernel or a tuple of them) and name their code by them.

    The arguments' ``repr`` must say all about them: numbers, strings, tuples, dataclasses of these.
    """
    read = origin(make.__module__)

    @functools.lru_cache(maxsize=None)
    @functools.wraps(make)
    def made(*args, **named):
        kernels = make(*args, **named)
        for kernel in kernels if isinstance(kernels, tuple) else (kernels,):
            kernel.origin = read and (read, f"{make.__qualname__}{args}{sorted(named.items())}")
        return kernels
    return made


def origin(module: str) -> tuple | None:
    """What names the code of a module's kernels: its sources as they are now. None where there are none to be found (a
    script, a module from an archive): such code is not kept."""
    try:
        return sources(module)
    except (ImportError, OSError, SyntaxError, ValueError):
        return None


@functools.lru_cache(maxsize=None)
def sources(module: str) -> tuple[tuple[str, str], ...]:
    """(name, SHA-256) of a module's source and of what it imports, directly or not, of its and of this package."""
    packages, found, left = {name.split(".")[0] for name in (module, __package__)}, {}, [module]
    while left:
        name = left.pop()
        if name not in found:
            found[name], imported = _source(name)
            imported = [n for full in (name, *imported) for n in _with_parents(full)]
            left += [n for n in imported if n.split(".")[0] in packages and n not in found and _file(n)]
    return tuple(sorted(found.items()))


def _with_parents(module: str) -> list[str]:
    """A module and the packages that are imported before it."""
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


@functools.lru_cache(maxsize=None)
def _source(module: str) -> tuple[str, tuple[str, ...]]:
    """SHA-256 of a module's source and the names that it imports (absolutely, as everything here does)."""
    file = _file(module)
    if file is None:
        raise ImportError(f"{module}: no source")
    text = file.read_bytes()
    imported = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ImportError(f"{module}: relative imports are not followed")
            imported += [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
    return hashlib.sha256(text).hexdigest(), tuple(imported)


def _file(module: str) -> Path | None:
    """The source file of a module of an imported package, without importing anything; None if it is no module."""
    top, *rest = module.split(".")
    known = sys.modules.get(top)
    if not rest and getattr(known, "__file__", None):
        return Path(known.__file__)
    for folder in getattr(known, "__path__", ()):
        path = Path(folder, *rest)
        for file in (path.with_name(path.name + ".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


@functools.lru_cache(maxsize=None)
def versions() -> str:
    """Everything besides the sources that decides what the compiler makes of them."""
    from cuda.bindings import nvjitlink, nvvm
    found = [f"Python {platform.python_version()}", f"NVVM {nvvm.version()}", f"nvJitLink {nvjitlink.version()}"]
    for package in ("numba", "numba-cuda", "llvmlite", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink",
                    "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:        # of another CUDA, or of the system
            pass
    found += sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("NUMBA_"))
    return ", ".join(found)


def identity(kernel, cc: tuple) -> str | None:
    """The name of a kernel's code for a compute capability; None for one of a script or from inside a function that is no
    factory."""
    if kernel.origin is None:
        return None
    said = (kernel.origin, kernel.name, str(kernel.signature), kernel.block_size, kernel.resident, cc, versions())
    return hashlib.sha256(repr(said).encode()).hexdigest()


def assemble(ltoir: bytes, name: str, cc: tuple, verbose: bool = False) -> tuple[bytes, str]:
    """(machine code, the assembler's remarks) of a kernel's intermediate code. Raises ValueError with its complaint."""
    from cuda.bindings import nvjitlink
    options = [f"-arch=sm_{''.join(map(str, cc))}", "-lto"] + ["-verbose"] * verbose
    handle = nvjitlink.create(len(options), options)
    try:
        try:
            nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, ltoir, len(ltoir), name)
            nvjitlink.complete(handle)
        except nvjitlink.nvJitLinkError as error:
            log = bytearray(nvjitlink.get_error_log_size(handle))
            nvjitlink.get_error_log(handle, log)
            raise ValueError(f"{name}: {log.decode().rstrip(chr(0))}") from error
        code, log = bytearray(nvjitlink.get_linked_cubin_size(handle)), bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_linked_cubin(handle, code)
        nvjitlink.get_info_log(handle, log)
        return bytes(code), log.decode().rstrip("\0")
    finally:
        nvjitlink.destroy(handle)


def code(kernel, cc: tuple) -> bytes:
    """The kernel's machine code for a compute capability, from disk or compiled and put there."""
    folder, name = disk.folder(), identity(kernel, cc) if ENABLED else None
    path = folder / "kernels" / f"{kernel.name}-{name}" if folder and name else None
    found = _read(path) if path else None
    if found is None:
        found, _ = assemble(kernel.compile_ltoir(cc), kernel.name, cc)
        if path:
            _write(path, found)
    return found


def entry(cubin: bytes) -> str:
    """The (mangled) name of the one kernel in machine code: its section of an ELF file is called .text.<name>."""
    names = set(re.findall(rb"\0\.text\.([^\0]+)\0", cubin))
    if len(names) != 1:
        raise ValueError(f"expected one kernel in the machine code, found {sorted(names)}")
    return names.pop().decode()


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:                           # none yet, or not ours to read
        return None
    digest, found = content[:DIGEST], content[DIGEST:]
    if hashlib.sha256(found).digest() != digest:
        warnings.warn(f"{path} is damaged and is compiled again", stacklevel=4)
        return None
    return found


def _write(path: Path, made: bytes) -> None:
    try:
        disk.write(path, hashlib.sha256(made).digest() + made)
    except OSError as e:
        warnings.warn(f"{path.parent}: compiled kernels cannot be kept ({e})", stacklevel=4)
        return
    with contextlib.suppress(OSError):        # another process may be at it
        oldest_first = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
        for old in oldest_first[:-KEPT_FILES]:
            old.unlink()
