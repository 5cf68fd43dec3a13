"""Machine code of kernels, kept on disk: compiling all of them takes half a minute, reading them back a tenth of a second.

``factory`` decorates the functions that make kernels. What identifies a kernel's code is then: the factory and its
arguments, the source of the factory's module and of every module here that it imports, the signature and
launch bounds, the compute capability, and the versions of Python, Numba and NVIDIA's compiler. Any change of these is
another file; old ones are never read again. A file holds the SHA-256 of the code in front of the code: a damaged one is
compiled anew. A folder that cannot be written costs only the time.
"""
from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import platform
import re
import tempfile
import warnings
from pathlib import Path

DIGEST = hashlib.sha256().digest_size
ENABLED = True                     # False: every kernel is compiled anew (for code that replaces parts of kernels)


def folder() -> Path:
    """Where what was compiled and measured is kept between runs: $XDG_CACHE_HOME/jev, or ~/.cache/jev."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jev"


def factory(make):
    """Remember the kernels that ``make(*arguments)`` returns (a Kernel or a tuple of them) and name their code by them.

    The arguments' ``repr`` must say all about them: numbers, strings, tuples, dataclasses of these.
    """
    @functools.lru_cache(maxsize=None)
    @functools.wraps(make)
    def made(*args, **named):
        kernels = make(*args, **named)
        for kernel in kernels if isinstance(kernels, tuple) else (kernels,):
            kernel.origin = (make.__module__, f"{make.__qualname__}{args}{sorted(named.items())}")
        return kernels
    return made


@functools.lru_cache(maxsize=None)
def sources(module: str) -> tuple[tuple[str, str], ...]:
    """(name, SHA-256) of a module's source and of what it imports, directly or not, of its and of this package."""
    packages, found, left = {module.split(".")[0], __package__}, {}, [module]
    while left:
        name = left.pop()
        if name in found:
            continue
        text = Path(importlib.util.find_spec(name).origin).read_bytes()
        found[name] = hashlib.sha256(text).hexdigest()
        for node in ast.walk(ast.parse(text)):
            names = ([a.name for a in node.names] if isinstance(node, ast.Import) else
                     [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
                     if isinstance(node, ast.ImportFrom) and node.module else [])
            left += [n for n in names if n.split(".")[0] in packages and n not in found and _is_module(n)]
    return tuple(sorted(found.items()))


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:               # package.module.name
        return False


@functools.lru_cache(maxsize=None)
def versions() -> str:
    """Everything besides the sources that decides what the compiler makes of them."""
    import llvmlite
    import numba
    import numba_cuda
    from cuda.bindings import nvjitlink, nvvm
    return (f"Python {platform.python_version()}, Numba {numba.__version__}, numba-cuda {numba_cuda.__version__}, llvmlite "
            f"{llvmlite.__version__}, NVVM {nvvm.version()} {nvvm.ir_version()}, nvJitLink {nvjitlink.version()}")


def identity(kernel, cc: tuple) -> str | None:
    """The name of a kernel's code for a compute capability; None for one from inside a function that is no factory."""
    if kernel.origin is None:
        return None
    module, made = kernel.origin
    said = (made, kernel.name, str(kernel.signature), kernel.block_size, kernel.resident, cc, versions(), sources(module))
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
    name = identity(kernel, cc) if ENABLED else None
    path = folder() / "kernels" / f"{kernel.name}-{name}" if name else None
    kept = _read(path) if path else None
    if kept is None:
        kept, _ = assemble(kernel.compile_ltoir(cc), kernel.name, cc)
        if path:
            _write(path, kept)
    return kept


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
    digest, kept = content[:DIGEST], content[DIGEST:]
    if hashlib.sha256(kept).digest() != digest:
        warnings.warn(f"{path} is damaged and is compiled again", stacklevel=4)
        return None
    return kept


def _write(path: Path, kept: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(kept).digest() + kept)
        os.replace(temporary, path)
    except OSError as e:
        warnings.warn(f"{path.parent}: compiled kernels cannot be kept ({e})", stacklevel=4)
