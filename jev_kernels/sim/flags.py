"""Words of device memory by which blocks tell each other what is done, in plain Python, for the simulator.

What is relaxed orders nothing; a load with acquire semantics comes behind the stores with release semantics so far.
"""
from __future__ import annotations

import ctypes
import threading

from jev_kernels.sim.simulator import check_global, collective


def _word(address):
    check_global(int(address), 4)
    return ctypes.c_uint32.from_address(int(address))


def store(address, value, release=False):
    """st.relaxed or st.release."""
    _word(address).value = int(value)
    _raised(address, release)


def store_of_warp(address, lane, value, release=False):
    """bar.warp.sync, then the first lane's store."""
    collective("syncwarp", None, lambda values: values)
    if int(lane) == 0:
        store(address, value, release)


def add(address, release=False) -> int:
    """atom.add of 1, relaxed or release: what the word held."""
    word = _word(address)
    word.value += 1
    _raised(address, release)
    return word.value - 1


def load(address) -> int:
    """ld.acquire."""
    me = threading.current_thread()
    if me.block.races:
        me.block.races.see_flag(me.number, int(address))
    return _word(address).value


def await_at_least(address, value):
    """ld.acquire again and again until the word is not below ``value``."""
    me = threading.current_thread()
    me.block.wait(me, lambda: _word(address).value >= int(value),
                  f"a flag in device memory at {int(address):#x} that nobody raises")
    load(address)


def _raised(address, release):
    me = threading.current_thread()
    if release and me.block.races:
        me.block.races.raise_flag(me.number, int(address))
