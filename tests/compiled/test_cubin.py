"""Machine code kept on disk: read back, made anew when anything it depends on changed or when it is damaged."""
from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
from numba.cuda import types
from numba.cuda.core import config

from jev_kernels.rowwise import silu
from jev_kernels.runtime import cubin, disk
from jev_kernels.runtime.launch import Kernel
from tests.compiled.registered import kernels
from tools import synthetic

if config.ENABLE_CUDASIM:
    pytest.skip("compiles for real: not under NUMBA_ENABLE_CUDASIM", allow_module_level=True)
pytest.importorskip("cuda.bindings.nvjitlink")

HOPPER = (9, 0, "a")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jev" / "kernels"


def no_compiler(monkeypatch):
    def compile_ltoir(self, cc):
        raise AssertionError(f"{self.name} was compiled")
    monkeypatch.setattr(Kernel, "compile_ltoir", compile_ltoir)


def test_code_is_compiled_once_and_read_back(folder, monkeypatch):
    kernel = silu.silu_mul_kernel(True)
    made = cubin.code(kernel, HOPPER)
    assert made.startswith(b"\x7fELF") and "silu_mul" in cubin.entry(made)
    assert len(list(folder.iterdir())) == 1
    no_compiler(monkeypatch)
    assert cubin.code(kernel, HOPPER) == made


@pytest.mark.parametrize("damage", [lambda kept: b"", lambda kept: kept[:-1], lambda kept: kept[:99] + b"?" + kept[100:]])
def test_damaged_code_is_compiled_again(folder, monkeypatch, damage):
    kernel = silu.silu_mul_kernel(True)
    cubin.code(kernel, HOPPER)
    path, = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match="damaged"):
        made = cubin.code(kernel, HOPPER)
    assert cubin.entry(made)
    no_compiler(monkeypatch)
    assert cubin.code(kernel, HOPPER) == made


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch):
    (tmp_path / "jev").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert cubin.code(silu.silu_mul_kernel(True), HOPPER).startswith(b"\x7fELF")


def test_the_newest_files_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cubin, "KEPT_FILES", 3)
    folder = tmp_path / "jev" / "kernels"
    folder.mkdir(parents=True)
    for age in range(5):
        (folder / f"old-{age}").write_bytes(b"")
        os.utime(folder / f"old-{age}", (1e9 - age, 1e9 - age))
    cubin.code(silu.silu_mul_kernel(True), HOPPER)
    names = {file.name for file in folder.iterdir()}
    assert len(names) == 3 and {"old-0", "old-1"} < names


def test_whatever_decides_the_code_decides_its_name(monkeypatch):
    kernel = silu.silu_mul_kernel(True)
    names = {cubin.identity(kernel, HOPPER), cubin.identity(kernel, (8, 0)),
             cubin.identity(silu.silu_mul_kernel(False), HOPPER)}
    names.add(cubin.identity(_like(kernel, threads=128), HOPPER))
    names.add(cubin.identity(_like(kernel, signature=types.void(types.int32)), HOPPER))
    names.add(cubin.identity(_like(kernel, resident=2), HOPPER))
    other = _like(kernel)
    other.origin = ((("jev_kernels.rowwise.silu", "another hash"),), kernel.origin[1])
    names.add(cubin.identity(other, HOPPER))
    cubin.versions.cache_clear()
    monkeypatch.setenv("NUMBA_OPT", "0")
    names.add(cubin.identity(kernel, HOPPER))
    cubin.versions.cache_clear()
    assert len(names) == 8 and None not in names


def _like(kernel, threads=None, signature=None, resident=1):
    made = Kernel(kernel.function, signature or kernel.signature, threads or kernel.threads, resident=resident)
    made.origin = kernel.origin
    return made


def test_a_kernel_from_inside_a_function_has_no_file(folder):
    def inner(x):
        x[0] = 1

    made = Kernel(inner, types.void(types.int32[::1]), 32)
    assert cubin.identity(made, HOPPER) is None
    cubin.code(made, HOPPER)
    assert not folder.exists()


def test_every_kernel_of_the_package_is_kept():
    found = [cubin.identity(kernel, HOPPER) for _, kernel, *_ in kernels()]
    assert len(set(found)) > 30 and all(found)


def test_sources_are_those_that_were_imported(tmp_path, monkeypatch):
    """What is edited after the import names other code than the one that runs."""
    (tmp_path / "edited.py").write_text("""
from numba.cuda import types
from jev_kernels.runtime import cubin
from jev_kernels.runtime.launch import Kernel
@cubin.factory
def make(n):
    def inner(x):
        x[0] = n
    return Kernel(inner, types.void(types.int32[::1]), 32)
""")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "edited", raising=False)
    edited = importlib.import_module("edited")
    before = cubin.identity(edited.make(1), HOPPER)
    (tmp_path / "edited.py").write_text("nothing of the kind")
    assert before == cubin.identity(edited.make(1), HOPPER) != cubin.identity(edited.make(2), HOPPER)


def test_without_a_home_nothing_is_kept(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")
    monkeypatch.setattr("pathlib.Path.home", no_home)
    assert disk.folder() is None
    assert cubin.code(silu.silu_mul_kernel(True), HOPPER).startswith(b"\x7fELF")


def test_files_are_whole_and_as_readable_as_the_umask_allows(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "file"
    before = os.umask(0o022)
    try:
        disk.write(path, b"first")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644

    def fails(*args):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError):
        disk.write(path, b"second")
    assert path.read_bytes() == b"first" and list(path.parent.iterdir()) == [path]


def test_sources_follow_every_import():
    found = dict(cubin.sources("jev_kernels.rowwise.silu"))
    assert {"jev_kernels.rowwise.silu", "jev_kernels.bf16", "jev_kernels.ptx.device", "jev_kernels.pool"} <= set(found)
    assert "jev_kernels.gdn.hopper" not in found
    assert "jev_kernels.ptx.device" in dict(cubin.sources(synthetic.__name__)), "from another package"


def test_another_process_names_the_same_code():
    code = ("from jev_kernels.gemm import wide\nfrom jev_kernels.rowwise import silu\nfrom jev_kernels.runtime import cubin\n"
            "print(cubin.identity(silu.silu_mul_kernel(True), (9, 0, 'a')))\n"
            "print(cubin.identity(wide.kernel(wide.Config(tokens=128)), (9, 0, 'a')))\n")
    seen = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(seen) == 1
    assert seen.pop().split()[0] == cubin.identity(silu.silu_mul_kernel(True), HOPPER)


def test_sources_are_found_across_folders():
    """A kernel's code depends on what its module imports from other folders of the package, and on what those import."""
    for _, kernel, *_ in kernels():
        read, made = kernel.origin
        names = {name for name, _ in read}
        assert {"jev_kernels", "jev_kernels.runtime.launch", "jev_kernels.ptx", "jev_kernels.ptx.device"} <= names, made
    scan = dict(cubin.sources("jev_kernels.gdn.scan"))
    assert {"jev_kernels.gdn", "jev_kernels.gdn.flags", "jev_kernels.gdn.prepare"} <= scan.keys()


@pytest.mark.parametrize("edited", ["kernels_of_a_test/__init__.py", "kernels_of_a_test/rooms/__init__.py",
                                    "kernels_of_a_test/rooms/other.py", "kernels_of_a_test/rooms/kernel.py"])
def test_an_edit_in_any_folder_is_other_code(tmp_path, monkeypatch, edited):
    package = tmp_path / "kernels_of_a_test"
    (package / "rooms").mkdir(parents=True)
    for name, text in (("__init__", ""), ("rooms/__init__", ""), ("rooms/other", "N = 1\n"),
                       ("rooms/kernel", "from kernels_of_a_test.rooms.other import N\n")):
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("kernels_of_a_test")

    def found():
        cubin.sources.cache_clear()
        cubin._source.cache_clear()
        return cubin.origin("kernels_of_a_test.rooms.kernel")
    try:
        before = found()
        path = tmp_path / edited
        path.write_text(path.read_text() + "# edited\n")
        assert before is not None and before != found()
    finally:
        del sys.modules["kernels_of_a_test"]


@pytest.mark.parametrize("relative", ["", ".", ".cache", "../cache"])
def test_a_cache_folder_that_is_not_absolute_counts_as_unset(relative, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", relative)
    assert disk.folder() == tmp_path / ".cache" / "jev"
    monkeypatch.setenv("HOME", ".")
    assert disk.folder() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert disk.folder() == tmp_path / "x" / "jev"
